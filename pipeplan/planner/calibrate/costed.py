"""How long does an iteration take that somebody states in full, and which passes make it as long as it is?

Stages, pipelines, recomputation, schedule and batch are said; nothing is searched and nothing has to fit: a measured
run is set beside it. Passes on the critical path are counted by layer, to fit them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ...cost.roofline import Constants, timed, with_exchanges
from ...cost.stage_graph import stage_graph
from ...errors import BadInput
from ...plan import Stage
from ...problem import Chain, Platform, Policy, Problem
from ...schedule.kinds import schedules
from ...schedule.program import PASSES, Step
from ...schedule.simulate import simulate
from ...schedule.timeline import Timeline, run_uses, worth
from ..periodic.stated import replicated, stated


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run in words, as ``plan --split`` takes them: layers per stage (None: one stage), equal pipelines, GPUs of each
    stage, recomputed layers, the schedule's name, samples per update (None: a microbatch for each pipeline), whether a
    barrier stands between two updates, and the share of activations that weight gradients need.
    """

    split: str | None = None
    pipelines: int = 1
    on: str | None = None
    recompute: str = "none"
    schedule: str = "1f1b"
    batch: int | None = None
    barrier: bool = True
    weight_keeps: Fraction = Fraction(1)


@dataclass(frozen=True)
class Costed:
    """A configuration's stages and simulated iteration."""

    stages: tuple[Stage, ...]
    timeline: Timeline
    platform: Platform
    barrier: bool = True

    @property
    def iteration_ns(self) -> int:
        """From the first forward to the next iteration's: the makespan with a barrier, else the longest span."""
        return worth(self.timeline, self.barrier)

    @property
    def peak_bytes(self) -> int:
        """What the fullest GPU holds at most."""
        return max(use.peak_bytes for use in run_uses(self.timeline, self.platform))


def costed(chain: Chain, platform: Platform, policy: Policy, asked: Configuration) -> Costed:
    """Return the iteration of a stated run, drained; BadInput says what in the configuration cannot be.

    ``policy`` says how weights are kept; the batch decides how many microbatches an update has. Steps come behind it:
    when the norm of all gradients is known, or without a barrier when a GPU's own are summed.
    """
    batch = chain.microbatch * asked.pipelines if asked.batch is None else asked.batch
    if batch % (chain.microbatch * asked.pipelines):
        raise BadInput(
            f"batch: {batch} samples are no whole number of microbatches of {chain.microbatch} for each of "
            f"{asked.pipelines} pipelines"
        )
    known = schedules()
    entry = known.get(asked.schedule)
    if entry is None or not entry.drains or entry.build is None:
        drained = ", ".join(name for name, x in known.items() if x.drains and x.build is not None)
        raise BadInput(f"schedule: {asked.schedule!r} doesn't drain; those that do are {drained}")
    microbatches = batch // chain.microbatch
    drained_policy = replace(policy.drained(microbatches), clip=asked.barrier)
    problem = Problem(chain, platform, drained_policy, checkpointing="segments")
    split = asked.split or str(len(chain))
    replicas = None if asked.on is not None else replicated(split, asked.pipelines)
    allocation = next(stated(problem, split, replicas, asked.on, asked.recompute))
    graph = stage_graph(chain, platform, drained_policy, allocation.stages)
    refused = entry.refuses(graph)
    if refused is not None:
        raise BadInput(f"schedule: {refused}")
    options = {"weight_keeps": asked.weight_keeps} if entry.splits else {}
    timeline = simulate(entry.build(graph, microbatches, **options))
    return Costed(allocation.stages, timeline, platform, asked.barrier)


Floats = NDArray[np.float64]  # by layer, or by run


@dataclass(frozen=True)
class Run:
    """A measured iteration: what ran, and how long it took."""

    name: str
    chain: Chain
    platform: Platform
    policy: Policy
    configuration: Configuration
    measured_ns: float

    def timed(self, constants: Constants) -> Chain:
        """Return the chain with the times of ``constants``, and with what its groups exchange."""
        chain = timed(self.chain, constants)
        return chain if chain.width == 1 else with_exchanges(chain, self.platform.whole or self.platform)

    def costed(self, constants: Constants) -> Costed:
        """Return the run as it is predicted with ``constants``."""
        return costed(self.timed(constants), self.platform, self.policy, self.configuration)


@dataclass(frozen=True)
class Passes:
    """How many forwards, backwards and optimizer steps of each layer take ``measured_ns``, together with ``rest_ns``.

    Counts have shape (L,); shares of a pass are counted as such.
    """

    name: str
    chain: Chain
    forward: Floats
    backward: Floats
    optimizer: Floats
    rest_ns: float
    measured_ns: float


def critical_passes(run: Run, constants: Constants) -> Passes:
    """Return the passes on the critical path of ``run`` as it is predicted with ``constants``."""
    chain, predicted = run.timed(constants), run.costed(constants)
    path = list(_critical_path(predicted.timeline, predicted.barrier))
    counts = _counts(chain, predicted, path)
    times = [(x.forward_ns, x.backward_ns, x.optimizer_ns) for x in chain.layers]
    known = [
        count @ np.array(own, dtype=np.float64) for count, own in zip(counts, zip(*times, strict=True), strict=True)
    ]
    return Passes(run.name, run.chain, *counts, float(predicted.iteration_ns - sum(known)), run.measured_ns)


def _counts(chain: Chain, ran: Costed, path: Sequence[Step]) -> tuple[Floats, Floats, Floats]:
    """Return how many forwards, backwards and optimizer steps of each layer stand on a path, from its end back: steps
    are those of the device with the last pass."""
    program, graph = ran.timeline.program, ran.timeline.program.graph
    forward, backward, optimizer = (np.zeros(len(chain)) for _ in range(3))
    weights = np.array([x.weight_part_ns / x.backward_ns if x.backward_ns else 0.0 for x in chain.layers])
    for work in (program.operations[step.position] for step in path):
        if work.kind not in PASSES:
            continue
        stage = ran.stages[work.stage]
        own = slice(stage.start, stage.stop)
        if work.kind == "F":
            forward[own] += 1
        elif work.kind == "W":
            backward[own] += weights[own]
        elif work.kind != "R":
            backward[own] += 1 - weights[own] if program.split and work.kind == "B" else 1
        if work.kind == ("R" if work.stage in program.apart else "B"):
            for first, last in stage.checkpoint:
                forward[first:last] += 1
    for s in graph.stages_on(graph.stages[program.operations[path[0].position].stage].resource):
        stage = ran.stages[s]
        optimizer[stage.start : stage.stop] += 1 / graph.policy.sharers(stage.replicas)
    return forward, backward, optimizer


def _critical_path(timeline: Timeline, barrier: bool) -> Iterable[Step]:
    """Yield the steps of a chain without gaps, from the end back: with a barrier to the run's first start, without one
    back to that of the device with the longest span."""
    program = timeline.program
    before: dict[Step, Step] = {}
    for lane in program.lanes:
        before.update(zip(lane.steps[1:], lane.steps, strict=False))
    lanes = [i for i, lane in enumerate(program.lanes) if lane.device is not None and lane.steps]
    if barrier:
        step = max((program.lanes[i].steps[-1] for i in lanes), key=timeline.end_ns)
        until = 0
    else:
        longest = max(lanes, key=timeline.span_ns)
        step = program.lanes[longest].steps[-1]
        until = timeline.begin_ns(program.lanes[longest].steps[0])
    while True:
        yield step
        begin = timeline.begin_ns(step)
        if begin <= until:
            return
        candidates = [before[step]] if step in before else []
        candidates += [Step(step.microbatch, source) for source in program.needs[step.position]]
        found = next((x for x in candidates if timeline.end_ns(x) == begin), None)
        if found is None:
            return
        step = found


def stage_passes(chain: Chain, stages: Sequence[Stage], measured: Sequence[tuple[int, int, int]]) -> list[Passes]:
    """Return the passes that a run measured of each stage: ns of a forward, a backward and an optimizer step."""
    found = []
    for s, (stage, times) in enumerate(zip(stages, measured, strict=True)):
        own, again, none = (np.zeros(len(chain)) for _ in range(3))
        own[stage.start : stage.stop] = 1
        for first, last in stage.checkpoint:
            again[first:last] = 1
        counts = ("forward", own, none, none), ("backward", again, own, none), ("update", none, none, own)
        for (kind, forward, backward, optimizer), ns in zip(counts, times, strict=True):
            if ns:
                found.append(Passes(f"{kind} of stage {s}", chain, forward, backward, optimizer, 0.0, float(ns)))
    return found

"""Which passes make an iteration, or a measured time of a stage, as long as it is? Counts by layer, to fit them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...cost.collectives import with_exchanges
from ...cost.roofline import Constants, timed
from ...plan import Stage
from ...problem import Chain, Platform, Policy
from ...schedule.program import PASSES, Program, Step
from ...schedule.timeline import Timeline
from .costed import Configuration, Costed, costed

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
        return chain if chain.tensor == 1 else with_exchanges(chain, self.platform.levels[0].bandwidth)

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
    predicted = run.costed(constants)
    chain = run.timed(constants)
    counts = _PathCounts(chain, predicted.stages, predicted.timeline.program)
    for step in _critical_path(predicted.timeline, predicted.barrier):
        counts.add(step)
    sums = chain.layers
    known = (
        counts.forward @ np.array([x.forward_ns for x in sums], dtype=np.float64)
        + counts.backward @ np.array([x.backward_ns for x in sums], dtype=np.float64)
        + counts.optimizer @ np.array([x.optimizer_ns for x in sums], dtype=np.float64)
    )
    rest = float(predicted.iteration_ns - known)
    return Passes(run.name, run.chain, counts.forward, counts.backward, counts.optimizer, rest, run.measured_ns)


class _PathCounts:
    """How many passes of each layer stand on a path."""

    def __init__(self, chain: Chain, stages: Sequence[Stage], program: Program) -> None:
        self.chain, self.stages, self.program = chain, stages, program
        self.forward, self.backward, self.optimizer = (np.zeros(len(chain)) for _ in range(3))
        parts = [x.weight_part_ns / x.backward_ns if x.backward_ns else 0.0 for x in chain.layers]
        self.weight_part = np.array(parts)

    def add(self, step: Step) -> None:
        """Count one step."""
        work = self.program.operations[step.position]
        if work.kind not in PASSES:
            return
        stage = self.stages[work.stage]
        own = slice(stage.start, stage.stop)
        policy = self.program.graph.policy
        if work.kind == "F":
            self.forward[own] += 1
        elif work.kind == "R":
            pass
        elif self.program.split and work.kind == "B":
            self.backward[own] += 1 - self.weight_part[own]
        elif work.kind == "W":
            self.backward[own] += self.weight_part[own]
        else:
            self.backward[own] += 1
        if work.kind == ("R" if work.stage in self.program.apart else "B"):
            for first, last in stage.checkpoint:
                self.forward[first:last] += 1
        if work.kind == ("W" if self.program.split else "B") and policy.coarsening is None:
            interval = policy.update_interval(stage.replicas) * policy.sharers(stage.replicas)
            self.optimizer[own] += stage.replicas / interval


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

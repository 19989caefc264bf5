"""What will a run of a plan do? Its ranks, every rank's instructions, and what should come of it.

Without torch, so that a plan that cannot be run is refused before any process starts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm

from ...check.evaluate import evaluate, summed_beside
from ...check.lateness import plan_delays
from ...check.validate import tied_violations
from ...cost.stage_cost import first_on_devices
from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ...integers import ceil_div
from ...plan import Plan
from ...problem import Chain
from ...schedule.kinds import graph_of, kind_of
from ...schedule.pattern import most_in_flight, starts_of
from ...schedule.program import Decide, Program
from ...schedule.timeline import Timeline, flush_makespan_ns, in_flight, lane_use, most_held
from ...schedule.weight_versions import Delay
from .instructions import NOBODY, Instruction, Message, Save, StagePass
from .segments import Repeat, Repeated, Segments, forwards


@dataclass(frozen=True, slots=True)
class Position:
    """How far training has come: updates made, microbatches consumed."""

    step: int = 0
    microbatch: int = 0


FROM_THE_START = Position()
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class LoweredRun:
    """A run of ``plan`` over ``steps`` updates from position ``first`` on, each from ``interval`` microbatches.

    ``devices[rank]`` is the platform device that a rank plays. The pipeline drains at the end of each of ``segments``
    (first microbatch, microbatches), which is where checkpoints are. ``program`` is one mini-batch of a drained
    schedule, otherwise the longest segment, or as much of it as tells the rest; ``timeline`` is its simulation with the
    plan's times, whose order is run. ``tied`` are the sets of stages with copies of weights. With ``reads_newest``
    backwards use other weights than the forwards did. With ``evaluates`` there are only forwards. Stages ``beside`` sum
    gradients of replicas while passes go on; some have a second gradient for that, of so many bytes.
    """

    plan: Plan
    graph: StageGraph
    steps: int
    interval: int
    drains: bool
    devices: tuple[int, ...]
    program: Program
    timeline: Timeline
    instructions: tuple[Repeated, ...]
    segments: tuple[tuple[int, int], ...]
    tied: tuple[tuple[int, ...], ...] = ()
    reads_newest: bool = False
    first: Position = FROM_THE_START
    evaluates: bool = False
    beside: Mapping[int, int] = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        """Microbatches of the whole run."""
        return self.steps * self.interval

    def width_of(self, stage: int) -> int:
        """Return how many processes run the layers of ``stage`` together."""
        return self.plan.chain.tensor * self.plan.allocation.stages[stage].tensor

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """How many processes each rank is, as many as run its layers together, rank after rank."""
        return tuple(self.width_of(self.stages_of(rank)[0]) for rank in range(len(self.devices)))

    @property
    def widest(self) -> int:
        """The first rank that is the most processes."""
        return self.widths.index(max(self.widths))

    @cached_property
    def processes(self) -> tuple[tuple[int, int], ...]:
        """Of each process that runs it the rank, and which of those that are this rank it is."""
        return tuple((rank, place) for rank, width in enumerate(self.widths) for place in range(width))

    def chain_of(self, rank: int) -> Chain:
        """Return the plan's chain as a process of a rank has it."""
        stage = self.plan.allocation.stages[self.stages_of(rank)[0]]
        return self.plan.chain.of(stage.way)

    def of_place(self, place: int) -> LoweredRun:
        """Return the run among the processes at ``place``, of the ranks that have one, in a row; others' messages to
        them and from them are :data:`NOBODY`'s."""
        there = [rank for rank, width in enumerate(self.widths) if width > place]
        if len(there) == len(self.devices):
            return self
        number = {rank: index for index, rank in enumerate(there)}

        def among(some: Iterable[Instruction]) -> Iterable[Instruction]:
            return (replace(x, peer=number.get(x.peer, NOBODY)) if isinstance(x, Message) else x for x in some)

        instructions = tuple(self.instructions[rank].changed(among) for rank in there)
        return replace(self, devices=tuple(self.devices[rank] for rank in there), instructions=instructions)

    @property
    def last(self) -> Position:
        """Where the run ends."""
        return self.at(self.first.step + self.steps)

    def at(self, step: int) -> Position:
        """Return the position after ``step`` updates, of which this run makes those after its first."""
        return Position(step, self.first.microbatch + (step - self.first.step) * self.interval)

    def minibatch(self, instruction: Instruction) -> int:
        """Return the mini-batch that an instruction works for; mini-batch j makes version j + 1."""
        match instruction:  # what comes most often first: a run asks before each
            case StagePass() | Message():
                return self.first.step + (instruction.microbatch - self.first.microbatch) // self.interval
            case Save(step):
                return step - 1
            case _:
                return instruction.version - 1

    @property
    def round(self) -> int:
        """Microbatches after which every stage's replicas have had equally many."""
        return lcm(*(resource.replicas for resource in self.graph.resources))

    @property
    def window(self) -> int:
        """Microbatches over which times are averaged: whole updates, and whole rounds of the replicas."""
        return ceil_div(self.interval, self.round) * self.round

    def period_of(self, timeline: Timeline) -> float | None:
        """Return ns per microbatch in the steady state of ``timeline``, None where the run is too short to have one."""
        if self.drains:
            return flush_makespan_ns(timeline) / self.interval
        return timeline.steady_period_ns()

    @property
    def by_arrival(self) -> bool:
        """Whether devices decide on the way what they do next, by what arrives."""
        return kind_of(self.plan).by_arrival

    @property
    def limit(self) -> int | None:
        """Microbatches at most in each pipeline of a message-driven run, None for a run whose order is fixed."""
        if not self.by_arrival or self.evaluates:
            return None
        assert self.program.limit is not None, "message-driven programs are limited"
        return self.program.limit // self.plan.allocation.stages[0].replicas

    def rule(self, rank: int) -> Decide:
        """Return what decides the order of a rank of a message-driven run: the rule of its lane in the program."""
        lane = next(lane for lane in self.program.lanes if lane.device == self.devices[rank])
        assert lane.rule is not None, "the order of a message-driven run is decided by rules"
        return lane.rule()

    def most_held(self, rank: int) -> dict[int, int]:
        """Return how many microbatches of each of its stages a rank of a message-driven run may hold at most.

        As many as in the simulated run, and on a device with one stage as many as its memory has room for.
        """
        device = self.devices[rank]
        lane = next(i for i, lane in enumerate(self.program.lanes) if lane.device == device)
        held = in_flight(self.timeline, lane)
        if len(held) == 1:
            ((s, count),) = held.items()
            free = self.plan.platform.devices[device].memory_bytes - lane_use(self.timeline, lane).peak_bytes
            held[s] = count + max(0, free) // max(1, self.graph.stages[s].kept_bytes)
        return held

    def most_activation_bytes(self, rank: int) -> int:
        """Return what a rank of a message-driven run holds at most of activations, whatever comes first; 0 for others.

        One that holds more microbatches than in the simulated run is let, where its memory has room for them; it never
        holds more than are in the pipelines that it serves.
        """
        if self.limit is None:
            return 0
        stages, total, more = self.plan.allocation.stages, 0, 0
        for s, room in self.most_held(rank).items():
            served = stages[0].replicas // gcd(stages[0].replicas, stages[s].replicas)
            count = min(room, self.limit * served, ceil_div(self.interval, stages[s].replicas))
            cost = self.graph.stages[s]
            total += count * cost.kept_bytes
            more = max(more, cost.peak_bytes - cost.kept_bytes)
        return total + more

    def waiting_bytes(self, rank: int) -> tuple[int, int]:
        """Return what a rank has at most on its device of activations that wait in host memory, and there."""
        stages = [(s, self.plan.allocation.stages[s]) for s in self.stages_of(rank)]
        layers = {s: self.plan.chain.of(x.way).layers[x.start : x.stop] for s, x in stages}
        coming = max(x.on_its_way_bytes for own in layers.values() for x in own)
        if not coming:
            return 0, 0
        lane = next(i for i, lane in enumerate(self.program.lanes) if lane.device == self.devices[rank])
        held = self.most_held(rank) if self.limit is not None else in_flight(self.timeline, lane)
        return coming, sum(count * sum(x.host_bytes for x in layers[s]) for s, count in held.items())

    @property
    def planned_period_ns(self) -> float:
        """What the plan promises: the pattern's period, or a drained mini-batch's share per microbatch."""
        if self.drains:
            return flush_makespan_ns(self.timeline) / self.interval
        return evaluate(self.plan).period_ns

    @property
    def filled(self) -> int:
        """Microbatches after which the pipeline has held as many as it ever will, on every replica.

        Where the order is decided on the way, what it holds may differ; the first mini-batch stands for the others.
        """
        pattern = self.plan.pattern
        if pattern is None:
            if self.drains:
                return self.interval
            lanes = [index for index, lane in enumerate(self.program.lanes) if lane.device is not None]
            return 2 * max(most_held(self.timeline, lane) for lane in lanes) + self.round
        return 2 * most_in_flight(self.graph, starts_of(pattern), pattern.period_ns) + self.round

    @cached_property
    def delays(self) -> list[Delay]:
        """How many updates the gradients of each stage miss in the steady state."""
        return plan_delays(self.plan, self.graph)

    def waits(self, stage: int) -> bool:
        """Whether gradients of weights that ``stage`` shares, alone, wait until an earlier stage's are there."""
        return not (self.drains or self.plan.policy.waits_for_norm) and any(stage in own[1:] for own in self.tied)

    def homes(self, stages: Iterable[int]) -> list[int]:
        """Return of ``stages``, which share weights, those that keep them: the first on each group of devices."""
        return first_on_devices(self.plan.allocation.stages, stages)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in chain order."""
        device = self.devices[rank]
        return [s for s, stage in enumerate(self.plan.allocation.stages) if device in stage.devices]

    def ranks_of(self, stage: int) -> list[int]:
        """Return the ranks of a stage's replicas, in replica order, of those that there are."""
        devices = self.plan.allocation.stages[stage].devices
        return [self.devices.index(device) for device in devices if device in self.devices]

    def turn(self, microbatch: int) -> int:
        """Return the how manieth a microbatch is since the pipeline was empty: replicas take turns from there on."""
        first, _ = self.segments[bisect_right(self.segments, (microbatch, self.microbatches)) - 1]
        return (microbatch - first) % self.interval if self.drains else microbatch - first


def processes_of(plan: Plan) -> int:
    """Return how many processes run ``plan``: one for each GPU that it uses."""
    return len({device for stage in plan.allocation.stages for device in stage.members}) * plan.chain.tensor


def lower_run(
    plan: Plan,
    steps: int,
    *,
    every: int | None = None,
    first: Position = FROM_THE_START,
    evaluates: bool = False,
    judged: int | None = None,
) -> LoweredRun:
    """Return the lowered run of a valid ``plan`` from position ``first`` until ``steps`` updates have been made.

    With ``every`` a checkpoint is written after each update whose number it divides, and after the last; the pipeline
    drains before it, as it does where the model is evaluated, every ``judged`` updates. BadInput says what cannot be
    run, or not yet. The simulation proves that the order doesn't deadlock. Linear in the microbatches of a mini-batch,
    or of the fill and a few rounds of an asynchronous pattern, and in the checkpoints, whatever the number of updates
    between them.
    """
    if steps < 1:
        raise BadInput(f"steps: {steps} is not a positive number of weight updates")
    if steps <= first.step:
        raise BadInput(f"steps: the checkpoint has {first.step} updates already, and the run is to end after {steps}")
    _refuse(plan)
    if plan.policy.accumulate is None:
        raise BadInput("plan: policy.accumulate is not decided, so nothing says when weights are updated")
    segments = Segments(plan, {} if evaluates else summed_beside(plan, graph_of(plan)), evaluates)
    interval = plan.interval
    lengths = _lengths(first.step, steps, [x for x in (every, judged) if x is not None])
    made = {length: segments.of(length) for length in sorted(set(lengths), reverse=True)}
    joined: list[list[Repeat]] = [[] for _ in segments.devices]
    places = []
    step, microbatch = first.step, first.microbatch
    for length in lengths:
        places.append((microbatch, length * interval))
        for parts, listing in zip(joined, made[length][2], strict=True):
            parts += listing.later(microbatch, step).parts
        step += length
        microbatch += length * interval
        if every is not None or judged is not None:
            for parts in joined:
                parts.append(Repeat((Save(step),)))
    if evaluates:
        one = {"versions": 0, "version": first.step}
        joined = [[replace(x, instructions=tuple(forwards(x.instructions)), **one) for x in xs] for xs in joined]
    program, timeline, _ = made[max(lengths)]
    return LoweredRun(
        plan=plan,
        graph=segments.graph,
        steps=steps - first.step,
        interval=interval,
        drains=segments.policy.drains,
        devices=segments.devices,
        program=program,
        timeline=timeline,
        instructions=tuple(map(Repeated, joined)),
        segments=tuple(places),
        tied=segments.tied,
        reads_newest=segments.policy.reads_newest,
        first=first,
        evaluates=evaluates,
        beside=segments.beside,
    )


def _lengths(first: int, last: int, every: Sequence[int]) -> list[int]:
    """Return the updates of each segment between updates ``first`` and ``last``."""
    ends = {first, last, *(end for some in every for end in range((first // some + 1) * some, last, some))}
    return [end - start for start, end in pairwise(sorted(ends))]


def _refuse(plan: Plan) -> None:
    """Raise BadInput with one sentence for what the runtime doesn't do."""
    kind = kind_of(plan)
    if kind.by_arrival:
        if plan.policy.weights not in kind.weights:
            raise BadInput("plan: " + kind.refusal.format(weights=plan.policy.weights))
        _refuse_uneven(plan)
    elif plan.pattern is None and kind.build is None:
        raise BadInput("plan: has no pattern, so nothing says when its operations run")
    if plan.policy.precision == "mixed" and plan.chain.dtype not in HALVES:
        raise BadInput(
            f"plan: mixed precision runs in the 16 bits of its profile, but {plan.chain.name} was profiled in "
            f"{plan.chain.dtype}, so its activations and times are others; profile it with --dtype bfloat16"
        )
    misfit = plan.chain.misfit(plan.policy.precision)
    if misfit is not None:
        raise BadInput(f"plan: {misfit}")
    for parted in tied_violations(plan.chain, plan.policy, plan.allocation.stages):
        raise BadInput(f"plan: {parted}")


def _refuse_uneven(plan: Plan) -> None:
    """Raise BadInput unless every replica gets equally many microbatches of a batch, as in a grid of pipelines."""
    count = plan.schedule.microbatches
    assert count is not None, "a plan that drains knows its batch"
    for s, stage in enumerate(plan.allocation.stages):
        fewer = count - count % stage.replicas
        if fewer < count:
            enough = " or ".join(str(n) for n in (fewer, fewer + stage.replicas) if n)
            raise BadInput(
                f"plan: a batch of {count} microbatches cannot be shared evenly by the {stage.replicas} replicas of "
                f"stage {s}; {enough} can"
            )

"""What does each device and link do, in which order? The Program, to which every kind of schedule comes down.

Simulator and runtime know programs only. A lane is the work of one device or one link: in a fixed order, or decided
while the program runs by the lane's rule. That is all that a program says; times come from the simulator or from the
real machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from ..cost.stage_graph import StageGraph
from ..errors import BadInput
from ..plan import Pattern
from .pattern import starts_of

StepKind = Literal["F", "R", "B", "W", "SEND_F", "SEND_B"]
PASSES: tuple[Literal["F", "R", "B", "W"], ...] = ("F", "R", "B", "W")  # what devices do


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One operation on one microbatch; ``position`` is its index in the program's operations.

    A backward that covers several microbatches is the step of the last of them.
    """

    microbatch: int
    position: int


@dataclass(frozen=True, slots=True)
class Work:
    """What the steps of one position do: as an operation of the path, ``covers`` microbatches at a time.

    ``R`` runs what a stage recomputes again, where that is no part of its backward. In a program that splits the
    backward, ``B`` computes the gradient of the input and ``W`` those of the weights.
    """

    kind: StepKind
    stage: int
    duration_ns: int
    resource: int
    covers: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """A step that waits for its lane, and when all that it needs is there (which may lie in the future).

    Until it is ``sure``, a transfer that it needs still waits for its link, and ``at_ns`` is the earliest that can be.
    """

    at_ns: int
    step: Step
    kind: StepKind
    stage: int
    sure: bool = True

    def has_come(self, now_ns: int) -> bool:
        """Whether the step can start at ``now_ns``."""
        return self.sure and self.at_ns <= now_ns


Decide = Callable[[int, Sequence[Arrival]], Arrival | None]
"""What a lane does next: given the time and the steps announced to it, sorted by arrival, one that has come, or None to
wait for the next arrival. A lane's ``rule`` makes one for each run, so that it may remember what it chose."""


@dataclass(frozen=True)
class Lane:
    """The steps of one device (``device`` is its platform index) or of one link (``device`` is None).

    They run in this order, or, with a ``rule``, in the order that it decides.
    """

    name: str
    device: int | None
    steps: tuple[Step, ...]
    rule: Callable[[], Decide] | None = None


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over replicas of a stage: ``ns`` from the end of the last of ``after`` on; ``before`` wait for it."""

    ns: int
    after: tuple[Step, ...]
    before: tuple[Step, ...]


@dataclass(frozen=True)
class Program:
    """Lanes that run ``microbatches`` microbatches through ``graph``; together they hold every step exactly once.

    ``batch``: microbatches that one backward covers. ``split``: whether the backward's weight part is a step of its
    own. ``limit``: how many batches may be between the first stage's first forward and last backward, None for what
    the order allows. ``weight_keeps``: the share of the activations that the weight part of a split backward needs; 1:
    what the profile says, or all. ``apart``: stages whose recomputation is a step of its own, anywhere between F and B.

    ``fused`` are steps that follow each other in a lane and run as one operation: it starts when all that they need is
    there, and what they make leaves at its end. They are the two parts of a backward, or a forward and those, which run
    together: ``overlap`` is the share of the shorter of the two that this hides.

    ``sums`` are those that updates wait for while nothing drains.
    """

    graph: StageGraph
    microbatches: int
    lanes: tuple[Lane, ...]
    batch: int = 1
    split: bool = False
    limit: int | None = None
    weight_keeps: Fraction = Fraction(1)
    fused: tuple[tuple[Step, ...], ...] = ()
    overlap: Fraction = Fraction(0)
    apart: frozenset[int] = frozenset()
    sums: tuple[Sum, ...] = ()

    @cached_property
    def operations(self) -> tuple[Work, ...]:
        """What each position does: the path, then the weight parts of all stages when the backward is split, then the
        recomputations that are apart."""
        return operations_of(self.graph, self.batch, self.split, self.apart)

    @cached_property
    def position(self) -> dict[tuple[StepKind, int], int]:
        """Position of each (kind, stage)."""
        return {(work.kind, work.stage): i for i, work in enumerate(self.operations)}

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """Of each position those of the same microbatch that must be over before: what comes before it on the path, of
        a weight part the input part, of a recomputation the forward, which its backward needs, too."""
        return needs_of(self.operations)

    @cached_property
    def release(self) -> tuple[int, ...]:
        """For each stage, the position of the step that frees its last activations: B, or W when split."""
        return tuple(self.position["W" if self.split else "B", s] for s in range(len(self.graph.stages)))

    def buffer_bytes(self, stage: int) -> int:
        """Return the send and receive buffers of ``stage``, half for gradients: those of a batch are one message."""
        cost = self.graph.stages[stage]
        more = cost.split_buffer_bytes if self.split else 0
        return cost.buffer_bytes + cost.buffer_bytes // 2 * (self.batch - 1) + more

    def buffers(self, stages: Sequence[int]) -> int:
        """Return the same of all ``stages`` of a device, where one pass works at once, or one each way."""
        working = sorted(self.graph.stages[s].working_bytes for s in stages)
        return sum(map(self.buffer_bytes, stages)) - sum(working[: -2 if self.fused else -1])

    def stages_of(self, lane: int) -> list[int]:
        """Return the stages on a lane's device in chain order, whether or not it has steps; none on a link."""
        device, graph = self.lanes[lane].device, self.graph
        if device is None:
            return []
        return [s for s, stage in enumerate(graph.stages) if device in graph.resources[stage.resource].devices]

    def leader(self, microbatch: int) -> int:
        """Return the microbatch whose steps are the backward of ``microbatch``: the last of its batch."""
        return microbatch - microbatch % self.batch + self.batch - 1

    def name(self, step: Step) -> str:
        """Return ``2F5`` for stage 2's forward of microbatch 5; ``I`` is the input part of a split backward."""
        work = self.operations[step.position]
        kind = "I" if self.split and work.kind == "B" else work.kind
        return f"{work.stage}{kind}{step.microbatch}"

    def text(self) -> str:
        """Return one row per device, ``0F0 0F1 0B0``: stage, kind, microbatch, as torch's pipelining writes them."""
        rows = [f"{lane.name}: " + " ".join(self.cells(lane)) for lane in self.lanes if lane.device is not None]
        return "\n".join(rows) + "\n"

    def cells(self, lane: Lane) -> list[str]:
        """Return a lane's operations in torch's words: ``7B0`` for both parts of a backward in one operation,
        ``(0F4;7B0)OVERLAP_F_B`` for a forward and a backward in one."""
        groups = {group[0]: group for group in self.fused}
        inside = {step for group in self.fused for step in group[1:]}
        return [self._cell(groups.get(step, (step,))) for step in lane.steps if step not in inside]

    def _cell(self, group: Sequence[Step]) -> str:
        if len(group) == 1:
            return self.name(group[0])
        *ahead, back, _ = map(self.name, group)
        both = [*ahead, back.replace("I", "B")]
        return both[0] if len(both) == 1 else f"({';'.join(both)})OVERLAP_F_B"

    def first_come(self) -> Program:
        """Return the program with links that carry what comes first, instead of in a fixed order."""
        lanes = (
            lane if lane.device is not None or lane.rule else replace(lane, rule=lambda: first_come)
            for lane in self.lanes
        )
        return replace(self, lanes=tuple(lanes))


def first_come(now_ns: int, announced: Sequence[Arrival]) -> Arrival | None:
    """Decide for what arrived first; at equal times for what comes first in the model, then for the older."""
    for arrival in announced:
        if arrival.at_ns > now_ns:  # and so are all behind it
            return None
        if arrival.sure:
            return arrival
    return None


def oldest(first: Callable[[StepKind, int], bool]) -> Decide:
    """Return what decides for what arrived first, but for kinds and stages that go ``first`` before all else; backwards
    before others that arrive at once. By its ``first`` the simulator keeps what has come in order."""

    def decide(now_ns: int, announced: Sequence[Arrival]) -> Arrival | None:
        def rank(arrival: Arrival) -> tuple[bool, int, bool, Arrival]:
            return not first(arrival.kind, arrival.stage), arrival.at_ns, arrival.kind != "B", arrival

        return min((arrival for arrival in announced if arrival.has_come(now_ns)), key=rank, default=None)

    decide.first = first  # type: ignore[attr-defined]
    return decide


def operations_of(
    graph: StageGraph, batch: int = 1, split: bool = False, apart: Set[int] = frozenset()
) -> tuple[Work, ...]:
    """Return the operations of a program on ``graph``; times of what covers a batch are the sum over it."""
    assert batch == 1 or not apart, "what recomputes a batch does so within its backward"
    works = []
    half = len(graph.round_trips)
    for position, op in enumerate(graph.operations):
        covers = batch if position >= half else 1
        duration = op.duration_ns
        if split and op.kind == "B":
            duration -= graph.stages[op.stage].backward_weight_ns
        if op.kind == "B" and op.stage in apart:
            duration -= graph.stages[op.stage].recompute_ns
        works.append(Work(op.kind, op.stage, covers * duration, op.resource, covers))
    if split:
        works += [
            Work("W", s, batch * stage.backward_weight_ns, stage.resource, batch)
            for s, stage in enumerate(graph.stages)
        ]
    works += [Work("R", s, graph.stages[s].recompute_ns, graph.stages[s].resource) for s in sorted(apart)]
    return tuple(works)


def needs_of(works: Sequence[Work]) -> tuple[tuple[int, ...], ...]:
    """Return :attr:`Program.needs` of a program's operations."""
    at = {(work.kind, work.stage): position for position, work in enumerate(works)}
    found: list[tuple[int, ...]] = []
    for position, work in enumerate(works):
        before = at["B", work.stage] if work.kind == "W" else at["F", work.stage] if work.kind == "R" else position - 1
        again = at.get(("R", work.stage)) if work.kind == "B" else None
        found.append(tuple(x for x in (before, again) if x is not None and x >= 0))
    return tuple(found)


def device_of(graph: StageGraph, stage: int, microbatch: int) -> int:
    """Return the device that runs ``microbatch`` of ``stage``: replica ``microbatch mod r`` (PipeDream 3.2)."""
    devices = graph.resources[graph.stages[stage].resource].devices
    return devices[microbatch % len(devices)]


def on_devices(graph: StageGraph, rule: Callable[[], Decide]) -> dict[tuple[int, int], Callable[[], Decide]]:
    """Return the rules of lanes where every device decides by ``rule``."""
    devices = [(i, resource) for i, resource in enumerate(graph.resources) if not resource.is_link]
    return {(i, replica): rule for i, resource in devices for replica in range(resource.replicas)}


def not_one_each(graph: StageGraph, schedule: str) -> str | None:
    """Return why ``schedule``, which needs one GPU per stage and one stage per GPU, cannot run ``graph``; or None."""
    for s, replicas in enumerate(replicas_of(graph)):
        if replicas > 1:
            return f"{schedule} gives each stage one GPU; stage {s} of this plan has {replicas}"
    return shared_devices(graph, schedule)


def shared_devices(graph: StageGraph, schedule: str) -> str | None:
    """Return why ``schedule``, which needs one stage per GPU, cannot run ``graph``; or None."""
    for index, resource in enumerate(graph.resources):
        stages = graph.stages_on(index)
        if len(stages) > 1:
            return f"{schedule} gives each GPU one stage; {resource.name} has stages {stages} in this plan"
    return None


def refuse(found: str | None) -> None:
    """Raise BadInput where a reason was found."""
    if found is not None:
        raise BadInput(found)


def pipelines(graph: StageGraph, schedule: str) -> int:
    """Return how many equal pipelines the stages of ``graph`` make; BadInput where replicas differ, as ``schedule``,
    which orders one pipeline, runs them side by side."""
    refuse(unequal(graph, schedule))
    return side_by_side(graph)


def side_by_side(graph: StageGraph) -> int:
    """Return how many equal pipelines the stages of ``graph`` make: the replicas of the first."""
    return graph.resources[graph.stages[0].resource].replicas


def no_pipelines(graph: StageGraph, schedule: str) -> str | None:
    """Return why the stages of ``graph`` are no equal pipelines of one stage per GPU, for ``schedule``; or None."""
    return shared_devices(graph, schedule) or unequal(graph, schedule)


def replicas_of(graph: StageGraph) -> list[int]:
    """Return the number of each stage's replicas."""
    return [graph.resources[stage.resource].replicas for stage in graph.stages]


def unequal(graph: StageGraph, schedule: str) -> str | None:
    """Return why the stages of ``graph`` are no equal pipelines, which ``schedule`` needs; or None."""
    counts = replicas_of(graph)
    other = next((s for s, count in enumerate(counts) if count != counts[0]), None)
    if other is None:
        return None
    return (
        f"{schedule} runs equal pipelines side by side; stage 0 of this plan has {counts[0]} "
        f"GPU{'s' if counts[0] > 1 else ''}, stage {other} has {counts[other]}"
    )


def unroll(graph: StageGraph, pattern: Pattern, microbatches: int) -> Program:
    """Return the program that runs ``microbatches`` microbatches in the pattern's order: fill, steady state, drain.

    Microbatch m runs each operation at its start + m * period, so lanes are sorted by that time; operations of a valid
    pattern tie on one lane only when the first of them takes no time.
    """
    starts = starts_of(pattern)
    queues: dict[tuple[int, int], list[Step]] = {}
    for m in range(microbatches):
        for position, op in enumerate(graph.operations):
            key = op.resource, m % graph.resources[op.resource].replicas
            queues.setdefault(key, []).append(Step(m, position))

    def when(step: Step) -> tuple[int, int, Step]:
        start = starts[step.position] + step.microbatch * pattern.period_ns
        return start, graph.operations[step.position].duration_ns, step

    return make_program(graph, microbatches, {key: sorted(queue, key=when) for key, queue in queues.items()})


def make_program(
    graph: StageGraph,
    microbatches: int,
    orders: Mapping[tuple[int, int], Sequence[Step]],
    *,
    rules: Mapping[tuple[int, int], Callable[[], Decide]] = MappingProxyType({}),
    batch: int = 1,
    split: bool = False,
    limit: int | None = None,
    weight_keeps: Fraction = Fraction(1),
    apart: Set[int] = frozenset(),
) -> Program:
    """Return the program whose lanes run ``orders``: (resource, replica) to steps in order.

    A lane without an order decides as it goes: as ``rules`` say for it, or for what comes first, as links do.
    """
    works = operations_of(graph, batch, split, apart)
    on: list[list[int]] = [[] for _ in graph.resources]
    for position, work in enumerate(works):
        on[work.resource].append(position)
    lanes: list[Lane] = []
    for index, resource in enumerate(graph.resources):
        for replica in range(min(resource.replicas, max(1, microbatches)) if resource.is_link else resource.replicas):
            device = None if resource.is_link else resource.devices[replica]
            name = resource.one_name(replica)
            order = orders.get((index, replica))
            if order is not None:
                lanes.append(Lane(name, device, tuple(order)))
                continue
            steps = tuple(
                Step(m, position)
                for m in range(replica, microbatches, resource.replicas)
                for position in on[index]
                if works[position].covers == 1 or m % batch == batch - 1
            )
            lanes.append(Lane(name, device, steps, rules.get((index, replica), lambda: first_come)))
    lanes.sort(key=lambda lane: (lane.device is None, -1 if lane.device is None else lane.device))
    return Program(graph, microbatches, tuple(lanes), batch, split, limit, weight_keeps, apart=frozenset(apart))

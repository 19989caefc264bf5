"""What does a periodic pattern hold? Microbatches in flight, its groups, and the memory of each device.

A pattern says when each operation runs on microbatch 0; on microbatch m it runs m periods later, without end. A
microbatch is in flight at a stage, which keeps its activations, from the start of its forward to the end of its
backward there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from ..cost.stage_graph import StageGraph
from ..integers import ceil_div
from ..plan import OpKind, Pattern, TimedOp
from ..problem import Platform


def starts_of(pattern: Pattern) -> list[int]:
    """Return the absolute starts of a pattern's operations in path order."""
    return [op.start_ns for op in pattern.operations]


def make_pattern(graph: StageGraph, starts: Sequence[int], period: int) -> Pattern:
    """Return the pattern of ``graph`` with ``starts`` (ns, in path order)."""
    timed = zip(graph.operations, starts, strict=True)
    return Pattern(period, tuple(TimedOp(op.kind, op.stage, start, op.duration_ns) for op, start in timed))


def one_at_a_time(graph: StageGraph) -> Pattern:
    """Return the pattern that starts a microbatch when the one before has left; valid when any pattern is."""
    starts = [0, *accumulate(op.duration_ns for op in graph.operations[:-1])]
    return make_pattern(graph, starts, max(graph.path_ns, graph.period_floor_ns))


def in_flight(graph: StageGraph, starts: Sequence[int], period: int, stage: int, at: int) -> int:
    """Return how many microbatches of ``stage`` one replica holds at the absolute time ``at`` of the steady state.

    Held from the start of F to the end of B; at equal instants releases come before acquisitions.
    """
    step = graph.resources[graph.stages[stage].resource].replicas * period
    begin = starts[graph.position["F", stage]]
    last = graph.position["B", stage]
    end = starts[last] + graph.operations[last].duration_ns
    return (at - begin) // step - (at - end) // step


def _turning(graph: StageGraph, starts: Sequence[int], period: int, stage: int, later: int) -> int:
    """Return how many microbatches of one replica, at most, have begun their backward in stage ``later`` on the same
    devices and not ended it in ``stage``."""
    step = graph.resources[graph.stages[stage].resource].replicas * period
    begin, last = starts[graph.position["B", later]], graph.position["B", stage]
    return ceil_div(starts[last] + graph.operations[last].duration_ns - begin, step)


def most_in_flight(graph: StageGraph, starts: Sequence[int], period: int) -> int:
    """Return d: the most microbatches in flight at any stage over all its replicas; 2bw must accumulate as many."""
    return max(
        ceil_div(starts[graph.position["B", s]] + stage.backward_ns - starts[graph.position["F", s]], period)
        for s, stage in enumerate(graph.stages)
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Where a pattern puts a stage (``kind`` F), or the cut behind it (SEND_F): MadPipe sections 3 and 4.1.

    ``number`` is that of its group, 1 at the loss: from the begin of its way there to the end of its way back pass more
    than ``number - 1`` periods and at most ``number``, so ``number`` microbatches are in between, on all replicas
    together. ``shifts`` are the periods in which the way there and the way back begin, counted from the period that
    begins when a microbatch enters.
    """

    kind: OpKind
    stage: int
    number: int
    shifts: tuple[int, int]


def groups(graph: StageGraph, pattern: Pattern) -> list[Group]:
    """Return the group of each of ``graph.round_trips``, in order."""
    found, period, starts = [], pattern.period_ns, starts_of(pattern)
    for i, (there, back) in enumerate(graph.round_trips):
        begin, turn = starts[i] - starts[0], starts[-1 - i] - starts[0]
        number = ceil_div(turn + back.duration_ns - begin, period)
        found.append(Group(there.kind, there.stage, number, (begin // period, turn // period)))
    return found


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Memory of one device in the steady state, in bytes; ``in_flight`` has one count for each stage on it."""

    memory_bytes: int
    weights_bytes: int
    activation_bytes: int
    buffer_bytes: int
    in_flight: tuple[int, ...]

    @property
    def static_bytes(self) -> int:
        """What is held all the time: weights and buffers."""
        return self.weights_bytes + self.buffer_bytes

    @property
    def peak_bytes(self) -> int:
        """Weights, activations at the worst instant, and buffers."""
        return self.static_bytes + self.activation_bytes

    @property
    def over_bytes(self) -> int:
        """How much is held beyond the memory; none where it fits."""
        return self.peak_bytes - self.memory_bytes


def resource_use(graph: StageGraph, starts: Sequence[int], period: int, resource: int) -> DeviceUse:
    """Return the memory of each device of a group under the pattern (ALGORITHMS section 3).

    Peaks occur at forward starts, and at backward starts of stages that recompute.
    """
    stages = graph.stages_on(resource)
    weights = buffers = 0
    counts = []
    of_first = in_flight(graph, starts, period, 0, starts[graph.position["F", 0]])
    for s in stages:
        stage = graph.stages[s]
        count = max(1, in_flight(graph, starts, period, s, starts[graph.position["F", s]]))
        counts.append(count)
        kept = graph.versions(s, count, of_first)
        weights += graph.weights_bytes(s, kept)
        if stage.lent:
            weights += graph.lent_bytes(s, partial(_turning, graph, starts, period, s))
        buffers += stage.buffer_bytes
    instants = [starts[graph.position["F", s]] for s in stages]
    instants += [
        starts[graph.position["B", s]] for s in stages if graph.stages[s].peak_bytes > graph.stages[s].kept_bytes
    ]
    step = graph.resources[resource].replicas * period
    activation = 0
    for at in instants:
        held = 0
        for s in stages:
            stage = graph.stages[s]
            held += in_flight(graph, starts, period, s, at) * stage.kept_bytes
            if (at - starts[graph.position["B", s]]) % step < max(1, stage.backward_ns):
                held += stage.peak_bytes - stage.kept_bytes
        activation = max(activation, held)
    memory = graph.resources[resource].memory_bytes
    assert memory is not None, "links hold nothing"
    return DeviceUse(memory, weights, activation, buffers, tuple(counts))


def memory_fits(graph: StageGraph, starts: Sequence[int], period: int) -> bool:
    """Whether every device group stays within its memory."""
    devices = (i for i, resource in enumerate(graph.resources) if not resource.is_link)
    uses = (resource_use(graph, starts, period, i) for i in devices)
    return all(use.over_bytes <= 0 for use in uses)


def unused(platform: Platform) -> list[DeviceUse]:
    """Return the use of every device of the platform while they hold nothing."""
    return [DeviceUse(device.memory_bytes, 0, 0, 0, ()) for device in platform.devices]


def device_uses(graph: StageGraph, starts: Sequence[int], period: int, platform: Platform) -> list[DeviceUse]:
    """Return the memory of every device of the platform; unused devices hold nothing."""
    uses = unused(platform)
    for index, resource in enumerate(graph.resources):
        if not resource.is_link:
            use = resource_use(graph, starts, period, index)
            for d in resource.devices:
                uses[d] = replace(use, memory_bytes=platform.devices[d].memory_bytes)
    return alike(graph, uses, platform)


def alike(graph: StageGraph, uses: list[DeviceUse], platform: Platform) -> list[DeviceUse]:
    """Return ``uses`` where all devices that run a stage's layers together hold what the first of them does."""
    for resource in graph.resources:
        for d in () if resource.is_link else resource.devices:
            for other in range(d + 1, d + resource.width // platform.width):
                uses[other] = uses[d]
    return uses

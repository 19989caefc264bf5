"""What is there to order? Passes of equal microbatches on devices and links, their times, and what devices hold.

All microbatches are alike. So some best order has every kind of pass in the order of the microbatches: exchanging them
so keeps each pass behind what it needs, and what devices hold. An order is then a word of kinds for each machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import gcd

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ..memory import step_changes
from ..program import Program, operations_of

NEVER_COUNTS = -(2**50)  # the tail of what has no part in the value
Word = tuple[int, ...]  # kinds of passes of one machine, in order


class NoRoom(BadInput):
    """A device cannot hold what one microbatch takes, in whatever order."""


@dataclass(frozen=True, slots=True)
class Store:
    """What devices hold, in any unit: by how much a kind of pass changes it as it ``starts`` and as it ``ends``, and
    the ``room`` of each machine."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    room: tuple[int, ...]


@dataclass(frozen=True)
class OrderProblem:
    """``microbatches`` of each kind of pass, a position of the program, to be ordered on machines, a graph's resources.

    The first ``path`` kinds are on the way of a microbatch, those behind are weight parts.
    ``needs[k]`` is the kind of the same microbatch that must be over before, or -1. The value of an order is the most,
    over kinds k, of the end of the last of them plus ``tail[k]``. ``spans``: tails are less by when the device's first
    pass starts at the earliest, so that the value is the longest span of one device; else it is the makespan.
    """

    durations: tuple[int, ...]
    needs: tuple[int, ...]
    machines: tuple[int, ...]
    devices: tuple[int, ...]
    tail: tuple[int, ...]
    stores: tuple[Store, ...]
    microbatches: int
    spans: bool
    path: int

    @cached_property
    def on(self) -> tuple[tuple[int, ...], ...]:
        """The kinds of each machine."""
        found: list[list[int]] = [[] for _ in range(max(self.machines) + 1)]
        for kind, machine in enumerate(self.machines):
            found[machine].append(kind)
        return tuple(map(tuple, found))

    @cached_property
    def head(self) -> tuple[int, ...]:
        """How long a microbatch takes before each kind of pass."""
        found = [0] * len(self.needs)
        for kind in self.by_depth:
            needed = self.needs[kind]
            if needed >= 0:
                found[kind] = found[needed] + self.durations[needed]
        return tuple(found)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """How many kinds of passes of a microbatch come before each kind."""
        found: list[int] = []
        for kind in range(len(self.needs)):
            steps, needed = 0, self.needs[kind]
            while needed >= 0:
                steps, needed = steps + 1, self.needs[needed]
            found.append(steps)
        return tuple(found)

    @cached_property
    def by_depth(self) -> tuple[int, ...]:
        """All kinds, each behind what it needs."""
        return tuple(sorted(range(len(self.needs)), key=self.depth.__getitem__))

    @cached_property
    def rests(self) -> tuple[int, ...]:
        """What at least follows on the end of the last pass of each kind until the value is reached."""
        rests = list(self.tail)
        for kind in reversed(self.by_depth):
            needed = self.needs[kind]
            if needed >= 0:
                rests[needed] = max(rests[needed], self.durations[kind] + rests[kind])
        return tuple(rests)

    def begins_at_once(self, machine: int) -> bool:
        """Whether the first pass of a machine starts as early as can be in every order: what it needs comes first
        everywhere."""
        first = {on: min(kinds, key=lambda k: (self.head[k], k)) for on, kinds in enumerate(self.on) if kinds}
        kind = first[machine]
        while self.needs[kind] >= 0:
            kind = self.needs[kind]
            if first[self.machines[kind]] != kind:
                return False
        return True

    @cached_property
    def grain(self) -> int:
        """What divides the value of every order."""
        return gcd(*self.durations, *(tail for tail in self.tail if tail != NEVER_COUNTS)) or 1

    @cached_property
    def measured(self) -> bool:
        """Whether the value of every order is its makespan or longest span: no span begins later than tails say."""
        return not self.spans or all(self.begins_at_once(i) for i, kinds in enumerate(self.on) if kinds)

    @cached_property
    def work(self) -> tuple[int, ...]:
        """What each machine has to do."""
        return tuple(self.microbatches * sum(self.durations[k] for k in kinds) for kinds in self.on)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """What at least comes behind the last pass of each machine, less when its span begins."""
        return tuple(min((self.tail[k] for k in kinds), default=0) for kinds in self.on)

    def is_weight(self, kind: int) -> bool:
        """Whether a kind of pass computes weight gradients alone."""
        return kind >= self.path

    def is_backward(self, kind: int) -> bool:
        """Whether a kind of pass, or the transfer, is on the way back."""
        return self.path // 2 <= kind < self.path

    def one_by_one(self, machine: int) -> Word:
        """Return the passes of a machine for one microbatch, those of weight gradients as soon as they can be."""
        return tuple(sorted(self.on[machine], key=lambda k: (self.depth[k], -k)))

    def holds(self, machine: int, word: Sequence[int]) -> bool:
        """Whether a device can hold all that it does in this order."""
        for store in self.stores:
            held, room, starts, ends = 0, store.room[machine], store.starts, store.ends
            for kind in word:
                held += starts[kind]
                if held > room:
                    return False
                held += ends[kind]
        return True

    def complete(self, words: Sequence[Word]) -> bool:
        """Whether every machine has each of its kinds once for every microbatch."""
        count = self.microbatches
        return all(Counter(word) == dict.fromkeys(kinds, count) for kinds, word in zip(self.on, words, strict=True))


def order_problem(
    graph: StageGraph,
    microbatches: int,
    *,
    barrier: bool = True,
    split: bool = True,
    weight_keeps: Fraction = Fraction(1),
    limit: int | None = None,
) -> OrderProblem:
    """Return the problem of one pipeline: memory of its devices in bytes, and at most ``limit`` activations on each.

    An activation counts, in ``limit``, as one from the start of its forward, and as ``weight_keeps`` of one from the
    end of its backward's first part to the end of its second. NoRoom where a device cannot hold what one microbatch
    takes.
    """
    works = operations_of(graph, 1, split)
    position = {(work.kind, work.stage): k for k, work in enumerate(works)}
    path = len(graph.operations)
    needs = [k - 1 if k < path else position["B", works[k].stage] for k in range(len(works))]
    stores = [_bytes(graph, split, weight_keeps)]
    if limit is not None:
        stores.append(_activations(graph, split, weight_keeps, limit))
    problem = OrderProblem(
        tuple(work.duration_ns for work in works),
        tuple(needs),
        tuple(work.resource for work in works),
        devices := tuple(i for i, resource in enumerate(graph.resources) if not resource.is_link),
        (0,) * len(works),
        tuple(stores),
        microbatches,
        not barrier,
        path,
    )
    problem = replace(problem, tail=_tails(graph, problem, barrier))
    for device in devices:
        if not problem.holds(device, problem.one_by_one(device)):
            where, said = graph.resources[device].name, "" if limit is None else f", of {limit} activations at most,"
            raise NoRoom(f"{where} has no room{said} for the passes of even one microbatch at a time")
    return problem


def _tails(graph: StageGraph, problem: OrderProblem, barrier: bool) -> tuple[int, ...]:
    works = range(len(problem.durations))
    if barrier:
        steps = [sum(s.step_ns for s in graph.stages if s.resource == r) for r in range(len(graph.resources))]
        rest = graph.norm_ns + max(steps) if graph.policy.clip else 0
        path = len(graph.operations)
        at = [op.stage for op in graph.operations] + [k - path for k in works if k >= path]
        return tuple(graph.stages[at[k]].update_ns * (problem.machines[k] in problem.devices) + rest for k in works)
    found = []
    for k in works:
        machine = problem.machines[k]
        if machine not in problem.devices:
            found.append(NEVER_COUNTS)
            continue
        stages = graph.stages_on(machine)
        first = min(problem.head[other] for other in problem.on[machine])
        found.append(sum(graph.stages[s].update_ns for s in stages) - first)
    return tuple(found)


def _bytes(graph: StageGraph, split: bool, weight_keeps: Fraction) -> Store:
    """Return the bytes of activations, as the simulator counts them, and what weights and buffers leave of memory."""
    empty = Program(graph, 0, (), 1, split, None, weight_keeps)
    changes = [step_changes(empty, k, 0, 1) for k in range(len(empty.operations))]
    starts, ends = (tuple(sum(size for at, size in some if at == when) for some in changes) for when in (0, 1))
    room = []
    for index, resource in enumerate(graph.resources):
        stages = graph.stages_on(index)
        fixed = sum(graph.weights_bytes(s, graph.versions(s, 1, 1)) + empty.buffer_bytes(s) for s in stages)
        room.append(0 if resource.memory_bytes is None else resource.memory_bytes - fixed)
    return Store(starts, ends, tuple(room))


def _activations(graph: StageGraph, split: bool, weight_keeps: Fraction, limit: int) -> Store:
    whole, later = weight_keeps.denominator, weight_keeps.numerator
    change = {"F": (whole, 0), "B": (0, later - whole if split else -whole), "W": (0, -later)}
    pairs = [change.get(work.kind, (0, 0)) for work in operations_of(graph, 1, split)]
    room = (limit * whole,) * len(graph.resources)
    return Store(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), room)

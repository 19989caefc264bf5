"""What is there to order? Passes of equal microbatches on devices and links, their times, and what devices hold.

All microbatches are alike. So some best order has every kind of pass in the order of the microbatches: exchanging them
so keeps each pass behind what it needs, and what devices hold. An order is then a word of kinds for each machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from graphlib import TopologicalSorter
from math import gcd

from ...cost.stage_graph import StageGraph
from ...deadline import NEVER, Deadline
from ...errors import BadInput
from ..program import Program, Work, needs_of, operations_of, unequal
from ..programs.slots import Pass, homes, listed
from ..simulate import simulate
from ..timeline import step_changes

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

    The first ``path`` kinds are on the way of a microbatch, those behind are weight parts, and last recomputations.
    ``needs[k]`` is the kind of the same microbatch that must be over before, or -1, and ``again[k]`` that of what a
    backward has recomputed on its own machine, or -1. The value of an order is the most,
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
    again: tuple[int, ...]

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """All kinds of the same microbatch that must be over before each kind."""
        return tuple(tuple(x for x in pair if x >= 0) for pair in zip(self.needs, self.again, strict=True))

    @cached_property
    def backward_of(self) -> dict[int, int]:
        """The backward that needs each kind of recomputation."""
        return {again: kind for kind, again in enumerate(self.again) if again >= 0}

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
            found[kind] = max((found[needed] + self.durations[needed] for needed in self.before[kind]), default=0)
        return tuple(found)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """How many kinds of passes of a microbatch come one after the other before each kind."""
        found = [0] * len(self.needs)
        for kind in TopologicalSorter(dict(enumerate(self.before))).static_order():
            found[kind] = max((found[needed] + 1 for needed in self.before[kind]), default=0)
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
            for needed in self.before[kind]:
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
        return not self.spans or all(self.begins_at_once(i) for i in self.devices if self.on[i])

    @cached_property
    def work(self) -> tuple[int, ...]:
        """What each machine has to do."""
        return tuple(self.microbatches * sum(self.durations[k] for k in kinds) for kinds in self.on)

    def is_weight(self, kind: int) -> bool:
        """Whether a kind of pass computes weight gradients alone."""
        return kind >= self.path and kind not in self.backward_of

    def one_by_one(self, machine: int) -> Word:
        """Return the passes of a machine for one microbatch, those of weight gradients as soon as they can be, and
        recomputations as late."""
        return self.with_again(
            sorted((k for k in self.on[machine] if k not in self.backward_of), key=lambda k: (self.depth[k], -k))
        )

    def with_again(self, word: Sequence[int]) -> Word:
        """Return a word without recomputations with each right before its backward."""
        return tuple(x for kind in word for x in (self.again[kind], kind) if x >= 0)

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
    apart: Set[int] = frozenset(),
) -> OrderProblem:
    """Return the problem of one pipeline: memory of its devices in bytes, and at most ``limit`` activations on each.

    Of stages ``apart`` recomputations are passes of their own.

    An activation counts, in ``limit``, as one from the start of its forward, and as ``weight_keeps`` of one from the
    end of its backward's first part to the end of its second. NoRoom where a device cannot hold what one microbatch
    takes.
    """
    works = operations_of(graph, 1, split, apart)
    path = len(graph.operations)
    needs = needs_of(works)
    stores = [_bytes(graph, split, weight_keeps, apart)]
    if limit is not None:
        stores.append(_activations(works, split, weight_keeps, limit, len(graph.resources)))
    problem = OrderProblem(
        tuple(work.duration_ns for work in works),
        tuple(needed[0] if needed else -1 for needed in needs),
        tuple(work.resource for work in works),
        devices := tuple(i for i, resource in enumerate(graph.resources) if not resource.is_link),
        (0,) * len(works),
        tuple(stores),
        microbatches,
        not barrier,
        path,
        tuple(needed[1] if len(needed) > 1 else -1 for needed in needs),
    )
    problem = replace(problem, tail=_tails(graph, problem, [work.stage for work in works], barrier))
    for device in devices:
        if not problem.holds(device, problem.one_by_one(device)):
            where, said = graph.resources[device].name, "" if limit is None else f", of {limit} activations at most,"
            raise NoRoom(f"{where} has no room{said} for the passes of even one microbatch at a time")
    return problem


def _tails(graph: StageGraph, problem: OrderProblem, at: Sequence[int], barrier: bool) -> tuple[int, ...]:
    """Return the tail of each kind, which is of the stage ``at`` its place."""
    works = range(len(problem.durations))
    if barrier:
        steps = [sum(s.step_ns for s in graph.stages if s.resource == r) for r in range(len(graph.resources))]
        if graph.policy.clip:
            steps = [graph.norm_ns + max(steps)] * len(steps)
        own = [machine in problem.devices for machine in problem.machines]
        return tuple(graph.stages[at[k]].update_ns * own[k] + steps[problem.machines[k]] for k in works)
    found = []
    for k in works:
        machine = problem.machines[k]
        if machine not in problem.devices:
            found.append(NEVER_COUNTS)
            continue
        stages = graph.stages_on(machine)
        first = min(problem.head[other] for other in problem.on[machine])
        found.append(sum(graph.stages[s].update_ns + graph.stages[s].step_ns for s in stages) - first)
    return tuple(found)


def _bytes(graph: StageGraph, split: bool, weight_keeps: Fraction, apart: Set[int]) -> Store:
    """Return the bytes of activations, as the simulator counts them, and what weights and buffers leave of memory."""
    empty = Program(graph, 0, (), 1, split, None, weight_keeps, apart=frozenset(apart))
    changes = [step_changes(empty, k, 0, 1) for k in range(len(empty.operations))]
    starts, ends = (tuple(sum(size for at, size in some if at == when) for some in changes) for when in (0, 1))
    room = []
    for index, resource in enumerate(graph.resources):
        stages = graph.stages_on(index)
        fixed = sum(graph.weights_bytes(s, graph.versions(s, 1, 1)) for s in stages) + empty.buffers(stages)
        room.append(0 if resource.memory_bytes is None else resource.memory_bytes - fixed)
    return Store(starts, ends, tuple(room))


def _activations(works: Sequence[Work], split: bool, weight_keeps: Fraction, limit: int, machines: int) -> Store:
    whole, later = weight_keeps.denominator, weight_keeps.numerator
    change = {"F": (whole, 0), "B": (0, later - whole if split else -whole), "W": (0, -later)}
    pairs = [change.get(work.kind, (0, 0)) for work in works]
    room = (limit * whole,) * machines
    return Store(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), room)


def program_of_words(
    graph: StageGraph,
    microbatches: int,
    words: Sequence[Word],
    split: bool,
    weight_keeps: Fraction = Fraction(1),
    apart: Set[int] = frozenset(),
) -> Program:
    """Return the program in which each of the equal pipelines of ``graph`` runs ``words``; a pipeline with fewer
    microbatches leaves the last out."""
    works = operations_of(graph, 1, split, apart)

    def order(d: int, most: int) -> list[Pass]:
        seen: Counter[int] = Counter()
        found: list[Pass] = []
        for kind in words[homes(graph)[d]]:
            if seen[kind] < most:
                found.append((works[kind].kind, works[kind].stage, seen[kind]))
            seen[kind] += 1
        return found

    refused = unequal(graph, "a synthesised order")
    return listed(graph, microbatches, refused, order, split, weight_keeps if split else Fraction(1), apart)


def words_of(program: Program, problem: OrderProblem, deadline: Deadline = NEVER) -> list[Word]:
    """Return the words of a simulated run of one pipeline, in which backwards recompute themselves.

    Where the problem splits backwards and the program doesn't, weight parts come right behind.
    """
    path = problem.path
    splits = any(map(problem.is_weight, range(path, len(problem.durations))))
    words: list[Word] = [()] * len(problem.on)
    for lane in simulate(program, deadline=deadline).program.lanes:
        word: list[int] = []
        for step in lane.steps:
            word.append(step.position)
            work = program.operations[step.position]
            if splits and not program.split and work.kind == "B":
                word.append(path + work.stage)
        if word:
            words[problem.machines[word[0]]] = tuple(word)
    return words

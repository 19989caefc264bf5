"""Which order of few passes is the best of all? Passes are begun one by one, as they begin, in every way that may be.

A pass begins as soon as its machine is free and what it needs is there, but no sooner than the one begun before it:
every order can be run so, and loses nothing. Where the same passes have begun, one way dominates another that has
nothing earlier. What devices hold depends on those passes alone. What can't beat the best known order isn't followed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...deadline import Deadline
from .problem import NEVER_COUNTS, OrderProblem, Word

Times = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """How passes have begun: when machines are free, and ``ends`` of passes that others wait for, by kind and in order;
    what has ended is worth so much already; the ``last`` begun, after which way ``before``."""

    free: Times
    ends: tuple[Times, ...]
    worth: int
    last: int
    before: _Way | None

    def dominates(self, other: _Way) -> bool:
        """Whether nothing is later than in ``other``, in which the same passes have begun."""
        if self.worth > other.worth or any(a > b for a, b in zip(self.free, other.free, strict=True)):
            return False
        return all(
            a <= b
            for ours, theirs in zip(self.ends, other.ends, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )


def best_words(problem: OrderProblem, value: int, most: int, deadline: Deadline) -> tuple[bool, list[Word] | None]:
    """Return whether all orders of less than ``value`` were followed, by at most so many steps, and the best of them,
    None where there is none."""
    count, kinds = problem.microbatches, range(len(problem.durations))
    search = _Search(problem, value)
    layer = {(0,) * len(kinds): [_Way((0,) * len(problem.on), ((),) * len(kinds), 0, -1, None)]}
    steps = 0
    for _ in range(count * len(kinds)):
        following: dict[tuple[int, ...], list[_Way]] = {}
        for counts, ways in layer.items():
            for kind in search.ready(counts):
                after = (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])
                steps += len(ways)
                if steps > most or deadline.passed:
                    return False, None
                beside = following.setdefault(after, [])
                for way in ways:
                    new = search.begun(way, kind, counts, after)
                    if new is not None and not any(other.dominates(new) for other in beside):
                        beside[:] = [other for other in beside if not new.dominates(other)]
                        beside.append(new)
        layer = {counts: ways for counts, ways in following.items() if ways}
    best = min((way for ways in layer.values() for way in ways), key=lambda way: way.worth, default=None)
    return True, None if best is None else search.words(best)


class _Search:
    """What may begin when, in one problem, of orders of less than ``value``."""

    def __init__(self, problem: OrderProblem, value: int) -> None:
        self.problem, self.value = problem, value
        self.waiting: list[list[int]] = [[] for _ in problem.needs]  # kinds that need each
        for kind, before in enumerate(problem.before):
            for needed in before:
                self.waiting[needed].append(kind)

    def ready(self, counts: tuple[int, ...]) -> list[int]:
        """Return the kinds of which another pass may begin, and is held."""
        problem, found = self.problem, []
        for kind, before in enumerate(problem.before):
            if counts[kind] < problem.microbatches and all(counts[needed] > counts[kind] for needed in before):
                machine = problem.machines[kind]
                if machine not in problem.devices or self._held(machine, kind, counts):
                    found.append(kind)
        return found

    def _held(self, machine: int, kind: int, counts: tuple[int, ...]) -> bool:
        for store in self.problem.stores:
            held = sum((store.starts[k] + store.ends[k]) * counts[k] for k in self.problem.on[machine])
            if held + store.starts[kind] > store.room[machine]:
                return False
        return True

    def begun(self, way: _Way, kind: int, counts: tuple[int, ...], after: tuple[int, ...]) -> _Way | None:
        """Return the way with another pass begun; None where nothing better than the best known can come of it."""
        problem, machine = self.problem, self.problem.machines[kind]
        start = way.free[machine]
        for needed in problem.before[kind]:
            start = max(start, way.ends[needed][counts[kind] - counts[needed]])
        end = start + problem.durations[kind]
        free = tuple(end if i == machine else max(start, x) for i, x in enumerate(way.free))
        ends = list(way.ends)
        ends[kind] = (*ends[kind], end)
        for needed in {kind, *problem.before[kind]}:
            kept = after[needed] - min((after[k] for k in self.waiting[needed]), default=after[needed])
            ends[needed] = ends[needed][len(ends[needed]) - kept :]
        ends = [tuple([max(start, x) for x in some]) for some in ends]
        worth = way.worth
        if after[kind] == problem.microbatches and problem.tail[kind] != NEVER_COUNTS:
            worth = max(worth, end + problem.tail[kind])
        if worth >= self.value or self._least(free, ends, after) >= self.value:
            return None
        return _Way(free, tuple(ends), worth, kind, way)

    def _least(self, free: Times, ends: list[Times], counts: tuple[int, ...]) -> int:
        """Return what at least becomes of machines' work, and of the way of each kind's next microbatch."""
        problem, least = self.problem, 0
        count, durations = problem.microbatches, problem.durations
        for machine, kinds in enumerate(problem.on):
            left = [k for k in kinds if counts[k] < count]
            if left:
                work = sum(durations[k] * (count - counts[k]) for k in left)
                least = max(least, free[machine] + work + min(problem.rests[k] for k in left))
        starts = [0] * len(counts)
        for k in problem.by_depth:
            if counts[k] < count:
                start = free[problem.machines[k]]
                for needed in problem.before[k]:
                    ahead = counts[k] - counts[needed]
                    there = ends[needed][ahead] if ahead < 0 else starts[needed] + (ahead + 1) * durations[needed]
                    start = max(start, there)
                starts[k] = start
                least = max(least, start + (count - counts[k]) * durations[k] + problem.rests[k])
        return least

    def words(self, way: _Way | None) -> list[Word]:
        """Return what each machine has run."""
        found: list[list[int]] = [[] for _ in self.problem.on]
        while way is not None and way.before is not None:
            found[self.problem.machines[way.last]].append(way.last)
            way = way.before
        return [tuple(reversed(word)) for word in found]

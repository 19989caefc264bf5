"""Can the value of an order be so small? A linear program over how many passes of each kind have started by when.

Time goes in slots of one length. Durations are rounded down, earliest and latest starts to the slot in which they are,
so what has no answer here has none in truth. Microbatches are alike, so counts say all: N[k, x] of kind k have started
by the end of slot x. They follow those of what they need, a machine runs one pass at a time, and devices hold what they
have room for. The bound is strong because whole microbatches say from when on, and until when, each count can grow.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd
from typing import Any

from ..periodic.solvers import Solver, SolverLimits, solved
from .problem import OrderProblem

MARGIN = 1e-9  # of room, for what arithmetic in floating point loses

Term = tuple[int, int, float]  # kind, slot, factor
Names = dict[tuple[int, int], Any]  # PuLP's variables by kind and slot


@dataclass(frozen=True)
class Slots:
    """The order problem in slots of ``length`` ns, for values up to ``value``.

    Only the first and the last ``window`` slots are looked at one by one: what has started within those between counts
    as started at their end, and they hold no more work than there is time. Of the ``machines`` that aren't named passes
    take their time, and are never in each other's way; all are where none is.
    """

    problem: OrderProblem
    length: int
    value: int
    window: int
    machines: tuple[int, ...] = ()

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of passes that are looked at."""
        machines = self.machines or range(len(self.problem.on))
        return tuple(k for k, machine in enumerate(self.problem.machines) if machine in machines)

    def behind(self, kind: int) -> list[tuple[int, int]]:
        """Return kinds that are looked at which one needs, on its way and what it has recomputed, and from the start of
        each on for how many ns."""
        problem, found = self.problem, list[tuple[int, int]]()
        needed, between = problem.needs[kind], [kind]
        while needed >= 0 and needed not in self.kinds:
            between.append(needed)
            needed = problem.needs[needed]
        if needed >= 0:
            found.append((needed, self._way(needed, between)))
        again = problem.again[kind]
        return [*found, (again, problem.durations[again])] if again >= 0 else found

    def _way(self, first: int, others: Sequence[int]) -> int:
        """Return how long after the start of ``first`` the first of ``others`` can start: each needs the next, the last
        of them ``first``, and some of them a recomputation behind another."""
        problem, reached = self.problem, {first: 0}
        for kind in reversed(others):
            ways = [problem.needs[kind], problem.again[kind]]
            if ways[1] >= 0 and problem.needs[ways[1]] in reached:
                forward = problem.needs[ways[1]]
                reached[ways[1]] = reached[forward] + problem.durations[forward]
            reached[kind] = max(reached[x] + problem.durations[x] for x in ways if x in reached)
        return reached[others[0]]

    @cached_property
    def durations(self) -> tuple[int, ...]:
        """How many slots each kind of pass takes at least."""
        return tuple(duration // self.length for duration in self.problem.durations)

    @cached_property
    def exact(self) -> bool:
        """Whether no duration is rounded."""
        return all(duration % self.length == 0 for duration in self.problem.durations)

    def first(self, kind: int, m: int) -> int:
        """Return the slot in which the pass of microbatch ``m`` starts at the earliest."""
        return (self.problem.head[kind] + m * self.problem.durations[kind]) // self.length

    def last(self, kind: int, behind: int) -> int:
        """Return the slot in which it starts at the latest that has ``behind`` others of its kind after it."""
        problem = self.problem
        return (self.value - problem.rests[kind] - (behind + 1) * problem.durations[kind]) // self.length

    @cached_property
    def range(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """For each kind, the least and most that can have started by the end of each slot."""
        count, total = self.problem.microbatches, self.number
        found = []
        for kind in range(len(self.durations)):
            least, most = [0] * total, [0] * total
            for m in range(count):
                for bounds, at in ((most, self.first(kind, m)), (least, self.last(kind, count - 1 - m))):
                    if at < total:
                        bounds[max(at, 0)] += 1
            found.append((tuple(accumulate(least)), tuple(accumulate(most))))
        return tuple(found)

    @cached_property
    def number(self) -> int:
        """How many slots there are until the last pass starts at the latest."""
        return max(self.last(kind, 0) for kind in self.kinds) + 1

    @cached_property
    def seen(self) -> tuple[int, ...]:
        """The slots that are looked at."""
        return tuple(x for x in range(self.number) if x < self.window or x >= self.number - self.window)

    def _at(self, slot: int) -> int:
        """Return the first slot from this one on that is looked at."""
        return max(slot, self.number - self.window) if slot >= self.window else slot

    @property
    def possible(self) -> bool:
        """Whether every pass has a slot to start in."""
        count = self.problem.microbatches
        return all(
            self.first(kind, m) <= self.last(kind, count - 1 - m)
            for kind in range(len(self.durations))
            for m in range(count)
        )

    def rows(self) -> Iterator[tuple[list[Term], float]]:
        """Yield the constraints: terms whose sum is at most a number."""
        problem = self.problem
        for kind in self.kinds:
            before, needs = -1, self.behind(kind)
            for x in self.seen:
                yield [(kind, before, 1), (kind, x, -1)], 0
                before = x
                for needed, lag in needs:
                    yield [(kind, x, 1), (needed, self._at(x - lag // self.length), -1)], 0
        for machine, kinds in enumerate(problem.on):
            if self.machines and machine not in self.machines:
                continue
            for x in self.seen:
                yield [t for k in kinds for t in ((k, x, 1.0), (k, self._at(x - self.durations[k]), -1.0))], 1
            yield from self._between(kinds)
            if machine in problem.devices:
                for store in problem.stores:
                    yield from self._held(machine, store.starts, store.ends, store.room[machine])
            if not self.exact:
                yield from self._work(machine)

    def _between(self, kinds: Sequence[int]) -> Iterator[tuple[list[Term], float]]:
        """Yield what a machine does in the slots that are not looked at: no more than they are."""
        start, stop = self.window - 1, self.number - self.window + max(self.durations[k] for k in kinds)
        if start + 1 < self.number - self.window and stop <= self.number:
            over = [(k, stop - 1 - u, 1.0) for k in kinds for u in range(self.durations[k])]
            yield over + [(k, start - u, -1.0) for k in kinds for u in range(self.durations[k])], stop - 1 - start

    def _held(
        self, machine: int, starts: Sequence[int], ends: Sequence[int], room: int
    ) -> Iterator[tuple[list[Term], float]]:
        kinds = self.problem.on[machine]
        whole = float(max(room, 1))
        for x in self.seen:
            began = [(k, x, starts[k] / whole) for k in kinds if starts[k]]
            over = [(k, self._at(x - self.durations[k]), ends[k] / whole) for k in kinds if ends[k]]
            if began:
                yield began + over, room / whole + MARGIN

    def _work(self, machine: int) -> Iterator[tuple[list[Term], float]]:
        """Yield what the work itself, not rounded, leaves: of what has started by a time all but one pass is over."""
        problem = self.problem
        kinds = problem.on[machine]
        begin = min(problem.head[k] for k in kinds)
        longest = max(problem.durations[k] for k in kinds)
        leaving = min(problem.rests[k] for k in kinds)
        whole = float(self.length)
        for x in self.seen:
            at = (x + 1) * self.length
            yield (
                [(k, x, problem.durations[k] / whole) for k in kinds],
                max(0, at - 1 - begin + longest) / whole + MARGIN,
            )
            rest = self.value - leaving - at
            if rest >= 0:
                yield (
                    [(k, x, -problem.durations[k] / whole) for k in kinds],
                    (rest - problem.work[machine]) / whole + MARGIN,
                )


def slot_length(problem: OrderProblem, value: int, most: int, kinds: int) -> int:
    """Return the length of slots that loses least by rounding, ``most`` of them times so many ``kinds`` at most.

    All that loses nothing is equal; of these it is the longest.
    """
    exact = gcd(*problem.durations)
    if exact and kinds * (value // exact + 1) <= most:
        return exact
    least = max(1, -(-value * kinds // most))
    lengths = {least} | {d // q for d in set(problem.durations) for q in range(1, 13) if d // q >= least}
    paths = sum(problem.durations)
    return max(sorted(lengths), key=lambda x: (sum(d // x * x for d in problem.durations) / max(1, paths), -x))


def refuted(slots: Slots, solver: Solver, limits: SolverLimits) -> bool:
    """Return whether no order has at most the value of ``slots``, as far as the solver decides within its limits."""
    if not slots.possible:
        return True
    import pulp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces names of PuLP 4
        model = pulp.LpProblem("order", pulp.LpMinimize)
        model += pulp.lpSum(())
        names = _variables(slots)
        if not _constrain(model, slots, names):
            return True
        solved(model, solver, limits)
    return bool(model.status == pulp.LpStatusInfeasible)


def _variables(slots: Slots) -> Names:
    """Return a variable for every count that earliest and latest starts leave open."""
    import pulp

    return {
        (kind, x): pulp.LpVariable(f"n{kind}_{x}", least[x], most[x])
        for kind in slots.kinds
        for least, most in [slots.range[kind]]
        for x in slots.seen
        if least[x] < most[x]
    }


def _constrain(model: Any, slots: Slots, names: Names) -> bool:
    """Add the rows that the variables' ranges don't fulfil already; False where one cannot be fulfilled."""
    import pulp

    for terms, top in slots.rows():
        free, rest, low, high = _substituted(slots, names, terms, top)
        if low > rest + MARGIN:
            return False
        if high > rest:
            model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(free), pulp.LpConstraintLE, rhs=rest))
    return all(least[x] <= most[x] for least, most in slots.range for x in slots.seen)


def _substituted(
    slots: Slots, names: Names, terms: Iterable[Term], top: float
) -> tuple[list[tuple[Any, float]], float, float, float]:
    """Return the terms that are open, the rest for them, and the least and most that their sum can be."""
    free: list[tuple[Any, float]] = []
    low = high = 0.0
    for kind, x, factor in terms:
        if x < 0:
            continue
        least, most = slots.range[kind]
        name = names.get((kind, x))
        if name is None:
            top -= factor * least[x]
            continue
        free.append((name, factor))
        low += factor * (least[x] if factor > 0 else most[x])
        high += factor * (most[x] if factor > 0 else least[x])
    return free, top, low, high

"""Which stages, each on GPUs of its own, as many as it needs, drain a mini-batch soonest under 1F1B? A heuristic.

The number of replicas of every stage is chosen first: each way to share the GPUs where these are few, elsewhere what a
dynamic program finds best for several lengths of the longest stage, and pipelines of a few side by side. Then come
cuts, by shortest paths and local moves, and how many forwards stages have ahead: as 1F1B has, or the pattern of the
shortest period, 1F1B*, or one that holds less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, combinations, pairwise
from math import gcd

import numpy as np

from ...integers import NEVER, Ints, ceil_div, smallest
from ...partition.tables.split_paths import up_to
from ...plan import ScheduleKind
from ...problem import Problem
from ...schedule.one_f_one_b import forwards_ahead
from ..periodic.incumbent import MARGIN
from .run import Run, drained_run
from .tables import SLACK, Shares, Split, Tables, near, tables_of

_FEW = 8  # GPUs of which every way to share them is looked at
_REPLICAS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_TABLES = 3 * 10**8  # entries of tables, of each step of the dynamic program, beyond which nothing is searched
_PERIODS = (Fraction(1), Fraction(21, 20), Fraction(6, 5))  # of patterns, in shortest ones: longer ones hold less
_TRIED = 3  # neighbours that are simulated
_MAKE, _SIMULATE = 100, 300  # what a step to be made and one to be simulated cost, in steps of a split that is timed


@dataclass(frozen=True, slots=True)
class DrainedEffort:
    """How many ways to share the GPUs are simulated, how many have their cuts moved, and the steps of splits that are
    timed in all, half of them before anything is simulated."""

    runs: int
    climbs: int
    steps: int


EFFORTS = {
    "quick": DrainedEffort(10, 2, 6 * 10**7),
    "normal": DrainedEffort(60, 12, 4 * 10**8),
    "high": DrainedEffort(400, 60, 4 * 10**9),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """A split over shared GPUs, and about the time of a mini-batch (ns)."""

    makespan_ns: int
    shares: Shares
    split: Split


class DrainedSearch:
    """The search for stages that drain soonest, run under some ``kinds`` of schedules; ``steps`` were timed so far."""

    def __init__(self, problem: Problem, kinds: Sequence[ScheduleKind], effort: DrainedEffort) -> None:
        self.problem, self.kinds, self.effort = problem, tuple(kinds), effort
        self.microbatches = problem.policy.accumulate or 1
        self.steps = 0
        self.best: Run | None = None

    def run(self) -> None:
        """Search; the ``best`` is there all the time."""
        tables = tables_of(self.problem)
        if tables is None:
            return
        starts: list[Timed] = []
        for replicas in self._shares(tables):
            self.steps += _MAKE * self._count(replicas)
            if 2 * self.steps > self.effort.steps:
                break
            starts += self._starts(tables, replicas)
        starts.sort(key=_soonest)
        ran: dict[tuple[int, ...], tuple[Run, Timed]] = {}  # the best of each way to share the GPUs
        for start in starts[: self.effort.runs]:
            for run in self._runs(start):
                known = ran.get(start.shares.replicas)
                if known is None or run.makespan_ns < known[0].makespan_ns:
                    ran[start.shares.replicas] = run, start
        best = sorted(ran.values(), key=lambda found: found[0].makespan_ns)
        for run, start in best[: self.effort.climbs]:
            self._climb(run, start)

    def _starts(self, tables: Tables, replicas: tuple[int, ...]) -> Iterator[Timed]:
        """Yield the most hopeful splits of GPUs shared so: one by 1F1B, and some by patterns."""
        shares = Shares.of(tables, replicas, forwards_ahead(replicas))
        splits = list(shares.starts())
        if not splits:
            return
        if set(self.kinds) != {"flush"}:
            yield from self._timed(shares, splits)[:1]
        if "flush" in self.kinds:
            for ahead in dict.fromkeys(shares.counts(splits[0], slack) for slack in _PERIODS):
                other = shares.with_ahead(ahead)
                self.steps += _MAKE * self._count(replicas)
                yield from self._timed(other, list(other.starts()))[:1]

    def _count(self, replicas: Sequence[int]) -> int:
        """Return the steps of a mini-batch on stages with ``replicas``."""
        return (4 * len(replicas) - 2) * ceil_div(self.microbatches, gcd(*replicas))

    def _runs(self, timed: Timed) -> list[Run]:
        steps = _SIMULATE * len(self.kinds) * self._count(timed.shares.replicas)
        if self.steps + steps > self.effort.steps:
            return []
        self.steps += steps
        stages = timed.shares.stages(timed.split)
        found = [run for kind in self.kinds if (run := drained_run(self.problem, stages, kind)) is not None]
        for run in found:
            self._keep(run)
        return found

    def _keep(self, run: Run) -> None:
        """Keep a run that is the best; more stages have to pay."""
        best = self.best
        if best is None or run.makespan_ns < best.makespan_ns - (len(run.stages) > len(best.stages)) * (
            best.makespan_ns // MARGIN
        ):
            self.best = run

    def _climb(self, run: Run, start: Timed) -> None:
        """Move the cuts of a run about as long as that helps."""
        at = start.split
        shares = start.shares if run.pattern is None else start.shares.with_ahead(run.held)
        while self.steps < self.effort.steps and shares.possible:
            here = int(shares.makespans([at], run)[0])
            better = None
            for timed in [*self._moved(shares, at, run, here), *self._otherwise_ahead(shares, at)]:
                found = [x for x in self._runs(timed) if x.makespan_ns < run.makespan_ns]
                if found:
                    better = min(found, key=lambda x: x.makespan_ns), timed
                    break
            if better is None:
                return
            run, (at, shares) = better[0], (better[1].split, better[1].shares)
            if run.pattern is not None:
                shares = shares.with_ahead(run.held)

    def _otherwise_ahead(self, shares: Shares, split: Split) -> Iterator[Timed]:
        """Yield the same cuts with more or fewer forwards ahead, and what that takes of recomputation."""
        seen = {shares.held}
        for ahead in (forwards_ahead(shares.replicas), *(shares.counts(split, slack) for slack in _PERIODS)):
            other = shares.with_ahead(ahead)
            if other.held not in seen and other.possible:
                seen.add(other.held)
                if int(other.least_makespans([split])[0]) < NEVER:
                    yield Timed(0, other, split)

    def _moved(self, shares: Shares, split: Split, run: Run, than: int) -> list[Timed]:
        """Return where a walk leads that keeps the order of a ``run``, and the best of its first neighbours."""
        close = [x for x in self._timed(shares, list(near(split, shares.tables.size)), run) if x.makespan_ns < than]
        if not close:
            return []
        first, best = close[:_TRIED], close[0]
        while True:
            close = self._timed(shares, list(near(best.split, shares.tables.size)), run)[:1]
            if not close or close[0].makespan_ns >= best.makespan_ns:
                break
            best = close[0]
        return list({timed.split: timed for timed in (best, *first)}.values())

    def _timed(self, shares: Shares, splits: Sequence[Split], run: Run | None = None) -> list[Timed]:
        if not splits or self.steps >= self.effort.steps or not shares.possible:
            return []
        self.problem.deadline.check()
        self.steps += shares.cost(len(splits))
        found = shares.least_makespans(splits) if run is None else shares.makespans(splits, run)
        pairs = zip(found.tolist(), splits, strict=True)
        return sorted((Timed(ns, shares, split) for ns, split in pairs if ns < NEVER), key=_soonest)

    def _shares(self, tables: Tables) -> Iterator[tuple[int, ...]]:
        """Yield numbers of replicas of the stages, most hopeful first."""
        count, most = len(self.problem.platform), tables.size - 1
        if not self.problem.replicas:
            yield from ((1,) * stages for stages in range(min(count, most), 0, -1))
        elif count <= _FEW:
            for used in range(count, 0, -1):
                for stages in range(min(used, most), 0, -1):
                    yield from _compositions(used, stages)
        else:
            yield from dict.fromkeys(chain(_by_longest(tables, count), _side_by_side(count, most)))


def _soonest(timed: Timed) -> tuple[int, int, Split]:
    return timed.makespan_ns, len(timed.split), timed.split


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write ``total`` as a sum of ``parts`` positive numbers in order."""
    for ends in combinations(range(1, total), parts - 1):
        yield tuple(high - low for low, high in pairwise((0, *ends, total)))


def _side_by_side(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to share a few of ``count`` devices over stages, ``most`` of them, as often as there are so many
    devices; as few pipelines as can be first."""
    for few in range(_FEW, 0, -1):
        pipelines = count // few
        for stages in range(min(few, most), 0, -1):
            yield from (tuple(pipelines * r for r in shares) for shares in _compositions(few, stages))


def _by_longest(tables: Tables, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the replicas of stages on ``count`` devices with which the way of a microbatch is shortest, for several
    lengths of the longest stage."""
    sizes = [r for r in _REPLICAS if r <= count]
    if count * len(sizes) * tables.size**2 > _TABLES:
        return

    def within(longest: int) -> tuple[int, ...] | None:
        return _shortest_shares(tables, count, sizes, longest)

    found = smallest(within, max(1, int(tables.found.work[-1]) // (2 * count)), tables.most_ns)
    if found is None:
        return
    yield found[1]
    for step in SLACK[1:]:
        more = within(found[0] + found[0] * step // 256)
        assert more is not None, "longer stages are allowed"
        yield more


def _shortest_shares(tables: Tables, count: int, sizes: Sequence[int], longest: int) -> tuple[int, ...] | None:
    """Return the replicas of the shortest way through stages of at most ``longest`` ns for each microbatch."""
    path = [np.full(tables.size, NEVER, dtype=np.int64) for _ in range(count + 1)]
    path[0][0] = 0
    came: list[list[tuple[int, Ints]]] = [[] for _ in path]
    for used in range(count):
        tables.problem.deadline.check()
        if path[used].min() >= NEVER:
            continue
        for r in sizes:
            group, held = range(used, used + r), min(ceil_div(count - used, r), ceil_div(tables.microbatches, r))
            table = None if used + r > count else tables.times(tuple(group), held)
            if table is None:
                continue
            through = np.minimum(up_to(r * longest, table) + path[used][:, None], NEVER)
            if used + r < count:
                through = np.minimum(through + tables.trip(tuple(group), (used + r,))[None, :], NEVER)
            came[used + r].append((r, through.argmin(axis=0)))
            better = through.min(axis=0)
            path[used + r] = np.minimum(path[used + r], better)
            came[used + r][-1] = (r, np.where(better <= path[used + r], came[used + r][-1][1], -1))
    if path[count][-1] >= NEVER:
        return None
    at, used, found = tables.size - 1, count, list[int]()
    while used:
        r, pick = next((r, pick) for r, pick in reversed(came[used]) if pick[at] >= 0)
        found.append(r)
        at, used = int(pick[at]), used - r
    return tuple(reversed(found))

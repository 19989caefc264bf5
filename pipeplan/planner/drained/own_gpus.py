"""Which stages, each on GPUs of its own, as many as it needs, drain a mini-batch soonest under 1F1B? A heuristic.

The number of replicas of every stage is chosen first: each way to share the GPUs where these are few, elsewhere what a
dynamic program finds best for several lengths of the longest stage, and pipelines of a few side by side. Then come
cuts, by shortest paths and local moves, and how many forwards stages have ahead: as 1F1B has, or the pattern of the
shortest period, 1F1B*, or one that holds less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, chain, combinations, pairwise, permutations, product
from math import gcd

import numpy as np

from ...integers import NEVER, Ints, ceil_div, smallest
from ...partition.tables.split_paths import up_to
from ...plan import ScheduleKind
from ...schedule.programs.one_f_one_b import forwards_ahead
from ..periodic.incumbent import Incumbent
from .run import Run
from .search import EFFORTS, Found, Memo, Space
from .tables import SLACK, Shares, Split, Tables, near

_FEW = 8  # GPUs of which every way to share them is looked at
_FEW_ORDERED = 4  # GPUs that differ of which every order is looked at
_REPLICAS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_TABLES = 3 * 10**8  # entries of tables, of each step of the dynamic program, beyond which nothing is searched
_PERIODS = (Fraction(1), Fraction(21, 20), Fraction(6, 5))  # of patterns, in shortest ones: longer ones hold less
_TRIED = 3  # neighbours that are simulated
_MAKE, _SIMULATE = 100, 300  # what a step to be made and one to be simulated cost, in steps of a split that is timed


_Timed = tuple[int, int, Split, Shares]  # about the time of a mini-batch (ns), stages, their cuts, and the GPUs


def search_own_gpus(
    incumbent: Incumbent, kinds: Iterable[ScheduleKind], effort: str, tables: Memo | None = None
) -> None:
    """Let stages that drain soonest with forwards and backwards in turn be the best."""
    row = EFFORTS[effort]
    OwnGpus(incumbent, kinds, row.own_steps, tables, row.starts).search(row.climbs)


class OwnGpus(Space):
    """Stages on GPUs of their own, of which so many ways to share the GPUs are simulated at first, ``most_starts``."""

    def __init__(
        self,
        incumbent: Incumbent,
        kinds: Iterable[ScheduleKind],
        most: int,
        tables: Memo | None,
        most_starts: int,
    ) -> None:
        super().__init__(incumbent, kinds, most, tables)
        self.most_starts = most_starts

    def starts(self) -> list[Found]:
        """Return the best run of each way to share the GPUs that promises most."""
        tables = self.tables(1) if self.kinds else None
        if tables is None:
            return []
        timed: list[_Timed] = []
        for groups in self._groups(tables):
            self.steps += _MAKE * self._count(tuple(map(len, groups)))
            if 2 * self.steps > self.most:
                break
            timed += self._starts(tables, groups)
        ran: dict[tuple[tuple[int, ...], ...], Found] = {}
        for _, _, split, shares in sorted(timed, key=lambda x: x[:3])[: self.most_starts]:
            for found in self._runs(shares, split):
                known = ran.get(shares.groups)
                if known is None or found.makespan_ns < known.makespan_ns:
                    ran[shares.groups] = found
        return list(ran.values())

    def _groups(self, tables: Tables) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield the GPUs of stages: in the listed order, and where they differ slowest or fastest first, and of few in
        every order."""
        devices = self.problem.platform.devices
        kinds = [devices.index(x) for x in devices]
        listed = tuple(range(len(devices)))
        slowest = tuple(sorted(listed, key=lambda d: (devices[d].speed, devices[d].memory_bytes)))
        every = permutations(listed) if len(listed) <= _FEW_ORDERED else ()
        orders = (listed, slowest, slowest[::-1], *every)[: None if len(set(kinds)) > 1 else 1]
        seen = set()
        for order, replicas in product(orders, list(self._shares(tables))):
            ends = accumulate(replicas, initial=0)
            groups = tuple(tuple(sorted(order[low:high])) for low, high in pairwise(ends))
            alike = tuple(tuple(sorted(kinds[d] for d in group)) for group in groups)
            if alike not in seen:
                seen.add(alike)
                yield groups

    def _starts(self, tables: Tables, groups: tuple[tuple[int, ...], ...]) -> Iterator[_Timed]:
        """Yield the most hopeful splits of GPUs shared so: one by 1F1B, and some by patterns."""
        replicas = tuple(map(len, groups))
        shares = Shares.of(tables, groups, forwards_ahead(replicas))
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

    def _runs(self, shares: Shares, split: Split) -> list[Found]:
        """Return the runs of a split that fit, the soonest first."""
        stages, found = shares.stages(split), []
        for kind in self.kinds:
            run = self.simulated(stages, kind, _SIMULATE * self._count(shares.replicas))
            if run is not None and run.fits:
                self.keep(run)
                found.append(Found(run, shares if run.pattern is None else shares.with_ahead(run.held), split))
        return sorted(found, key=lambda x: x.makespan_ns)

    def near(self, here: Found, tried: set[Split]) -> Iterator[Found]:
        """Yield the soonest runs where a walk leads that keeps the order of a run, or of its first neighbours, and of
        the same cuts with other forwards ahead."""
        shares = here.layout
        assert isinstance(shares, Shares), "it has been one of these"
        if self.steps < self.most and shares.possible:
            for other, split in chain(self._moved(shares, here), self._otherwise_ahead(shares, here.split)):
                yield from self._runs(other, split)[:1]

    def _otherwise_ahead(self, shares: Shares, split: Split) -> Iterator[tuple[Shares, Split]]:
        """Yield the same cuts with more or fewer forwards ahead, and what that takes of recomputation."""
        seen = {shares.held}
        for ahead in (forwards_ahead(shares.replicas), *(shares.counts(split, slack) for slack in _PERIODS)):
            other = shares.with_ahead(ahead)
            if other.held not in seen and other.possible:
                seen.add(other.held)
                if int(other.least_makespans([split])[0]) < NEVER:
                    yield other, split

    def _moved(self, shares: Shares, here: Found) -> Iterator[tuple[Shares, Split]]:
        """Yield where a walk leads that keeps the order of a run, and the best of its first neighbours."""

        def close(split: Split, than: int) -> list[_Timed]:
            return [x for x in self._timed(shares, list(near(split, shares.tables.size)), here.run) if x[0] < than]

        first = close(here.split, int(shares.makespans([here.split], here.run)[0]))[:_TRIED]
        best = first[:1]
        while best and (better := close(best[0][2], best[0][0])):
            best = better[:1]
        yield from ((shares, split) for split in dict.fromkeys(x[2] for x in (*best, *first)))

    def _timed(self, shares: Shares, splits: Sequence[Split], run: Run | None = None) -> list[_Timed]:
        if not splits or self.steps >= self.most or not shares.possible:
            return []
        self.problem.deadline.check()
        self.steps += shares.cost(len(splits))
        found = shares.least_makespans(splits) if run is None else shares.makespans(splits, run)
        pairs = zip(found.tolist(), splits, strict=True)
        timed = ((ns, len(split), split, shares) for ns, split in pairs if ns < NEVER)
        return sorted(timed, key=lambda x: x[:3])

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

"""Which split has the shortest longest stage, or the shortest way through it? Dynamic programs over tables of stages.

``tables[s][i, j]`` is what stage s costs from cut i to cut j, NEVER where it can't be; behind all stages but the last
stands what is paid at each cut between the two, if that is anything. O(p n^2) for p stages and n cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from ...integers import NEVER, Ints, ceil_div, smallest

Flags = npt.NDArray[np.bool_]
SLACK = (0, 1, 2, 4, 8, 16, 32, 64, 96)  # 256ths by which the longest stage may exceed the shortest possible
_PRECISION = 4096  # a bound is found to this part
_PAIRS = 16  # cuts up to which any two move together


def least_longest(tables: Sequence[Ints], between: Sequence[Ints] = ()) -> int | None:
    """Return the least longest cost, of stages and of what is ``between`` them, of any split; None if there is none."""
    best = _at_the_first_cut(len(tables[0]))
    for s, table in enumerate(tables):
        best = np.maximum(best[:, None], table).min(axis=0)
        if s < len(between):
            best = np.maximum(best, between[s])
    return None if best[-1] >= NEVER else int(best[-1])


def shortest_split(tables: Sequence[Ints], between: Sequence[Ints]) -> tuple[int, ...] | None:
    """Return the cuts (indices) of the split whose stages and what is ``between`` them cost least together."""
    cost, chosen = _shortest(tables, between, lambda s, path: True)
    return None if cost >= NEVER else walked(chosen)


def short_splits(
    each: Sequence[Ints], ways: Sequence[Ints], between: Sequence[Ints], loads: Sequence[Ints] = ()
) -> Iterator[tuple[int, ...]]:
    """Yield splits whose longest stage by ``each``, or link by its load, is shortest or somewhat longer, and of these
    those whose ``ways`` and what is ``between`` them cost least together."""
    shortest, seen = least_longest(each, loads), set()
    if shortest is None:
        return
    for step in SLACK:
        longest = shortest + shortest * step // 256
        allowed = [up_to(longest, x, way) for x, way in zip(each, ways, strict=True)]
        links = [up_to(longest, load, cost) for load, cost in zip(loads, between, strict=True)] if loads else between
        split = shortest_split(allowed, links)
        if split is not None and split not in seen:
            seen.add(split)
            yield split


def soonest_split(
    tables: Sequence[Ints],
    between: Sequence[Ints],
    ends: Sequence[Ints],
    alone: Sequence[Ints],
    low: int,
    most: int,
    rounds: int = 1,
) -> tuple[int, tuple[int, ...]] | None:
    """Return a time below which no split is over, and a split of which no more can be said; None where none is over
    within ``most``.

    A stage is over ``ends`` behind the way through those before it, and not before ``alone``; the last not before so
    many ``rounds`` through all. The least time that all stages of a split stay within is bisected from ``low`` on; for
    one time a dynamic program keeps the shortest way to every cut.
    """

    def within(total: int) -> tuple[int, ...] | None:
        found = _shortest(tables, between, lambda s, path: (ends[s] + path[:, None] <= total) & (alone[s] <= total))
        return None if found[0] >= NEVER or rounds * found[0] > total else walked(found[1])

    if most < low or within(most) is None:
        return None
    top = 2 * low
    while top < most and within(top) is None:
        low, top = top + 1, 2 * top
    grain = max(1, low // _PRECISION)
    found = smallest(lambda step: within(step * grain), max(1, low // grain), ceil_div(min(top, most), grain))
    assert found is not None, "the last is enough"
    return max(low, (found[0] - 1) * grain + 1), found[1]


def near(split: Sequence[int], far: int, several: bool) -> Iterator[tuple[int, ...]]:
    """Yield splits with one cut moved up to ``far`` places, or two neighbouring ones by one; with ``several`` any run
    of neighbours, or any two."""
    inner = range(1, len(split) - 1)
    moves: list[dict[int, int]] = [{s: step} for s in inner for by in range(1, far + 1) for step in (by, -by)]
    ends = {a: range(a + 2, len(split) if several else min(a + 3, len(split))) for a in inner}
    moves += [dict.fromkeys(range(a, b), step) for a in inner for b in ends[a] for step in (1, -1)]
    if several and len(inner) <= _PAIRS:
        moves += [{a: x, b: y} for a, b in combinations(inner, 2) for x, y in ((1, -1), (-1, 1))]
        moves += [{a: x, b: x} for a, b in combinations(inner, 2) if b > a + 1 for x in (1, -1)]
    for change in moves:
        moved = tuple(cut + change.get(s, 0) for s, cut in enumerate(split))
        if all(low < high for low, high in pairwise(moved)):
            yield moved


def first_split(tables: Sequence[Ints], long_first: bool) -> tuple[int, ...] | None:
    """Return the cuts (indices) of the split whose first stages are longest, or shortest, of those that there are."""
    possible = [np.arange(len(tables[0])) == len(tables[0]) - 1]  # from which cuts the stages behind can go on
    for table in reversed(tables):
        possible.append(((table < NEVER) & possible[-1][None, :]).any(axis=1))
    if not possible[-1][0]:
        return None
    split = [0]
    for table, behind in zip(tables, reversed(possible[:-1]), strict=True):
        stops = np.flatnonzero((table[split[-1]] < NEVER) & behind)
        split.append(int(stops[-1 if long_first else 0]))
    return tuple(split)


def extreme_splits(tables: Sequence[Ints]) -> Iterator[tuple[int, ...]]:
    """Yield of the splits whose longest stage is shortest those with the long ones first, and last; none if there are
    none."""
    longest = least_longest(tables)
    if longest is not None:
        allowed = [up_to(longest, table) for table in tables]
        yield from filter(None, (first_split(allowed, True), first_split(allowed, False)))


def up_to(longest: int, table: Ints, costs: Ints | None = None) -> Ints:
    """Return ``costs``, those of the ``table`` itself unless others are given, with NEVER where that is over
    ``longest``."""
    return np.where(table <= longest, table if costs is None else costs, NEVER)


def walked(chosen: Sequence[Ints]) -> tuple[int, ...]:
    """Return the cuts of a path that ends at the last, by what was chosen before each."""
    split = [len(chosen[-1]) - 1]
    for pick in reversed(chosen):
        split.append(int(pick[split[-1]]))
    return tuple(reversed(split))


def _shortest(
    tables: Sequence[Ints], between: Sequence[Ints], allowed: Callable[[int, Ints], Flags | bool]
) -> tuple[int, list[Ints]]:
    """Return the least cost of all stages and what is ``between`` them, and before each what is chosen for that, of the
    stages ``allowed``, by number, behind the ways to every cut."""
    path, chosen = _at_the_first_cut(len(tables[0])), []
    for s, table in enumerate(tables):
        through = np.where(allowed(s, path), table + path[:, None], NEVER)
        chosen.append(through.argmin(axis=0))
        path = np.minimum(through[chosen[-1], np.arange(len(path))], NEVER)
        if s < len(between):
            path = np.minimum(path + between[s], NEVER)
    return int(path[-1]), chosen


def _at_the_first_cut(size: int) -> Ints:
    best = np.full(size, NEVER, dtype=np.int64)
    best[0] = 0
    return best

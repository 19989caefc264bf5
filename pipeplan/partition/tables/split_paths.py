"""Which split has the shortest longest stage, or the shortest way through it? Dynamic programs over tables of stages.

``tables[s][i, j]`` is what stage s costs from cut i to cut j, NEVER where it can't be; behind all stages but the last
stands what is paid at each cut between the two, if that is anything. O(p n^2) for p stages and n cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...integers import NEVER, Ints


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
    best = _at_the_first_cut(len(tables[0]))
    chosen = []
    for s, table in enumerate(tables):
        through = table + best[:, None]
        pick = through.argmin(axis=0)
        chosen.append(pick)
        best = np.minimum(through[pick, np.arange(len(best))], NEVER)
        if s < len(between):
            best = np.minimum(best + between[s], NEVER)
    return None if best[-1] >= NEVER else walked(chosen)


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


def up_to(longest: int, table: Ints) -> Ints:
    """Return ``table`` with NEVER where it is over ``longest``."""
    return np.where(table <= longest, table, NEVER)


def walked(chosen: Sequence[Ints]) -> tuple[int, ...]:
    """Return the cuts of a path that ends at the last, by what was chosen before each."""
    split = [len(chosen[-1]) - 1]
    for pick in reversed(chosen):
        split.append(int(pick[split[-1]]))
    return tuple(reversed(split))


def _at_the_first_cut(size: int) -> Ints:
    best = np.full(size, NEVER, dtype=np.int64)
    best[0] = 0
    return best

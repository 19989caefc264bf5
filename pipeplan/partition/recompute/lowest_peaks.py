"""How little may a stage hold, whatever it recomputes and that costs? The label of the lowest peak of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from ...integers import Ints
from ..tables.stages import Ranges
from .labels import CORES, SEGMENT, Units, joined


@dataclass(frozen=True)
class LowestPeak:
    """For each stage from one layer the label of the lowest peak, and the one that stores everything.

    ``first[j]`` is where the first part of the lowest label up to j stops, times four, plus its kind (:class:`Labels`);
    ``nearest[held][i, j]`` is that of the parts behind, from i on.
    """

    kept: Ints
    peak: Ints
    cost: Ints
    position: Ints
    first: Ints
    nearest: Ints
    units: Units
    numbers: Ints  # of the positions, as the tables count them
    exact: bool = False

    def at(self, positions: Ints) -> LowestPeak:
        """Return labels made over numbered ``positions`` at their places in the chain."""
        return replace(self, position=positions[self.position])

    def ranges(self, label: int, cores: bool = False) -> Ranges:
        """Return the recomputed segments of a label, in chain order, or the runs whose ``cores`` run again."""
        where = dict(zip(self.numbers.tolist(), self.position.tolist(), strict=True))
        which = CORES if cores else SEGMENT
        found = tuple((where[start], where[stop]) for start, stop, kind in self._parts(label) if kind & which)
        return joined(found) if cores else found

    def _parts(self, label: int) -> Iterator[tuple[int, int, int]]:
        start, stop, held = int(self.numbers[0]), int(self.numbers[label]), False
        if 2 * label >= len(self.position):  # one of those that store everything
            return
        end, kind = divmod(int(self.first[stop]), 4)
        while start < stop:
            yield start, end, kind
            held = bool(self.units.ways[kind & CORES].held_behind(start, end, held, kind >= SEGMENT))
            start = end
            end, kind = divmod(int(self.nearest[int(held), start, stop]), 4)


def lowest_peaks(units: Units) -> tuple[LowestPeak, ...]:
    """Return by first layer the labels of the lowest peak, whatever they cost: the least memory that stages can take.

    With one microbatch in flight a stage holds no more than its peak, and what the first part keeps only adds to the
    peaks behind it: the lowest peak is a recursion over the first part, and whether its input is held already. O(L^3),
    L vectorised steps.
    """
    count, states = len(units.saved), 1 + units.holds
    tables = _PeakTables(*(np.zeros((states, count, count), dtype=np.int64) for _ in range(4)))
    found = []
    for start in range(count - 2, -1, -1):
        ends = np.arange(start + 1, count)
        alone = tables.first(units, start, ends, True, False)
        behind = [alone]
        if units.later_keeps[start, ends[0]] != units.keeps[start, ends[0]]:
            behind = [tables.first(units, start, ends, False, False)]
        if states > 1:
            behind.append(tables.first(units, start, ends, False, True))
        for state, columns in enumerate(behind):
            for table, column in zip(tables, columns, strict=True):
                table[state, start, ends] = column
        zero, position = np.zeros(1, dtype=np.int64), np.arange(start, count)
        stored = units.saved[start, position] * (position > start)
        peak, kept, cost, first = (np.concatenate([zero, column]) for column in alone)
        found.append(
            LowestPeak(
                kept=np.concatenate([kept, stored]),
                peak=np.concatenate([peak, stored]),
                cost=np.concatenate([cost, 0 * stored]),
                position=np.concatenate([position, position]),
                numbers=np.concatenate([position, position]),
                first=np.concatenate([np.zeros(start, dtype=np.int64), first]),
                nearest=tables.nearest,
                units=units,
            )
        )
    return tuple(reversed(found))


class _PeakTables(NamedTuple):
    """What the lowest peak of ``layers[i:j]`` behind other parts takes, tables ``[held, i, j]``."""

    peak: Ints
    kept: Ints
    cost: Ints
    nearest: Ints

    def first(self, units: Units, start: int, ends: Ints, alone: bool, held: bool) -> tuple[Ints, ...]:
        """Return the columns of the parts from ``start`` on, of which the first is the stage's, ``alone``, or behind
        others, its input ``held`` or not."""
        rest = slice(start + 1, None)

        def behind(state: Ints) -> Ints:
            some = self.peak[0, rest, rest]
            if state.any():
                some = np.where(state[:, None] > 0, self.peak[1, rest, rest], some)
            return np.where(ends[:, None] > ends[None, :], 2**61, some)

        size, nothing = len(ends), np.zeros_like(ends)
        keeps = (units.held_keeps if held else units.keeps if alone else units.later_keeps)[start, ends]
        kept, cost, after, peaks = [], [], [], []
        for recomputed, own in product((False, True), units.ways):  # by kind: a stored run first, as it costs nothing
            after.append(own.held_behind(start, ends, held, recomputed).astype(np.int64))
            later = behind(after[-1])
            if recomputed:
                kept.append(keeps)
                later = np.maximum(own.transient[start, ends][:, None], later)
            else:
                kept.append(own.run(start, ends, alone, nothing, np.full(size, held))[0])
            peaks.append(kept[-1][:, None] + later)
            cost.append((own.recompute if recomputed else own.run_cost)[start, ends])
        every = np.stack(peaks).reshape(-1, size)
        best = every.argmin(axis=0)
        way, index = np.divmod(best, size)
        state, end = np.stack(after)[way, index], ends[index]
        return (
            every[best, np.arange(size)],
            np.stack(kept)[way, index] + self.kept[state, end, ends],
            np.stack(cost)[way, index] + self.cost[state, end, ends],
            4 * end + (way if units.cores is not None else SEGMENT * way),
        )

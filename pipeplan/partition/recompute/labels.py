"""In which ways can a stage recompute some of its segments, and what does each way keep, hold and cost?

A *label* is one way to cut the layers from a stage's first to some position into recomputed segments and stored runs
(neighbours whose activations are kept). It has three numbers, and less is better in each: ``kept`` bytes for each
microbatch in flight, the ``peak`` bytes of the one in its backward (which holds one segment's activations after the
other), and the ``cost`` in ns of running its segments forward again. So only labels that no other beats or equals in
all three are kept (:mod:`.pareto`). Labels depend on neither the period nor the devices: a dynamic program over
positions makes them once for each first layer. ALGORITHMS section 5, "Segments"; not in any paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost import memory_model
from ...integers import IntLike, Ints
from ...problem import Chain
from ..tables.stages import Ranges
from .pareto import Resolution, unbeaten

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Units:
    """What ``layers[i:j]`` add to a stage as one recomputed segment or one stored run: tables ``[i, j]``.

    They are over all positions in the chain, or over some alone: then i and j number those.

    The memory of their input may be *held* already by the part of the stage before them; then it isn't kept twice.
    Bytes that a segment adds: ``keeps`` as the stage's first part, ``later_keeps`` behind other parts, nothing where
    its input is held. Bytes that a run adds: ``saved``, ``later_saved``, and ``inner`` where its input is held. While a
    segment runs backward it holds ``transient`` bytes more, and running it again costs ``recompute`` ns. ``output``
    says whether a run holds the memory of its output for the part behind it, ``passes`` whether the output is a view of
    the input, and so held where that was; both are None where no run ever holds its output. ``storage`` is what the
    tensor at each position takes when nobody holds it. Rules: :func:`....cost.memory_model.stored`, ``keeps_output``.

    ``growing``: runs and segments only grow with their length, and a run can be made layer by layer, as in every chain
    without skip connections.
    """

    keeps: Ints
    later_keeps: Ints
    transient: Ints
    recompute: Ints
    saved: Ints
    later_saved: Ints
    inner: Ints
    output: Flags | None
    passes: Flags | None
    storage: Ints
    growing: bool

    @staticmethod
    def of(chain: Chain, positions: Ints | None = None) -> Units:
        """Return the tables of ``chain``, over some ``positions`` alone; entries with j <= i mean nothing."""
        places = np.arange(len(chain) + 1) if positions is None else positions
        count = len(places)
        start, stop = places[:, None], places[None, :]

        def table(values: IntLike) -> Any:
            return np.broadcast_to(np.asarray(values), (count, count))

        keeps, transient, recompute = map(table, memory_model.segment(chain, start, stop))
        later = table(memory_model.segment(chain, start, stop, inside=True)[0])
        saved, later_saved = (table(memory_model.stored(chain, start, stop, inside=x)) for x in (False, True))
        inner = table(memory_model.stored(chain, start, stop, held=True))
        output, passes = (
            table(memory_model.keeps_output(chain, start, stop, False, recomputed=x)) for x in (False, True)
        )
        proper = stop > start
        holds = bool((proper & (output | passes)).any())
        return Units(
            keeps=keeps,
            later_keeps=later,
            transient=transient,
            recompute=recompute,
            saved=saved,
            later_saved=later_saved,
            inner=inner,
            output=output if holds else None,
            passes=passes if holds else None,
            storage=np.diagonal(later),
            growing=chain.edges is None,
        )

    def held_behind(self, start: int, stop: IntLike, held: npt.NDArray[np.bool_] | bool, recomputed: bool) -> Flags:
        """Return whether the output's storage is held behind a segment or run from ``start``."""
        if self.output is None or self.passes is None:
            return np.zeros(np.shape(stop) or np.shape(held), dtype=np.bool_)
        passes = self.passes[start, stop]
        return np.asarray(passes | np.zeros_like(held) if recomputed else self.output[start, stop] | (held & passes))


@dataclass(frozen=True)
class Labels:
    """Labels of the stages that start at one layer, in order of position; entry 0 is the empty one.

    ``parent`` is the label before the last unit, which is a recomputed segment where ``recomputed`` says so and a
    stored run otherwise. ``exact``: no label was dropped that isn't beaten by another.
    """

    kept: Ints
    peak: Ints
    cost: Ints
    position: Ints
    parent: Ints
    recomputed: Flags
    exact: bool

    def at(self, positions: Ints) -> Labels:
        """Return labels made over numbered ``positions`` at their places in the chain."""
        return replace(self, position=positions[self.position])

    def ranges(self, label: int) -> Ranges:
        """Return the recomputed segments of a label, in chain order."""
        found = []
        while label:
            before = int(self.parent[label])
            if self.recomputed[label]:
                found.append((int(self.position[before]), int(self.position[label])))
            label = before
        return tuple(reversed(found))


@dataclass(frozen=True)
class LowestPeak:
    """For each stage from one layer the label of the lowest peak, and the one that stores everything.

    ``first[j]`` is where the first part of the lowest label up to j stops, negative for a stored run;
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

    def ranges(self, label: int) -> Ranges:
        """Return the recomputed segments of a label, in chain order."""
        where = dict(zip(self.numbers.tolist(), self.position.tolist(), strict=True))
        return tuple((where[start], where[stop]) for start, stop in self._numbered(label))

    def _numbered(self, label: int) -> Ranges:
        start, stop, found = int(self.numbers[0]), int(self.numbers[label]), []
        if 2 * label >= len(self.position):  # one of those that store everything
            return ()
        end, held = int(self.first[stop]), False
        while start < stop:
            recomputed = end > 0
            if recomputed:
                found.append((start, end))
            held = bool(self.units.held_behind(start, abs(end), held, recomputed))
            start = abs(end)
            end = int(self.nearest[int(held), start, stop])
        return tuple(found)


def lowest_peaks(units: Units) -> tuple[LowestPeak, ...]:
    """Return by first layer the labels of the lowest peak, whatever they cost: the least memory that stages can take.

    With one microbatch in flight a stage holds no more than its peak, and what the first part keeps only adds to the
    peaks behind it: the lowest peak is a recursion over the first part, and whether its input is held already. O(L^3),
    L vectorised steps.
    """
    count, states = len(units.saved), 1 if units.output is None else 2
    tables = _PeakTables(*(np.zeros((states, count, count), dtype=np.int64) for _ in range(4)))
    found = []
    for start in range(count - 2, -1, -1):
        ends = np.arange(start + 1, count)
        alone = tables.first(units, start, ends, units.saved, units.keeps, False)
        behind = [alone]
        if units.later_keeps[start, ends[0]] != units.keeps[start, ends[0]]:
            behind = [tables.first(units, start, ends, units.later_saved, units.later_keeps, False)]
        if states > 1:
            behind.append(tables.first(units, start, ends, units.inner, np.zeros_like(units.keeps), True))
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

    def first(self, units: Units, start: int, ends: Ints, saved: Ints, keeps: Ints, held: bool) -> tuple[Ints, ...]:
        """Return the columns of the parts from ``start`` on, of which the first adds ``saved`` or ``keeps``."""
        rest = slice(start + 1, None)
        after = [units.held_behind(start, ends, held, recomputed).astype(np.int64) for recomputed in (False, True)]

        def behind(state: Ints) -> Ints:
            some = self.peak[0, rest, rest]
            if state.any():
                some = np.where(state[:, None] > 0, self.peak[1, rest, rest], some)
            return np.where(ends[:, None] > ends[None, :], 2**61, some)

        keeps, saved = keeps[start, ends], saved[start, ends]
        segments = keeps[:, None] + np.maximum(units.transient[start, ends][:, None], behind(after[1]))
        both = np.stack([saved[:, None] + behind(after[0]), segments])  # a stored run first: it costs nothing
        both = both.reshape(-1, len(ends))
        best = both.argmin(axis=0)
        recomputed, index = best >= len(ends), best % len(ends)
        end = ends[index]
        state = np.where(recomputed, after[1][index], after[0][index])
        return (
            both[best, np.arange(len(ends))],
            np.where(recomputed, keeps[index], saved[index]) + self.kept[state, end, ends],
            np.where(recomputed, units.recompute[start, end], 0) + self.cost[state, end, ends],
            np.where(recomputed, end, -end),
        )


class _Open:
    """The labels that one more segment or run may still extend, in order of position, as contiguous columns."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.kept, self.peak, self.cost, self.index = (np.zeros(1, dtype=np.int64) for _ in range(4))
        self.after_segment = np.ones(1, dtype=np.bool_)  # a stored run may follow
        self.held = np.zeros(1, dtype=np.bool_)  # whether the storage of what goes on is held
        self.starts, self.counts = [start], [1]  # positions, and how many labels stand at each

    def at(self, table: npt.NDArray[Any], stop: int, first: Ints | None = None) -> npt.NDArray[Any]:
        """Return the entries of ``table`` from each label's position to ``stop``, for the stage's first part of
        ``first``."""
        values = table[self.starts, stop]
        if first is not None and self.starts and self.starts[0] == self.start:
            values[0] = first[self.start, stop]
        return np.repeat(values, self.counts)

    def keep(self, which: Flags) -> None:
        """Drop the other labels."""
        ends = np.cumsum(self.counts)
        kept = np.diff(np.concatenate([[0], np.cumsum(which)])[np.concatenate([[0], ends])])
        self.starts = [x for x, n in zip(self.starts, kept.tolist(), strict=True) if n]
        self.counts = [n for n in kept.tolist() if n]
        self.kept, self.peak, self.cost, self.index = (x[which] for x in (self.kept, self.peak, self.cost, self.index))
        self.after_segment, self.held = self.after_segment[which], self.held[which]

    def add(
        self, position: int, kept: Ints, peak: Ints, cost: Ints, index: int, recomputed: Flags, held: Flags
    ) -> None:
        """Append labels at ``position``, numbered from ``index``."""
        self.kept, self.peak, self.cost, self.index = (
            np.concatenate(pair)
            for pair in (
                (self.kept, kept),
                (self.peak, peak),
                (self.cost, cost),
                (self.index, np.arange(index, index + len(kept))),
            )
        )
        self.after_segment = np.concatenate([self.after_segment, recomputed])
        self.held = np.concatenate([self.held, held])
        if len(kept):
            self.starts.append(position)
            self.counts.append(len(kept))


def labels_from(
    units: Units,
    start: int,
    positions: Ints,
    most_cost: Ints,
    most_peak: Ints,
    resolution: Resolution,
    work: int | None = None,
) -> tuple[Labels | None, int]:
    """Return the labels of all stages that start at layer ``start``, at ``positions`` in chain order.

    They cost and hold at most what the caps allow there (shape (L + 1,); they never grow with the position). The Pareto
    set at every position (ALGORITHMS section 5, "Segments"), exactly or on the resolution's grid; a label that is
    beaten as a stage's end stays where it wouldn't be if the storage that it holds were still to be taken
    (:func:`_chosen`). Also returns how many extensions were tried; None for labels when these would be more than
    ``work``. O(L * labels).
    """
    zero = np.zeros(1, dtype=np.int64)
    found = [(zero, zero, zero, zero + start, zero)]  # kept, peak, cost, position, parent
    recomputed = [np.zeros(1, dtype=np.bool_)]
    open_labels, size, tried, exact, previous = _Open(start), 1, 0, True, start
    for stop in positions[(positions > start) & (most_peak[positions] >= 0)].tolist():
        tried += len(open_labels.kept)
        if work is not None and tried > work:
            return None, tried
        new_cost = open_labels.cost + open_labels.at(units.recompute, stop)
        keeps = open_labels.at(units.later_keeps, stop, units.keeps)
        new_kept = open_labels.kept + np.where(open_labels.held, 0, keeps)
        transient = open_labels.at(units.transient, stop)
        new_peak = np.maximum(open_labels.peak, new_kept + transient)
        fits = (new_cost <= most_cost[stop]) & (new_peak <= most_peak[stop])
        useful = np.flatnonzero(fits & (transient > 0))  # otherwise storing costs no more bytes and no time
        if units.growing:  # runs grow layer by layer
            count = open_labels.counts[-1] if open_labels.starts[-1] == previous else 0
            stored = np.arange(len(open_labels.kept) - count, len(open_labels.kept))
            held = open_labels.held[stored]
            fresh = (units.saved if previous == start else units.later_saved)[previous, stop]
            run_kept = open_labels.kept[stored] + np.where(held, units.inner[previous, stop], fresh)
            run_held = units.held_behind(previous, stop, held, recomputed=False)
        else:
            stored = np.flatnonzero(open_labels.after_segment)
            run_kept = (open_labels.kept + open_labels.at(units.later_saved, stop, units.saved))[stored]
            run_held = np.zeros(len(stored), dtype=np.bool_)
        run_peak, run_cost = np.maximum(open_labels.peak[stored], run_kept), open_labels.cost[stored]
        runs = np.flatnonzero((run_peak <= most_peak[stop]) & (run_cost <= most_cost[stop]))
        kept, peak, cost = (
            np.concatenate([one[runs], other[useful]])
            for one, other in ((run_kept, new_kept), (run_peak, new_peak), (run_cost, new_cost))
        )
        passes = np.zeros(len(useful), dtype=np.bool_)
        if units.passes is not None:
            passes = open_labels.at(units.passes, stop)[useful]
        held = np.concatenate([run_held[runs], passes])
        parents = np.concatenate([open_labels.index[stored][runs], open_labels.index[useful]])
        chosen, complete = _chosen(kept, peak, cost, held, int(units.storage[stop]), resolution)
        exact = exact and complete
        found.append((kept[chosen], peak[chosen], cost[chosen], np.full(len(chosen), stop), parents[chosen]))
        recomputed.append(chosen >= len(runs))
        if units.growing and 4 * np.count_nonzero(fits) < 3 * len(fits):  # what is too much now stays so
            open_labels.keep(fits)
        open_labels.add(stop, *found[-1][:3], size, recomputed[-1], held[chosen])
        size, previous = size + len(chosen), stop
        if not len(open_labels.kept):
            break
    every_kept, every_peak, every_cost, position, parent = (np.concatenate(x) for x in zip(*found, strict=True))
    return Labels(every_kept, every_peak, every_cost, position, parent, np.concatenate(recomputed), exact), tried


def _chosen(kept: Ints, peak: Ints, cost: Ints, held: Flags, storage: int, resolution: Resolution) -> tuple[Ints, bool]:
    """Return the indices of the labels at one position that are worth keeping, and whether none is missing.

    Labels that already hold the memory of the tensor that leaves there (``held``) have an advantage of ``storage``
    bytes over the others where the next part keeps that tensor, and none where it doesn't, or where the stage ends. So
    a label stays if no other beats it in one of these two counts of what is kept.
    """
    chosen, complete = unbeaten(kept, peak, cost, resolution)
    if not storage or held.all() or not held.any():
        return chosen, complete
    others, whole = unbeaten(kept + np.where(held, 0, storage), peak, cost, resolution)
    return np.union1d(chosen, others), complete and whole

"""Ways to cut the layers from a stage's first to some position into recomputed segments and stored layers.

A *label* is one such way: what it keeps per microbatch, the most that the microbatch in backward holds, and what
recomputation costs. Labels depend on neither the period nor the devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import costs
from ..problem import Chain, Ints
from .fronts import Resolution, front
from .menus import Ranges


@dataclass(frozen=True)
class Units:
    """What ``layers[i:j]`` cost as one recomputed segment or one stored run, tables of shape (L + 1, L + 1).

    ``additive``: stored runs and segments only grow with their length, and a run is the sum of its layers, as in every
    chain without skip connections.
    """

    keeps: Ints
    transient: Ints
    recompute: Ints
    saved: Ints
    additive: bool

    @staticmethod
    def of(chain: Chain) -> Units:
        """Return the tables of ``chain``; entries with j <= i mean nothing."""
        count = len(chain) + 1
        start, stop = np.arange(count)[:, None], np.arange(count)[None, :]
        keeps, transient, recompute = (np.broadcast_to(x, (count, count)) for x in costs.segment(chain, start, stop))
        saved = np.asarray(chain.saved_bytes(start, stop))
        additive = chain.edges is None and np.array_equal(saved, saved[:1] - saved[:1].T)
        return Units(keeps, transient, recompute, saved, additive)


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
    recomputed: npt.NDArray[np.bool_]
    exact: bool

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
class LeanLabels:
    """For each stage from one layer the label that peaks lowest, and the one that stores everything.

    ``nearest[i, j]`` is where the first unit of the leanest ``layers[i:j]`` stops, negative for a stored run.
    """

    kept: Ints
    peak: Ints
    cost: Ints
    position: Ints
    nearest: Ints
    exact: bool = False

    def ranges(self, label: int) -> Ranges:
        """Return the recomputed segments of a label, in chain order."""
        start, stop, found = int(self.position[0]), int(self.position[label]), []
        if 2 * label >= len(self.position):  # one of those that store everything
            return ()
        while start < stop:
            end = int(self.nearest[start, stop])
            if end > 0:
                found.append((start, end))
            start = abs(end)
        return tuple(found)


def lean_labels(units: Units) -> tuple[LeanLabels, ...]:
    """Return by first layer the labels that peak lowest, whatever they cost.

    With one microbatch in flight a stage holds no more than its peak, and what the first unit keeps only adds to the
    peaks behind it: the lowest peak is a recursion over the first unit. O(L^3), L vectorised steps.
    """
    count = len(units.saved)
    kept, peak, cost = (np.zeros((count, count), dtype=np.int64) for _ in range(3))
    nearest = np.zeros((count, count), dtype=np.int64)
    found = []
    for start in range(count - 2, -1, -1):
        ends = np.arange(start + 1, count)
        behind = np.where(ends[:, None] > ends[None, :], 2**61, peak[start + 1 :, start + 1 :])
        keeps, saved = units.keeps[start, ends][:, None], units.saved[start, ends][:, None]
        segments = np.maximum(keeps + units.transient[start, ends][:, None], keeps + behind)
        both = np.stack([saved + behind, segments])  # a stored run first: it costs nothing
        best = both.reshape(-1, len(ends)).argmin(axis=0)
        recomputed, end = best >= len(ends), ends[best % len(ends)]
        peak[start, ends] = both.reshape(-1, len(ends))[best, np.arange(len(ends))]
        kept[start, ends] = np.where(recomputed, units.keeps[start, end], units.saved[start, end]) + kept[end, ends]
        cost[start, ends] = np.where(recomputed, units.recompute[start, end], 0) + cost[end, ends]
        nearest[start, ends] = np.where(recomputed, end, -end)
    for start in range(count - 1):
        ends = np.arange(start, count)
        stored, nothing = units.saved[start, ends], np.zeros_like(ends)
        columns = ((kept, stored), (peak, stored), (cost, nothing))
        sizes = [np.concatenate([table[start, ends], plain]) for table, plain in columns]
        found.append(LeanLabels(sizes[0], sizes[1], sizes[2], np.concatenate([ends, ends]), nearest))
    return tuple(found)


class _Open:
    """The labels that may still be extended, in order of position, as contiguous columns."""

    def __init__(self, start: int) -> None:
        self.kept, self.peak, self.cost, self.index = (np.zeros(1, dtype=np.int64) for _ in range(4))
        self.after_segment = np.ones(1, dtype=np.bool_)  # a stored run may follow
        self.starts, self.counts = [start], [1]  # positions, and how many labels stand at each

    def at(self, table: Ints, stop: int) -> Ints:
        """Return the entries of ``table`` from each label's position to ``stop``."""
        return np.repeat(table[self.starts, stop], self.counts)

    def keep(self, which: npt.NDArray[np.bool_]) -> None:
        """Drop the other labels."""
        ends = np.cumsum(self.counts)
        kept = np.diff(np.concatenate([[0], np.cumsum(which)])[np.concatenate([[0], ends])])
        self.starts = [x for x, n in zip(self.starts, kept.tolist(), strict=True) if n]
        self.counts = [n for n in kept.tolist() if n]
        self.kept, self.peak, self.cost, self.index = (x[which] for x in (self.kept, self.peak, self.cost, self.index))
        self.after_segment = self.after_segment[which]

    def add(
        self, position: int, kept: Ints, peak: Ints, cost: Ints, index: int, recomputed: npt.NDArray[np.bool_]
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
    set at every position (ALGORITHMS section 5, "Segments"), exactly or on the resolution's grid. Also returns how many
    extensions were tried; None for labels when these would be more than ``work``. O(L * labels).
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
        new_kept = open_labels.kept + open_labels.at(units.keeps, stop)
        transient = open_labels.at(units.transient, stop)
        new_peak = np.maximum(open_labels.peak, new_kept + transient)
        fits = (new_cost <= most_cost[stop]) & (new_peak <= most_peak[stop])
        useful = np.flatnonzero(fits & (transient > 0))  # otherwise storing costs no more bytes and no time
        if units.additive:  # runs grow layer by layer
            count = open_labels.counts[-1] if open_labels.starts[-1] == previous else 0
            stored = np.arange(len(open_labels.kept) - count, len(open_labels.kept))
            run_kept = open_labels.kept[stored] + units.saved[previous, stop]
        else:
            stored = np.flatnonzero(open_labels.after_segment)
            run_kept = (open_labels.kept + open_labels.at(units.saved, stop))[stored]
        run_peak, run_cost = np.maximum(open_labels.peak[stored], run_kept), open_labels.cost[stored]
        runs = np.flatnonzero((run_peak <= most_peak[stop]) & (run_cost <= most_cost[stop]))
        kept, peak, cost = (
            np.concatenate([one[runs], other[useful]])
            for one, other in ((run_kept, new_kept), (run_peak, new_peak), (run_cost, new_cost))
        )
        parents = np.concatenate([open_labels.index[stored][runs], open_labels.index[useful]])
        chosen, complete = front(kept, peak, cost, resolution)
        exact = exact and complete
        found.append((kept[chosen], peak[chosen], cost[chosen], np.full(len(chosen), stop), parents[chosen]))
        recomputed.append(chosen >= len(runs))
        if units.additive and 4 * np.count_nonzero(fits) < 3 * len(fits):  # what is too much now stays so
            open_labels.keep(fits)
        open_labels.add(stop, *found[-1][:3], size, recomputed[-1])
        size, previous = size + len(chosen), stop
        if not len(open_labels.kept):
            break
    every_kept, every_peak, every_cost, position, parent = (np.concatenate(x) for x in zip(*found, strict=True))
    return Labels(every_kept, every_peak, every_cost, position, parent, np.concatenate(recomputed), exact), tried

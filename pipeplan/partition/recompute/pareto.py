"""Which labels (kept, peak, cost) does no other label beat? All, or one for each bucket when there are too many.

A label beats another when it is no larger in any of the three numbers and smaller in one; see :mod:`.labels` for what
they mean. With buckets of cost and peak a label may go though none beats it: the numbers that stay are exact, but the
search is no longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...integers import Ints

_BLOCK = 128  # labels compared pairwise at a time
_LATER = np.tri(_BLOCK, k=-1, dtype=np.bool_).T.copy()  # [i, j]: j comes after i
_MOST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Resolution:
    """How labels are compared: exactly up to ``exact`` candidates, beyond that by buckets of cost and peak."""

    exact: int
    cost_buckets: int = 200
    peak_buckets: int = 24


def unbeaten(kept: Ints, peak: Ints, cost: Ints, resolution: Resolution) -> tuple[Ints, bool]:
    """Return the indices of the labels that stay, and whether these are all that no other label beats."""
    left = _worth(kept, peak, cost) if len(kept) > 2 * _BLOCK else np.arange(len(kept))
    exact = len(left) <= resolution.exact
    chosen = pareto(*(x[left] for x in (kept, peak, cost))) if exact else _bucketed(left, kept, peak, cost, resolution)
    return (left[chosen] if exact else chosen), exact


def pareto(kept: Ints, peak: Ints, cost: Ints) -> Ints:
    """Return the indices of the labels that no other label beats or equals in all three, by cost, kept, peak.

    Of equal labels the first stays. Sorted by cost, a label is beaten when an earlier one is no larger in the other
    two: blocks are compared with the staircase of all earlier labels, then among themselves. O(n log n) for small
    staircases.
    """
    order = np.lexsort((peak, kept, cost))
    kept, peak = kept[order], peak[order]
    stair_kept, stair_peak = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    chosen = []
    for begin in range(0, len(order), _BLOCK):
        some_kept, some_peak = kept[begin : begin + _BLOCK], peak[begin : begin + _BLOCK]
        alive = np.arange(len(some_kept))
        if begin:
            below = np.searchsorted(stair_kept, some_kept, side="right") - 1
            alive = np.flatnonzero((below < 0) | (stair_peak[below] > some_peak))
            some_kept, some_peak = some_kept[alive], some_peak[alive]
        if not len(alive):
            continue
        beats = (some_kept[:, None] <= some_kept) & (some_peak[:, None] <= some_peak)
        beats &= _LATER[: len(alive), : len(alive)]
        alone = ~beats.any(axis=0)
        chosen.append(begin + alive[alone])
        if begin + _BLOCK < len(order):
            stair_kept, stair_peak = _staircase(
                np.concatenate([stair_kept, some_kept[alone]]), np.concatenate([stair_peak, some_peak[alone]])
            )
    return order[np.concatenate(chosen)] if chosen else order


def _staircase(kept: Ints, peak: Ints) -> tuple[Ints, Ints]:
    """Return the pairs that no other beats, by growing kept and falling peak."""
    order = np.lexsort((peak, kept))
    kept, peak = kept[order], peak[order]
    lowest = np.minimum.accumulate(peak)
    step = np.concatenate([[True], peak[1:] < lowest[:-1]])
    return kept[step], peak[step]


def _cells(values: Ints, count: int) -> Ints:
    """Return the bucket, 0..count - 1, of each value; a smaller value is never in a higher bucket."""
    low, high = int(values.min()), int(values.max())
    place: Ints = ((values - low) * (count / (high - low + 1))).astype(np.int64)
    return np.minimum(place, count - 1)


def _worth(kept: Ints, peak: Ints, cost: Ints) -> Ints:
    """Return the indices of labels without one that keeps no more in a bucket of lower cost and lower peak.

    A first sieve: what goes is beaten for certain.
    """
    rows, columns = _cells(cost, 64), _cells(peak, 32)
    least = np.full((65, 33), _MOST)
    np.minimum.at(least[1:, 1:], (rows, columns), kept)
    least = np.minimum.accumulate(np.minimum.accumulate(least, axis=0), axis=1)
    return np.flatnonzero(least[rows, columns] > kept)


def _bucketed(left: Ints, kept: Ints, peak: Ints, cost: Ints, resolution: Resolution) -> Ints:
    """Return the indices of labels that stand for the labels ``left``, one for each bucket of cost and peak at most.

    A bucket's label is its lowest in kept, then peak, then cost; it goes when a bucket of no higher cost and peak has
    a label that keeps no more. O(n log n).
    """
    kept, peak, cost = kept[left], peak[left], cost[left]
    rows, columns = resolution.cost_buckets, resolution.peak_buckets
    row, column = _cells(cost, rows), _cells(peak, columns)
    least = np.full((rows + 1, columns + 1), _MOST)
    np.minimum.at(least[1:, 1:], (row, column), kept)
    lowest = np.flatnonzero(kept == least[row + 1, column + 1])
    least = np.minimum.accumulate(np.minimum.accumulate(least, axis=0), axis=1)
    beaten = np.minimum(least[row, column + 1], least[row + 1, column])[lowest] <= kept[lowest]
    lowest = lowest[~beaten]
    cell = (row * columns + column)[lowest]
    order = np.lexsort((cost[lowest], peak[lowest], cell))
    first = np.concatenate([[True], np.diff(cell[order]) > 0])
    chosen: Ints = left[lowest[order[first]]]
    return chosen

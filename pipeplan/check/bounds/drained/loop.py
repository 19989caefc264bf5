"""How soon can a mini-batch be over on stages that go round and round the GPUs, wherever layers are cut and what they
recompute?

Stages are taken apart: one of n layers has the least work, and holds the least, of any n layers that it can be. What is
left is how many layers each stage has, looked at in all ways for one GPU, and put together over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from ....integers import Ints, ceil_div
from ....schedule.kinds import KINDS
from .tables import NEVER, Placed

_MOST = 2 * 10**6  # ways to have so many layers in each of its stages, of one GPU, that are looked at one by one


@dataclass(frozen=True)
class Loop(Placed):
    """As many stages on each rank, in turn.

    A rank begins when a forward has come through a layer for each rank before it, then has M passes of all its stages,
    and where backwards are whole the last of them goes back through those layers. When its first backward begins it
    holds as many microbatches of each stage as the kind's order says. What doesn't fit it recomputes, at the best ratio
    of bytes to time of any layer. Layers are dealt out to the ranks by numbers, so that all are over in time.
    """

    @cached_property
    def before(self) -> list[int]:
        """For each rank what comes before its first pass, and behind its last where backwards are whole."""
        found = [int(head.min()) for head in self.heads]
        if KINDS[self.kind].splits:
            return found
        bare = self.tables.back - self.tables.transfer
        trip = int(self.tables.transfer[1:-1].min(initial=NEVER))
        return [before + int(bare[rank]) + rank * trip for rank, before in enumerate(found)]

    def least(self, than: int | None = None) -> int | None:
        """Return the least time within which stages of this shape may be over; None where they fit in no way."""
        ranks, stages = self.shape.ranks, self.shape.ranks * self.shape.chunks
        own = self.work + self.held[:, None] + self.held[None, :]
        price = min(self.price, 1e12) / max(self.counts)
        columns: list[tuple[Ints, Ints, Ints]] = []
        for s, count in enumerate(self.counts):
            summed = self.sums * (s < ranks and not KINDS[self.kind].splits and self.shape.pipelines > 1)
            kept = count * self.tables.saved + self.weights
            three = (own + summed, kept, self.weights if np.isfinite(self.price) else kept)
            stage = self.tables.stages.stop > self.tables.stages.start
            work, size, must = (_least_of(np.where(stage, table, NEVER), s, stages) for table in three)
            columns.append((work, size, must))
        works = [_of_one(columns[rank::ranks], self.room, price) for rank in range(ranks)]
        total = int(reduce(_joined, works)[-1])
        if total >= NEVER:
            return than
        once = self.shared[1]
        ends = [np.where(x < NEVER, x + early - once, NEVER) for x, early in zip(works, self.before, strict=True)]
        evenly = ceil_div(max(total, int(own[0, -1])) + sum(self.before) - ranks * once, ranks)
        found = max(self.floor_ns, _least_longest(ends), evenly)
        return found if than is None else min(found, than)


def _least_of(table: Ints, stage: int, stages: int) -> Ints:
    """Return the least of ``table``, of shape (cuts, cuts), by the number of units of a stage, which leaves one at
    least to each of the others; the first has the first unit, the last the last."""
    last, behind = len(table) - 1, stages - 1 - stage
    found = np.full(last + 1, NEVER, dtype=np.int64)
    for count in range(1, last + 1):
        first = last - count if not behind else stage
        final = 0 if not stage else last - behind - count
        if first <= final:
            starts = np.arange(first, final + 1)
            found[count] = min(NEVER, int(table[starts, starts + count].min()))
    return found


def _of_one(stages: Sequence[tuple[Ints, Ints, Ints]], room: int, price: float) -> Ints:
    """Return the least work of a GPU's ``stages``, by the units in all of them.

    Of each stage its work, what it keeps, and what it must keep, in bytes, by its units. For each byte that it keeps
    beyond the ``room`` it pays a ``price``. Of many stages the least of each of the three is taken for itself.
    """
    units = len(stages[0][0]) - 1
    most = units - len(stages) + 1
    if most ** len(stages) > _MOST:
        work, size, least = (reduce(_joined, column) for column in zip(*stages, strict=True))
        count = np.arange(units + 1)
    else:
        work, size, least, count = (np.zeros(1, dtype=np.int64) for _ in range(4))
        more = np.arange(1, most + 1)
        for stage in stages:
            own = [column[more] for column in stage] + [more]
            sums = zip((work, size, least, count), own, strict=True)
            work, size, least, count = ((one[:, None] + other[None, :]).ravel() for one, other in sums)
    fits = (count <= units) & (least <= room)
    again = np.minimum(np.maximum(size - room, 0) * price, NEVER).astype(np.int64)
    found = np.full(units + 1, NEVER, dtype=np.int64)
    np.minimum.at(found, count[fits], np.minimum(work + again, NEVER)[fits])
    return found


def _joined(one: Ints, other: Ints) -> Ints:
    """Return the least of both together, by the units in all."""
    size = len(one)
    found = np.full(size, NEVER, dtype=np.int64)
    for count in range(size):
        found[count] = min(NEVER, int((one[: count + 1] + other[count::-1]).min()))
    return found


def _least_longest(ends: Sequence[Ints]) -> int:
    """Return the least time within which all GPUs are over and have all units."""
    units = len(ends[0]) - 1
    times = sorted({int(x) for end in ends for x in end if x < NEVER})
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _dealt_within(ends, times[middle], units):
            high = middle
        else:
            low = middle + 1
    return times[low]


def _dealt_within(ends: Sequence[Ints], time: int, units: int) -> bool:
    """Whether all units can be dealt out to GPUs that are all over within ``time``; a bit stands for a number."""
    reached = 1
    for end in ends:
        more = 0
        for count in np.flatnonzero(end <= time).tolist():
            more |= reached << count
        reached = more & ((1 << (units + 1)) - 1)
    return bool(reached >> units & 1)

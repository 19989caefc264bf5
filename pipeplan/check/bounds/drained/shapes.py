"""How soon can a mini-batch be over on stages that a schedule places, wherever layers are cut and what they recompute?

Where they go round and round the GPUs, stages are taken apart: one of n layers has the least work, and holds the least,
of any n layers that it can be. What is left is how many layers each stage has, looked at in all ways for one GPU, and
put together over all of them. Placed like a V, rank r of p has stages r and 2p - 1 - r, so ranks take layers from both
ends of the chain. Which (first, last) layers the ranks before one can leave to it, all of them over in time, is a
dynamic program over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from ....integers import Ints, ceil_div, smallest
from ....schedule.kinds import KINDS
from .tables import NEVER, Placed

_MOST = 2 * 10**6  # ways to have so many layers in each of its stages, of one GPU, that are looked at one by one


@dataclass(frozen=True)
class Loop(Placed):
    """As many stages on each rank, in turn.

    A rank begins when a forward has come through a layer for each rank before it, then has M passes of all its stages.
    Behind them it makes updates; where backwards are whole the last also goes back through those layers. When its first
    backward begins it holds as many microbatches of each stage as the kind's order says. What doesn't fit it
    recomputes, at the best ratio of bytes to time of any layer. Layers are dealt out to the ranks by numbers, so that
    all are over in time.
    """

    def least(self, than: int | None = None) -> int | None:
        """Return the least time within which stages of this shape may be over; None where they fit in no way."""
        whole, heads = not KINDS[self.kind].splits, [int(head.min()) for head in self.heads]
        found = self._least(self.steps, self.sums * (whole and self.shape.pipelines > 1), heads, self.shared[1])
        if whole and found is not None:
            bare = self.tables.back - self.tables.transfer
            trip = int(self.tables.transfer[1:-1].min(initial=NEVER))
            through = [before + int(bare[rank]) + rank * trip for rank, before in enumerate(heads)]
            none = np.zeros_like(self.work)
            found = max(found, self._least(none, none, through, 0) or 0)
        return than if found is None or (than is not None and than < found) else found

    def _least(self, steps: Ints, sums: Ints, before: Sequence[int], once: int) -> int | None:
        """Return the least time for passes, ``steps`` of all stages and ``sums`` of each rank's first, and what comes
        ``before`` a rank or behind its passes, ``once`` ns of which may be counted twice; None where nothing fits."""
        ranks, stages = self.shape.ranks, self.shape.ranks * self.shape.chunks
        own = self.work + steps + self.held[:, None] + self.held[None, :]
        price = min(self.price, 1e12) / max(self.counts)
        columns: list[tuple[Ints, Ints, Ints]] = []
        for s, count in enumerate(self.counts):
            summed = sums * (s < ranks)
            kept = count * self.tables.saved + self.weights
            three = (own + summed, kept, self.weights if np.isfinite(self.price) else kept)
            stage = self.tables.stages.stop > self.tables.stages.start
            work, size, must = (_least_of(np.where(stage, table, NEVER), s, stages) for table in three)
            columns.append((work, size, must))
        works = [_of_one(columns[rank::ranks], self.room, price) for rank in range(ranks)]
        total = int(reduce(_joined, works)[-1])
        if total >= NEVER:
            return None
        ends = [np.where(x < NEVER, x + early - once, NEVER) for x, early in zip(works, before, strict=True)]
        evenly = ceil_div(max(total, int(own[0, -1])) + sum(before) - ranks * once, ranks)
        return max(self.floor_ns, _least_longest(ends), evenly)


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


PRECISION = 4096  # a bound is found to this part

Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]
_Condition = tuple[Numbers, Numbers, Callable[[Ints], Numbers]]  # of both stages, and the room for them by the budget


@dataclass(frozen=True)
class Vee(Placed):
    """Two stages on each rank, placed like a V.

    1. A rank begins when a forward has come through all layers before its first stage and as many transfers as there
       are ranks before it; then it has M passes of each of both stages, the sum of one's gradients, and steps. What is
       no weight part is over before the last gradient goes back through the layers before.
    2. When its first backward begins it holds as many microbatches of both stages as the kind's order says, one at
       least. What doesn't fit it recomputes, at the best ratio of bytes to time of any layer.
    """

    @cached_property
    def way_ns(self) -> int:
        """What a microbatch takes from the first layer to the loss and back."""
        ranks, tables = self.shape.ranks, self.tables
        least = int(tables.transfer[1:-1].min(initial=NEVER)) * (ranks > 1)
        return int(tables.there[-1] + tables.back[-1]) + 4 * (ranks - 1) * least

    def least(self, than: int | None = None) -> int | None:
        """Return the least time (ns) within which stages of this shape may be over, or ``than`` where that is less."""
        if not self._possible(NEVER):
            return than
        low = max(1, self.floor_ns, self.way_ns)
        if than is not None and (low >= than or not self._possible(than - 1)):
            return than
        high = low if than is None else than - 1
        while than is None and not self._possible(high):
            low, high = high + 1, 2 * high
        grain = max(1, low // PRECISION)
        steps = max(1, low // grain), ceil_div(high, grain)
        found = smallest(lambda step: self._possible(step * grain) or None, *steps)
        assert found is not None, "the last is possible"
        return max(low, (found[0] - 1) * grain + 1)

    def _possible(self, total: int) -> bool:
        """Whether all ranks may be over within ``total`` ns, as far as is looked at."""
        size = len(self.tables.cuts)
        left = np.zeros((size, size), dtype=np.bool_)  # the layers from one cut to another
        left[0, -1] = True
        for rank in range(self.shape.ranks):
            self.tables.problem.deadline.check()
            left = self._taken(rank, left, total)
        return bool(np.diagonal(left).any())

    def _taken(self, rank: int, left: Bools, total: int) -> Bools:
        """Return what a rank may leave of each range of layers that is ``left`` to it."""
        size = len(left)
        cuts = np.arange(size)
        budget = np.minimum(total, NEVER) + self.shared[1] - self.heads[rank]
        ways = [[(one, other, room(budget)) for one, other, room in way] for way in self._ways(rank)]
        found = np.zeros_like(left)
        for stop in np.flatnonzero(left.any(axis=0)).tolist():
            starts = np.flatnonzero(left[:, stop] & (budget >= 0))
            if not len(starts):
                continue
            since = np.full((len(starts), size), size)
            for way in ways:
                own = [_since(other[:stop, stop], room[starts, None] - one[starts]) for one, other, room in way]
                since = np.minimum(since, np.maximum.reduce(own))
            since = np.where(cuts[None, :] > starts[:, None], since, size)
            earliest = np.maximum(since.min(axis=0), cuts)  # nothing is taken twice
            found |= (cuts[None, :] >= earliest[:, None]) & (cuts[None, :] < stop)
        return found

    def _ways(self, rank: int) -> list[list[_Condition]]:
        """Return the ways in which a rank may end, each with the conditions that then hold at once."""
        ends, turn = self.held, rank == self.shape.ranks - 1  # between whose stages nothing is sent
        held = ends[:, None] + ends[None, :] * (not turn), ends[:, None] * (not turn) + ends[None, :]
        done, two = (self.work - self.later + messages for messages in held)
        one, other = (self.work + self.steps + messages for messages in held)
        back = self.tables.back
        always: list[_Condition] = [(done, _falling(two), lambda budget: budget - back), *self._room(rank, one, other)]
        if self.shape.pipelines == 1:
            return [[(one, _falling(other), lambda budget: budget), *always]]
        return [
            [(one + self.sums, _falling(other), lambda budget: budget), *always],
            [(one, _falling(other + self.sums), lambda budget: budget), *always],
        ]

    def _room(self, rank: int, one: Ints, other: Ints) -> Iterator[_Condition]:
        """Yield what a rank's stages keep and the room for it; where they may keep less, with the time that this takes,
        and their weights alone."""
        counts = self.counts[rank], self.counts[-1 - rank]
        first, second = (held * self.tables.saved + self.weights for held in counts)
        room = float(self.room)
        if not np.isfinite(self.price):
            yield first, _falling(second), lambda budget: np.full(len(budget), room)
            return
        again = self.price / max(counts)
        yield one + again * first, _falling(other + again * second), lambda budget: budget + again * room
        yield self.weights, _falling(self.weights), lambda budget: np.full(len(budget), room)


def _falling(table: Numbers) -> Numbers:
    """Return the table with no entry above one of a longer range with the same stop."""
    return np.minimum.accumulate(table, axis=0)


def _since(falling: Numbers, room: Numbers) -> Ints:
    """Return the first place from which on what ``falling`` says fits the ``room``; its length where none does."""
    return len(falling) - np.searchsorted(falling[::-1], room, side="right")

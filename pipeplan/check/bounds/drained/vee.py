"""How soon can a mini-batch be over on two stages per GPU, placed like a V, wherever layers are cut and what they
recompute?

Rank r of p has stages r and 2p - 1 - r, so ranks take layers from both ends of the chain. Which (first, last) layers
the ranks before one can leave to it, all of them over in time, is a dynamic program over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ....integers import Ints, ceil_div, smallest
from .tables import NEVER, Placed

PRECISION = 4096  # a bound is found to this part

Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]
_Condition = tuple[Numbers, Numbers, Callable[[Ints], Numbers]]  # of both stages, and the room for them by the budget


@dataclass(frozen=True)
class Vee(Placed):
    """Two stages on each rank, placed like a V.

    1. A rank begins when a forward has come through all layers before its first stage and as many transfers as there
       are ranks before it; then it has M passes of each of both stages, and the sum of one's gradients. What is no
       weight part is over before the last gradient goes back through the layers before.
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
        one, other = (self.work + messages for messages in held)
        back = self.tables.back
        always: list[_Condition] = [
            (one - self.later, _falling(other - self.later), lambda budget: budget - back),
            *self._room(rank, one, other),
        ]
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

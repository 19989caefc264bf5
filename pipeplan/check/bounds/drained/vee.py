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

from ....cost import time_model
from ....integers import Ints, ceil_div, smallest
from ....plan import Bound, ScheduleKind
from ....problem import Problem
from ....schedule.occupancy import held_at_first
from .tables import NEVER, PlacedTables

FIXED: tuple[ScheduleKind, ...] = ("zbv", "v-half", "v-min")  # whose forwards before the first backward are known
MOST = 2 * 10**7  # layers to the third, times ranks, beyond which nothing is bounded
PRECISION = 4096  # a bound is found to this part

Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]
_Condition = tuple[Numbers, Numbers, Callable[[Ints], Numbers]]  # of both stages, and the room for them by the budget


def vee_bound(problem: Problem, kind: ScheduleKind) -> Bound | None:
    """Return the bound on all plans under a ``kind`` that places stages like a V; None where that would take too long,
    or nothing fits. OutOfTime at the problem's deadline.

    1. A rank begins when a forward has come through all layers before its first stage and as many transfers as there
       are ranks before it; then it has M passes of each of both stages, and the sum of one's gradients. What is no
       weight part is over before the last gradient goes back through the layers before.
    2. When its first backward begins it holds as many microbatches of both stages as the kind's order says, one at
       least. What doesn't fit it recomputes, at the best ratio of bytes to time of any layer.

    Of M microbatches in all each of r pipelines has a share; every number of ranks and pipelines is looked at.
    """
    relaxed = time_model.relative(problem)
    count, devices, microbatches = len(problem.chain), len(problem.platform), problem.policy.accumulate or 1
    if (count + 1) ** 3 * devices > MOST:
        return None
    shapes = [
        _Vee(relaxed, kind, ranks, pipelines)
        for ranks in range(1, min(devices, count // 2) + 1)
        for pipelines in range(1, devices // ranks + 1 if problem.replicas else 2)
    ]
    best: int | None = None
    for shape in sorted(shapes, key=lambda one: (one.floor_ns, one.ranks)):
        best = shape.least(best)
    if best is None:
        return None
    return Bound("any", problem.replicas, problem.checkpointing, ceil_div(best, microbatches), schedule=kind)


@dataclass(frozen=True)
class _Vee(PlacedTables):
    """Two stages on each rank, placed like a V."""

    @cached_property
    def held(self) -> list[tuple[int, int]]:
        """For each rank how many microbatches of its first and its second stage it holds at one time."""
        if self.kind not in FIXED or self.ranks == 1:
            return [(1, 1)] * self.ranks
        counts = held_at_first(self.kind, self.ranks, 2, self.count)
        return [(counts[rank], counts[-1 - rank]) for rank in range(self.ranks)]

    def least(self, than: int | None) -> int | None:
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
        size = len(self.problem.chain) + 1
        left = np.zeros((size, size), dtype=np.bool_)  # the layers from one cut to another
        left[0, -1] = True
        for rank in range(self.ranks):
            self.problem.deadline.check()
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
        ends = self.count * self.tables.held * (self.ranks > 1)
        turn = rank == self.ranks - 1  # between whose stages nothing is sent
        held = ends[:, None] + ends[None, :] * (not turn), ends[:, None] * (not turn) + ends[None, :]
        one, other = (self.work + messages for messages in held)
        back = self.tables.back
        always: list[_Condition] = [
            (one - self.later, _falling(other - self.later), lambda budget: budget - back),
            *self._room(rank, one, other),
        ]
        if self.pipelines == 1:
            return [[(one, _falling(other), lambda budget: budget), *always]]
        return [
            [(one + self.sums, _falling(other), lambda budget: budget), *always],
            [(one, _falling(other + self.sums), lambda budget: budget), *always],
        ]

    def _room(self, rank: int, one: Ints, other: Ints) -> Iterator[_Condition]:
        """Yield what a rank's stages keep and the room for it; where they may keep less, with the time that this takes,
        and their weights alone."""
        counts = self.held[rank]
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

"""What is the least longest stage of every range of layers on m units of a level? PipeDream's recurrence.

A level joins units: devices inside a server, then servers. The best stages of a range end with one last stage on some
of the units, and the best stages of what is left on the others (PipeDream section 3.1). The two modes of ``pipedream``
differ in what a stage costs, which they pass in as rows; the recurrence, and reading the stages back, are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...deadline import Deadline
from ...plan import Allocation, Stage

Table = npt.NDArray[Any]  # periods: int64 ns, or float64 in the released optimizer's arithmetic
Rows = Callable[[int], Table]
UNREACHABLE = 2**62
BLOCK = 128  # starts at a time: keeps the working set in cache and skips most cuts that lie before them


class StageRange(NamedTuple):
    """One stage: ``[start:stop]`` on ``replicas`` units of the level below, in the end devices."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True)
class Solved:
    """A solved level. ``table[m, stop, start]``: the least period of ``[start:stop]`` on m units.

    ``first(stop)`` and ``later(stop)`` have shape (units, stop): the period of ``[start:stop]`` as the only stage, and
    as the last of several with what enters it, on 1, 2, .. units. ``before(stop)`` are the cuts allowed before stop.
    """

    table: Table
    first: Rows
    later: Rows
    before: Callable[[int], Any]
    most_replicas: int

    def partition(self, start: int, stop: int, units: int) -> list[StageRange]:
        """Return stages of ``[start:stop]`` that have the period ``table[units, stop, start]``."""
        stages: list[StageRange] = []
        while True:
            least = self.table[units, stop, start]
            if units <= self.most_replicas and self.first(stop)[units - 1, start] == least:
                return [StageRange(start, stop, units), *stages[::-1]]
            cut = self._last_stage(start, stop, units)
            if cut is None:
                units -= 1  # one unit is left over
                continue
            stages.append(cut)
            stop, units = cut.start, units - cut.replicas

    def _last_stage(self, start: int, stop: int, units: int) -> StageRange | None:
        """Return the last of several stages, the longest one of those that are as good."""
        cuts = np.arange(stop)[self.before(stop)]
        entered, found = self.later(stop), []
        for m in range(1, min(units - 1, self.most_replicas) + 1):
            through = np.maximum(self.table[units - m, cuts, start], entered[m - 1, cuts])
            (hits,) = np.nonzero(through == self.table[units, stop, start])
            found += [StageRange(int(cuts[hits[0]]), stop, m)] if len(hits) else []
        return min(found, default=None)


def solve_level(
    length: int,
    units: int,
    first: Rows,
    later: Rows,
    *,
    before: Callable[[int], Any] | None = None,
    every_start: bool,
    fewer_units: bool,
    most_replicas: int,
    deadline: Deadline,
) -> Solved:
    """Return the dynamic program over the last stage of ``[start:stop]`` on ``units`` units (see :class:`Solved`).

    ``table[m, stop, start] = min(first, min over cuts k and q < m of max(table[m - q, k, start], later[q, k]))``, for
    start 0 alone unless ``every_start``; ``fewer_units`` lets units stay unused. ``before`` gives the cuts k, all in
    between by default. Time O(length^3 units^2) with every start, else O(length^2 units^2); vectorised.
    """
    before = before or (lambda stop: slice(1, stop))
    dtype = first(1).dtype
    unreachable = np.inf if dtype.kind == "f" else UNREACHABLE
    starts = length if every_start else 1
    table = np.full((units + 1, length + 1, starts), unreachable, dtype=dtype)
    for stop in range(1, length + 1):
        deadline.check()
        width = min(stop, starts)
        best = np.full((units, width), unreachable, dtype=dtype)
        best[:most_replicas] = first(stop)[:most_replicas, :width]
        entered, cuts = later(stop), before(stop)
        earlier, position = table[:, cuts, :width], np.arange(stop)[cuts]
        for left in range(0, width, BLOCK):
            block = slice(left, min(left + BLOCK, width))
            beyond = int(np.searchsorted(position, left, side="right"))  # the first cut after a start of the block
            for q in range(1, min(units - 1, most_replicas) + 1 if beyond < len(position) else 1):
                last = entered[q - 1, cuts, None][beyond:]
                for m in range(q + 1, units + 1):
                    through = np.maximum(earlier[m - q, beyond:, block], last).min(axis=0)
                    np.minimum(best[m - 1, block], through, out=best[m - 1, block])
        if fewer_units:
            np.minimum.accumulate(best, axis=0, out=best)
        table[1:, stop, :width] = best
    return Solved(table, first, later, before, most_replicas)


def device_stages(solved: Sequence[Solved], units: Sequence[int], length: int) -> list[StageRange]:
    """Return the stages of ``[0:length]`` on a whole solved hierarchy, lowest level first; replicas are devices."""
    stages = [StageRange(0, length, 1)]
    for level, count in zip(reversed(solved), reversed(units), strict=True):
        stages = [
            StageRange(inner.start, inner.stop, inner.replicas * outer.replicas)
            for outer in stages
            for inner in level.partition(outer.start, outer.stop, count)
        ]
    return stages


def on_consecutive_devices(stages: Sequence[StageRange], period: int) -> Allocation:
    """Return the allocation of ``stages`` on the platform's devices in order, claiming ``period`` ns."""
    placed, first = [], 0
    for stage in stages:
        placed.append(Stage(stage.start, stage.stop, tuple(range(first, first + stage.replicas))))
        first += stage.replicas
    return Allocation(tuple(placed), period)

"""At which of very many ideals may contiguous stages of at most one period be cut? Most are ruled out without tables.

A search over all orders of a DAG's layers (:mod:`...cost.ideal_chain`) takes tables over pairs of ideals, too many of
some tens of thousands. But a period says how much fits between two cuts, and so how many devices the layers before an
ideal and those behind it need at least (as :mod:`.device_counts` has it); where the two are more than there are, no
such plan is cut there. Pairs are looked at in blocks, of which the few that may be stages are kept: first by what
costs little, times, cuts and weights, then what is left with all that stages hold. The nearer the period to what the
work takes of the devices, or the less fits, the fewer ideals are left; exact searches go on with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost import time_model
from ...cost.stage_tables import StageTables
from ...integers import NEVER, Ints, ceil_div, extend_array
from ...problem import Problem
from ..cuts import round_trips_ns
from ..tables.device_counts import TOO_MANY, stage_needs
from ..tables.options import FewOptions, quickest_replicas, stage_limits, stage_times
from ..tables.stages import carried, longest_delay
from .ideal_chain import IdealChain

_BLOCK = 2**20  # pairs that are looked at together


def sifted(problem: Problem, chain: IdealChain, period: int) -> IdealChain | None:
    """Return the ideals of ``chain``, in whose place ``problem`` has its layers, without those at which no plan of at
    most ``period`` ns is cut.

    None where there is no such plan at all. The ideals are in order of the work that they have. About O(n^2) for n
    ideals; of plans for much longer periods than work takes of all devices few are ruled out.
    """
    left = _by_work(problem, chain, period)
    if left is not None and problem.checkpointing != "segments":
        left = _by_pairs(replace(problem, checkpointing="segments"), left, period)
    return left and _by_pairs(problem, left, period, delays=not problem.replicas)


def _work(problem: Problem, chain: IdealChain) -> Ints:
    """Return the ns of work before each ideal on the best device, rounded down."""
    sums, speed = chain.sums, problem.platform.best_device.speed
    found: Ints = (sums.forward_ns + sums.backward_ns) * speed.denominator // speed.numerator
    return found


def _trips(problem: Problem, chain: IdealChain, period: int) -> Ints:
    """Return the round trip of each cut on the quickest link, NEVER where none carries it once per ``period``."""
    platform = problem.platform
    cuts = np.arange(len(chain) + 1)
    trips = [min(NEVER, trip) for trip in round_trips_ns(chain, platform, cuts, 0)]
    return carried(problem, np.array(trips, dtype=np.int64) * (not platform.blocking), 0, period)


def _by_work(problem: Problem, chain: IdealChain, period: int) -> IdealChain | None:
    """Return the chain without ideals that have too much work before or behind, or that no link carries."""
    work = _work(problem, chain)
    devices = ceil_div(work, period) + ceil_div(np.maximum(work[-1] - work - 1, 0), period)
    if devices[0] > len(problem.platform):
        return None
    left = (devices <= len(problem.platform)) & (_trips(problem, chain, period) < NEVER)
    left[[0, -1]] = True
    return chain.select(np.flatnonzero(left))


def _by_pairs(problem: Problem, chain: IdealChain, period: int, delays: bool = False) -> IdealChain | None:
    """Return the chain without ideals that have too few devices for the stages before and behind, or, with
    ``delays``, at which none of those are cut that meet the period on single devices like the best."""
    count = len(problem.platform)
    walk = _Walk(problem, chain, period)
    rows = walk.back()
    if walk.after[0] > count:
        return None
    before = np.full(len(walk.after), TOO_MANY, dtype=np.int64)
    before[0] = 0
    for row in reversed(rows):
        np.minimum.at(before, row.columns, before[row.row] + row.need)
    left = before + walk.after <= count
    if delays:
        left &= _on_ways(walk, rows)
        if not left[0]:
            return None
    return chain.select(np.flatnonzero(left))


def _on_ways(walk: _Walk, rows: Sequence[_Row]) -> npt.NDArray[np.bool_]:
    """Return whether each ideal is on a way of stages on single devices that meet the period.

    As in :mod:`.decision`, with the best device and link for all: of each ideal and number of devices behind it the
    least delay, and then what is met on the ways back from the first ideal.
    """
    problem, period = walk.problem, walk.period
    count, cap = len(problem.platform), longest_delay(problem, period)
    apart = len(problem.platform.levels) > 1 or problem.platform.both_ways(0)
    enter = np.full((count + 1, len(walk.after)), NEVER, dtype=np.int64)
    enter[0, -1] = 0
    ways = []
    for row in rows:
        found = row.delays(enter[:-1, row.columns], period, cap)
        ways.append(found < NEVER)
        least, trip = found.min(axis=1), int(walk.trips[row.row])
        through = (
            least + trip if apart else extend_array(np.minimum(least, NEVER // 2), np.full_like(least, trip), period)
        )
        enter[1:, row.row] = np.where(least < NEVER, through, NEVER)
    met = np.zeros(enter.shape, dtype=np.bool_)
    met[:, 0] = enter[:, 0] < NEVER
    for row, way in zip(reversed(rows), reversed(ways), strict=True):
        met[:-1, row.columns] |= way & met[1:, row.row, None]
    return np.asarray(met.any(axis=0))


class _Row(NamedTuple):
    """Stages from one ideal: where they may stop, how many devices they need at least, and in which ways each may keep
    or recompute what it saves: (ns, microbatches that it can hold so)."""

    row: int
    columns: Ints
    need: Ints
    options: Sequence[tuple[Ints, Ints]]

    def delays(self, behind: Ints, period: int, cap: int) -> Ints:
        """Return the delays before the stages on single devices, whose last dimension is that of those ``behind``."""

        def work(in_flight: Ints) -> Ints:
            least = np.full(in_flight.shape, NEVER, dtype=np.int64)
            for time, limit in reversed(self.options):
                np.copyto(least, time, where=in_flight <= limit)
            return least

        group = ceil_div(behind, period)
        end = group * period
        stay, opened = work(group) + behind, work(group + 1) + end
        found = np.where(stay <= end, stay, opened)
        found[(found > np.minimum(end + period, cap)) | (behind >= NEVER)] = NEVER
        return found


class _Pairs(NamedTuple):
    """Stages between ideals, by row: devices that they need at least, and their options (see :class:`_Row`)."""

    rows: Ints
    columns: Ints
    need: Ints
    options: Sequence[tuple[Ints, Ints]]

    def of(self, row: int, some: slice) -> _Row:
        """Return those of one row, which are ``some``."""
        options = [(time[some], limit[some]) for time, limit in self.options]
        return _Row(row, self.columns[some], self.need[some], options)


class _Walk:
    """One pass from the last ideal to the first: how many devices are needed ``after`` each, and the least delay."""

    def __init__(self, problem: Problem, chain: IdealChain, period: int) -> None:
        self.problem, self.period = problem, period
        self.chain, self.work = chain, _work(problem, chain)
        size, best = len(self.work), problem.platform.best_device
        cuts, end = np.arange(size), np.int64(size - 1)
        replicas = quickest_replicas(problem)
        bare = time_model.work_ns(self.chain, problem.policy, cuts, end, replicas=replicas, speed=best.speed)
        self.trips = _trips(problem, chain, period)
        self.enter = np.minimum(bare + self.trips, NEVER)  # the least delay that a stage which stops here sees
        self.after = np.full(size, TOO_MANY, dtype=np.int64)
        self.after[-1] = 0

    def back(self) -> list[_Row]:
        """Fill ``after``; return the stages that there may be, from the last row on."""
        found = list[_Row]()
        most = len(self.problem.platform) if self.problem.replicas else 1
        first = np.searchsorted(self.work, self.work + most * self.period + 1, side="right")
        stop = len(self.work) - 1
        while stop > 0:
            self.problem.deadline.check()
            width = int(first[stop - 1]) - stop + 1
            start = max(0, stop - max(1, _BLOCK // width))
            found += self._block(start, stop, int(first[stop - 1]))
            stop = start
        return found

    def _block(self, start: int, stop: int, end: int) -> list[_Row]:
        """Do the same for the rows ``start`` to ``stop``, whose stages stop before ``end``."""
        pairs = self._pairs(slice(start, stop), slice(start + 1, end))
        ends = np.searchsorted(pairs.rows, np.arange(start, stop + 1)).tolist()
        most = (len(self.problem.platform) - ceil_div(self.work[start:stop], self.period)).tolist()
        found = []
        for number in range(stop - start - 1, -1, -1):
            row = pairs.of(start + number, slice(ends[number], ends[number + 1]))
            together = row.need + self.after[row.columns]
            possible = np.flatnonzero(together <= most[number])
            if len(possible):
                row = _Row(
                    row.row,
                    row.columns[possible],
                    row.need[possible],
                    [(t[possible], m[possible]) for t, m in row.options],
                )
                self.after[row.row] = int(together[possible].min())
                time = np.minimum.reduce([np.where(limit > 0, time, NEVER) for time, limit in row.options])
                delay = int((time + self.enter[row.columns]).min())
                self.enter[row.row] = min(NEVER, max(int(self.enter[row.row]), delay + int(self.trips[row.row])))
                found.append(row)
        return found

    def _pairs(self, rows: slice, columns: slice) -> _Pairs:
        """Return the stages between some ideals and others that some number of devices is enough for."""
        most = len(self.problem.platform) if self.problem.replicas else 1
        chain = self.chain.window(rows, columns)
        start, stop = np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)[None, :]
        may = chain.is_range(start, stop) & (self.work[stop] - self.work[start] <= most * self.period + 1)
        at, to = np.nonzero(may)
        start, stop = at + rows.start, to + columns.start
        problem = replace(self.problem, chain=chain)
        best = problem.platform.best_device
        tables = StageTables(problem, start, stop)
        options = FewOptions(start, stage_times(tables, best), stage_limits(tables, best.memory_bytes)).relaxed()
        gradients = tables.gradients if problem.replicas else np.zeros(len(start), dtype=np.int64)
        need = stage_needs(problem, options, gradients, self.enter[stop], self.period)
        enough = need < TOO_MANY
        some = [(time[enough], limit[enough]) for time, limit in options]
        return _Pairs(start[enough], stop[enough], need[enough].astype(np.int64), some)

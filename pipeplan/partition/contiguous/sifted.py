"""At which of very many ideals may contiguous stages of at most one period be cut? Most are ruled out without tables.

A search over all orders of a DAG's layers (:mod:`...cost.ideal_chain`) takes tables over pairs of ideals, too many of
some tens of thousands. But a period says how much fits between two cuts, and so how many devices the layers before an
ideal and those behind it need at least (as :mod:`.device_counts` has it); where the two are more than there are, no
such plan is cut there. Pairs are looked at in blocks, of which the few that may be stages are kept: first by what
costs little, times, cuts and weights, then what is left with all that stages hold. The nearer the period to what the
work takes of the devices, or the less fits, the fewer ideals are left; exact searches go on with those.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...cost import memory_model, time_model
from ...cost.ideal_chain import IdealChain
from ...integers import Ints, ceil_div
from ...problem import Problem
from ..cuts import round_trips_ns
from .device_counts import TOO_MANY, stage_needs
from .options import NEVER, FewOptions, quickest_replicas, stage_limits, stage_times
from .tables import carried

_BLOCK = 2**20  # pairs that are looked at together


def sifted(problem: Problem, period: int) -> Problem | None:
    """Return ``problem``, whose chain is one of ideals, without those at which no plan of at most ``period`` ns is cut.

    None where there is no such plan at all. The ideals are in order of the work that they have. About O(n^2) for n
    ideals; of plans for much longer periods than work takes of all devices few are ruled out.
    """
    relaxed = _by_work(problem, period)
    if relaxed is None or problem.checkpointing == "segments":
        return None if relaxed is None else _by_pairs(relaxed, period)
    quick = _by_pairs(replace(relaxed, checkpointing="segments"), period)
    return None if quick is None else _by_pairs(replace(quick, checkpointing=problem.checkpointing), period)


def _chain(problem: Problem) -> IdealChain:
    assert isinstance(problem.chain, IdealChain), "what is sifted are ideals"
    return problem.chain


def _work(problem: Problem) -> Ints:
    """Return the ns of work before each ideal on the best device, rounded down."""
    sums, speed = problem.chain.sums, problem.platform.best_device.speed
    found: Ints = (sums.forward_ns + sums.backward_ns) * speed.denominator // speed.numerator
    return found


def _trips(problem: Problem, period: int) -> Ints:
    """Return the round trip of each cut on the quickest link, NEVER where none carries it once per ``period``."""
    platform, chain = problem.platform, problem.chain
    cuts = np.arange(len(chain) + 1)
    trips = [min(NEVER, trip) for trip in round_trips_ns(chain, platform, cuts, 0)]
    return carried(problem, np.array(trips, dtype=np.int64) * (not platform.blocking), 0, period)


def _by_work(problem: Problem, period: int) -> Problem | None:
    """Return the problem without ideals that have too much work before or behind, or that no link carries."""
    work = _work(problem)
    devices = ceil_div(work, period) + ceil_div(np.maximum(work[-1] - work - 1, 0), period)
    if devices[0] > len(problem.platform):
        return None
    left = (devices <= len(problem.platform)) & (_trips(problem, period) < NEVER)
    left[[0, -1]] = True
    return replace(problem, chain=_chain(problem).select(np.flatnonzero(left)))


def _by_pairs(problem: Problem, period: int) -> Problem | None:
    """Return the problem without ideals that have too few devices for the stages before and behind."""
    count = len(problem.platform)
    walk = _Walk(problem, period)
    rows = walk.back()
    if walk.after[0] > count:
        return None
    before = np.full(len(walk.after), TOO_MANY, dtype=np.int64)
    before[0] = 0
    for row, columns, need in reversed(rows):
        np.minimum.at(before, columns, before[row] + need)
    left = before + walk.after <= count
    return replace(problem, chain=_chain(problem).select(np.flatnonzero(left)))


class _Pairs(NamedTuple):
    """Stages between ideals, by row: what they take at least."""

    rows: Ints
    columns: Ints
    need: Ints  # devices
    time: Ints  # ns on one, NEVER where they never fit


class _Walk:
    """One pass from the last ideal to the first: how many devices are needed ``after`` each, and the least delay."""

    def __init__(self, problem: Problem, period: int) -> None:
        self.problem, self.period = problem, period
        self.chain, self.work = _chain(problem), _work(problem)
        size, best = len(self.work), problem.platform.best_device
        cuts, end = np.arange(size), np.int64(size - 1)
        replicas = quickest_replicas(problem)
        bare = time_model.work_ns(self.chain, problem.policy, cuts, end, replicas=replicas, speed=best.speed)
        self.trips = _trips(problem, period)
        self.enter = np.minimum(bare + self.trips, NEVER)  # the least delay that a stage which stops here sees
        self.after = np.full(size, TOO_MANY, dtype=np.int64)
        self.after[-1] = 0

    def back(self) -> list[tuple[int, Ints, Ints]]:
        """Fill ``after``; return by row, from the last on, the columns at which stages may stop, and devices needed."""
        found = []
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

    def _block(self, start: int, stop: int, end: int) -> list[tuple[int, Ints, Ints]]:
        """Do the same for the rows ``start`` to ``stop``, whose stages stop before ``end``."""
        pairs = self._pairs(slice(start, stop), slice(start + 1, end))
        ends = np.searchsorted(pairs.rows, np.arange(start, stop + 1)).tolist()
        most = (len(self.problem.platform) - ceil_div(self.work[start:stop], self.period)).tolist()
        found = []
        for row in range(stop - 1, start - 1, -1):
            some = slice(ends[row - start], ends[row - start + 1])
            columns, need = pairs.columns[some], pairs.need[some]
            together = need + self.after[columns]
            possible = np.flatnonzero(together <= most[row - start])
            if len(possible):
                columns = columns[possible]
                self.after[row] = int(together[possible].min())
                delay = int((pairs.time[some][possible] + self.enter[columns]).min())
                self.enter[row] = min(NEVER, max(int(self.enter[row]), delay + int(self.trips[row])))
                found.append((row, columns, need[possible]))
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
        best, policy = problem.platform.best_device, problem.policy
        options = FewOptions(
            start, stage_times(problem, start, stop, best), stage_limits(problem, start, stop, best.memory_bytes)
        ).relaxed()
        gradients = np.zeros(len(start), dtype=np.int64)
        if problem.replicas:
            gradients += memory_model.gradient_of(chain, policy, start, stop)
        need = stage_needs(problem, options, gradients, self.enter[stop], self.period)
        time = np.minimum.reduce([np.where(limit > 0, time, NEVER) for time, limit in options])
        enough = need < TOO_MANY
        return _Pairs(start[enough], stop[enough], need[enough].astype(np.int64), time[enough])

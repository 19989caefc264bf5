"""What do all stages, cuts and groups of devices cost? The tables that a search over contiguous allocations reads.

Everything here holds for every period, so one search computes it once. Stages begin and end at the n + 1 ``cuts``
(0 and L included); tables over pairs of cuts are indexed ``[first cut, last cut]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isqrt

import numpy as np

from ...cost import memory_model, time_model
from ...cost.stage_tables import StageTables
from ...integers import NEVER, Ints, ceil_div, most_in_common
from ...plan import Stage
from ...problem import Device, Problem
from ..cuts import legal_cuts, round_trips_ns, spread_cuts
from ..devices.orders import Order, Orders
from ..devices.states import DeviceKinds, DeviceStates
from ..in_flight import memory_counts
from .options import FewOptions, StageOptions, replica_counts, stage_limits, stage_times

_MOST_ENTRIES = 9 * 10**7  # of all tables together, of 8 bytes each
SPREAD = 1000  # cuts that are looked at where all are too many
_FEW_SPREAD = 64  # cuts all over the chain, at least, where tables take long
_MOST_NEAR = 160  # and cuts near the ends of stages


@dataclass(frozen=True)
class DeviceClass:
    """How long stages take on the groups of devices of one floor (:mod:`.states`), which are as good as ``device``."""

    options: StageOptions
    device: Device


@dataclass(frozen=True)
class SearchTables:
    """All that a decision reads and that doesn't depend on the period; stages start and stop at ``cuts`` alone."""

    problem: Problem
    cuts: Ints
    classes: tuple[DeviceClass, ...]  # by floor
    best: StageOptions  # on ``best_device``
    best_device: Device  # as fast as the fastest and as large as the largest
    gradients: Ints  # (n + 1, n + 1) bytes that replicas of a stage exchange
    round_trips: Ints  # (levels, n + 1) ns that both directions of a cut take on links, over each level
    work: Ints  # (n + 1,) ns that the layers before each cut take at least on a device of relative speed 1
    states: DeviceStates  # what stages can take in one order, the platform's if no other is said
    orders: Orders | None  # to search in turn, where there are several
    complete: bool = True  # whether all legal cuts are here

    def select(self, index: Ints) -> SearchTables:
        """Return the same tables with the cuts ``index`` alone."""
        return replace(
            self,
            cuts=self.cuts[index],
            classes=tuple(replace(x, options=x.options.select(index)) for x in self.classes),
            best=self.best.select(index),
            gradients=self.gradients[np.ix_(index, index)],
            round_trips=self.round_trips[:, index],
            work=self.work[index],
            complete=self.complete and len(index) == len(self.cuts),
        )

    def in_order(self, order: Order) -> SearchTables:
        """Return the same tables for stages that take devices in ``order``."""
        return replace(self, states=replace(self.states, order=order), orders=None)


def stage_tables(problem: Problem, some: Ints | None = None) -> SearchTables:
    """Return the tables of ``problem`` over all its legal cuts, or ``some``; fewer where they would take a gigabyte.

    Where segments are allowed, stages are taken to hold and to recompute nothing: a relaxation, in whose place
    :mod:`.segments` puts what they may really do.
    """
    chain, platform = problem.chain, problem.platform
    legal = legal_cuts(problem)
    cuts, count, most = legal if some is None else some, len(legal), most_cuts(problem)
    if len(cuts) > most:
        index = spread_cuts(problem, cuts, min(SPREAD, 3 * most // 4))
        assert index is not None, "these are fewer"
        cuts = cuts[index]
    stages = StageTables.between(problem, cuts)
    round_trips = [
        [min(NEVER, trip) for trip in round_trips_ns(chain, platform, cuts, level)]
        for level in range(len(platform.levels))
    ]
    best = platform.best_device

    @cache
    def times_on(pace: Device) -> tuple[tuple[Ints, ...], ...]:
        return stage_times(stages, pace)

    @cache
    def limits_of(memory: int) -> tuple[tuple[Ints, ...], ...]:
        return stage_limits(stages, memory)

    def options_of(device: Device) -> StageOptions:
        return FewOptions(cuts, times_on(replace(device, memory_bytes=0)), limits_of(device.memory_bytes))

    kinds = DeviceKinds.on(platform, problem.replicas)
    slowest = [kinds.slowest(floor) for floor in range(len(kinds.floors))]
    trips = np.array(round_trips, dtype=np.int64) * (not platform.blocking)
    relaxed, orders = time_model.relative(problem), Orders.of(problem)
    speeds = tuple(x.speed for x in relaxed.platform.devices)
    return SearchTables(
        problem,
        cuts,
        tuple(DeviceClass(options_of(x), x) for x in slowest),
        options_of(best),
        best,
        stages.gradients,
        trips,
        (relaxed.chain.sums.forward_ns + relaxed.chain.sums.backward_ns)[cuts],
        DeviceStates(kinds, tuple(range(len(platform))), problem.replicas, speeds),
        orders if orders.count > 1 else None,
        complete=count == len(cuts),
    )


def thinned(tables: SearchTables, stages: Sequence[Stage] = (), turn: int = 0) -> SearchTables:
    """Return tables between few cuts: some all over the chain, and about :data:`_MOST_NEAR` near the ends of
    ``stages``, others each ``turn`` where there are more."""
    problem, cuts = tables.problem, legal_cuts(tables.problem)
    index = spread_cuts(problem, cuts, max(_FEW_SPREAD, len(problem.platform)))
    if index is None:
        return tables
    if stages:
        index = np.union1d(index, _near(cuts, stages, turn))
    if tables.complete:
        return tables.select(index)
    return replace(stage_tables(problem, cuts[index]), states=tables.states, orders=tables.orders)


def _near(cuts: Ints, stages: Sequence[Stage], turn: int) -> Ints:
    """Return the indices of cuts 0, 1, 2, 4, .. cuts away from the ends of ``stages``, up to half a stage, so that
    stages can move far and settle exactly."""
    ends = np.searchsorted(cuts, [*(stage.start for stage in stages), stages[-1].stop])
    steps = [2**k for k in range(max(1, (len(cuts) // (2 * len(stages))).bit_length()))]
    some = steps[turn % (turns := ceil_div(len(steps) * 2 * len(ends), _MOST_NEAR)) :: turns]
    away = np.array([-x for x in some] + [0, *some])
    return np.unique((ends[:, None] + away).clip(0, len(cuts) - 1))


def most_cuts(problem: Problem) -> int:
    """Return how many cuts the tables may be over, by their number and that of what is held while they are read."""
    platform = problem.platform
    paces, memories = {(x.speed, x.times) for x in platform.devices}, {x.memory_bytes for x in platform.devices}
    tables = len(replica_counts(problem)) * len(paces) + len(memory_counts(problem)) * len(memories)
    return isqrt(_MOST_ENTRIES // ((2 if problem.checkpointing == "stages" else 1) * tables + 9))


def closed(tables: SearchTables, level: int, period: int) -> Ints:
    """Return the round trips over ``level``, NEVER for those that no links between two groups can carry once per
    ``period``."""
    return carried(tables.problem, tables.round_trips[level], level, period)


def carried(problem: Problem, round_trips: Ints, level: int, period: int) -> Ints:
    """Return :func:`closed` for these ``round_trips``."""
    load = round_trips // 2 if problem.platform.both_ways(level) else round_trips
    links = most_in_common(len(problem.platform)) if problem.replicas else 1
    return np.where(load <= min(links * period, NEVER - 1), round_trips, NEVER)


def longest_delay(problem: Problem, period: int) -> int:
    """Return the longest life of an activation that the policy allows (2bw: section 3)."""
    return min(period * (problem.policy.most_lifetime or NEVER), NEVER - 1)


def largest_synced_gradients(problem: Problem, period: int) -> Ints:
    """Return the most gradient bytes that replicas can sum at ``period``, by level and replica count 0..P."""
    policy, count = problem.policy, len(problem.platform)
    return np.array(
        [
            [2**62, *(memory_model.largest_synced_gradient(policy, period, r, *path) for r in range(1, count + 1))]
            for path in problem.platform.paths
        ],
        dtype=np.int64,
    )

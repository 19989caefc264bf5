"""Which stages, each on devices of its own in the platform's order, have the shortest period?

Exact: optimal among allocations whose stages take devices in platform order (any may stay unused), each stage with any
number of replicas and recomputed as the problem allows, under schedules that repeat every period (1F1B*, ALGORITHMS
sections 4 and 5). A period can be met or not (:mod:`.decision`); here the smallest one that can is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain as chained

import numpy as np

from ...cost import memory_model, time_model
from ...cost.group_bound import group_bound
from ...cost.stage_graph import stage_graph
from ...deadline import OutOfTime
from ...integers import Ints
from ...plan import Allocation, Stage
from ...problem import Device, Platform, Problem
from ..cuts import spread_cuts
from .decision import decide
from .device_counts import device_counts, shortest_delays
from .options import NEVER, quickest_replicas
from .orders import FEW, Order
from .pareto import Resolution
from .segments import LabelEffort, with_lowest_peaks, with_segments
from .tables import StageTables, stage_tables
from .tied import best_with_sums, first_within, longest_sums_ns, sums_bound_periods

_MOST_CUTS = 112  # more are thinned out to about 64 before segments are searched
_MOST_LAYERS = 2000  # whose segments are searched at all; the tables of more take a gigabyte
_LAST = Resolution(exact=16, cost_buckets=8, peak_buckets=4)
_COARSE = LabelEffort((Resolution(exact=64, cost_buckets=40, peak_buckets=10),), _LAST, work=3 * 10**6)
_FINE = LabelEffort(
    (
        Resolution(exact=8192),
        Resolution(exact=256, cost_buckets=60, peak_buckets=16),
        Resolution(exact=64, cost_buckets=40, peak_buckets=10),
    ),
    _LAST,
    work=10**7,
)
_QUICK = LabelEffort(
    (Resolution(exact=8192), Resolution(exact=64, cost_buckets=40, peak_buckets=10)), _LAST, work=10**6
)


def contiguous(problem: Problem) -> Iterator[Allocation]:
    """Yield the allocation of the smallest period, or nothing when no contiguous one fits the memory.

    Where servers share links that is the smallest if they didn't, and so a lower bound.

    ``claimed_period_ns`` is the smallest integer period, and exact where it equals ``lower_bound_ns``: always, but with
    segments only while the ways to recompute a stage (:mod:`.labels`) stay few enough to be kept whole, as they do for
    chains of up to about 80 layers; beyond, a heuristic plan comes with a weaker bound (:func:`_with_segments`). So
    does one of a chain with too many cuts for tables of all (:func:`.tables.stage_tables`), and one whose replicas sum
    the gradients of weights that stages share (:mod:`.tied`). The decision for one period is a dynamic program over
    (first layer, first device), O(L^2 P^2) with replicas for L layers and P devices before pruning.
    """
    best = smallest_period(problem)
    if best is not None:
        yield best


def feasible(problem: Problem, period: int) -> Allocation | None:
    """Return a contiguous allocation that has a valid pattern of ``period`` ns, or None when there is none.

    Of those that have, one with the smallest delay at its first stage, so the first to drain. The allocation claims its
    own smallest period, which may be shorter. With segments that holds while all ways to recompute a stage can be kept;
    beyond, a plan may be missed or drain later, but never when the period is so long that memory alone decides.
    """
    if not len(problem.chain) or period < 1:
        return None
    if sums_bound_periods(problem):
        period = min(period, longest_period_ns(problem))
        return first_within(problem, period, lambda easier: feasible(easier, period))
    longest = longest_period_ns(problem)
    period = min(period, longest)
    tables = stage_tables(problem)
    least_delay = _plain_delays(tables)
    if problem.checkpointing == "segments":
        if period == longest:
            tables = with_lowest_peaks(tables, period, longest)
        else:
            found = with_segments(tables, period, period, longest, least_delay, _QUICK)
            if found is None:
                return None
            tables = found[0]
    for some in [tables] if tables.orders is None else map(tables.in_order, tables.orders.first()):
        stages = decide(some, period, least_delay)
        if stages is not None:
            return _claim(problem, stages, period)
    return None


def tables_within(problem: Problem, slack: Fraction) -> tuple[StageTables, int, bool] | None:
    """Return (tables of all stages that take at most ``slack`` times the smallest period, that time, whether the tables
    have every way to recompute them).

    For searches with another goal than the period, with up to 2P microbatches in flight on P devices. None when no
    contiguous allocation fits the memory at any period. Stages take devices as these are listed.
    """
    best = smallest_period(problem, as_listed=True)
    if best is None:
        return None
    tables = stage_tables(problem)
    most = math.ceil(_claimed(best) * slack)
    if problem.checkpointing != "segments":
        return tables, most, True
    longest = longest_period_ns(problem)
    least = max(1, longest // len(problem.platform))  # twice as many microbatches in flight as devices
    found = with_segments(tables, most, least, longest, _plain_delays(tables), _QUICK)
    assert found is not None, "the best allocation is among them"
    return found[0], most, found[1]


def smallest_period(
    problem: Problem, upper: int | None = None, lower: int | None = None, as_listed: bool = False
) -> Allocation | None:
    """Return the contiguous allocation of the smallest period, or None when there is none of at most ``upper`` ns.

    ``lower`` is a period known to be a lower bound; the search starts there. Periods are bisected with the decision;
    first among few cuts, then among those near the best ones found, so that the exact search starts from a narrow gap.
    The result's ``lower_bound_ns`` is what has been proved; it is optimal where that equals ``claimed_period_ns``. At
    the problem's deadline it is the best so far; OutOfTime when there is none. Stages take devices in any order, of
    many kinds in some (:mod:`.orders`), or ``as_listed``.
    """
    if not len(problem.chain):
        return None
    if sums_bound_periods(problem):
        best = best_with_sums(problem, lambda easier: smallest_period(easier, upper, lower, as_listed))
        return None if best is None or (upper is not None and _claimed(best) > upper) else best
    tables = stage_tables(problem)
    if as_listed:
        tables = tables.as_listed()
    high = longest_period_ns(problem) if upper is None else min(upper, longest_period_ns(problem))
    least_delay = _plain_delays(tables)
    if high < 1 or device_counts(tables, high, least_delay) is None:
        return None
    floor = _shared_work(tables, max(1, lower or 1), high)
    low = _least_possible(tables, floor, high, least_delay)
    if problem.checkpointing == "segments":
        return _bounded(tables, *_with_segments(tables, least_delay, low, high, as_listed), floor)
    best = None
    try:
        for index, tolerance in (
            (spread_cuts(problem, tables.cuts, max(32, 4 * len(problem.platform))), 32),
            (None, 256),
        ):
            if index is None:
                index = _near(tables, best, 24)
            if index is not None:
                best, _ = _search(tables.select(index), least_delay[index], low, high, best, tolerance)
        if best is not None:
            high = _claimed(best)
            least_delay = np.maximum(least_delay, shortest_delays(tables, high))
            low = _least_possible(tables, low, high, least_delay)
        best, low = _search(tables, least_delay, low, high, best, None)
    except OutOfTime:
        if best is None:
            raise
    return _bounded(tables, best, low, floor)


def _with_segments(
    tables: StageTables, least_delay: Ints, low: int, high: int, as_listed: bool
) -> tuple[Allocation | None, int]:
    """Return the best allocation with segments from ``low`` to ``high`` ns (ALGORITHMS section 5, "Segments"), and a
    period below which there is none.

    The plan that recomputes all or nothing, or as it takes least memory, bounds what recomputation may cost, and so how
    many ways to recompute a stage are worth keeping; a search that keeps few of them bounds it tighter, and the last
    ones are exact where they keep all. Chains of many cuts are searched between some of them, with segments that begin
    and end there, which is never exact.
    """
    problem, longest = tables.problem, longest_period_ns(tables.problem)
    best = smallest_period(replace(problem, checkpointing="stages"), high, low, as_listed)
    if best is None and len(problem.chain) <= _MOST_LAYERS:
        best, _ = _search(with_lowest_peaks(tables, low, longest), least_delay, low, high, None, 256)
    if len(problem.chain) > _MOST_LAYERS:
        return best, low
    spread = None
    if len(tables.cuts) > _MOST_CUTS:
        spread = spread_cuts(problem, tables.cuts, max(64, len(problem.platform)))
    bound = low
    repeats = 3 if spread is None else 1  # a better plan leaves recomputation less time, and fronts less to hold
    try:
        for effort, tolerance in ((_COARSE, 256), *((_FINE, None),) * repeats):
            upper = high if best is None else _claimed(best) - 1
            if upper < low:
                break
            index = spread
            if spread is not None and best is not None:
                near = _near(tables, best, 64 // len(best.stages))
                index = spread if near is None else np.union1d(spread, near)
            some = tables if index is None else tables.select(index)
            ends = least_delay if index is None else least_delay[index]
            found = with_segments(some, upper, low, longest, ends, effort)
            exact, before, reached = index is None and (found is None or found[1]), best, upper + 1
            if found is not None:
                best, reached = _search(found[0], ends, low, upper, best, tolerance)
            if exact:
                bound = reached
            if effort is _FINE and (exact or best is before):  # nothing is left, or another round would be the same
                break
    except OutOfTime:
        if best is None:
            raise
    return best, bound


def _bounded(tables: StageTables, best: Allocation | None, bound: int, floor: int) -> Allocation | None:
    """Return the allocation with the lower bound that was proved, ``floor`` where not all cuts were looked at."""
    return None if best is None else replace(best, lower_bound_ns=bound if tables.complete else floor)


def _search(
    tables: StageTables, least_delay: Ints, low: int, high: int, best: Allocation | None, tolerance: int | None
) -> tuple[Allocation | None, int]:
    """Return the best allocation between the cuts of ``tables``, no shorter than ``low`` and no longer than ``high``,
    and a period below which there is none.

    With ``tolerance`` it may stop when the gap is below that part of the period; without, it is exact. At the deadline
    it ends with what it has, if it has any. Where orders of devices are searched in turn, each for what beats the best
    of those before, also those near one that did are, and nothing above ``low`` is proved; with ``tolerance`` a few.
    """
    orders = tables.orders
    if orders is None:
        return _search_in(tables, least_delay, low, high, best, tolerance)
    most = orders.most if tolerance is None else min(FEW, orders.most)
    seen: set[tuple[Device, ...]] = set()
    waiting: Iterator[Order] = orders.first(_devices_of(best))
    while len(seen) < most and (order := next(waiting, None)) is not None:
        if (kinds := orders.along_kinds(order)) in seen:
            continue
        seen.add(kinds)
        found, _ = _search_in(tables.in_order(order), least_delay, low, high, best, tolerance)
        if found is not best:
            waiting = chained(orders.near(order), waiting)
        best = found
    return best, low


def _devices_of(best: Allocation | None) -> list[int]:
    return [] if best is None else [d for stage in best.stages for d in stage.devices]


def _search_in(
    tables: StageTables, least_delay: Ints, low: int, high: int, best: Allocation | None, tolerance: int | None
) -> tuple[Allocation | None, int]:
    """Do the same for what stages can take by ``tables.states``; ``best`` may be something else."""
    problem = tables.problem
    width, probe = max(1, low // 64), True
    try:
        while best is None:  # widen from below: periods below the optimum are decided quickly
            period = min(high, low + width)
            stages = decide(tables, period, least_delay)
            if stages is not None:
                best = _claim(problem, stages, period)
            elif period == high:
                return None, high + 1
            else:
                low, width = period + 1, 2 * width
        while (gap := _claimed(best) - low) > (_claimed(best) // tolerance if tolerance else 0):
            period = _claimed(best) - 1 if probe else low + gap // 2
            stages = decide(tables, period, least_delay)
            if stages is None:
                low, probe = period + 1, True
            else:
                best, probe = _claim(problem, stages, period), False
    except OutOfTime:
        if best is None:
            raise
    return best, low


def _claimed(allocation: Allocation) -> int:
    assert allocation.claimed_period_ns is not None
    return allocation.claimed_period_ns


def longest_period_ns(problem: Problem) -> int:
    """Return a period so long that every allocation that fits at all has it: one microbatch at a time."""
    platform = problem.platform
    slowest = platform.slowest(range(len(platform)))
    chain = problem.chain.timed(slowest.times)
    count = len(chain)
    recompute = int(chain.sums.forward_ns[-1])
    replicas = 1 if problem.policy.zero else len(platform)  # with which steps take most
    work: int = time_model.work_ns(chain, problem.policy, 0, count, recompute, replicas, slowest.speed)
    transfers = (2 if platform.blocking else 1) * sum(
        2 * platform.transfer_ns(x, len(platform.levels) - 1) for x in chain.cut_bytes[1:-1]
    )
    period = work + 3 * count + transfers  # each stage rounds up three times
    if problem.policy.zero and problem.replicas:  # some fit on several replicas alone, which must sum their gradients
        gradient = memory_model.gradient_of(chain, problem.policy, 0, count)
        once = problem.policy.update_interval()
        period += int(time_model.ring_all_reduce_ns(gradient, len(platform), *platform.paths[-1], shared_by=once))
    if sums_bound_periods(problem):
        period += longest_sums_ns(problem)
    return min(period, NEVER // (2 * len(platform)))  # months for a microbatch; beyond, integers would overflow


def _plain_delays(tables: StageTables) -> Ints:
    """Return for each cut the bare time of all that is behind it: a lower bound on the delay there."""
    best, policy, cuts = tables.best_device, tables.problem.policy, tables.cuts
    chain = tables.problem.chain.timed(best.times)
    end = np.int64(len(chain))
    replicas = quickest_replicas(tables.problem)
    bare: Ints = time_model.work_ns(chain, policy, cuts, end, replicas=replicas, speed=best.speed)
    return bare


def _shared_work(tables: StageTables, low: int, high: int) -> int:
    """Return a period in ``low..high`` below which all devices together are too slow."""
    relaxed = time_model.relative(tables.problem)
    sums, speed = relaxed.chain.sums, sum(x.speed for x in relaxed.platform.devices)
    return min(high, max(low, math.ceil(int(sums.forward_ns[-1] + sums.backward_ns[-1]) / speed)))


def _least_possible(tables: StageTables, low: int, high: int, least_delay: Ints) -> int:
    """Return a period in ``low..high`` below which there are not enough devices; ``high`` is long enough.

    Within a thousandth of the largest such period.
    """
    width = max(1, low // 64)
    while high - low > low // 1024:
        period = min(low + width, low + (high - low) // 2)
        if device_counts(tables, period, least_delay) is None:
            low, width = period + 1, 2 * width
        else:
            high = period
    return low


def _near(tables: StageTables, best: Allocation | None, most: int) -> Ints | None:
    """Return the indices of the cuts of ``best`` and up to ``most`` neighbours on each side; None where those are most
    of the cuts."""
    if best is None:
        return None
    count = len(tables.cuts)
    width = min(most, max(2, count // (8 * len(best.stages))))
    at = np.searchsorted(tables.cuts, [stage.start for stage in best.stages] + [len(tables.problem.chain)])
    near = np.unique(np.clip(at[:, None] + np.arange(-width, width + 1), 0, count - 1))
    return None if 4 * len(near) > 3 * count else near


def _claim(problem: Problem, stages: Sequence[Stage], met: int) -> Allocation:
    """Return ``stages``, which a decision found for the period ``met``, with their smallest period by its rules."""
    policy = memory_model.without_vertical_sync(problem.policy)
    free = problem.tied == "free"
    graph = stage_graph(problem.chain, problem.platform, policy, stages, free_sums=free, sharing=False)
    period = group_bound(graph)
    assert period is not None
    assert period <= met, "what a decision finds has a pattern of its period"
    return Allocation(on_lowest_devices(problem.platform, stages), period)


def on_lowest_devices(platform: Platform, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return ``stages`` on the first of equal devices, in the same order and as near to each other.

    The used units inside every unit of a level become its first ones, so every two devices stay joined by their level.
    Where devices share links, which ones do would change; unequal ones on several levels stay as they are.
    """
    used = list(dict.fromkeys(d for stage in stages for d in stage.devices))
    if platform.shared_level is not None:
        return tuple(stages)
    if len(platform.levels) == 1:
        free = {x: iter([d for d, y in enumerate(platform.devices) if y == x]) for x in set(platform.devices)}
        moved = {d: next(free[platform.devices[d]]) for d in used}
    elif len(set(platform.devices)) == 1:
        moved = dict.fromkeys(used, 0)
        size = 1
        for level in platform.levels:
            groups: dict[int, list[int]] = {}
            for unit in dict.fromkeys(d // size for d in used):
                groups.setdefault(unit // level.count, []).append(unit)
            for d in used:
                moved[d] += size * groups[d // size // level.count].index(d // size)
            size *= level.count
    else:
        return tuple(stages)
    return tuple(replace(stage, devices=tuple(moved[d] for d in stage.devices)) for stage in stages)

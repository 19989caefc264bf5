"""The exact contiguous partitioner: the shortest period of all allocations in platform order.

Optimal among allocations whose stages take devices in platform order (any may stay unused), each stage with any number
of replicas and recomputed as the problem allows, under 1-periodic schedules (1F1B*, ALGORITHMS sections 4 and 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .. import costs
from ..groups import ceil_div, extend
from ..plan import Allocation, Stage
from ..problem import Ints, Problem
from ..search import smallest
from .delays import decide
from .device_counts import device_counts, shortest_delays
from .ground import Ground, ground
from .menus import NEVER, in_flight_limit


def contiguous(problem: Problem) -> Iterator[Allocation]:
    """Yield the allocation of the smallest period, or nothing when no contiguous one fits the memory.

    Exact; ``claimed_period_ns`` is the smallest integer period. The decision for one period is a dynamic program over
    (first layer, first device), O(L^2 P^2) with replicas for L layers and P devices before pruning.
    """
    best = smallest_period(problem)
    if best is not None:
        yield best


def feasible(problem: Problem, period: int) -> Allocation | None:
    """Return a contiguous allocation that has a valid pattern of ``period`` ns, or None when there is none.

    Of those that have, one with the smallest delay at its first stage, so the first to drain. The allocation claims its
    own smallest period, which may be shorter.
    """
    if not len(problem.chain) or period < 1:
        return None
    period = min(period, _unhurried(problem))
    tables = ground(problem)
    stages = decide(tables, period, _plain_delays(tables))
    return None if stages is None else _claim(problem, stages, 1, period)


def smallest_period(problem: Problem, upper: int | None = None, lower: int | None = None) -> Allocation | None:
    """Return the contiguous allocation of the smallest period, or None when there is none of at most ``upper`` ns.

    ``lower`` is a period known to be a lower bound; the search starts there. Periods are bisected with the decision;
    first among few cuts, then among those near the best ones found, so that the exact search starts from a narrow gap.
    """
    if not len(problem.chain):
        return None
    tables = ground(problem)
    high = _unhurried(problem) if upper is None else min(upper, _unhurried(problem))
    tail = _plain_delays(tables)
    if high < 1 or device_counts(tables, high, tail) is None:
        return None
    low = _least_possible(tables, max(1, lower or 1), high, tail)
    best = None
    for index, tolerance in ((_spread_cuts(tables), 32), (None, 256)):
        if index is None:
            index = _near(tables, best)
        if index is not None:
            best = _search(tables.select(index), tail[index], low, high, best, tolerance)
    if best is not None:
        high = _claimed(best)
        tail = np.maximum(tail, shortest_delays(tables, high))
        low = _least_possible(tables, low, high, tail)
    return _search(tables, tail, low, high, best, None)


def _search(
    tables: Ground, tail: Ints, low: int, high: int, best: Allocation | None, tolerance: int | None
) -> Allocation | None:
    """Return the best allocation between the cuts of ``tables``, no shorter than ``low`` and no longer than ``high``.

    With ``tolerance`` it may stop when the gap is below that part of the period; without, it is exact.
    """
    problem = tables.problem
    width = max(1, low // 64)
    while best is None:  # widen from below: periods below the optimum are decided quickly
        period = min(high, low + width)
        stages = decide(tables, period, tail)
        if stages is not None:
            best = _claim(problem, stages, low, period)
        elif period == high:
            return None
        else:
            low, width = period + 1, 2 * width
    probe = True
    while (gap := _claimed(best) - low) > (_claimed(best) // tolerance if tolerance else 0):
        period = _claimed(best) - 1 if probe else low + gap // 2
        stages = decide(tables, period, tail)
        if stages is None:
            low, probe = period + 1, True
        else:
            best, probe = _claim(problem, stages, low, period), False
    return best


def _claimed(allocation: Allocation) -> int:
    assert allocation.claimed_period_ns is not None
    return allocation.claimed_period_ns


def _unhurried(problem: Problem) -> int:
    """Return a period so long that every allocation that fits at all has it: one microbatch at a time."""
    chain, platform = problem.chain, problem.platform
    speed = min(x.speed for x in platform.devices)
    count = len(chain)
    forward = costs.forward_ns(chain, 0, count, speed)
    recompute = int(chain.sums.forward_ns[-1])
    work: int = forward + costs.backward_ns(chain, problem.policy, 0, count, recompute, len(platform), speed)
    transfers = sum(2 * platform.transfer_ns(x, len(platform.levels) - 1) for x in chain.cut_bytes[1:-1])
    period = work + 3 * count + transfers  # each stage rounds up three times
    return min(period, NEVER // (2 * len(platform)))  # months for a microbatch; beyond, integers would overflow


def _plain_delays(tables: Ground) -> Ints:
    """Return for each cut the bare time of all that is behind it: a lower bound on the delay there."""
    chain, policy, cuts = tables.problem.chain, tables.problem.policy, tables.cuts
    speed = max(x.speed for x in tables.problem.platform.devices)
    end = np.int64(len(chain))
    bare: Ints = costs.forward_ns(chain, cuts, end, speed) + costs.backward_ns(chain, policy, cuts, end, 0, 1, speed)
    return bare


def _least_possible(tables: Ground, low: int, high: int, tail: Ints) -> int:
    """Return a period in ``low..high`` below which there are not enough devices; ``high`` is long enough.

    Within a thousandth of the largest such period.
    """
    sums, speed = tables.problem.chain.sums, sum(x.speed for x in tables.problem.platform.devices)
    low = min(high, max(low, math.ceil(int(sums.forward_ns[-1] + sums.backward_ns[-1]) / speed)))
    width = max(1, low // 64)
    while high - low > low // 1024:
        period = min(low + width, low + (high - low) // 2)
        if device_counts(tables, period, tail) is None:
            low, width = period + 1, 2 * width
        else:
            high = period
    return low


def _spread_cuts(tables: Ground) -> Ints | None:
    """Return the indices of a few cuts with small transfers, spread over the chain's time; None for a short chain."""
    bins = max(32, 4 * len(tables.problem.platform))
    count = len(tables.cuts)
    if 3 * count < 4 * bins:
        return None
    chain = tables.problem.chain
    time = (chain.sums.forward_ns + chain.sums.backward_ns)[tables.cuts]
    place = time * bins // max(1, int(time[-1]) + 1)
    order = np.lexsort((np.arange(count), tables.round_trips[0], place))
    first = order[np.concatenate([[True], np.diff(place[order]) > 0])]
    return np.unique(np.concatenate([[0], first, [count - 1]]))


def _near(tables: Ground, best: Allocation | None) -> Ints | None:
    """Return the indices of the cuts of ``best`` and their neighbours; None where those are most of the cuts."""
    if best is None:
        return None
    count = len(tables.cuts)
    width = max(2, min(24, count // (8 * len(best.stages))))
    at = np.searchsorted(tables.cuts, [stage.start for stage in best.stages] + [len(tables.problem.chain)])
    near = np.unique(np.clip(at[:, None] + np.arange(-width, width + 1), 0, count - 1))
    return None if 4 * len(near) > 3 * count else near


def _claim(problem: Problem, stages: Sequence[Stage], low: int, high: int) -> Allocation:
    """Return ``stages`` with their smallest period, known to lie in ``low..high``."""
    period = own_period(problem, stages, low, high)
    assert period is not None
    return Allocation(tuple(stages), period)


def own_period(problem: Problem, stages: Sequence[Stage], low: int, high: int) -> int | None:
    """Return the smallest period in ``low..high`` at which contiguous ``stages`` have a valid pattern, or None.

    Bisects the walk of 1F1B* (ALGORITHMS section 4).
    """
    chain, platform, policy = problem.chain, problem.platform, problem.policy
    steps: list[
        tuple[int, int, int, int]
    ] = []  # from the last stage: work, replicas, most in flight, round trip before
    for k, stage in reversed(list(enumerate(stages))):
        device = platform.slowest(stage.devices)
        kept, peak, recompute = costs.activations(chain, stage.start, stage.stop, stage.checkpoint)
        work = costs.forward_ns(chain, stage.start, stage.stop, device.speed) + costs.backward_ns(
            chain, policy, stage.start, stage.stop, recompute, stage.replicas, device.speed
        )
        limit = int(in_flight_limit(problem, stage.start, stage.stop, kept, peak, device.memory_bytes))
        trip = 0
        if k:
            level = platform.level_of(stages[k - 1].devices + stage.devices)
            trip = 2 * platform.transfer_ns(chain.cut_bytes[stage.start], level)
        steps.append((work, stage.replicas, limit, trip))
        low = max(low, int(ceil_div(work, stage.replicas)), trip // 2 if platform.full_duplex else trip)
        low = max(low, _sync_period(problem, stage))
    cap = policy.accumulate if policy.weights == "2bw" else None

    def valid(period: int) -> bool:
        delay = 0
        for work, replicas, limit, trip in steps:
            delay = extend(delay, work, replicas * period)
            if ceil_div(delay, replicas * period) > limit or (cap is not None and delay > cap * period):
                return False
            delay = delay + trip if platform.full_duplex else extend(delay, trip, period)
        return True

    found = smallest(lambda period: valid(period) or None, low, high)
    return None if found is None else found[0]


def _sync_period(problem: Problem, stage: Stage) -> int:
    total, parameters = problem.chain.sums.weight_bytes, problem.chain.sums.parameters
    gradient = costs.gradient_bytes(
        problem.policy,
        int(total[stage.stop] - total[stage.start]),
        int(parameters[stage.stop] - parameters[stage.start]),
    )
    bandwidth, _ = problem.platform.paths[problem.platform.level_of(stage.devices)]
    return costs.sync_period_ns(problem.policy, gradient, stage.replicas, bandwidth)

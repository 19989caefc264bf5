"""What is the smallest period of contiguous stages between given cuts, and what do stages claim?

Decisions (:mod:`.decision`) are bisected; what they find claims its own smallest period.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain as chained

import numpy as np

from ...cost import memory_model, time_model
from ...cost.group_bound import group_bound
from ...cost.stage_graph import stage_graph
from ...deadline import OutOfTime
from ...integers import NEVER, Ints
from ...plan import Allocation, Stage
from ...problem import Device, Platform, Problem
from ..devices.orders import FEW, Order
from ..tables.options import quickest_replicas
from ..tables.stages import SearchTables
from .decision import decide
from .easier import longest_sums_ns, sums_bound_periods


def longest_period_ns(problem: Problem) -> int:
    """Return a period so long that every allocation that fits at all has it: one microbatch at a time."""
    platform = problem.platform
    slowest = platform.slowest(range(len(platform)))
    chain = problem.chain.timed(slowest.times)
    count = len(chain)
    recompute = int(chain.sums.forward_ns[-1])
    replicas = 1 if problem.policy.zero else len(platform)  # with which steps take most
    work: int = time_model.work_ns(chain, problem.policy, 0, count, recompute, replicas, slowest.speed)
    last = len(platform.levels) - 1
    transfers = sum(
        4 * platform.held_ns(x, last) + (0 if platform.blocking else 2 * platform.transfer_ns(x, last))
        for x in chain.cut_bytes[1:-1]
    )
    period = work + 3 * count + transfers  # each stage rounds up three times
    if problem.policy.zero and problem.replicas:  # some fit on several replicas alone, which must sum their gradients
        gradient = memory_model.gradient_of(chain, problem.policy, 0, count)
        once = problem.policy.update_interval()
        period += int(time_model.ring_all_reduce_ns(gradient, len(platform), *platform.paths[-1], shared_by=once))
    if sums_bound_periods(problem):
        period += longest_sums_ns(problem)
    return min(period, NEVER // (2 * len(platform)))  # months for a microbatch; beyond, integers would overflow


def claim(problem: Problem, stages: Sequence[Stage], met: int) -> Allocation:
    """Return ``stages``, which a decision found for the period ``met``, with their smallest period by its rules."""
    found = claimed(problem, stages)
    assert found is not None, "what a decision finds has a pattern"
    assert claimed_ns(found) <= met, "what a decision finds has a pattern of its period"
    return found


def claimed(problem: Problem, stages: Sequence[Stage]) -> Allocation | None:
    """Return ``stages`` with their smallest period by the rules of decisions, None where they have none."""
    policy = memory_model.without_vertical_sync(problem.policy)
    free = problem.tied == "free"
    graph = stage_graph(problem.chain, problem.platform, policy, stages, free_sums=free, sharing=False)
    period = group_bound(graph)
    return None if period is None else Allocation(on_lowest_devices(problem.platform, stages), period)


def claimed_ns(allocation: Allocation) -> int:
    """Return the period that an allocation claims."""
    assert allocation.claimed_period_ns is not None
    return allocation.claimed_period_ns


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


def shortest_between(
    tables: SearchTables, least_delay: Ints, low: int, high: int, best: Allocation | None, tolerance: int | None
) -> tuple[Allocation | None, int]:
    """Return the best allocation between the cuts of ``tables``, no shorter than ``low`` and no longer than ``high``,
    and a period below which there is none.

    With ``tolerance`` it may stop when the gap is below that part of the period; without, it is exact. At the deadline
    it ends with what it has, if it has any. Orders of devices are searched in turn, each for what beats the best of
    those before, and also those near one that did; with ``tolerance`` a few. Where some are left out nothing above
    ``low`` is proved.
    """
    orders = tables.orders
    if orders is None:
        return _in_order(tables, least_delay, low, high, best, tolerance)
    most = orders.most if tolerance is None else min(FEW, orders.most)
    seen: set[tuple[Device, ...]] = set()
    waiting: Iterator[Order] = orders.first(_devices_of(best))
    proved = high + 1
    while len(seen) < most and (order := next(waiting, None)) is not None:
        if (kinds := orders.along_kinds(order)) in seen:
            continue
        seen.add(kinds)
        found, reached = _in_order(tables.in_order(order), least_delay, low, high, best, tolerance)
        if found is not best:
            waiting = chained(orders.near(order), waiting)
        best, proved = found, min(proved, reached)
    return best, proved if len(seen) == orders.count else low


def _devices_of(best: Allocation | None) -> list[int]:
    return [] if best is None else [d for stage in best.stages for d in stage.devices]


def _in_order(
    tables: SearchTables, least_delay: Ints, low: int, high: int, best: Allocation | None, tolerance: int | None
) -> tuple[Allocation | None, int]:
    """Do the same for what stages can take by ``tables.states``; ``best`` may be something else."""
    problem = tables.problem
    width, probe = max(1, low // 64), True
    try:
        while best is None:  # widen from below: periods below the optimum are decided quickly
            period = min(high, low + width)
            stages = decide(tables, period, least_delay)
            if stages is not None:
                best = claim(problem, stages, period)
            elif period == high:
                return None, high + 1
            else:
                low, width = period + 1, 2 * width
        while (gap := claimed_ns(best) - low) > (claimed_ns(best) // tolerance if tolerance else 0):
            period = claimed_ns(best) - 1 if probe else low + gap // 2
            stages = decide(tables, period, least_delay)
            if stages is None:
                low, probe = period + 1, True
            else:
                best, probe = claim(problem, stages, period), False
    except OutOfTime:
        if best is None:
            raise
    return best, low


def plain_delays(tables: SearchTables) -> Ints:
    """Return for each cut the bare time of all that is behind it: a lower bound on the delay there."""
    best, policy, cuts = tables.best_device, tables.problem.policy, tables.cuts
    chain = tables.problem.chain.timed(best.times)
    end = np.int64(len(chain))
    replicas = quickest_replicas(tables.problem)
    bare: Ints = time_model.work_ns(chain, policy, cuts, end, replicas=replicas, speed=best.speed)
    return bare

"""What is the smallest period of contiguous stages between given cuts, and what do stages claim?

Decisions (:mod:`.decision`) are bisected; what they find claims its own smallest period. Some problems are searched in
the place of a harder one.

Sums over the stages that have copies of what layers share bound the period. Such a sum is no operation and delays
nothing (ALGORITHMS section 2, synchronisation): it is a load of every interval on each stage with a copy, which depends
on how many devices have one. So a problem is searched twice: with these layers in one stage, where there is no sum, and
with any cuts, as if sums took no time. The second search's plan is then timed with its sums; whatever parts the layers
takes at least the sum of two devices over the fastest link.

Where devices are very many, a *group* of q neighbouring ones counts as one. Whatever stages take r groups at a period
of q T, with an update every k / q microbatches, runs q times side by side at T: each stage has q r replicas, each of
which holds as much and has as long for a microbatch. So the search sees only multiples of q replicas, and of all sums
of gradients those of one device of every group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain as chained
from math import isqrt

import numpy as np

from ...cost import memory_model, relaxations, time_model
from ...cost.group_bound import group_bound
from ...cost.memory_model import shared_gradient
from ...cost.stage_graph import stage_graph
from ...deadline import OutOfTime
from ...integers import NEVER, Ints, ceil_div
from ...plan import Allocation, Stage
from ...problem import Device, Level, Platform, Problem
from ..cuts import legal_cuts
from ..devices.orders import FEW, Order
from ..tables.stages import SPREAD, SearchTables, most_cuts
from .decision import decide

Search = Callable[[Problem], Allocation | None]


def sums_bound_periods(problem: Problem) -> bool:
    """Whether some allocations of ``problem`` have sums over several stages that a pattern must leave time for."""
    policy = problem.policy
    return bool(problem.chain.tied) and problem.tied == "apart" and policy.updates_together and not policy.drains


def best_with_sums(problem: Problem, search: Search) -> Allocation | None:
    """Return the best of what ``search`` finds for the two easier problems, timed with its sums, with a lower bound.

    It is optimal where the bound equals its period: always without replicas on a network of one level. Where replicas
    have copies too and their sums bind, the best plan without replicas is tried as well. OutOfTime when the first
    search has nothing in time.
    """
    free = search(_free(problem))
    if free is None:
        return None
    bound = max(_proved(free), least_sum_ns(problem))
    found = [timed(problem, free)]
    try:
        together = search(replace(problem, tied="together"))
        if together is not None:
            found.append(together)
            bound = min(bound, _proved(together))
        if problem.replicas and min(map(_claimed, found)) > bound:
            single = search(replace(_free(problem), replicas=False))
            found += [] if single is None else [timed(problem, single)]
    except OutOfTime:
        bound = _proved(free)
    best = min(found, key=_claimed)
    return replace(best, lower_bound_ns=min(bound, _claimed(best)))


def first_within(problem: Problem, period: int, search: Search) -> Allocation | None:
    """Return what ``search`` finds for one of the two easier problems that has a valid pattern of ``period`` ns."""
    for easier in (_free(problem), replace(problem, tied="together")):
        found = search(easier)
        if found is not None and _claimed(again := timed(problem, found)) <= period:
            return again
    return None


def timed(problem: Problem, allocation: Allocation) -> Allocation:
    """Return ``allocation``, which fits without the sums, with its smallest period with them."""
    period = group_bound(stage_graph(problem.chain, problem.platform, problem.policy, allocation.stages))
    assert period is not None, "sums take time and no memory"
    return replace(allocation, claimed_period_ns=period)


def least_sum_ns(problem: Problem) -> int:
    """Return a period below which nothing parts tied layers: one device has a copy beside a stage's own replicas."""
    chain, policy = problem.chain, problem.policy
    fastest = max(level.bandwidth for level in problem.platform.levels), problem.platform.paths[0][1]
    most = len(problem.platform) - 1 if problem.replicas else 1
    return min(
        int(time_model.ring_all_reduce_ns(shared_gradient(policy, x), r + 1, *fastest, policy.update_interval(r)))
        for x in chain.ties
        for r in range(1, max(most, 1) + 1)
    )


def longest_sums_ns(problem: Problem) -> int:
    """Return a period that leaves time for all sums, over however many devices."""
    slowest = problem.platform.paths[-1]
    gradients = (shared_gradient(problem.policy, x) for x in problem.chain.ties)
    return sum(int(time_model.ring_all_reduce_ns(x, len(problem.platform), *slowest)) for x in gradients)


def _free(problem: Problem) -> Problem:
    return replace(problem, tied="free")


def _claimed(allocation: Allocation) -> int:
    assert allocation.claimed_period_ns is not None
    return allocation.claimed_period_ns


def _proved(allocation: Allocation) -> int:
    assert allocation.lower_bound_ns is not None
    return allocation.lower_bound_ns


MOST_PLACES = 4_200_000  # cuts times devices squared, for which one decision takes less than a second
_FEWEST = 8  # groups


@dataclass(frozen=True)
class Grouped:
    """A problem whose devices are groups of ``size`` devices of ``whole``."""

    whole: Problem
    problem: Problem
    size: int

    def stages(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return stages on groups as stages on all their devices."""
        size = self.size
        return tuple(
            replace(stage, devices=tuple(d for group in stage.devices for d in range(group * size, (group + 1) * size)))
            for stage in stages
        )

    def groups(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return stages between the same cuts on any groups."""
        return tuple(replace(stage, devices=(0,)) for stage in stages)


def group_sizes(problem: Problem) -> list[int]:
    """Return the sizes of groups to try in turn, the largest first, each a quarter of the one before; empty where the
    devices themselves are few enough."""
    count, cuts = len(problem.platform), min(len(legal_cuts(problem)), SPREAD)
    if not problem.replicas or problem.chain.variants or cuts * count**2 <= MOST_PLACES:
        return []
    most = max(_FEWEST, isqrt(MOST_PLACES // cuts))
    found = [_size(problem.platform, most), _size(problem.platform, 2 * most)]
    return [size for size in dict.fromkeys(found) if size > 1]


def coarseness(problem: Problem) -> str | None:
    """Return in words what a contiguous search leaves out first, or altogether; None where it looks at everything."""
    cuts, sizes = len(legal_cuts(problem)), group_sizes(problem)
    found = [f"GPUs in groups of {' or '.join(map(str, sizes))}"] if sizes else []
    if cuts > most_cuts(problem):
        found.append(f"about {SPREAD} of {cuts - 2} cuts, then those near the best")
    return f"{'; '.join(found)}; bounds are of all GPUs and cuts" if found else None


def grouped(problem: Problem, size: int) -> Grouped:
    """Return the problem on groups of ``size`` devices, each as large and as quick as the least of them.

    Devices that are left over stay unused.
    """
    platform = problem.platform
    count = len(platform) // size
    devices = tuple(platform.slowest(range(g * size, (g + 1) * size)) for g in range(count))
    policy = replace(problem.policy, pipelines=problem.policy.pipelines * size)
    if policy.accumulate is not None:
        policy = replace(policy, accumulate=max(1, ceil_div(policy.accumulate, size)))
    coarse = replace(platform, devices=devices, levels=_levels(platform, size, count))
    return Grouped(problem, replace(problem, platform=coarse, policy=policy), size)


def smaller(groups: Grouped) -> Grouped:
    """Return groups of a quarter of the size, or about that: the smallest are the devices themselves."""
    platform = groups.whole.platform
    return grouped(groups.whole, _size(platform, 4 * (len(platform) // groups.size)))


def _levels(platform: Platform, size: int, count: int) -> tuple[Level, ...]:
    """Return the levels that join groups: those above their own, the lowest of which joins parts of its unit."""
    found = []
    for k, (level, unit) in enumerate(zip(platform.levels, platform.unit_sizes, strict=True)):
        below = platform.unit_sizes[k - 1] if k else 1
        joined = count if len(platform.levels) == 1 else unit // max(size, below)
        if joined > 1:
            bandwidth, latency = platform.paths[k]
            found.append(replace(level, count=joined, bandwidth=bandwidth, latency_ns=latency))
    return tuple(found) or (replace(platform.levels[-1], count=1),)


def _size(platform: Platform, most: int) -> int:
    """Return the least size of groups that are ``most`` at most, within units or of whole units, with few devices left
    over."""
    count = len(platform)
    for size in range(1, count):
        within = [unit for unit in platform.unit_sizes[:-1] if unit % size and size % unit]
        left = count % size
        if count // size <= most and 64 * left <= (count if len(platform.levels) == 1 else 0) and not within:
            return size
    return count


def longest_period_ns(problem: Problem) -> int:
    """Return a period so long that every allocation that fits at all has it: one microbatch at a time."""
    platform = problem.platform
    slowest = platform.slowest(range(len(platform)))
    chain = relaxations.extreme(problem.chain, max).timed(slowest.times)
    count = len(chain)
    recompute = int(chain.sums.forward_ns[-1])
    replicas = 1 if problem.policy.zero else len(platform)  # with which steps take most
    work: int = time_model.Passes(chain, problem.policy, 0, count, replicas, slowest.speed).work_ns(recompute)
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
    if platform.shared_level is not None or any(stage.tensor > 1 for stage in stages):
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
    used = [] if best is None else [d for stage in best.stages for d in stage.devices]
    waiting: Iterator[Order] = orders.first(used)
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
    chain = relaxations.extreme(tables.problem.chain, min).timed(best.times)
    end = np.int64(len(chain))
    replicas = tables.problem.most_replicas if policy.zero else 1  # with which a microbatch pays least for steps
    bare: Ints = time_model.Passes(chain, policy, cuts, end, replicas, best.speed).work_ns()
    return bare


def by_first_use(platform: Platform, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return ``stages`` with equal devices on one level numbered by first use, which changes nothing else."""
    return tuple(stages) if len(platform.levels) > 1 else on_lowest_devices(platform, stages)

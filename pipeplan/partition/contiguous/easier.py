"""Which easier problems are searched in the place of one: without sums of tied weights, with few large devices?

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from ...cost import time_model
from ...cost.group_bound import group_bound
from ...cost.memory_model import shared_gradient
from ...cost.stage_graph import stage_graph
from ...deadline import OutOfTime
from ...integers import ceil_div
from ...plan import Allocation, Stage
from ...problem import Level, Platform, Problem
from ..cuts import legal_cuts
from ..tables.stages import SPREAD, most_cuts

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
    if not problem.replicas or cuts * count**2 <= MOST_PLACES:
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

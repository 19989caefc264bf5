"""What do layers that share weights change about the search? Sums over the stages that have copies bound the period.

Such a sum is no operation and delays nothing (ALGORITHMS section 2, synchronisation): it is a load of every interval
on each stage with a copy, which depends on how many devices have one. So a problem is searched twice: with these layers
in one stage, where there is no sum, and with any cuts, as if sums took no time. The second search's plan is then timed
with its sums; whatever parts the layers takes at least the sum of two devices over the fastest link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...cost import time_model
from ...cost.group_bound import group_bound
from ...cost.memory_model import shared_gradient
from ...cost.stage_graph import stage_graph
from ...deadline import OutOfTime
from ...plan import Allocation
from ...problem import Problem

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

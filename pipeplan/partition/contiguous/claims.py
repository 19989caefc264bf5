"""How short a period do contiguous stages have, what do they claim, and which of equal devices do they take?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...cost import memory_model, time_model
from ...cost.group_bound import group_bound
from ...cost.stage_graph import stage_graph
from ...integers import NEVER
from ...plan import Allocation, Stage
from ...problem import Platform, Problem
from .tied import longest_sums_ns, sums_bound_periods


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

"""How often should weights be updated where nobody said it? As often as costs next to nothing.

Rarer updates cost less and allow more microbatches in flight, so the period shrinks as the interval grows. A plan made
for updates at their limit has the best period of any interval; here the smallest interval is found that comes close.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...check.evaluate import waiting_period_ns
from ...cost.group_bound import may_reach
from ...cost.stage_graph import StageGraph, stage_graph
from ...integers import smallest
from ...partition.contiguous.contiguous import feasible
from ...plan import Allocation, Alternative, Pattern, Stage
from ...problem import ENDLESS, Problem
from ...schedule.pattern import most_in_flight, starts_of
from ...schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from ...schedule.periodic.retime import order_of, retime
from .incumbent import Incumbent, Scheduled

CLOSE = 1000  # a period is close to another when it is longer by no more than this part of it


def at_interval(problem: Problem, interval: int | None) -> Problem:
    """Return the problem with an update every ``interval`` microbatches; None leaves that open."""
    return problem.with_policy(replace(problem.policy, accumulate=interval))


def smaller_intervals(found: Incumbent, widen: bool) -> Iterator[tuple[int, Scheduled]]:
    """Yield smaller and smaller intervals (microbatches) at which a period is within 0.1% of ``found``'s best, with it.

    ``found`` has searched with the interval open. The first comes at once. No smaller one than the last is enough for
    the stages that were found, by 1F1B* or the integer program, nor, with ``widen``, for any contiguous ones, as far as
    those are searched exactly. It is at least the most replicas of a stage: each sees a microbatch between two updates.
    """
    assert found.best is not None
    problem, best = found.problem, found.best
    longest = best.cost + max(best.cost // CLOSE, 1)  # shares of updates are rounded up
    for interval, scheduled in _of_stages(found, best, longest):
        yield interval, scheduled
    if not widen:
        return

    def contiguous(fewer: int) -> Allocation | None:
        return feasible(at_interval(problem, fewer), longest, best.allocation.stages)

    sooner = smallest(contiguous, 1, interval - 1)
    if sooner is not None:
        fewer = max(sooner[0], most_replicas(sooner[1].stages))
        other = _scheduled(found, sooner[1], fewer, longest) if fewer < interval else None
        if other is not None:
            yield fewer, other


def _of_stages(found: Incumbent, best: Scheduled, longest: int) -> Iterator[tuple[int, Scheduled]]:
    """Yield smaller intervals at which the stages of ``best`` take ``longest`` ns at most, first in the same order."""
    problem, stages, first = found.problem, best.allocation.stages, best.pattern
    assert first is not None
    same_costs = not updates_cost_time(problem)  # else the claim was about updates at their limit
    allocation = best.allocation if same_costs else Allocation(stages)

    def possible(interval: int) -> bool | None:
        return may_reach(_graph(problem, stages, interval), longest) or None

    def as_before(interval: int) -> Pattern | None:
        pattern = _retimed(problem, best.allocation, first, interval)
        return pattern if pattern is not None and _cost_ns(problem, stages, pattern, interval) <= longest else None

    low = most_replicas(stages)
    least = smallest(possible, low, ENDLESS, low)
    assert least is not None, "at the limit it is reached"
    if best.status is None:
        sooner = smallest(lambda n: _scheduled(found, allocation, n, longest), least[0], ENDLESS, least[0])
        assert sooner is not None, "at the limit it is reached"
        yield sooner
        return
    same = smallest(as_before, least[0], ENDLESS, least[0])
    assert same is not None, "at the limit it is reached"
    cost = _cost_ns(problem, stages, same[1], same[0])
    yield same[0], replace(best, cost=cost, allocation=allocation, pattern=same[1])
    sooner = smallest(lambda n: _scheduled(found, allocation, n, longest), least[0], same[0] - 1, least[0])
    if sooner is not None:
        yield sooner


def _graph(problem: Problem, stages: tuple[Stage, ...], interval: int | None) -> StageGraph:
    return stage_graph(problem.chain, problem.platform, at_interval(problem, interval).policy, stages)


def _scheduled(found: Incumbent, allocation: Allocation, interval: int, longest: int) -> Scheduled | None:
    """Return the best schedule of ``allocation`` with this interval if its period is at most ``longest`` ns."""
    pattern, status = found.schedule(_graph(found.problem, allocation.stages, interval), longest + 1)
    if pattern is None:
        return None
    cost = _cost_ns(found.problem, allocation.stages, pattern, interval)
    return None if cost > longest else Scheduled(cost, allocation, pattern, status)


def _cost_ns(problem: Problem, stages: tuple[Stage, ...], pattern: Pattern, interval: int | None) -> int:
    """Return what a microbatch takes under ``pattern`` with an update every ``interval``."""
    return waiting_period_ns(_graph(problem, stages, interval), problem.chain.tied, pattern, problem.platform)


def _retimed(problem: Problem, allocation: Allocation, pattern: Pattern, interval: int | None) -> Pattern | None:
    """Return the shortest pattern with the order that ``pattern`` has under ``problem``, with another interval."""
    now = stage_graph(problem.chain, problem.platform, problem.policy, allocation.stages)
    order = order_of(now, starts_of(pattern), pattern.period_ns)
    return retime(_graph(problem, allocation.stages, interval), order)


def rescheduled(problem: Problem, best: Scheduled, interval: int | None) -> Scheduled | None:
    """Return ``best`` with another interval (None: open), the same stages, in the same order unless 1F1B* has a better.

    None where that order holds more microbatches than the interval.
    """
    assert best.pattern is not None
    graph = _graph(problem, best.allocation.stages, interval)
    if graph.separate:
        pattern = best_one_f_one_b_star(graph)
    else:
        pattern = _retimed(problem, best.allocation, best.pattern, interval)
    if pattern is None:
        return None
    allocation = Allocation(best.allocation.stages) if updates_cost_time(problem) else best.allocation
    return Scheduled(_cost_ns(problem, allocation.stages, pattern, interval), allocation, pattern, best.status)


def more_often(problem: Problem, best: Scheduled) -> Alternative | None:
    """Return what the stages of ``best`` take, in the same order if the integer program gave it, with an update as soon
    as the microbatches in flight allow; None where the problem's interval is no longer."""
    assert best.pattern is not None
    graph = stage_graph(problem.chain, problem.platform, problem.policy, best.allocation.stages)
    in_flight = most_in_flight(graph, starts_of(best.pattern), best.pattern.period_ns)
    interval = max(in_flight, most_replicas(best.allocation.stages))
    if interval >= problem.policy.update_interval():
        return None
    sooner = rescheduled(problem, best, interval)
    return None if sooner is None else Alternative(problem.policy.weights, interval, sooner.cost)


def updates_cost_time(problem: Problem) -> bool:
    """Whether any cost depends on how often weights are updated: optimizer steps, or all-reduces between devices."""
    sums, several = problem.chain.sums, problem.replicas or problem.chain.tied
    return bool(sums.optimizer_ns[-1]) or (bool(several) and len(problem.platform) > 1 and bool(sums.parameters[-1]))


def most_replicas(stages: tuple[Stage, ...]) -> int:
    """Return the most replicas of a stage."""
    return max(stage.replicas for stage in stages)

"""The composition: partition, schedule, keep the best, bound, and judge. Reads like the picture in the design.

Takes and returns values; the clock belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import __version__
from .bounds import any_bound
from .errors import Infeasible
from .evaluate import flush_makespan_ns
from .explain import longest_period_ns, why_infeasible
from .partition import ALGORITHMS, Algorithm
from .partition.contiguous import feasible
from .plan import Allocation, Bound, Pattern, Plan, Provenance, Schedule
from .problem import Problem
from .program import unroll
from .schedule.one_f_one_b import best_one_f_one_b_star
from .simulate import simulate
from .stages import StageGraph, most_in_flight, stage_graph, starts_of
from .validate import check

MINI_BATCH_PER_DEVICE = 4  # default microbatches of a drained mini-batch for each device, GPipe's rule of thumb


def make_plan(problem: Problem, algorithm: str = "contiguous", options: Mapping[str, Any] | None = None) -> Plan:
    """Return the validated plan that ``algorithm`` gives for ``problem``; Infeasible, explained, when it finds none.

    ``options`` go to the algorithm. An undecided ``policy.accumulate`` is decided here: under 2bw as many microbatches
    as are in flight, otherwise one (flush: four per device).
    """
    entry = ALGORITHMS[algorithm]
    options = dict(options or {})
    if problem.policy.weights == "flush":
        problem, best = _plan_flush(problem, entry, options)
    else:
        problem, best = _plan_pattern(problem, entry, options)
    allocation, pattern = best
    schedule = Schedule()
    if problem.policy.weights == "flush":
        schedule = Schedule("flush", problem.policy.accumulate)
    plan = Plan(
        chain=problem.chain,
        platform=problem.platform,
        policy=problem.policy,
        allocation=allocation,
        pattern=pattern,
        lower_bounds=_bounds(problem, entry, allocation, pattern),
        provenance=Provenance(algorithm, options, allocation.claimed_period_ns, version=__version__),
        schedule=schedule,
    )
    check(plan)
    return plan


def _plan_pattern(
    problem: Problem, entry: Algorithm, options: dict[str, Any]
) -> tuple[Problem, tuple[Allocation, Pattern]]:
    """Plan for the shortest period; decide ``accumulate`` from what the best plan has in flight and plan again with it.

    Fewer updates per microbatch only make stages cheaper, so the first plan stays feasible in the second round.
    """
    if problem.policy.accumulate is not None:
        return problem, _best(problem, entry, options, _period)
    if problem.policy.weights != "2bw":
        problem = problem.with_policy(replace(problem.policy, accumulate=1))
        return problem, _best(problem, entry, options, _period)
    allocation, pattern = _best(problem, entry, options, _period)
    depth = most_in_flight(_graph(problem, allocation), starts_of(pattern), pattern.period_ns)
    problem = problem.with_policy(replace(problem.policy, accumulate=depth))
    return problem, _best(problem, entry, options, _period)


def _plan_flush(
    problem: Problem, entry: Algorithm, options: dict[str, Any]
) -> tuple[Problem, tuple[Allocation, Pattern]]:
    """Plan for the shortest drained mini-batch.

    The shortest period need not drain fastest, so an optimal partitioner also offers what it finds at longer periods,
    where it minimises the delay of the first stage. A heuristic in the class that the partitioner searches.
    """
    if problem.policy.accumulate is None:
        microbatches = MINI_BATCH_PER_DEVICE * len(problem.platform)
        problem = problem.with_policy(replace(problem.policy, accumulate=microbatches))

    def partition(problem: Problem, **options: Any) -> Iterator[Allocation]:
        for allocation in entry.partition(problem, **options):
            yield allocation
            if entry.optimal and allocation.claimed_period_ns is not None:
                for period in _longer(allocation.claimed_period_ns, longest_period_ns(problem)):
                    slower = feasible(problem, period)
                    if slower is not None:
                        yield replace(slower, claimed_period_ns=allocation.claimed_period_ns)

    return problem, _best(problem, replace(entry, partition=partition), options, _drained)


def _longer(period: int, longest: int) -> Iterator[int]:
    """Yield periods above ``period`` in steps of a quarter octave, the last at least ``longest``."""
    step = 0
    while period * 2 ** (step / 4) < longest:
        step += 1
        yield int(period * 2 ** (step / 4)) + 1


def _best(
    problem: Problem,
    entry: Algorithm,
    options: dict[str, Any],
    cost: Callable[[Problem, StageGraph, Pattern], int],
) -> tuple[Allocation, Pattern]:
    """Return the allocation and pattern of least ``cost`` among all that the partitioner yields and that can run."""
    best: tuple[int, Allocation, Pattern] | None = None
    rejected: list[Allocation] = []
    for allocation in entry.partition(problem, **options):
        graph = _graph(problem, allocation)
        pattern = best_one_f_one_b_star(graph)
        if pattern is None:
            rejected.append(allocation)
            continue
        value = cost(problem, graph, pattern)
        if best is None or value < best[0]:
            best = value, allocation, pattern
    if best is None:
        raise Infeasible(why_infeasible(problem, rejected))
    return best[1], best[2]


def _graph(problem: Problem, allocation: Allocation) -> StageGraph:
    return stage_graph(problem.chain, problem.platform, problem.policy, allocation.stages)


def _period(problem: Problem, graph: StageGraph, pattern: Pattern) -> int:
    return pattern.period_ns


def _drained(problem: Problem, graph: StageGraph, pattern: Pattern) -> int:
    return flush_makespan_ns(simulate(unroll(graph, pattern, problem.policy.accumulate or 1)))


def _bounds(problem: Problem, entry: Algorithm, allocation: Allocation, pattern: Pattern) -> tuple[Bound, ...]:
    """Return the bounds whose class contains the plan: an optimal partitioner's own, and class ``any``."""
    bounds = [any_bound(problem)]
    if entry.optimal and problem.policy.weights != "flush" and allocation.contiguous:
        bounds.insert(0, Bound("contiguous", problem.replicas, problem.checkpointing, pattern.period_ns))
    return tuple(bounds)

"""The composition: propose, schedule, keep the best, bound, and judge. Reads like the picture in the design.

Takes and returns values; the clock belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from . import __version__
from .bounds import any_bound
from .errors import Infeasible
from .evaluate import flush_makespan_ns
from .explain import longest_period_ns, why_infeasible
from .judge import Judge, Settings, Verdict, period_cost
from .partition import ALGORITHMS
from .partition.balance import balance
from .partition.contiguous import feasible
from .partition.local_search import local_search
from .partition.pipedream import pipedream
from .plan import Allocation, Bound, Pattern, Plan, Provenance, Schedule
from .portfolio import EFFORTS, propose_contiguous, search
from .problem import Problem
from .program import unroll
from .simulate import simulate
from .stages import StageGraph, most_in_flight, stage_graph, starts_of
from .validate import check, class_violations

AUTO = "auto"
MINI_BATCH_PER_DEVICE = 4  # default microbatches of a drained mini-batch for each device, GPipe's rule of thumb
DRAINED_MOVES = 300  # local moves of a drained plan
Propose = Callable[[Problem, Judge], None]


def make_plan(
    problem: Problem,
    algorithm: str = AUTO,
    options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    effort: str = "normal",
) -> Plan:
    """Return the validated plan that ``algorithm`` (or the portfolio, ``auto``) gives; Infeasible, explained, if none.

    ``options`` go to the algorithm. An undecided ``policy.accumulate`` is decided here: under 2bw as many microbatches
    as are in flight, otherwise one (flush: four per device). A KeyboardInterrupt ends the search with the best plan so
    far, if there is one.
    """
    settings, options = settings or Settings(), dict(options or {})
    if algorithm == AUTO:
        settings = replace(settings, time_limit_s=min(settings.time_limit_s, EFFORTS[effort].solver_s))
    propose = _proposer(algorithm, options, effort)
    if problem.policy.weights == "flush":
        problem, judge, status = _plan_flush(problem, propose, settings, widen=algorithm in (AUTO, "contiguous"))
    else:
        problem, judge, status = _plan_pattern(problem, propose, settings)
    if judge.best is None:
        raise Infeasible(why_infeasible(problem, judge.rejected, judge.broken))
    allocation, pattern = _tidy(problem, judge.best.allocation), judge.best.pattern
    plan = Plan(
        chain=problem.chain,
        platform=problem.platform,
        policy=problem.policy,
        allocation=allocation,
        pattern=pattern,
        lower_bounds=(*_class_bounds(judge), any_bound(problem)),
        provenance=Provenance(
            algorithm,
            options if algorithm != AUTO else {**options, "effort": effort},
            allocation.claimed_period_ns,
            solver=None if judge.best.status is None else settings.solver,
            solver_status=status or judge.best.status,
            version=__version__,
        ),
        schedule=Schedule("flush", problem.policy.accumulate) if problem.policy.weights == "flush" else Schedule(),
    )
    check(plan)
    return plan


def _proposer(algorithm: str, options: dict[str, Any], effort: str) -> Propose:
    if algorithm == AUTO:
        return lambda problem, judge: search(problem, judge, EFFORTS[effort])

    def propose(problem: Problem, judge: Judge) -> None:
        if algorithm == "contiguous":
            found = propose_contiguous(problem, judge)
        else:
            found = ALGORITHMS[algorithm].partition(problem, **options)
        for allocation in found:
            judge(allocation)
            if judge.expired:
                return

    return propose


def _plan_pattern(problem: Problem, propose: Propose, settings: Settings) -> tuple[Problem, Judge, str | None]:
    """Plan for the shortest period; decide ``accumulate`` from what the best plan has in flight and plan again with it.

    Fewer updates per microbatch only make stages cheaper, so the first plan stays feasible in the second round, which
    is left out when nothing would get cheaper.
    """
    if problem.policy.accumulate is None and problem.policy.weights != "2bw":
        problem = problem.with_policy(replace(problem.policy, accumulate=1))
    judge = Judge(problem, settings)
    status = _run(propose, problem, judge)
    if problem.policy.accumulate is not None or judge.best is None:
        return problem, judge, status
    decided = problem.with_policy(replace(problem.policy, accumulate=_depth(problem, judge.best)))
    if not _updates_cost_time(problem):
        return decided, judge, status
    again = Judge(decided, settings)
    if status != "interrupted":
        status = _run(propose, decided, again) or status
    again(judge.best.allocation)
    return decided, again, status


def _updates_cost_time(problem: Problem) -> bool:
    """Whether any cost depends on how often weights are updated: optimizer steps, or all-reduces between replicas."""
    sums = problem.chain.sums
    return bool(sums.optimizer_ns[-1]) or (problem.replicas and len(problem.platform) > 1 and bool(sums.parameters[-1]))


def _run(propose: Propose, problem: Problem, judge: Judge) -> str | None:
    """Let ``propose`` feed the judge; return why it stopped early, or None."""
    try:
        propose(problem, judge)
    except KeyboardInterrupt:
        if judge.best is None:
            raise
        return "interrupted"
    return "time limit" if judge.stopped else None


def _depth(problem: Problem, best: Verdict) -> int:
    graph = stage_graph(problem.chain, problem.platform, problem.policy, best.allocation.stages)
    return most_in_flight(graph, starts_of(best.pattern), best.pattern.period_ns)


def _plan_flush(
    problem: Problem, propose: Propose, settings: Settings, widen: bool
) -> tuple[Problem, Judge, str | None]:
    """Plan for the shortest drained mini-batch.

    The shortest period need not drain fastest, so with ``widen`` the best contiguous plans of longer periods are judged
    too, those of least delay at the first stage, and the baselines' splits, and then local moves. A heuristic.
    """
    if problem.policy.accumulate is None:
        microbatches = MINI_BATCH_PER_DEVICE * len(problem.platform)
        problem = problem.with_policy(replace(problem.policy, accumulate=microbatches))
    judge = Judge(problem, settings, partial(_drained, problem.policy.accumulate or 1))

    def widened(problem: Problem, judge: Judge) -> None:
        propose(problem, judge)
        for allocation in _around(problem, judge):
            if judge.expired:
                return
            judge(allocation)
        if judge.best is not None:
            start = judge.best.allocation
            local_search(problem, start, judge.promise, judge.improves, DRAINED_MOVES, lambda: judge.expired)

    return problem, judge, _run(widened if widen else propose, problem, judge)


def _around(problem: Problem, judge: Judge) -> Iterator[Allocation]:
    """Yield the baselines' splits, then the best contiguous plans of periods longer than the best so far has."""
    yield from chain(balance(problem), pipedream(problem), pipedream(problem, straight=True))
    if judge.best is not None:
        for period in _longer(judge.best.pattern.period_ns, longest_period_ns(problem)):
            slower = feasible(problem, period)
            if slower is not None:
                yield slower


def _longer(period: int, longest: int) -> Iterator[int]:
    """Yield periods above ``period`` in steps of a quarter octave, the last at least ``longest``."""
    step = 0
    while period * 2 ** (step / 4) < longest:
        step += 1
        yield int(period * 2 ** (step / 4)) + 1


def _drained(microbatches: int, graph: StageGraph, pattern: Pattern) -> int:
    return flush_makespan_ns(simulate(unroll(graph, pattern, microbatches)))


def _tidy(problem: Problem, allocation: Allocation) -> Allocation:
    """Return the allocation with equal devices on one level numbered by first use, which changes nothing else."""
    platform = problem.platform
    if len(platform.levels) > 1 or len(set(platform.devices)) > 1:
        return allocation
    names: dict[int, int] = {}
    for stage in allocation.stages:
        for device in stage.devices:
            names.setdefault(device, len(names))
    stages = (replace(stage, devices=tuple(names[d] for d in stage.devices)) for stage in allocation.stages)
    return replace(allocation, stages=tuple(stages))


def _class_bounds(judge: Judge) -> list[Bound]:
    """Return the bounds that the search proved and whose class contains its best plan."""
    assert judge.best is not None
    if judge.cost is not period_cost:  # those are bounds on a period that never drains
        return []
    return [bound for bound in judge.bounds if not class_violations(bound, judge.best.allocation)]

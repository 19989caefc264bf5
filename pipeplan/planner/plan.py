"""Which plan is best for a problem? Propose, schedule, keep the best, bound, and check: the composition.

Takes and returns values; the clock belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..check.bounds import any_bound
from ..check.evaluate import Evaluation
from ..check.validate import check, class_violations
from ..cost.stage_graph import stage_graph
from ..deadline import OutOfTime
from ..errors import BadInput, Infeasible
from ..partition import ALGORITHMS
from ..partition.contiguous.contiguous import on_lowest_devices
from ..plan import Allocation, Bound, Plan, Provenance, Schedule, ScheduleKind
from ..problem import Problem, Weights
from ..schedule.kinds import KINDS, kinds_for, too_long
from ..schedule.pattern import most_in_flight, starts_of
from ..version import __version__
from .explain import why_infeasible, why_not_admitted
from .incumbent import Incumbent, Propose, Scheduled, Settings, run_search
from .portfolio import EFFORTS, propose_contiguous, search
from .proposals import synced
from .simulated import plan_drained, plan_nf1b

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that has passed the validator, and its figures."""

    plan: Plan
    evaluation: Evaluation


def make_plan(
    problem: Problem,
    algorithm: str = AUTO,
    options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    effort: str = "normal",
    schedule: ScheduleKind | None = None,
    limit: int | None = None,
) -> Planned:
    """Return the validated plan that ``algorithm`` (or the portfolio, ``auto``) gives; Infeasible, explained, if none.

    ``options`` go to the algorithm. ``schedule`` is one that goes with the weights policy, by default the first that
    :func:`..schedule.kinds.kinds_for` names; ``limit`` is what nF1B or message-driven admit at once (None: chosen). An
    undecided ``policy.accumulate`` is decided here: under 2bw as many microbatches as are in flight, four per device
    where mini-batches are drained, under nF1B the best of several sizes, otherwise one. A KeyboardInterrupt ends the
    search with the best plan so far, if there is one; the problem's deadline too, or with the best of the simplest.
    """
    kind = _kind(problem.policy.weights, schedule, limit)
    _refuse_endless(problem, Schedule(kind, problem.policy.accumulate, limit))
    settings, options = settings or Settings(), dict(options or {})
    if algorithm == AUTO:
        settings = replace(settings, time_limit_s=min(settings.time_limit_s, EFFORTS[effort].solver_s))
    propose = _proposer(algorithm, options, effort)
    widen = algorithm in (AUTO, "contiguous")
    row = KINDS[kind]
    if row.drains:
        incumbent, status = plan_drained(problem, propose, settings, widen, kind, limit)
    elif row.simulated is not None:
        incumbent, status = plan_nf1b(problem, propose, settings, widen, kind, limit)
    else:
        relaxed = widen and problem.policy.vertical_sync
        incumbent, status = _plan_pattern(problem, synced(propose) if relaxed else propose, settings)
    problem = incumbent.problem
    if incumbent.best is None:
        raise Infeasible(_why_none(incumbent))
    allocation, pattern = _tidy(problem, incumbent.best.allocation), incumbent.best.pattern
    plan = Plan(
        chain=problem.chain,
        platform=problem.platform,
        policy=problem.policy,
        allocation=allocation,
        pattern=pattern,
        lower_bounds=(*_class_bounds(incumbent), any_bound(problem)),
        provenance=Provenance(
            algorithm,
            options if algorithm != AUTO else {**options, "effort": effort},
            allocation.claimed_period_ns,
            solver=None if incumbent.best.status is None else settings.solver,
            solver_status=status or incumbent.best.status,
            version=__version__,
        ),
        schedule=incumbent.best.schedule or Schedule(kind, problem.policy.accumulate if row.drains else None),
    )
    return Planned(plan, check(plan))


def _why_none(incumbent: Incumbent) -> str:
    """Return in a sentence why there is no plan, as far as there is time to find out."""
    problem = incumbent.problem
    if incumbent.late:
        rest = "; the simplest ones don't" if incumbent.exhausted else ", and left no time for the simplest ones"
        return f"the time limit ended the search before it found a plan that fits{rest}"
    try:
        with problem.deadline.insist():
            if incumbent.limits is not None:
                return why_not_admitted(problem, incumbent.limits.schedule, incumbent.rejected, incumbent.broken)
            return why_infeasible(problem, incumbent.rejected, incumbent.broken)
    except OutOfTime:
        return "no plan was found that fits; the time limit left no time to say what would help"


def _kind(weights: Weights, wanted: ScheduleKind | None, limit: int | None) -> ScheduleKind:
    """Return the kind of schedule to plan for; BadInput when ``wanted`` or ``limit`` doesn't go with the weights."""
    kind = wanted or kinds_for(weights)[0]
    if weights not in KINDS[kind].weights:
        raise BadInput(f"schedule: {kind} doesn't go with weights {weights}; only {' and '.join(kinds_for(weights))}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit: {limit} is not positive")
    if limit is not None and KINDS[kind].limit is None:
        limited = " and ".join(name for name, row in KINDS.items() if row.limit is not None)
        raise BadInput(f"limit: a {kind} schedule holds what its order says; {limited} have a limit")
    return kind


def _refuse_endless(problem: Problem, schedule: Schedule) -> None:
    """Raise BadInput where a stage on every GPU would take too long to simulate."""
    stages = min(len(problem.platform), len(problem.chain))
    endless = too_long(4 * stages - 2, schedule)
    if endless is not None:
        raise BadInput(f"--accumulate, --limit: on {stages} stages {endless}")


def _proposer(algorithm: str, options: dict[str, Any], effort: str) -> Propose:
    if algorithm == AUTO:
        return lambda incumbent: search(incumbent, EFFORTS[effort])

    def propose(incumbent: Incumbent) -> None:
        if algorithm == "contiguous":
            found = propose_contiguous(incumbent)
        else:
            found = ALGORITHMS[algorithm].partition(incumbent.problem, **options)
        for allocation in found:
            incumbent.try_(allocation)
            if incumbent.expired:
                return

    return propose


def _plan_pattern(problem: Problem, propose: Propose, settings: Settings) -> tuple[Incumbent, str | None]:
    """Plan for the shortest period; decide ``accumulate`` from what the best plan has in flight and plan again with it.

    Fewer updates per microbatch only make stages cheaper, so the first plan stays feasible in the second round, which
    is left out when nothing would get cheaper.
    """
    if problem.policy.accumulate is None and problem.policy.weights != "2bw":
        problem = problem.with_policy(replace(problem.policy, accumulate=1))
    incumbent = Incumbent(problem, settings)
    status = run_search(propose, incumbent)
    if problem.policy.accumulate is not None or incumbent.best is None:
        return incumbent, status
    decided = problem.with_policy(replace(problem.policy, accumulate=_depth(problem, incumbent.best)))
    if not _updates_cost_time(problem):
        incumbent.problem = decided
        return incumbent, status
    again = Incumbent(decided, settings)
    if status != "interrupted":
        status = "time limit" if again.expired else run_search(propose, again, dispensable=True) or status
    again.try_(incumbent.best.allocation)
    return again, status


def _updates_cost_time(problem: Problem) -> bool:
    """Whether any cost depends on how often weights are updated: optimizer steps, or all-reduces between replicas."""
    sums = problem.chain.sums
    return bool(sums.optimizer_ns[-1]) or (problem.replicas and len(problem.platform) > 1 and bool(sums.parameters[-1]))


def _depth(problem: Problem, best: Scheduled) -> int:
    assert best.pattern is not None
    graph = stage_graph(problem.chain, problem.platform, problem.policy, best.allocation.stages)
    return most_in_flight(graph, starts_of(best.pattern), best.pattern.period_ns)


def _tidy(problem: Problem, allocation: Allocation) -> Allocation:
    """Return the allocation with equal devices on one level numbered by first use, which changes nothing else."""
    if len(problem.platform.levels) > 1:
        return allocation
    return replace(allocation, stages=on_lowest_devices(problem.platform, allocation.stages))


def _class_bounds(incumbent: Incumbent) -> list[Bound]:
    """Return the bounds that the search proved and whose class contains its best plan."""
    assert incumbent.best is not None
    if not incumbent.periodic:  # those are bounds on a period that never drains
        return []
    return [bound for bound in incumbent.bounds if not class_violations(bound, incumbent.best.allocation)]

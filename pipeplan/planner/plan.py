"""Which plan is best for a problem? Propose, schedule, keep the best, bound, and check: the composition.

Takes and returns values; the clock belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from ..check.bounds import any_bound, follows
from ..check.classes import bound_violations, class_violations
from ..check.evaluate import Evaluation, gap
from ..check.validate import check
from ..deadline import OutOfTime
from ..errors import BadInput, Infeasible, InvalidPlan
from ..partition import ALGORITHMS
from ..partition.contiguous.claims import by_first_use
from ..plan import Allocation, Bound, Plan, Provenance, Schedule, ScheduleKind, Stage
from ..problem import Problem, Weights
from ..registry import Late
from ..schedule.kinds import KINDS, kinds_for, too_long
from ..version import __version__
from .periodic.incumbent import Incumbent, Propose, Scheduled, Settings, run_search, unsolved
from .periodic.interval import at_interval, more_often, rescheduled, smaller_intervals, updates_cost_time
from .periodic.portfolio import EFFORTS, MOST_PLACES, evenly_shared, places, propose_contiguous, search

AUTO = "auto"
STATED = "stated"
Searched = tuple[Incumbent, str | None]  # with why the search ended early, or None
plan_drained: Callable[..., Searched] = Late("planner.drained.plan:plan_drained")
plan_nf1b: Callable[..., Searched] = Late("planner.drained.plan:plan_nf1b")
synced, stated = Late("planner.drained.proposals:synced"), Late("planner.periodic.stated:stated")
claimed = Late("planner.periodic.explain:claimed")
why_infeasible: Callable[..., str] = Late("planner.periodic.explain:why_infeasible")
why_not_admitted: Callable[..., str] = Late("planner.periodic.explain:why_not_admitted")
why_not_placed: Callable[..., str] = Late("planner.periodic.explain:why_not_placed")
why_not_stated: Callable[..., str | None] = Late("planner.periodic.stated:why_not_stated")
OF_DRAINED = (Late("check.bounds.drained.proofs:quoted"),)  # what yields bounds on plans that drain
BEFORE = {"high": "normal"}  # the effort that is made first, so that more of it is never worse


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that has passed the validator, and its figures."""

    plan: Plan
    evaluation: Evaluation


def checked(
    problem: Problem, stages: Iterable[Stage], bounds: Iterable[Bound], provenance: Provenance, schedule: Schedule
) -> Planned:
    """Return the plan of stages without a pattern; InvalidPlan says where it breaks a rule."""
    given, allocation = (problem.chain, problem.platform, problem.policy), Allocation(tuple(stages))
    plan = Plan(*given, allocation, None, tuple(bounds), provenance, schedule)
    return Planned(plan, check(plan))


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

    ``options`` go to the algorithm; those of :data:`STATED` say the stages, see :func:`.stated.stated`. ``schedule`` is
    one that goes with the weights policy, by default the first that :func:`..schedule.kinds.kinds_for` names; ``limit``
    is what nF1B or message-driven admit at once (None: chosen). An undecided ``policy.accumulate`` is decided here:
    under 2bw the fewest microbatches whose period is within 0.1% of the best of any interval, four per device where
    mini-batches are drained, under nF1B the best of several sizes, otherwise one. A KeyboardInterrupt ends the
    search with the best plan so far, if there is one; the problem's deadline too, or with the best of the simplest.
    High effort is made behind normal, unless that comes near the bound of all plans.
    """
    settings, kind = settings or Settings(), _kind(problem.policy.weights, schedule, limit)
    _refuse_endless(problem, Schedule(kind, problem.policy.accumulate, limit))
    asked = _Asked(problem, algorithm, dict(options or {}), settings, kind, limit, schedule is None)
    if algorithm != AUTO or effort not in BEFORE:
        return asked.planned(effort)
    try:
        first = replace(asked, settings=replace(settings, explained=False)).planned(BEFORE[effort])
    except Infeasible:
        return asked.planned(effort)
    plan, period = first.plan.telling(effort=effort), first.evaluation.period_ns
    first = replace(first, plan=plan)
    if plan.provenance.solver_status == "interrupted" or problem.deadline.passed:
        return first
    if any(gap(period, bound) <= settings.gap for bound in plan.lower_bounds if bound.allocation == "any"):
        return first
    try:
        second = asked.planned(effort)
    except Infeasible:
        return first
    except KeyboardInterrupt:
        return replace(first, plan=replace(plan, provenance=replace(plan.provenance, solver_status="interrupted")))
    return second if second.evaluation.period_ns < period else first


@dataclass(frozen=True, slots=True)
class _Asked:
    """What :func:`make_plan` is asked: a plan under a ``kind`` of schedule, or where that drains ``anyhow`` under any
    that does."""

    problem: Problem
    algorithm: str
    options: dict[str, Any]
    settings: Settings
    kind: ScheduleKind
    limit: int | None
    anyhow: bool

    def planned(self, effort: str) -> Planned:
        """Return what :func:`make_plan` does, by one search of this effort."""
        asked, algorithm, options, settings, kind = self.problem, self.algorithm, self.options, self.settings, self.kind
        if algorithm == STATED:
            settings = replace(settings, simplest=False)
        if algorithm == AUTO:
            settings = replace(settings, time_limit_s=EFFORTS[effort].solver_s, node_limit=EFFORTS[effort].nodes)
        incumbent, status = self._found(effort, settings)
        problem, scheduled = incumbent.problem, incumbent.best
        if scheduled is None:
            raise Infeasible(_why_none(incumbent, algorithm) if settings.explained else "no plan was found")
        allocation = scheduled.allocation
        if algorithm != STATED:
            allocation = replace(allocation, stages=by_first_use(problem.platform, allocation.stages))
        sooner = more_often(problem, scheduled) if asked.policy.open else None
        provenance = Provenance(
            algorithm,
            options if algorithm != AUTO else {**options, "effort": effort, "gap": settings.gap},
            allocation.claimed_period_ns,
            solver=None if scheduled.status is None else settings.solver,
            solver_status=status or scheduled.status,
            version=__version__,
            alternatives=() if sooner is None else (sooner,),
        )
        usual = Schedule(kind, problem.policy.accumulate if KINDS[kind].drains else None)
        given = problem.chain, problem.platform, problem.policy
        plan = Plan(*given, allocation, scheduled.pattern, (), provenance, scheduled.schedule or usual)
        evaluation = check(plan)
        bounds = _bounds(asked, incumbent, scheduled, kind) if settings.bounded else ()
        plan = replace(plan, lower_bounds=tuple(_standing(bounds, evaluation.period_ns, settings.status.notes)))
        if broken := bound_violations(plan, evaluation.period_ns):
            raise InvalidPlan(broken)
        return Planned(plan, evaluation)

    def _found(self, effort: str, settings: Settings) -> Searched:
        """Search for the best plan; return why that ended early, or None."""
        problem, algorithm, row = self.problem, self.algorithm, KINDS[self.kind]
        propose = _proposer(algorithm, self.options, effort)
        widen = algorithm in (AUTO, "contiguous") and not problem.chain.variants
        if row.drains:
            kinds = kinds_for(problem.policy.weights) if self.anyhow else ()
            searched = effort if algorithm == AUTO else None
            return plan_drained(problem, propose, settings, widen, self.kind, self.limit, searched, kinds)
        if row.build is not None:
            return plan_nf1b(problem, propose, settings, widen, self.kind, self.limit)
        moves = algorithm == AUTO and EFFORTS[effort].rounds > 0
        again = partial(search, effort=EFFORTS[effort].again) if moves else propose
        if widen and problem.policy.vertical_sync:
            propose, again = synced(propose), synced(again)
        return _plan_pattern(problem, propose, again, settings, widen, moves)


def _standing(bounds: Iterable[Bound], period: int, notes: list[str]) -> Iterator[Bound]:
    """Yield the bounds that a plan of ``period`` ns leaves standing; note in a sentence each that it refutes."""
    for bound in bounds:
        if bound.period_ns <= period:
            yield bound
        else:
            notes.append(
                f"a lower bound of {bound.period_ns} ns for class {bound.allocation} is wrong and left out: the plan, "
                f"which is valid, takes {period} ns; please report it"
            )


def _why_none(incumbent: Incumbent, algorithm: str) -> str:
    """Return in a sentence why there is no plan, as far as there is time to find out, and what was claimed."""
    claims = (claimed(algorithm, stages, claim) for stages, claim in incumbent.seen.items() if claim is not None)
    failed = unsolved(incumbent.settings.status)
    return "; ".join([_reason(incumbent, algorithm), *islice(claims, 1), *filter(None, [failed])])


def _reason(incumbent: Incumbent, algorithm: str) -> str:
    problem = incumbent.problem
    if incumbent.late and algorithm == STATED:
        return "the time limit left no time to schedule the stated stages"
    if problem.chain.variants:
        return "no plan was found of contiguous stages that fit, whatever tensor degree each has"
    if incumbent.late:
        rest = "; the simplest ones don't" if incumbent.exhausted else ", and left no time for the simplest ones"
        return f"the time limit ended the search before it found a plan that fits{rest}"
    try:
        with problem.deadline.insist():
            reason = why_not_stated(incumbent) if algorithm == STATED else None
            if reason is not None:
                return reason
            limits = incumbent.limits
            told = incumbent.rejected is not None or incumbent.broken is None  # of equal pipelines others say nothing
            if algorithm == AUTO and limits is not None and (limits.places or not told):
                return why_not_placed(problem, limits.schedule.kind)
            if limits is not None:
                return why_not_admitted(problem, limits.schedule, incumbent.rejected, incumbent.broken)
            return why_infeasible(problem, incumbent.rejected, incumbent.broken)
    except OutOfTime:
        return "no plan was found that fits; the time limit left no time to say what would help"


def _kind(weights: Weights, wanted: ScheduleKind | None, limit: int | None) -> ScheduleKind:
    """Return the kind of schedule to plan for; BadInput when ``wanted`` or ``limit`` doesn't go with the weights."""
    kind = wanted or kinds_for(weights)[0]
    if KINDS[kind].written:
        raise BadInput(f"schedule: no plan is made for one that is {kind}; `run --schedule FILE.csv` runs it")
    if weights not in KINDS[kind].weights:
        raise BadInput(f"schedule: {kind} doesn't go with weights {weights}; only {' and '.join(kinds_for(weights))}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit: {limit} is not positive")
    if limit is not None and KINDS[kind].limit is None:
        limited = " and ".join(name for name, row in KINDS.items() if row.limit is not None)
        raise BadInput(f"limit: a {kind} schedule has a fixed order; {limited} have a limit")
    return kind


def _refuse_endless(problem: Problem, schedule: Schedule) -> None:
    """Raise BadInput where a stage on every GPU would take too long to simulate."""
    stages = min(len(problem.platform), len(problem.chain))
    endless = too_long(4 * stages - 2, schedule)
    if endless is not None:
        raise BadInput(f"--accumulate, --limit: on {stages} stages {endless}")


def _proposer(algorithm: str, options: dict[str, Any], effort: str) -> Propose:
    if algorithm == AUTO:
        return partial(search, effort=EFFORTS[effort])

    def propose(incumbent: Incumbent) -> None:
        if algorithm == "contiguous":
            found = propose_contiguous(incumbent)
        elif algorithm == STATED:
            found = stated(incumbent.problem, **options)
        else:
            found = ALGORITHMS[algorithm].partition(incumbent.problem, **options)
        for allocation in found:
            incumbent.try_(allocation)
            if incumbent.expired:
                return

    return propose


def _plan_pattern(
    problem: Problem, propose: Propose, again: Propose, settings: Settings, widen: bool, moves: bool
) -> Searched:
    """Plan for the shortest period; an open interval is decided by what the best plan of any interval takes.

    Where ``again`` makes local ``moves`` it is run with the interval that fills a pipeline over all devices as well, if
    the decided one is no longer; and once more with the interval decided, unless nothing can get shorter. Neither where
    the problem is large, nor are other stages sought for a smaller interval. The bounds are those of the first search,
    which hold for every interval.
    """
    if problem.policy.accumulate is None and not problem.policy.open:
        problem = at_interval(problem, 1)
    incumbent = Incumbent(problem, settings)
    status = run_search(propose, incumbent)
    if not problem.policy.open or incumbent.best is None:
        return incumbent, status
    quick = places(problem) <= MOST_PLACES
    widen, filled = widen and quick, 2 * len(problem.platform) - 1
    decided, cut = _decided(incumbent, widen, _ended(status, incumbent))
    status = cut or status
    sooner = moves and quick and decided.problem.policy.update_interval() <= filled and not incumbent.near_bound
    if sooner and not evenly_shared(problem, incumbent.best.allocation) and not _ended(status, incumbent):
        other = Incumbent(at_interval(problem, filled), settings)  # it begins as if the interval were given
        other.floor_ns = incumbent.floor_ns
        status = run_search(again, other, dispensable=True) or status
        best = None if other.best is None else rescheduled(other.problem, other.best, None)
        if best is not None and best.cost < incumbent.best.cost:
            incumbent.best = best
            decided, cut = _decided(incumbent, widen, _ended(status, incumbent))
            status = cut or status
    shortest = widen and decided.best_ns == incumbent.best_ns
    if quick and not shortest and updates_cost_time(problem) and not _ended(status, incumbent):
        status = run_search(again, decided, dispensable=True) or status
    decided.bounds, decided.bounded_up_to = incumbent.bounds, incumbent.bounded_up_to
    return decided, status


def _ended(status: str | None, incumbent: Incumbent) -> bool:
    """Whether somebody wants no more searches."""
    return status == "interrupted" or incumbent.expired


def _decided(found: Incumbent, widen: bool, ended: bool) -> Searched:
    """Return an incumbent with the smallest interval whose best is close to ``found``'s, and what cut that short."""
    intervals, cut = smaller_intervals(found, widen), None
    decided = next(intervals)  # which comes at once; without it there is no plan to go on with
    try:
        if not ended:
            for smaller in intervals:
                decided = smaller
    except KeyboardInterrupt:
        cut = "interrupted"
    except OutOfTime:
        cut = "time limit"
    interval, scheduled = decided
    at_that = Incumbent(at_interval(found.problem, interval), found.settings, start=scheduled)
    at_that.floor_ns = found.floor_ns
    return at_that, cut


def with_interval(found: Planned, interval: int) -> Planned:
    """Return the stages of a plan with a pattern, checked, with updates as often or rarer: every ``interval``
    microbatches; its operations keep their order where the integer program found it."""
    plan = found.plan
    assert plan.pattern is not None
    problem = Problem(plan.chain, plan.platform, plan.policy)
    best = Scheduled(found.evaluation.period_ns, plan.allocation, plan.pattern)
    other = rescheduled(problem, best, interval)
    bounds = tuple(bound for bound in plan.lower_bounds if bound.any_interval)
    policy = at_interval(problem, interval).policy
    pattern = None if other is None else other.pattern
    plan = replace(plan, policy=policy, pattern=pattern, lower_bounds=bounds)
    return Planned(plan, check(plan))


def _bounds(asked: Problem, incumbent: Incumbent, scheduled: Scheduled, kind: ScheduleKind) -> Iterator[Bound]:
    """Yield the bounds that the search proved and whose class contains ``scheduled``, or of a drained one those of its
    class, as far as they don't follow from that of all plans, which comes last."""
    problem = incumbent.problem
    up_to = (incumbent.bounded_up_to or scheduled.cost) if incumbent.periodic else None
    of_any = any_bound(asked if asked.policy.open else problem, up_to)
    found = incumbent.bounds if incumbent.periodic else []  # those are bounds on a period that never drains
    if problem.policy.drains and not problem.chain.variants:
        own = scheduled.schedule.kind if scheduled.schedule else kind
        found = [bound for bounds in OF_DRAINED for bound in bounds(problem, own)]
    for bound in found:
        if not class_violations(bound, scheduled.allocation, problem.platform) and not follows(bound, of_any):
            yield bound
    yield of_any

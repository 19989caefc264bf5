"""What would a plan's problem take with weights kept otherwise? As far as about a second of search tells.

So that nobody takes delayed weights without need, or drains without knowing the price. The work is bounded by counts,
not by a clock: equal inputs give equal answers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ...check.validate import check
from ...deadline import OutOfTime
from ...errors import BadInput, Infeasible
from ...partition.cuts import legal_cuts
from ...partition.madpipe.exact import smallest_period
from ...partition.madpipe.tables import MOST_CUTS
from ...plan import Allocation, Alternative, Plan, Provenance, Schedule
from ...problem import WEIGHTS, Checkpointing, Problem, Weights
from ...schedule.kinds import kinds_for
from ..drained.plan import plan_drained
from ..drained.proposals import widened
from ..least_late import drained_quickly
from ..periodic.incumbent import Incumbent, Settings
from ..periodic.portfolio import MOST_PLACES, places, propose_contiguous
from ..plan import Planned, make_plan

COMPARED = [weights for weights, rules in WEIGHTS.items() if not (rules.reads_newest or rules.fresher)]
MOST_STEPS = 3 * 10**5  # of simulated mini-batches, which take as long
_DRAINED = 24  # mini-batches that a search beyond the contiguous plan simulates, about


def with_alternatives(
    planned: Planned,
    problem: Problem,
    settings: Settings | None = None,
    drained: bool = True,
    find: Callable[[Problem], Planned] | None = None,
) -> Planned:
    """Return the plan with what others take with weights kept otherwise, at the same interval: its own stages, the
    best contiguous ones, and where layers must stay on one GPU, the best with several stages on one; where these take
    longer than the plan, and that doesn't drain, what ``find``, the search that it is from, finds. What drains is the
    best that a quick search under all such schedules finds, if that comes to an end; without ``drained`` it was made
    before.

    Left out are what the plan names already, all for networks and platforms that take longer to search, the
    drained one for mini-batches that take longer to simulate, and what the problem's deadline cuts off.
    """
    plan = planned.plan
    if places(problem) > MOST_PLACES:
        return planned
    found = list(plan.provenance.alternatives)
    if settings is not None:
        settings.status.phase = "other weights"
    known = {plan.policy.weights, *(x.weights for x in found)}
    with suppress(OutOfTime):
        for weights in COMPARED:
            if weights not in known and problem.policy.goes_with(weights):
                wanted = drained and WEIGHTS[weights].drains
                quick = _drained(problem, plan.interval, settings) if wanted else []
                found += quick or _alternative(problem, weights, planned, find)
    found.sort(key=lambda x: COMPARED.index(x.weights) if x.weights in COMPARED else -1)
    options = dict(plan.provenance.options)
    if plan.allocation.data_parallel:
        with suppress(OutOfTime):
            options["pipeline_ns"] = _pipeline_ns(problem, plan)
    provenance = replace(plan.provenance, options=options, alternatives=tuple(found))
    return replace(planned, plan=replace(plan, provenance=provenance))


def _pipeline_ns(problem: Problem, plan: Plan) -> int | None:
    """Return the period of the best contiguous pipeline without replicas, for a plan that has one stage alone."""
    alone = replace(problem.with_policy(plan.policy), replicas=False)
    try:
        return make_plan(alone, "contiguous", settings=Settings(explained=False)).evaluation.period_ns
    except Infeasible:
        return None


def _drained(problem: Problem, interval: int, settings: Settings | None) -> list[Alternative]:
    """Return what the best plan takes that drains, by a quick search; nothing where that takes long."""
    found = drained_quickly(problem, interval, settings or Settings())
    if found is None or found.plan.provenance.solver_status == "time limit":
        return []
    return [Alternative(found.plan.policy.weights, interval, found.evaluation.period_ns, quick=True)]


def _under(problem: Problem, weights: Weights, interval: int) -> Problem:
    policy = replace(problem.policy, weights=weights, accumulate=interval, vertical_sync=False)
    allowed: Checkpointing = "none" if problem.checkpointing == "none" else "stages"
    here = replace(problem.with_policy(policy), checkpointing=allowed)
    here.deadline.check()
    return here


def _alternative(
    problem: Problem, weights: Weights, planned: Planned, find: Callable[[Problem], Planned] | None
) -> list[Alternative]:
    """Return what the best plan found takes, also of the stages that are ``planned``; nothing where a second isn't
    enough to tell how long it drains."""
    plan, interval, found = planned.plan, planned.plan.interval, list[int]()
    here, quick = _under(problem, weights, interval), plan.policy.drains or WEIGHTS[weights].drains
    kind = kinds_for(weights)[0]
    if here.policy.drains:
        steps = interval * (4 * min(len(here.platform), len(here.chain)) - 2)
        if steps > MOST_STEPS:
            return []
        propose = widened(_contiguous, walks=False) if _DRAINED * steps <= MOST_STEPS else _contiguous
        incumbent, _ = plan_drained(here, propose, Settings(), False, kind, None)
    else:
        incumbent = Incumbent(here, Settings())
        if not plan.policy.drains:
            incumbent.try_(Allocation(plan.allocation.stages))
        _contiguous(incumbent)
        _with_ties_on_one_device(incumbent)
        longer = incumbent.best is None or incumbent.best.cost > planned.evaluation.period_ns
        if find is not None and longer and not plan.policy.drains:
            with suppress(BadInput, Infeasible):
                found.append(find(replace(here, checkpointing=problem.checkpointing)).evaluation.period_ns)
    if incumbent.best is None:
        return [Alternative(weights, interval, min(found, default=None), quick)]
    schedule = Schedule(kind, interval if here.policy.drains else None)
    best = incumbent.best
    plan = Plan(
        here.chain, here.platform, here.policy, best.allocation, best.pattern, (), Provenance("contiguous"), schedule
    )
    return [Alternative(weights, interval, min([check(plan).period_ns, *found]), quick)]


def _contiguous(incumbent: Incumbent) -> None:
    incumbent.try_all(propose_contiguous(incumbent))


def _with_ties_on_one_device(incumbent: Incumbent) -> None:
    problem = incumbent.problem
    bound = not problem.policy.updates_together and problem.chain.tied and len(problem.platform) > 1
    if bound and len(legal_cuts(problem, several=True)) <= MOST_CUTS + 1:
        found = smallest_period(problem, "full")
        incumbent.try_all([] if found is None else [found])

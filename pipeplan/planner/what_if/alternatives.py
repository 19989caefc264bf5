"""What would a plan's problem take with weights kept otherwise? As far as about a second of search tells.

So that nobody takes delayed weights without need, or drains without knowing the price. The work is bounded by counts,
not by a clock: equal inputs give equal answers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ...check.validate import judged
from ...deadline import OutOfTime
from ...errors import BadInput, Infeasible
from ...partition.balance import data_parallel
from ...plan import Allocation, Alternative, Plan, Provenance, Schedule
from ...problem import WEIGHTS, Checkpointing, Problem, Weights
from ..least_late import found_quickly
from ..periodic.incumbent import Incumbent, Settings
from ..periodic.portfolio import EFFORTS, MOST_PLACES, places, propose_contiguous
from ..plan import Planned, make_plan

COMPARED = [weights for weights, rules in WEIGHTS.items() if not (rules.reads_newest or rules.fresher)]
MOST_RECOMPUTED = 1000  # layers, each of which may run again
QUICK = EFFORTS["quick"]
NEARLY = 1.1  # as long as a pipeline at most: what takes none is then said


def with_alternatives(
    planned: Planned, problem: Problem, settings: Settings | None = None, drained: bool = True
) -> Planned:
    """Return the plan with what others take with weights kept otherwise, at the same interval: of those that drain by
    a quick search, unless without ``drained`` that was made before; of others the plan's own stages and the best
    contiguous ones, and where there are none, or these take longer than a plan that never drains, those of a quick
    search.

    Left out are what the plan names already, all for networks and platforms that take longer to search, the
    drained one for mini-batches that take longer to simulate, and what the problem's deadline cuts off.
    """
    plan = planned.plan
    if places(problem) > MOST_PLACES:
        return planned
    found, settings = list(plan.provenance.alternatives), settings or Settings()
    settings.status.phase = "other weights"
    known = {plan.policy.weights, *(x.weights for x in found)}
    with suppress(OutOfTime):
        for weights in COMPARED:
            asked = drained or not WEIGHTS[weights].drains
            if asked and weights not in known and problem.policy.goes_with(weights):
                found += _alternative(problem, weights, planned, settings)
    found.sort(key=lambda x: COMPARED.index(x.weights) if x.weights in COMPARED else -1)
    if plan.allocation.data_parallel:
        with suppress(OutOfTime):
            plan = plan.telling(pipeline_ns=_pipeline_ns(problem, plan))
    return replace(planned, plan=replace(plan, provenance=replace(plan.provenance, alternatives=tuple(found))))


def with_unpipelined(problem: Problem, planned: Planned) -> Planned:
    """Return a plan that drains with what one stage on all GPUs takes instead, if that isn't much longer, in
    ``provenance.options["unpipelined_ns"]``; what replicas share is as the policy of ``problem`` says."""
    plan = planned.plan
    piped = plan.policy.drains and not plan.allocation.data_parallel
    if not piped or problem.most_replicas == 1 or len(plan.chain) > MOST_RECOMPUTED:
        return planned
    policy = replace(
        plan.policy, zero=problem.policy.zero, bucket_parameters=problem.policy.bucket_parameters, coarsening=None
    )
    here = replace(problem, chain=plan.chain, policy=policy)
    schedule, found = Schedule("1f1b", plan.interval), list[int]()
    with suppress(BadInput, OutOfTime):
        for allocation in data_parallel(here):
            one = Plan(plan.chain, plan.platform, policy, allocation, None, (), Provenance("data-parallel"), schedule)
            result, broken = judged(one)
            found += [result.period_ns] if result is not None and not broken else []
    least = min(found, default=None)
    if least is None or least > NEARLY * planned.evaluation.period_ns:
        return planned
    return replace(planned, plan=plan.telling(unpipelined_ns=least))


def _pipeline_ns(problem: Problem, plan: Plan) -> int | None:
    """Return the period of the best contiguous pipeline without replicas, for a plan that has one stage alone."""
    alone = replace(problem.with_policy(plan.policy), replicas=False)
    try:
        return make_plan(alone, "contiguous", settings=Settings(explained=False)).evaluation.period_ns
    except Infeasible:
        return None


def _alternative(problem: Problem, weights: Weights, planned: Planned, settings: Settings) -> list[Alternative]:
    """Return what the best plan found takes; nothing of one that drains where a quick search doesn't come to an end."""
    plan, drains, periods = planned.plan, WEIGHTS[weights].drains, list[int]()
    quickly = drains or plan.policy.drains
    policy = replace(problem.policy, weights=weights, accumulate=plan.interval, vertical_sync=False)
    here = problem.with_policy(policy)
    here.deadline.check()
    if drains:
        quick = found_quickly(here, settings)
        if quick is None or quick.plan.provenance.solver_status == "time limit":
            return []
        periods.append(quick.evaluation.period_ns)
    else:
        whole: Checkpointing = "none" if problem.checkpointing == "none" else "stages"
        few = Settings(settings.solver, QUICK.solver_s, QUICK.nodes)
        incumbent = Incumbent(replace(here, checkpointing=whole), few)
        if not plan.policy.drains:
            incumbent.try_(Allocation(plan.allocation.stages))
        incumbent.try_all(propose_contiguous(incumbent))
        periods += [] if incumbent.best is None else [incumbent.best.cost]
        longer = not plan.policy.drains and periods > [planned.evaluation.period_ns]
        if longer or not periods:
            quick, quickly = found_quickly(here, settings), True
            periods += [] if quick is None else [quick.evaluation.period_ns]
    return [Alternative(weights, plan.interval, min(periods, default=None), quickly)]

"""What would a plan's problem take with weights kept otherwise? As far as about a second of search tells.

So that nobody takes delayed weights without need, or drains without knowing the price. The work is bounded by counts,
not by a clock: equal inputs give equal answers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ..check.validate import check
from ..deadline import OutOfTime
from ..errors import Infeasible
from ..partition.cuts import legal_cuts
from ..partition.madpipe.exact import smallest_period
from ..partition.madpipe.tables import MOST_CUTS
from ..plan import Alternative, Plan, Provenance, Schedule
from ..problem import Checkpointing, Problem, Weights
from ..schedule.kinds import kinds_for
from .incumbent import Incumbent, Settings
from .plan import Planned, make_plan
from .portfolio import MOST_PLACES, places, propose_contiguous
from .proposals import with_others
from .simulated import plan_drained

COMPARED: tuple[Weights, ...] = ("flush", "2bw", "stash")
MOST_STEPS = 3 * 10**5  # of simulated mini-batches, which take as long
_DRAINED = 24  # mini-batches that a search beyond the contiguous plan simulates, about


def with_alternatives(planned: Planned, problem: Problem) -> Planned:
    """Return the plan with what the best contiguous plans take with weights kept otherwise, at the same interval; and
    where layers must stay on one GPU, the best with several stages on one.

    That of 2bw is its own where nobody stated one and the plan's updates come with every microbatch: 2bw would then
    have one microbatch in flight.
    Stages are stored or recomputed whole. Left out are all for networks and platforms that take longer to search, the
    drained one for mini-batches that take longer to simulate, and what the problem's deadline cuts off.
    """
    plan = planned.plan
    if places(problem) > MOST_PLACES:
        return planned
    found = list(plan.provenance.alternatives)
    with suppress(OutOfTime):
        for weights in COMPARED:
            if weights != plan.policy.weights and problem.policy.goes_with(weights):
                own = weights == "2bw" and problem.policy.accumulate is None and not problem.policy.drains
                found += [_at_its_best(problem)] if own else _alternative(problem, weights, plan.interval)
    return replace(planned, plan=replace(plan, provenance=replace(plan.provenance, alternatives=tuple(found))))


def _at_its_best(problem: Problem) -> Alternative:
    """Return what the best contiguous plan under 2bw takes, at the interval that is decided for it."""
    try:
        found = make_plan(_under(problem, "2bw", None), "contiguous", settings=Settings(explained=False))
    except Infeasible:
        return Alternative("2bw", 1, None)
    return Alternative("2bw", found.plan.interval, found.evaluation.period_ns)


def _under(problem: Problem, weights: Weights, interval: int | None) -> Problem:
    policy = replace(problem.policy, weights=weights, accumulate=interval, vertical_sync=False)
    allowed: Checkpointing = "none" if problem.checkpointing == "none" else "stages"
    here = replace(problem.with_policy(policy), checkpointing=allowed)
    here.deadline.check()
    return here


def _alternative(problem: Problem, weights: Weights, interval: int) -> list[Alternative]:
    """Return what the best plan found takes; nothing where a second isn't enough to tell."""
    here = _under(problem, weights, interval)
    kind = kinds_for(weights)[0]
    if kind == "flush":
        steps = interval * (4 * min(len(here.platform), len(here.chain)) - 2)
        if steps > MOST_STEPS:
            return []
        propose = with_others(_contiguous) if _DRAINED * steps <= MOST_STEPS else _contiguous
        incumbent, _ = plan_drained(here, propose, Settings(), False, kind, None)
    else:
        incumbent = Incumbent(here, Settings())
        _contiguous(incumbent)
        _with_ties_on_one_device(incumbent)
    if incumbent.best is None:
        return [Alternative(weights, interval, None)]
    schedule = Schedule(kind, interval if kind == "flush" else None)
    best = incumbent.best
    plan = Plan(
        here.chain, here.platform, here.policy, best.allocation, best.pattern, (), Provenance("contiguous"), schedule
    )
    return [Alternative(weights, interval, check(plan).period_ns)]


def _contiguous(incumbent: Incumbent) -> None:
    incumbent.try_all(propose_contiguous(incumbent))


def _with_ties_on_one_device(incumbent: Incumbent) -> None:
    problem = incumbent.problem
    bound = not problem.policy.updates_together and problem.chain.tied and len(problem.platform) > 1
    if bound and len(legal_cuts(problem, several=True)) <= MOST_CUTS + 1:
        found = smallest_period(problem, "full")
        incumbent.try_all([] if found is None else [found])

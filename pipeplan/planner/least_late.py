"""Which weights where nobody says? Of those that never drain, the ones with the least late gradients, if nearly the
fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from ..check.bounds import any_bound
from ..check.delays import plan_delays
from ..errors import Infeasible
from ..plan import Alternative
from ..problem import Problem
from ..schedule.weight_versions import average_delay
from .plan import Planned

DEARER = Fraction(1, 50)  # that a period may be longer for gradients that are less late

Found = tuple[Planned, Problem]  # the problem may have its layers in another order


def least_late(problem: Problem, find: Callable[[Problem], Found]) -> Found:
    """Return of what ``find`` finds of ``problem``, whose policy is 2bw, under that and ``stash`` the plan whose
    gradients are least late on average, of those within 2% of the best period; it names what the other takes.

    2bw is only searched if its plans can be so much shorter: without replicas ``stash`` holds no more and waits for
    nothing. An open interval is one of 2bw alone, which can have any. Infeasible where neither has a plan.
    """
    if problem.policy.open or not problem.policy.goes_with("stash"):
        return find(problem)
    first: Found | None = None
    try:
        stashed = problem.with_policy(replace(problem.policy, weights="stash"))
        first = find(replace(stashed, deadline=problem.deadline.part(2)))
    except Infeasible:
        if _holds_no_more(problem):
            raise
    if first is not None and not _worth_asking(problem, first[0]):
        return first
    try:
        second = find(problem)
    except Infeasible:
        if first is None:
            raise
        return first
    if first is None:
        return second
    one, other = sorted((first, second), key=lambda found: _late(found[0]))
    if _period(one) > _period(other) * (1 + DEARER):
        one, other = other, one
    plan, others = one[0].plan, other[0].plan
    told = Alternative(others.policy.weights, others.interval, other[0].evaluation.period_ns)
    provenance = replace(plan.provenance, alternatives=(*plan.provenance.alternatives, told))
    return replace(one[0], plan=replace(plan, provenance=provenance)), one[1]


def _worth_asking(problem: Problem, stashed: Planned) -> bool:
    """Whether 2bw may be preferred to a plan under ``stash``."""
    if stashed.plan.provenance.solver_status == "interrupted" or problem.deadline.passed:
        return False
    if _late(stashed) > 1:
        return True
    period = stashed.evaluation.period_ns
    return not _holds_no_more(problem) and period > any_bound(problem, period).period_ns * (1 + DEARER)


def _holds_no_more(problem: Problem) -> bool:
    """Whether what fits under 2bw does under ``stash``, in the same time: with no more than two versions of weights."""
    several = problem.replicas and len(problem.platform) > 1
    return not several and not problem.chain.tied and problem.policy.update_interval() >= 2 * len(problem.platform)


def _period(found: Found) -> int:
    return found[0].evaluation.period_ns


def _late(planned: Planned) -> float:
    """Return by how many updates the gradients of a plan are late, on average over its stages."""
    return average_delay(plan_delays(planned.plan, planned.evaluation.graph))

"""What would a plan take if layers that share weights could be in several stages? Other weights policies let them."""

from __future__ import annotations

from dataclasses import replace

from ..deadline import OutOfTime
from ..errors import Infeasible
from ..plan import OtherWeights
from ..problem import Problem, Weights
from .plan import Planned, make_plan

APART: Weights = "2bw"  # of the policies that keep copies equal the one that doesn't drain, like those that can't


def with_other_weights(found: Planned, problem: Problem) -> Planned:
    """Return the plan ``found`` for ``problem``, with what its policy costs by keeping layers in one stage.

    Nothing is added where nothing is kept together, the other policy has no shorter plan, or the time is up.
    """
    policy = problem.policy
    if not problem.chain.tied or policy.updates_together or len(problem.platform) == 1:
        return found
    other = problem.with_policy(replace(policy, weights=APART, vertical_sync=False))
    try:
        period = make_plan(other, "contiguous").evaluation.period_ns
    except (Infeasible, OutOfTime):
        return found
    if period >= found.evaluation.period_ns:
        return found
    provenance = replace(found.plan.provenance, other_weights=OtherWeights(APART, period))
    return replace(found, plan=replace(found.plan, provenance=provenance))

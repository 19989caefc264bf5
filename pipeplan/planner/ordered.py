"""Which plan results if its GPUs run the best order of passes that is found, instead of a schedule's?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..check.validate import check, class_violations
from ..deadline import NEVER, Deadline
from ..errors import BadInput, InvalidPlan
from ..plan import Allocation, Plan, Schedule
from ..schedule.synthesis.problem import NoRoom
from ..schedule.synthesis.search import INTERRUPTED
from ..schedule.written_program import order_of_program
from .best_order import OWN, PLACEMENTS, TRIED, Found, best_orders
from .other_schedules import schedule_stages
from .plan import Planned

WHY_NOT = "the best order drains every mini-batch, which is for weights flush; the policy is {weights}"


def ordered_alike(plan: Plan) -> Plan:
    """Return a plan that drains, on its own stages in the best order that is found; checked."""
    if not plan.policy.drains:
        raise BadInput(f"plan: {WHY_NOT.format(weights=plan.policy.weights)}")
    found = in_order(plan, best_orders(plan, plan.schedule.mini_batch, placements=(OWN,))[0])
    check(found)
    return found


def in_order(plan: Plan, found: Found) -> Plan:
    """Return the plan with the stages and the order that were found for it, which drains; it isn't checked."""
    program = found.order.program
    own = found.placement == OWN
    stages = plan.allocation.stages if own else schedule_stages(plan, PLACEMENTS[found.placement])
    schedule = Schedule("written", program.microbatches, order=order_of_program(program))
    policy = replace(plan.policy, weights="flush", accumulate=program.microbatches, vertical_sync=False)
    allocation = Allocation(stages)
    bounds = tuple(
        bound
        for bound in plan.lower_bounds
        if bound.schedule is None and not class_violations(bound, allocation, plan.platform)
    )
    told = {"bound_ns": found.order.bound_ns, "value_ns": found.order.value_ns, "moves": found.order.moves}
    provenance = replace(plan.provenance, options={**plan.provenance.options, "order": told})
    return replace(
        plan,
        policy=policy,
        allocation=allocation,
        pattern=None,
        lower_bounds=bounds,
        provenance=provenance,
        schedule=schedule,
    )


def ordered(planned: Planned, deadline: Deadline = NEVER, placements: Sequence[str] = TRIED) -> Planned:
    """Return the plan, which drains, in the best order that is found on its stages or on others on its GPUs; as it is
    where none is better."""
    plan = planned.plan
    if plan.provenance.solver_status == INTERRUPTED:
        return planned
    try:
        found = best_orders(plan, plan.schedule.mini_batch, placements=placements, deadline=deadline)
    except KeyboardInterrupt:
        return replace(planned, plan=_cut(plan, INTERRUPTED))
    except NoRoom:  # not even for whole backwards
        return planned
    for one in found:
        other = in_order(plan, one)
        if one.order.cut is not None:
            other = _cut(other, one.order.cut)
        try:
            evaluation = check(other)
        except InvalidPlan:  # another engine's buffers need room, too
            continue
        if evaluation.period_ns < planned.evaluation.period_ns:
            return Planned(other, evaluation)
    return planned


def _cut(plan: Plan, status: str) -> Plan:
    return replace(plan, provenance=replace(plan.provenance, solver_status=status))

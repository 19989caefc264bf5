"""Which plan results if its GPUs run the best order of passes that is found, instead of a schedule's?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...check.validate import check, class_violations
from ...deadline import NEVER, Deadline
from ...errors import BadInput, InvalidPlan
from ...plan import Allocation, Plan, Schedule, Stage
from ...schedule.kinds import kind_of, program_of_kind
from ...schedule.program import Program, unequal
from ...schedule.programs.slots import shares
from ...schedule.synthesis.problem import NoRoom
from ...schedule.synthesis.recomputing import recomputed_early
from ...schedule.synthesis.synthesize import INTERRUPTED
from ...schedule.written import order_of_program
from ..plan import Planned
from ..simulated.other_schedules import schedule_stages
from .best_order import OWN, PLACEMENTS, TRIED, Found, best_orders, placed_graph

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
    own = found.placement == OWN
    stages = plan.allocation.stages if own else schedule_stages(plan, PLACEMENTS[found.placement])
    told = {"bound_ns": found.order.bound_ns, "value_ns": found.order.value_ns, "moves": found.order.moves}
    return _written(plan, found.order.program, stages, told)


def _early(plan: Plan) -> Plan | None:
    """Return a plan that drains in its own order with recomputations earlier; None where that cannot be."""
    graph = placed_graph(plan, OWN, plan.schedule.mini_batch)
    kind = kind_of(plan)
    if unequal(graph, "") is not None or kind.joins or not graph.recomputing:
        return None
    count = plan.schedule.mini_batch
    share = max(shares(count, graph.resources[graph.stages[0].resource].replicas))
    program = program_of_kind(graph.first_replicas(), plan.schedule, plan.pattern, share)
    early = recomputed_early(graph, program, count)
    return None if early is None else _written(plan, early, plan.allocation.stages, {"recomputes": "early"})


def _written(plan: Plan, program: Program, stages: tuple[Stage, ...], told: Mapping[str, Any]) -> Plan:
    schedule = Schedule("written", program.microbatches, order=order_of_program(program))
    policy = plan.policy.drained(program.microbatches)
    allocation = Allocation(stages)
    bounds = tuple(
        bound
        for bound in plan.lower_bounds
        if bound.schedule is None and not class_violations(bound, allocation, plan.platform)
    )
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
    """Return the plan, which drains, in the best order that is found on its stages or on others on its GPUs, or in its
    own with recomputations earlier; as it is where none is better."""
    plan = planned.plan
    if plan.provenance.solver_status == INTERRUPTED:
        return planned
    early = _early(plan)
    if early is not None:
        planned = _better(planned, early)
    try:
        found = best_orders(plan, plan.schedule.mini_batch, placements=placements, deadline=deadline)
    except KeyboardInterrupt:
        return replace(planned, plan=_cut(planned.plan, INTERRUPTED))
    except NoRoom:  # not even for whole backwards
        return planned
    for one in found:
        other = in_order(plan, one)
        if one.order.cut is not None:
            other = _cut(other, one.order.cut)
        better = _better(planned, other)
        if better is not planned:
            return better
    return planned


def _better(planned: Planned, other: Plan) -> Planned:
    """Return another plan if it is valid and better."""
    try:
        evaluation = check(other)
    except InvalidPlan:  # another engine's buffers need room, too
        return planned
    return Planned(other, evaluation) if evaluation.period_ns < planned.evaluation.period_ns else planned


def _cut(plan: Plan, status: str) -> Plan:
    return replace(plan, provenance=replace(plan.provenance, solver_status=status))

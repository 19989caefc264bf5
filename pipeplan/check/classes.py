"""Does the class that a lower bound is for contain a plan? A sentence for each reason why it doesn't."""

from __future__ import annotations

from typing import get_args

from ..choices import TargetName
from ..plan import Allocation, Bound, Plan
from ..problem import Platform
from ..registry import Late

TARGET_VIOLATIONS = Late("check.targets:target_violations")


def bound_violations(plan: Plan, period: int | None) -> list[str]:
    """Return each lower bound whose class doesn't contain the plan, or that is above the plan's own period (ns); None
    where that means nothing."""
    found = []
    for bound in plan.lower_bounds:
        if period is not None and bound.period_ns > period:
            found.append(f"{_bound_name(bound)} is above the period {period} ns")
        if bound.any_interval and not plan.policy.rules.any_interval:
            found.append(f"{_bound_name(bound)} is for any interval between updates, not for {plan.policy.weights}")
        if bound.schedule not in (None, plan.schedule.kind):
            found.append(f"{_bound_name(bound)} is for {bound.schedule}, not {plan.schedule.kind}")
        if bound.allocation in get_args(TargetName):
            outside = TARGET_VIOLATIONS(plan, bound.allocation)
            found += [f"{_bound_name(bound)} does not hold for this plan: {reason}" for reason in outside]
        found += class_violations(bound, plan.allocation, plan.platform)
    return found


def class_violations(bound: Bound, allocation: Allocation, platform: Platform) -> list[str]:
    """Return why ``allocation`` is outside the class of plans that ``bound`` holds for; empty when it is inside."""
    name, stages = _bound_name(bound), allocation.stages
    inside = {
        "contiguous": allocation.contiguous and allocation.keeps_units(platform),
        "one-special": allocation.one_special,
        "any": True,
    }
    found = []
    if not inside.get(bound.allocation, True):  # of a target's class the schedule decides, too
        found.append(f"{name} does not hold for this plan: its stages are not in that class")
    if not bound.replicas and any(stage.replicas > 1 for stage in stages):
        found.append(f"{name} is for plans without replicas; this one has some")
    if bound.checkpointing == "none" and any(stage.checkpoint for stage in stages):
        found.append(f"{name} is for plans without checkpointing; this one recomputes layers")
    in_part = any(stage.checkpoint not in ((), ((stage.start, stage.stop),)) for stage in stages)
    if bound.checkpointing == "stages" and in_part:
        found.append(f"{name} is for plans that recompute whole stages; this one recomputes parts of some")
    return found


def _bound_name(bound: Bound) -> str:
    return f"the lower bound {bound.period_ns} ns for class {bound.allocation}"

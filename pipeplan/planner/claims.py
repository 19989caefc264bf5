"""Do the lower bounds that a plan's file claims follow from its problem, by the searches that prove them, run anew?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..check.bounds import bounded, overstated
from ..check.targets import TARGETS
from ..deadline import NEVER, Deadline
from ..partition.contiguous.contiguous import smallest_period
from ..plan import Bound, Plan
from ..registry import Late
from ..schedule.kinds import kind_of
from ..status import Status

target_bound: Callable[..., int | None] = Late("planner.what_if.target:target_bound")
proved: Callable[..., Bound | None] = Late("check.bounds.drained.proofs:proved")
proved_special: Callable[..., int | None] = Late("planner.periodic.special:proved_special")


def derived(plan: Plan, deadline: Deadline = NEVER, status: Status | None = None) -> tuple[Plan, list[str]]:
    """Return ``plan`` with none of its bounds merely claimed, and a sentence for each claim that cannot be derived.

    It takes as long as planning did; OutOfTime at the ``deadline``. Bounds of narrower classes are on periods of
    patterns that never drain.
    """
    found = []
    for bound in plan.lower_bounds:
        if bound.claimed:
            (status or Status()).say(f"bound of class {bound.allocation}")
            found += _refuted(plan, bound, deadline)
    return replace(plan, lower_bounds=tuple(replace(bound, claimed=False) for bound in plan.lower_bounds)), found


def _refuted(plan: Plan, bound: Bound, deadline: Deadline) -> list[str]:
    kind, problem = kind_of(plan), replace(bounded(plan, bound), deadline=deadline)
    claim = f"lower_bounds: {bound.period_ns} ns of class {bound.allocation} cannot be derived"
    least_ns: int | None = None
    if bound.allocation in TARGETS:
        least_ns = target_bound(problem, bound.allocation, bound.schedule)
    elif bound.schedule is not None or (kind.drains and bound.allocation == "contiguous"):
        drained = proved(problem, bound.allocation, bound.schedule)
        least_ns = None if drained is None else drained.period_ns
    elif kind.build is not None or kind.drains:
        return [f"{claim}: that class has bounds on patterns that never drain; the schedule is {plan.schedule.kind}"]
    elif bound.allocation == "contiguous":
        best = smallest_period(problem)
        least_ns = None if best is None else best.lower_bound_ns
    elif not problem.replicas and problem.checkpointing == "none":  # one special device
        least_ns = proved_special(problem)
    if least_ns is None:
        return [f"{claim} with replicas {bound.replicas} and checkpointing {bound.checkpointing}: nothing proves such"]
    found = overstated(bound, least_ns)
    if found:
        deadline.check()  # where it ended the search, more may follow than was proved by then
    return found

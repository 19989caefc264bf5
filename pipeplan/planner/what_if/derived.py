"""Do the lower bounds that a plan's file claims follow from its problem? The searches that prove them, run anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ...check.bounds import bounded, overstated
from ...check.bounds.drained.proofs import proved
from ...check.targets import TARGETS
from ...deadline import NEVER, Deadline
from ...partition.contiguous.contiguous import smallest_period
from ...plan import Bound, Plan
from ...problem import Problem
from ...schedule.kinds import kind_of
from ...status import Status
from ..periodic.special import proved_special
from .target import target_bound


def _contiguous(problem: Problem) -> int | None:
    best = smallest_period(problem)
    return None if best is None else best.lower_bound_ns


def _one_special(problem: Problem) -> int | None:
    plain = not problem.replicas and problem.checkpointing == "none"
    return proved_special(problem) if plain else None


def _drained(problem: Problem, bound: Bound) -> int | None:
    found = proved(problem, bound.allocation, bound.schedule)
    return None if found is None else found.period_ns


PROOFS: dict[str, Callable[[Problem], int | None]] = {"contiguous": _contiguous, "one-special": _one_special}


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
    kind = kind_of(plan)
    claim = f"lower_bounds: {bound.period_ns} ns of class {bound.allocation} cannot be derived"
    prove = PROOFS.get(bound.allocation)
    if bound.allocation in TARGETS:
        prove = partial(target_bound, name=bound.allocation, kind=bound.schedule)
    elif bound.schedule is not None or (kind.drains and bound.allocation == "contiguous"):
        prove = partial(_drained, bound=bound)
    elif kind.simulated is not None or kind.drains:
        return [f"{claim}: that class has bounds on patterns that never drain; the schedule is {plan.schedule.kind}"]
    assert prove is not None, "bounds of class any under any schedule are never claimed"
    least_ns = prove(replace(bounded(plan, bound), deadline=deadline))
    if least_ns is None:
        return [f"{claim} with replicas {bound.replicas} and checkpointing {bound.checkpointing}: nothing proves such"]
    found = overstated(bound, least_ns)
    if found:
        deadline.check()  # where it ended the search, more may follow than was proved by then
    return found

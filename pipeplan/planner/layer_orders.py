"""In which order are a DAG's layers planned? In the profile's, or in another where contiguous stages win by it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ..check.bounds import quick_proof
from ..deadline import OutOfTime
from ..partition.contiguous.contiguous import contiguous
from ..partition.layer_orders import other_orders, several_orders
from ..problem import MICROBATCHES_PER_DEVICE, Problem
from .periodic.incumbent import MARGIN, Settings
from .periodic.interval import at_interval
from .plan import Planned


def planned_in_best_order(
    problem: Problem, settings: Settings, plan: Callable[[Problem], Planned]
) -> tuple[Planned, Problem]:
    """Return the ``plan`` of ``problem`` in the order of its layers whose contiguous stages have the shortest period,
    and the problem so.

    Another than the profile's has to win by more than a thousandth. Layers stay as they are where devices have profiles
    of their own, which are by the profile's order, and where another order comes too late for the problem's deadline.
    """
    if problem.platform.devices[0].times is not None or not several_orders(problem.chain):
        return plan(problem), problem
    settings.status.phase = "order of the layers"
    tried, best, best_ns = 1, problem, _period_ns(problem)
    if best_ns is None or best_ns > quick_proof(problem).period_ns * (1 + settings.gap):
        with suppress(OutOfTime):
            for order in other_orders(problem.chain):
                other = replace(problem, chain=problem.chain.reordered(order))
                period, tried = _period_ns(other), tried + 1
                if period is not None and (best_ns is None or period < best_ns - best_ns // MARGIN):
                    best, best_ns = other, period
    found = plan(best)
    told = {**found.plan.provenance.options, "layer_order": {"orders": tried}}
    return replace(found, plan=replace(found.plan, provenance=replace(found.plan.provenance, options=told))), best


def _period_ns(problem: Problem) -> int | None:
    """Return the shortest period of contiguous stages, each recomputed in whole or not; None where none fit."""
    if problem.policy.accumulate is None and not problem.policy.open:
        count = MICROBATCHES_PER_DEVICE * len(problem.platform)
        problem = at_interval(problem, count if problem.policy.drains else 1)
    whole = problem if problem.checkpointing == "none" else replace(problem, checkpointing="stages")
    with suppress(OutOfTime):
        return next((x.claimed_period_ns for x in contiguous(whole)), None)
    return None

"""In which order are a DAG's layers planned? In the profile's, or in another where stages win by it.

Of periods of contiguous stages the best order is known, or how far it can be. What is simulated, waits for other
stages or shares weights with them is planned in two orders, the profile's and one in which something like it is best.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ...check.bounds import proof
from ...check.validate import class_violations
from ...cost.layer_orders import several_orders
from ...deadline import OutOfTime
from ...errors import Infeasible
from ...partition.contiguous.contiguous import contiguous
from ...partition.layer_orders.layer_order import EFFORTS, Ordered, best_ordered, between_all, orders_matter
from ...plan import Bound, ScheduleKind
from ...problem import MICROBATCHES_PER_DEVICE, Problem
from ...schedule.kinds import KINDS, kinds_for
from ..drained.plan import ALTERNATING
from ..drained.search import EFFORTS as DRAINED_EFFORTS
from ..drained.search import DrainedSearch
from ..periodic.incumbent import MARGIN, Settings
from ..periodic.interval import at_interval
from ..plan import Planned


@dataclass(frozen=True)
class InOrder:
    """A problem whose layers stand as they are to be planned; ``found`` tells what they were chosen from, if at all."""

    problem: Problem
    found: Ordered | None = None
    bound: Bound | None = None

    def told(self, planned: Planned) -> Planned:
        """Return a plan of the problem that says how its order was chosen, with the bound that holds for all orders."""
        if self.found is None:
            return planned
        plan, bound = planned.plan, self.bound
        about = {"ideals": self.found.ideals, "all": self.found.complete}
        provenance = replace(plan.provenance, options={**plan.provenance.options, "layer_order": about})
        bounds = plan.lower_bounds
        if bound is not None and not class_violations(bound, plan.allocation, plan.platform):
            bounds = (bound, *(x for x in bounds if x.allocation != bound.allocation))
        return replace(planned, plan=replace(plan, provenance=provenance, lower_bounds=bounds))


def planned_in_best_order(
    problem: Problem,
    settings: Settings,
    effort: str,
    schedule: ScheduleKind | None,
    plan: Callable[[Problem], Planned],
) -> tuple[Planned, Problem]:
    """Return the best ``plan`` of ``problem`` in an order of its layers that is found for it, and the problem so.

    Infeasible where there is none in the profile's order and in what else is tried.
    """
    kind = KINDS[schedule or kinds_for(problem.policy.weights)[0]]
    if not kind.drains and kind.simulated is None and not problem.policy.vertical_sync and orders_matter(problem):
        arranged = in_best_order(problem, settings, effort)
        return arranged.told(plan(arranged.problem)), arranged.problem
    if problem.platform.devices[0].times is not None or not several_orders(problem.chain):
        return plan(problem), problem
    try:
        given = plan(replace(problem, deadline=problem.deadline.part(2)))
    except Infeasible:
        other = _other_order(problem, settings, effort, kind.drains, None)
        if other is None:
            raise
        return _told(plan(other)), other
    if problem.deadline.passed or given.plan.provenance.solver_status == "interrupted":
        return given, problem
    other = _other_order(problem, settings, effort, kind.drains, given)
    if other is None:
        return given, problem
    with suppress(Infeasible, OutOfTime):
        found = plan(other)
        if _shorter(found.evaluation.period_ns, given.evaluation.period_ns):
            return _told(found), other
    return _told(given), problem


def _told(planned: Planned) -> Planned:
    """Return a plan that says that it is the best of those in two orders."""
    plan = planned.plan
    provenance = replace(plan.provenance, options={**plan.provenance.options, "layer_order": {"orders": 2}})
    return replace(planned, plan=replace(plan, provenance=provenance))


def _shorter(found: int, than: int | None) -> bool:
    """Whether one is shorter than another, if there is one, by more than a thousandth."""
    return than is None or found < than - than // MARGIN


def _other_order(
    problem: Problem, settings: Settings, effort: str, drains: bool, given: Planned | None
) -> Problem | None:
    """Return ``problem`` in an order of the layers in which there may be better plans than the ``given`` one in its
    own; None where none is found.

    It is that of the stages that drain soonest, if that is sooner, or have the shortest period, if that is shorter.
    """
    chain = problem.chain
    settings.status.phase = "order of the layers"
    asked = problem if not chain.tied else replace(problem, tied="together")
    if given is not None:
        asked = asked.with_policy(given.plan.policy)
    elif asked.policy.accumulate is None and not asked.policy.open:
        asked = at_interval(asked, MICROBATCHES_PER_DEVICE * len(problem.platform) if drains else 1)
    try:
        order = (_drained_order if drains else _periodic_order)(asked, effort, given)
    except OutOfTime:
        return None
    moved = chain if order is None else chain.reordered(order)
    return None if moved is chain else replace(problem, chain=moved)


def _drained_order(problem: Problem, effort: str, given: Planned | None) -> tuple[int, ...] | None:
    """Return the order of stages that drain sooner, of those between all ideals; where these are too many, of those
    with a shorter period."""
    between = between_all(problem, EFFORTS[effort])
    if between is None:
        return _periodic_order(problem, effort, given)
    search = DrainedSearch(replace(problem, chain=between), ALTERNATING, DRAINED_EFFORTS["quick"])
    search.run()
    before = None if given is None else given.evaluation.period_ns * (problem.policy.accumulate or 1)
    if search.best is None or not _shorter(search.best.makespan_ns, before):
        return None
    return between.order_through(end for stage in search.best.stages for end in stage.ends)


def _periodic_order(problem: Problem, effort: str, given: Planned | None) -> tuple[int, ...] | None:
    """Return the order of contiguous stages with a shorter period than in the order of ``problem``."""
    found, own = best_ordered(problem, EFFORTS[effort]), next(iter(contiguous(problem)), None)
    before = None if own is None or given is None else own.claimed_period_ns
    return found.order if found is not None and _shorter(found.allocation.claimed_period_ns or 0, before) else None


def in_best_order(problem: Problem, settings: Settings, effort: str) -> InOrder:
    """Return ``problem`` with its layers in the order of the best contiguous stages, by more than a thousandth.

    Where the profile's order has a plan within the gap of the bound for all orders, that stays. At the deadline too.
    """
    settings.status.phase = "order of the layers"
    asked = problem
    if problem.policy.accumulate is None and not problem.policy.open:
        asked = at_interval(problem, 1)
    try:
        given = next(iter(contiguous(asked)), None)
        enough = proof(asked, any_order=True).period_ns * (1 + settings.gap)
        if given is not None and (given.claimed_period_ns or 0) <= enough:
            return InOrder(problem)
        found = best_ordered(asked, EFFORTS[effort])
    except OutOfTime:
        return InOrder(problem)
    if found is None:
        return InOrder(problem)
    period, bound = found.allocation.claimed_period_ns, None
    assert period is not None
    if found.complete and found.allocation.lower_bound_ns:
        least = found.allocation.lower_bound_ns
        bound = Bound(
            "contiguous",
            problem.replicas,
            problem.checkpointing,
            least,
            any_interval=asked.policy.open,
            any_order=True,
        )
    if _shorter(period, None if given is None else given.claimed_period_ns):
        problem = replace(problem, chain=problem.chain.reordered(found.order))
    return InOrder(problem, found, bound)

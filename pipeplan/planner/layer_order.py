"""In which order are a DAG's layers planned? In the profile's, or in another where contiguous stages win by it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..check.bounds import proof
from ..check.validate import class_violations
from ..deadline import OutOfTime
from ..partition.contiguous.contiguous import contiguous
from ..partition.layer_order import EFFORTS, Ordered, best_ordered, orders_matter
from ..plan import Bound, ScheduleKind
from ..problem import Problem
from ..schedule.kinds import KINDS, kinds_for
from .incumbent import MARGIN, Settings
from .interval import at_interval
from .plan import Planned


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


def in_best_order(problem: Problem, settings: Settings, effort: str, schedule: ScheduleKind | None = None) -> InOrder:
    """Return ``problem`` with its layers in the order of the best contiguous stages, by more than a thousandth.

    Where what is planned is no pattern, or the profile's order has a plan within the gap of the bound for all orders,
    that stays. At the deadline too.
    """
    kind = KINDS[schedule or kinds_for(problem.policy.weights)[0]]
    if kind.drains or kind.simulated is not None or problem.policy.vertical_sync or not orders_matter(problem):
        return InOrder(problem)
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
    before = given.claimed_period_ns if given is not None else None
    if before is None or period < before - before // MARGIN:
        problem = replace(problem, chain=problem.chain.reordered(found.order))
    return InOrder(problem, found, bound)

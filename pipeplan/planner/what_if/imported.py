"""How good is what somebody runs with a target today, and what does the target's best plan change?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...check.bounds import any_bound
from ...check.validate import check
from ...errors import BadInput, Infeasible
from ...plan import Allocation, Plan, Provenance, Schedule, ScheduleKind, Stage
from ...problem import Problem
from ...version import __version__
from ..periodic.incumbent import Settings
from ..plan import Planned
from .target import as_run_by, make_target_plan

IMPORTED = "imported"


@dataclass(frozen=True, slots=True)
class Judged:
    """The plan that is run today, and the best that was found of what its target can express, which may be the same."""

    today: Planned
    best: Planned


def judge(
    problem: Problem,
    name: str,
    stages: Sequence[Stage],
    kind: ScheduleKind,
    settings: Settings | None = None,
    effort: str = "normal",
    others: Sequence[Problem] = (),
) -> Judged:
    """Return the validated plan of ``stages`` under ``kind``, and the best one of the target ``name``, for the same
    updates, of this problem and of ``others``: the same in other tensor degrees.

    Both have the bounds of the target's class. InvalidPlan says where today's breaks a rule, memory first of all.
    """
    problem = as_run_by(problem, name)
    plan = Plan(
        chain=problem.chain,
        platform=problem.platform,
        policy=problem.policy,
        allocation=Allocation(tuple(stages)),
        pattern=None,
        lower_bounds=(any_bound(problem),),
        provenance=Provenance(IMPORTED, {"from": name}, version=__version__),
        schedule=Schedule(kind, problem.policy.accumulate),
    )
    today = Planned(plan, check(plan))
    try:
        best = make_target_plan(problem, name, settings, effort)
    except Infeasible:  # the time was too short to find any
        return Judged(today, today)
    period = today.evaluation.period_ns
    bounds = [replace(x, period_ns=min(x.period_ns, period)) for x in best.plan.lower_bounds]
    plan = replace(plan, lower_bounds=tuple(x for x in bounds if x.schedule in (None, kind)))
    today = Planned(plan, check(plan))
    best = best if best.evaluation.period_ns < period else today
    for other in others:
        with suppress(Infeasible, BadInput):
            best = make_target_plan(other, name, settings, effort, beat_ns=best.evaluation.period_ns)
    return Judged(today, best)

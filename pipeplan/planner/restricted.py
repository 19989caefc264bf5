"""Which plan is best of those that a target can express, and how far is it from what nothing of them can beat?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ..check.bounds import any_bound
from ..check.targets import TARGETS
from ..check.validate import check
from ..deadline import OutOfTime
from ..errors import BadInput, Infeasible
from ..integers import ceil_div
from ..plan import Allocation, Bound, Plan, Provenance, Schedule, ScheduleKind
from ..problem import Problem, Weights
from ..version import __version__
from .block_search import MOVES, BlockSearch
from .incumbent import Settings
from .plan import Planned, make_plan
from .simulated import MINI_BATCH_PER_DEVICE

PRICED: tuple[Weights, ...] = ("flush", "2bw")


def make_target_plan(
    problem: Problem,
    name: str,
    settings: Settings | None = None,
    effort: str = "normal",
    kinds: Sequence[ScheduleKind] = (),
) -> Planned:
    """Return the validated plan of the best that the target ``name`` can express; Infeasible, explained, if none fits.

    The policy drains; an undecided ``accumulate`` is four microbatches per device. ``kinds``: only these schedules.
    Every shape of pipelines is bounded, and searched where that may pay: the split whose bound is least, which proves
    itself the best where it takes no longer, some even ones, and local moves of the best, as many as ``effort`` says.
    """
    assert problem.policy.drains, "what others run drains"
    if problem.policy.accumulate is None:
        every = MINI_BATCH_PER_DEVICE * len(problem.platform)
        problem = problem.with_policy(replace(problem.policy, accumulate=every))
    problem = as_run_by(problem, name)
    all_kinds = TARGETS[name].kinds
    search = BlockSearch(problem, name, TARGETS[name], kinds or all_kinds, settings or Settings())
    stopped = search.run(MOVES[effort])
    if search.best is None:
        raise Infeasible(search.why_none(stopped))
    best, count = search.best, problem.policy.accumulate or 1
    classes = dict.fromkeys((None if set(search.kinds) == set(all_kinds) else best.config.kind, best.config.kind))
    bounds = tuple(
        Bound(name, problem.replicas, _allowed(problem), ceil_div(search.bound_ns(kind), count), schedule=kind)  # type: ignore[arg-type]  # targets are classes
        for kind in (classes if len(all_kinds) > 1 else (None,))
    )
    plan = Plan(
        chain=problem.chain,
        platform=problem.platform,
        policy=problem.policy,
        allocation=Allocation(best.stages),
        pattern=None,
        lower_bounds=(*bounds, any_bound(problem)),
        provenance=Provenance("target", {"for": name, "effort": effort}, solver_status=stopped, version=__version__),
        schedule=Schedule(best.config.kind, count),
    )
    return Planned(plan, check(plan))


def as_run_by(problem: Problem, name: str) -> Problem:
    """Return the problem in whose memory is what the target ``name`` holds."""
    return problem.with_policy(replace(problem.policy, engine=TARGETS[name].engine))


def target_bound(problem: Problem, name: str, kind: ScheduleKind | None = None) -> int | None:
    """Return a period (ns) below which the target ``name`` has no plan of a problem, None where nothing fits; with
    ``kind`` none under that schedule."""
    search = BlockSearch(problem, name, TARGETS[name], TARGETS[name].kinds if kind is None else (kind,), Settings())
    search.run(MOVES["normal"])
    if search.best is None:
        return None
    return ceil_div(search.bound_ns(kind), problem.policy.accumulate or 1)


def unrestricted(problem: Problem, settings: Settings | None = None, effort: str = "normal") -> dict[Weights, int]:
    """Return the periods (ns) of what is found without a target's restriction, drained and under 2bw, for the same
    updates; nothing of what the deadline cuts off or doesn't fit."""
    found: dict[Weights, int] = {}
    for weights in PRICED:
        with suppress(OutOfTime, Infeasible, BadInput):
            problem.deadline.check()
            free = problem.with_policy(replace(problem.policy, weights=weights, engine=None))
            found[weights] = make_plan(free, settings=settings, effort=effort).evaluation.period_ns
    return found


def with_price(planned: Planned, free: Mapping[Weights, int]) -> Planned:
    """Return the plan with what was found :func:`unrestricted` in ``provenance.options["price"]``.

    Where that is no shorter it is the plan's own period: all may run it that has no restriction.
    """
    plan, own = planned.plan, planned.evaluation.period_ns
    options = {**plan.provenance.options, "price": {weights: min(period, own) for weights, period in free.items()}}
    return replace(planned, plan=replace(plan, provenance=replace(plan.provenance, options=options)))


def _allowed(problem: Problem) -> str:
    return "none" if problem.checkpointing == "none" else "segments"

"""Does a plan that was made from one profile of a network hold for another, and at which period?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...check.bounds import any_bound
from ...check.validate import judged, structure_violations
from ...cost.stage_graph import StageGraph, stage_graph
from ...errors import BadInput
from ...names import shown
from ...partition.merging import merging
from ...plan import Bound, Pattern, Plan, Stage
from ...problem import Chain, Problem
from ...schedule.kinds import kind_of
from ...schedule.pattern import starts_of
from ...schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from ...schedule.periodic.retime import order_of, retime


@dataclass(frozen=True, slots=True)
class Carried:
    """A plan carried to another profile: its stages with the other costs, and what is broken then.

    ``plan`` has no pattern where no period keeps the plan's order. ``period_ns`` is None when something is broken, and
    then ``other_order_ns`` is the period that the same stages reach in another order (1F1B*), if they do.
    """

    plan: Plan
    period_ns: int | None
    violations: tuple[str, ...]
    other_order_ns: int | None = None


def carried(plan: Plan, chain: Chain, stages: tuple[Stage, ...] | None = None) -> Carried:
    """Return ``plan`` with the costs of ``chain``: the same stages in the same order, at the smallest period it allows.

    ``stages`` are the plan's where ``chain`` has other layers, None where the plan's own will do.

    A plan without a pattern keeps its schedule and its limit, and is simulated anew. Otherwise memory is judged with
    the microbatches in flight of that order. Where an operation appears or vanishes (a transfer of no bytes),
    contiguous stages get their best 1F1B* instead. Exact for the order (:func:`..schedule.periodic.retime.retime`).
    """
    own = plan.allocation.stages
    stages = stages or own
    moved = replace(
        plan, chain=chain, allocation=replace(plan.allocation, stages=stages), pattern=None, lower_bounds=()
    )
    if kind_of(plan).simulated is not None:
        result, found = judged(moved)
        if result is None or found:
            return Carried(moved, None, tuple(found))
        return Carried(replace(moved, lower_bounds=(_any_bound(moved),)), result.period_ns, ())
    broken = structure_violations(chain, plan.platform, plan.policy, stages)
    if broken or plan.pattern is None:
        return Carried(moved, None, tuple(broken or ["the plan has no pattern"]))
    graph = stage_graph(chain, plan.platform, plan.policy, stages)
    pattern = _pattern(stage_graph(plan.chain, plan.platform, plan.policy, own), graph, plan.pattern)
    if pattern is None:
        return Carried(moved, None, ("no period lets the stages run in the order of the plan",), _other_order(graph))
    moved = replace(moved, pattern=pattern)
    result, found = judged(moved)
    if result is None or found:
        return Carried(moved, None, tuple(found), _other_order(graph))
    return Carried(replace(moved, lower_bounds=(_any_bound(moved),)), result.period_ns, ())


def _any_bound(plan: Plan) -> Bound:
    return any_bound(Problem(plan.chain, plan.platform, plan.policy, True, "segments"))


def _other_order(graph: StageGraph) -> int | None:
    pattern = best_one_f_one_b_star(graph) if graph.separate else None
    return None if pattern is None else pattern.period_ns


def _pattern(old: StageGraph, new: StageGraph, pattern: Pattern) -> Pattern | None:
    same = [(x.kind, x.stage) for x in old.operations] == [(x.kind, x.stage) for x in new.operations]
    if same:
        return retime(new, order_of(old, starts_of(pattern), pattern.period_ns))
    return best_one_f_one_b_star(new) if new.separate else None


def matching_chain(plan: Plan, one: Chain, other: Chain) -> Chain:
    """Return ``other`` at the granularity at which ``plan`` was made from ``one``, its layers in the plan's order;
    BadInput if it wasn't."""
    own = plan.chain.in_own_order().layers
    for merge in (Chain.in_own_order, merging(), merging("articulation")):
        if own == merge(one).layers:
            found: Chain = merge(other)
            order = plan.chain.order
            return found if order is None or len(found) != len(own) else found.reordered(order)
    raise BadInput(f"the plan was made from another profile than {shown(one.name)}: its layers differ")

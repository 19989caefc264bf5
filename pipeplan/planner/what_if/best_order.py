"""Which order of passes is best for a plan's model on its GPUs, on its own stages or others, and which plan is that?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise, product
from math import comb
from typing import TYPE_CHECKING, Any

from ...check.classes import class_violations
from ...check.validate import check, structure_violations
from ...cost.stage_graph import StageGraph, stage_graph
from ...deadline import NEVER, Deadline
from ...errors import BadInput, InvalidPlan, PipeplanError
from ...partition.contiguous.claims import by_first_use
from ...plan import Allocation, Plan, Schedule, Stage
from ...problem import Policy, Problem
from ...schedule.kinds import drained_programs, kind_of, program_of_kind
from ...schedule.program import Program, unequal
from ...schedule.programs.slots import shares
from ...schedule.synthesis.problem import NoRoom
from ...schedule.synthesis.recomputing import recomputed_early
from ...schedule.synthesis.synthesize import INTERRUPTED, Synthesis, least_ns, proved, synthesize
from ...schedule.written import order_of_program
from ..drained.plan import MOST_ORDERED, PASSES
from ..periodic.incumbent import Incumbent, Scheduled
from ..periodic.limits import ENOUGH
from ..simulated.other_schedules import schedule_graph, schedule_stages

if TYPE_CHECKING:
    from ..plan import Planned

OWN = "own"
PLACEMENTS = {  # the schedule whose stages they are
    "straight": "zb1p",
    "vee": "v-half",
    "loop": "interleaved-zb",
}
TRIED = (OWN, *(x for x in PLACEMENTS if x != "straight"))
MOST = 300_000  # passes: more take too long to order


@dataclass(frozen=True, slots=True)
class Found:
    """The best order that was found on the stages of a placement."""

    placement: str
    order: Synthesis


def placed_graph(plan: Plan, placement: str, microbatches: int, chunks: int = 2) -> StageGraph:
    """Return the drained stages of a plan: its ``own``, or balanced ones that are placed anew on its GPUs."""
    if placement != OWN:
        return schedule_graph(plan, PLACEMENTS[placement], microbatches, chunks)
    policy = replace(plan.policy.drained(microbatches), engine=None)
    return stage_graph(plan.chain, plan.platform, policy, plan.allocation.stages)


def best_order(graph: StageGraph, microbatches: int, **options: Any) -> Synthesis:
    """Return the best order that is found on ``graph``, no worse than under known schedules.

    ``options`` are those of :func:`..schedule.synthesis.synthesize.synthesize`; where nothing is said of ``split``,
    backwards are split, or whole where no order of their parts fits the memory.
    """
    if 3 * len(graph.stages) * microbatches > MOST:
        raise BadInput(
            f"{microbatches} microbatches on {len(graph.stages)} stages have {3 * len(graph.stages) * microbatches} "
            f"passes; up to {MOST} are ordered"
        )
    known = partial(drained_programs, weight_keeps=Fraction(options.get("weight_keeps", 1)))
    try:
        return synthesize(graph, microbatches, known=known, **options)
    except NoRoom:
        if "split" in options:
            raise
    return synthesize(graph, microbatches, known=known, split=False, **options)


def best_orders(
    plan: Plan,
    microbatches: int,
    barrier: bool = True,
    placements: Sequence[str] = TRIED,
    deadline: Deadline = NEVER,
    **options: Any,
) -> list[Found]:
    """Return the best order that is found on each placement of stages on the plan's GPUs, the least of them first, with
    a bound on the orders of its stages.

    A deadline is shared out. BadInput says why no stages have any order, NoRoom that the first have none.
    """
    found: list[Found] = []
    why: list[PipeplanError] = []
    seen: list[tuple[Any, ...]] = []
    for number, placement in enumerate(placements):
        share = len(placements) + 1 - number
        try:
            graph = placed_graph(plan, placement, microbatches)
            if graph.stages in seen:
                continue
            seen.append(graph.stages)
            order = best_order(
                graph, microbatches, barrier=barrier, solver=None, deadline=deadline.part(share), **options
            )
        except PipeplanError as error:
            why.append(error)
            continue
        found.append(Found(placement, order))
        if order.cut == INTERRUPTED:
            break
    if not found:
        raise (NoRoom if isinstance(why[0], NoRoom) else BadInput)(f"no order: {why[0]}")
    found.sort(key=lambda one: one.order.value_ns)
    best = found[0]
    if best.order.cut != INTERRUPTED:
        try:
            order = proved(best.order, deadline=deadline.part(2))
        except KeyboardInterrupt:
            order = replace(best.order, cut=INTERRUPTED)
        found[0] = replace(best, order=order)
    return found


def refuse_undrained(policy: Policy, whose: str) -> None:
    """Raise BadInput for weights that aren't kept as the best order needs."""
    if not policy.drains:
        words = "the best order drains every mini-batch, which is for weights flush; the policy is"
        raise BadInput(f"{whose}: {words} {policy.weights}")


def ordered_alike(plan: Plan) -> Plan:
    """Return a plan that drains, on its own stages in the best order that is found; checked."""
    refuse_undrained(plan.policy, "plan")
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
    policy, allocation = plan.policy.drained(program.microbatches), Allocation(stages)
    found = (x for x in plan.lower_bounds if x.schedule is None)
    bounds = tuple(x for x in found if not class_violations(x, allocation, plan.platform))
    given, provenance = (plan.chain, plan.platform, policy), plan.telling(order=told).provenance
    return Plan(*given, allocation, None, bounds, provenance, schedule)


def ordered(planned: Planned, deadline: Deadline = NEVER, elsewhere: bool = True) -> Planned:
    """Return the plan, which drains, in the best order that is found on its stages, ``elsewhere``: or on others on its
    GPUs, or in its own with recomputations earlier; as it is where none is better."""
    plan = planned.plan
    if plan.provenance.solver_status == INTERRUPTED:
        return planned
    early = _early(plan)
    if early is not None:
        planned = _better(planned, early)
    try:
        placements = TRIED if elsewhere else (OWN,)
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
    better = evaluation.period_ns < planned.evaluation.period_ns
    return replace(planned, plan=other, evaluation=evaluation) if better else planned


def _cut(plan: Plan, status: str) -> Plan:
    return replace(plan, provenance=replace(plan.provenance, solver_status=status))


# --- stages that are tried beside a plan's own ----------------------------------------------------------------------

FEW_SPLITS, ORDERED_STAGES, FULLY_ORDERED, ORDER_MOVES = 500, 64, 8, 20_000


def in_own_order(incumbent: Incumbent) -> None:
    """Let the soonest stages that were tried, in the best order of few passes that a quick search finds, beat it."""
    problem, best = incumbent.problem, incumbent.best
    if best is None:  # nothing fits
        return
    count = problem.policy.accumulate or 1
    graphs, most = [], MOST_ORDERED // (PASSES * count)
    every = (best.allocation.stages, *incumbent.seen, *_few_splits(problem, most))
    for stages in dict.fromkeys(by_first_use(problem.platform, x) for x in every):  # as orders name GPUs
        if len(stages) <= most and not any(x.replicas > 1 for x in stages):
            graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
            graphs.append((count * graph.period_floor_ns, stages, graph))
    hopeful = []
    for floor_ns, stages, graph in sorted(graphs, key=lambda one: one[0])[:ORDERED_STAGES]:
        if not structure_violations(problem.chain, problem.platform, problem.policy, stages):
            with suppress(NoRoom):  # of parts of backwards
                floor_ns = least_ns(graph, count)
            hopeful.append((floor_ns, stages, graph))
    for number, (floor_ns, stages, graph) in enumerate(sorted(hopeful, key=lambda one: one[0]), 1):
        if incumbent.expired or floor_ns >= best.cost:
            return
        with suppress(BadInput, NoRoom):
            found = best_order(graph, count, moves=ORDER_MOVES // max(1, number - FULLY_ORDERED), solver=None)
            if found.value_ns < best.cost - best.cost // ENOUGH:
                order = Schedule("written", count, order=order_of_program(found.program))
                best = Scheduled(found.value_ns, Allocation(stages), None, schedule=order)
                incumbent.take(best)


def _few_splits(problem: Problem, most: int) -> Iterator[tuple[Stage, ...]]:
    """Yield every split into so many stages, at ``most``, nothing recomputed, on any GPUs, where these are few."""
    layers, gpus = len(problem.chain), range(len(problem.platform))
    for stages in range(1, min(layers, most) + 1):
        if comb(layers - 1, stages - 1) * len(gpus) ** stages <= FEW_SPLITS:
            for cuts, homes in product(combinations(range(1, layers), stages - 1), product(gpus, repeat=stages)):
                if all(a != b for a, b in pairwise(homes)):
                    parts = zip(pairwise((0, *cuts, layers)), homes, strict=True)
                    yield tuple(Stage(*part, (home,)) for part, home in parts)

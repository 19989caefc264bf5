"""Which order of passes is best for a plan's model on its GPUs, on its own stages or on others?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from ...cost.stage_graph import StageGraph, stage_graph
from ...deadline import NEVER, Deadline
from ...errors import BadInput, PipeplanError
from ...plan import Plan
from ...schedule.kinds import drained_programs
from ...schedule.program import Program
from ...schedule.synthesis.problem import NoRoom
from ...schedule.synthesis.synthesize import INTERRUPTED, Synthesis, proved, synthesize
from ..simulated.other_schedules import schedule_graph

OWN = "own"
TRIED = (OWN, "vee", "loop")
PLACEMENTS = {"straight": "zb1p", "loop": "interleaved-zb", "vee": "v-half"}  # the schedule whose stages they are
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
    keeps = Fraction(options.get("weight_keeps", 1))
    known = partial(_known, keeps=keeps)
    try:
        return synthesize(graph, microbatches, known=known, **options)
    except NoRoom:
        if "split" in options:
            raise
    return synthesize(graph, microbatches, known=known, split=False, **options)


def _known(graph: StageGraph, microbatches: int, keeps: Fraction) -> Iterable[Program]:
    return drained_programs(graph, microbatches, keeps)


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

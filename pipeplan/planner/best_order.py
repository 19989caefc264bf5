"""Which order of passes is best for a plan's model on its GPUs, on its own stages or on others?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..cost.stage_graph import StageGraph, stage_graph
from ..errors import BadInput, PipeplanError
from ..plan import Plan
from ..schedule.program import Program
from ..schedule.registry import drained_programs
from ..schedule.synthesis.synthesize import Synthesis, synthesize
from .other_schedules import schedule_graph

OWN = "own"
PLACEMENTS = {"straight": "zb1p", "loop": "interleaved-zb", "vee": "v-half"}  # the schedule whose stages they are
MOST = 300_000  # passes: more take too long to order


def placed_graph(plan: Plan, placement: str, microbatches: int, chunks: int = 2) -> StageGraph:
    """Return the drained stages of a plan: its ``own``, or balanced ones that are placed anew on its GPUs."""
    if placement != OWN:
        return schedule_graph(plan, PLACEMENTS[placement], microbatches, chunks)
    policy = replace(plan.policy, weights="flush", accumulate=microbatches, vertical_sync=False, engine=None)
    return stage_graph(plan.chain, plan.platform, policy, plan.allocation.stages)


def best_order(graph: StageGraph, microbatches: int, **options: Any) -> Synthesis:
    """Return the best order that is found on ``graph``, no worse than under any schedule that can run its stages.

    ``options`` are those of :func:`..schedule.synthesis.synthesize.synthesize`.
    """
    if 3 * len(graph.stages) * microbatches > MOST:
        raise BadInput(
            f"{microbatches} microbatches on {len(graph.stages)} stages have {3 * len(graph.stages) * microbatches} "
            f"passes; up to {MOST} are ordered"
        )
    keeps = options.get("weight_keeps", 1)
    return synthesize(graph, microbatches, known=lambda alone, count: drained_programs(alone, count, keeps), **options)


def best_program(plan: Plan, microbatches: int, options: Mapping[str, Any], barrier: bool = True) -> Program:
    """Return the program of the best order that is found, on the plan's own stages or others on its GPUs.

    Of a simulation's ``options`` it heeds ``weight_keeps``. BadInput says why no stages have any order.
    """
    given = {name: options[name] for name in ("weight_keeps",) if name in options}
    found: list[Synthesis] = []
    why: list[PipeplanError] = []
    seen: list[tuple[Any, ...]] = []
    for placement in (OWN, "vee", "loop"):
        try:
            graph = placed_graph(plan, placement, microbatches)
            if graph.stages in seen:
                continue
            seen.append(graph.stages)
            found.append(best_order(graph, microbatches, barrier=barrier, **given))
        except PipeplanError as error:
            why.append(error)
    if not found:
        raise BadInput(f"no order: {why[0]}")
    return min(found, key=lambda order: order.value_ns).program

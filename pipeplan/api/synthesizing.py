"""Which order of passes is best for a plan, or for stages that are said by their times, and how good could one be?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import inf
from typing import Any

from ..choices import DRAINED
from ..cost.stage_graph import StageGraph, stage_graph
from ..deadline import NEVER, Deadline
from ..errors import BadInput
from ..plan import Plan, Stage
from ..planner.simulated.other_schedules import default_microbatches
from ..planner.what_if.best_order import OWN, best_order, placed_graph
from ..problem import Chain, Layer, Platform, Policy
from ..schedule.kinds import loop, vee
from ..schedule.synthesis.synthesize import Synthesis

ROOM = 2**50  # bytes of GPUs that nothing is said of


def synthesized(
    graph: StageGraph,
    microbatches: int,
    *,
    weight_keeps: float | None = None,
    moves: int | None = None,
    deadline: Deadline = NEVER,
    **options: Any,
) -> Synthesis:
    """Return the best order that is found of ``microbatches`` on drained stages, with its lower bound.

    ``limit``: activations that a GPU may hold, each of one stage and microbatch. ``weight_keeps``: the share of them
    that weight gradients need. With a ``deadline`` and no number of ``moves`` it goes on until then. See
    :func:`..schedule.synthesis.synthesize.synthesize` for the other ``options``.
    """
    keeps = Fraction(1) if weight_keeps is None else Fraction(weight_keeps).limit_denominator(10**6)
    endless = moves is None and deadline.remaining_s() < inf
    return best_order(
        graph, microbatches, weight_keeps=keeps, moves=moves, deadline=deadline, endless=endless, **options
    )


def graph_of_plan(
    plan: Plan, microbatches: int | None = None, placement: str | None = None, chunks: int | None = None
) -> tuple[StageGraph, int]:
    """Return the drained stages of a plan, placed anew where a ``placement`` is named, and how many microbatches to
    order: its mini-batch, or as many as show its own schedule."""
    if chunks is not None and placement != "loop":
        raise BadInput("--chunks is for --placement loop")
    count = microbatches or default_microbatches(plan, "1f1b")
    return placed_graph(plan, placement or OWN, count, chunks or 2), count


def graph_of_times(
    gpus: int, placement: str, times: Sequence[int], transfer: int = 0, chunks: int | None = None
) -> StageGraph:
    """Return equal stages on equal GPUs: ``times`` are those of a stage's forward, input gradient and weight gradient.

    Between neighbours on different GPUs lies a ``transfer`` each way. A loop has ``chunks`` stages per GPU.
    """
    if len(times) != 3:
        raise BadInput(f"--times: {','.join(map(str, times))} are not the three times of F, B and W, such as 20,24,16")
    if chunks is not None and placement != "loop":
        raise BadInput("--chunks is for --placement loop")
    homes = {"straight": list(range(gpus)), "vee": vee(gpus, 2)}.get(placement) or loop(gpus, chunks or 2)
    forward, backward, weight = times
    layers = tuple(
        Layer(f"stage {i}", forward, backward + weight, 0, transfer, saved_bytes=1, backward_weight_ns=weight)
        for i in range(len(homes))
    )
    platform = replace(Platform.flat(gpus, ROOM, 10**9), full_duplex=True)
    stages = [Stage(i, i + 1, (home,)) for i, home in enumerate(homes)]
    return stage_graph(Chain("equal stages", layers, 0), platform, Policy(DRAINED), stages)

"""Which order of passes is best for a plan, or for stages that are said by their times, and how good could one be?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Any, Literal

from ..choices import DRAINED, Solver
from ..cost.stage_graph import StageGraph, stage_graph
from ..deadline import Deadline
from ..errors import BadInput
from ..files.plans import load_plan
from ..files.schedule_csv import written_schedule
from ..files.text import write_text
from ..plan import Plan, Stage
from ..planner.simulated.other_schedules import default_microbatches
from ..planner.what_if.best_order import OWN, best_order, placed_graph
from ..problem import Chain, Layer, Platform, Policy
from ..report.tables.synthesis import figures
from ..schedule.kinds import loop, vee
from ..schedule.synthesis.synthesize import Synthesis
from ..status import Status
from .given.problems import deadline_of
from .result import PlanResult

ROOM = 2**50  # bytes of GPUs that nothing is said of


@dataclass(frozen=True)
class Ordered:
    """The best order that was found: ``found`` has its program and timeline."""

    found: Synthesis

    def figures(self) -> dict[str, Any]:
        """Return every figure under a name with its unit, a lower bound among them."""
        return figures(self.found)

    def save(self, path: str | Path) -> None:
        """Write the order as torch's CSV, which simulations take as a schedule."""
        write_text(str(path), written_schedule(self.found.program))


def synthesize(
    plan: PlanResult | str | Path | None = None,
    *,
    microbatches: int | None = None,
    gpus: int | None = None,
    times: Sequence[int] | None = None,
    transfer: int | None = None,
    placement: Literal["straight", "loop", "vee"] | None = None,
    chunks: int | None = None,
    limit: int | None = None,
    weight_keeps: float | None = None,
    split: bool = True,
    barrier: bool = True,
    moves: int | None = None,
    seed: int = 0,
    solver: Solver = "cbc",
    time_limit: str | Deadline | None = None,
    status: Status | None = None,
) -> Ordered:
    """Return the best order that is found of ``microbatches`` on the stages of a plan, or on equal ones of ``gpus``.

    ``times`` are those of such a stage's forward, input gradient and weight gradient. ``limit``: activations that a GPU
    may hold, each of one stage and microbatch. ``weight_keeps``: the share of them that weight gradients need. With a
    ``time_limit`` and no number of ``moves`` it goes on until then. See :func:`..schedule.synthesis.synthesize
    .synthesize` for the others.
    """
    stated = {"--gpus": gpus, "--times": times, "--transfer": transfer}
    if plan is not None:
        for name in (name for name, value in stated.items() if value is not None):
            raise BadInput(f"{name}: PLAN sets it already; leave it out")
        graph, count = graph_of_plan(
            plan.plan if isinstance(plan, PlanResult) else load_plan(str(plan)), microbatches, placement, chunks
        )
    elif gpus is None or times is None or microbatches is None:
        raise BadInput("name a PLAN, or pass --gpus, --times and --microbatches")
    else:
        graph, count = graph_of_times(gpus, placement or "vee", times, transfer or 0, chunks), microbatches
    deadline, keeps = deadline_of(time_limit), Fraction(1 if weight_keeps is None else weight_keeps)
    found = best_order(
        graph,
        count,
        weight_keeps=keeps.limit_denominator(10**6),
        moves=moves,
        deadline=deadline,
        endless=moves is None and deadline.remaining_s() < inf,
        limit=limit,
        split=split,
        barrier=barrier,
        seed=seed,
        solver=solver,
        status=status,
    )
    return Ordered(found)


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

"""1F1B: a few forwards ahead, then one forward and one backward in turn. PipeDream's schedule, and 1F1B with flush."""

from __future__ import annotations

from ..errors import BadInput
from ..groups import ceil_div
from ..program import Program
from ..stages import StageGraph
from .staircase import staircase


def noam(graph: StageGraph) -> int:
    """Return PipeDream's number of active microbatches per input replica: ceil(workers / replicas of the first stage).

    Source: PipeDream section 3.2.
    """
    workers = sum(resource.replicas for resource in graph.resources if not resource.is_link)
    return ceil_div(workers, graph.resources[graph.stages[0].resource].replicas)


def one_f_one_b(graph: StageGraph, microbatches: int, depth: int | None = None) -> Program:
    """Return the 1F1B program: stage s of S runs S - s forwards, then a backward and a forward in turn, then drains.

    With 3 stages and 4 microbatches, one column per slot (balanced stages take (m + p - 1)(F + B))::

        device 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        device 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        device 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

    With replicas it is 1F1B-RR: a replica of stage s runs ceil(devices of stages s.. / replicas of s) forwards ahead.
    ``depth`` is the number of microbatches in flight at each input replica, :func:`noam` unless given. Less holds less
    memory and leaves bubbles; more hides transfers, and later stages then run ahead in proportion. Where a middle stage
    has the most replicas, NOAM is too few (1-3-1: 7 are needed, not 5). Stages may share devices when none has
    replicas. Source: PipeDream section 3.2 and Figure 18.
    """
    if depth is not None and depth < 1:
        raise BadInput(f"depth: {depth} is not positive")
    if all(graph.resources[stage.resource].replicas == 1 for stage in graph.stages):
        return _straight(graph, microbatches, depth)
    if not graph.contiguous:
        raise BadInput("1F1B-RR gives each stage its GPUs for itself; in this plan some replicated stages share GPUs")
    return _round_robin(graph, microbatches, depth)


def _straight(graph: StageGraph, microbatches: int, depth: int | None) -> Program:
    """Slots of one microbatch every 2 units, or fewer where the depth doesn't allow that; see the docstring above."""
    stages = len(graph.stages)
    depth = depth or stages
    period = max(2, ceil_div(2 * stages, depth))
    more = max(0, depth - stages)

    def slot(kind: str, stage: int, m: int) -> int:
        if kind == "F":
            return period * m + stage
        later = stages - 1 - stage
        return period * m + stages + later + ceil_div(2 * more * later, max(1, stages - 1))

    return staircase(graph, microbatches, slot)


def _round_robin(graph: StageGraph, microbatches: int, depth: int | None) -> Program:
    """Backward m comes right before the forward that is as many microbatches ahead as the stage's replicas run.

    A stage never runs further ahead than the one before it lets it: otherwise a replica's first backward would wait for
    a forward that waits for this backward.
    """
    stages = len(graph.stages)
    replicas = [graph.resources[stage.resource].replicas for stage in graph.stages]
    optimal = [ceil_div(sum(replicas[s:]), replicas[s]) for s in range(stages)]
    depth = depth or optimal[0]
    most = max(depth, optimal[0]) - 1
    ahead = [min(depth, 1 + most * (own - 1) // max(1, optimal[0] - 1)) for own in optimal]
    for s in range(1, stages):
        ahead[s] = min(ahead[s], (ahead[s - 1] * replicas[s - 1] - 1) // replicas[s] + 1)

    def slot(kind: str, stage: int, m: int) -> int:
        if kind == "F":
            return slot("B", stage, m - ahead[stage] * replicas[stage]) + 1
        return 2 * m - stage

    return staircase(graph, microbatches, slot)

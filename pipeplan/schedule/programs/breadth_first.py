"""What runs when if every device runs all microbatches through its first chunk, then through its second? Looped BFS."""

from __future__ import annotations

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ..program import Program, pipelines
from ..slots import Pass, explicit
from .interleaved import not_interleaved


def breadth_first(graph: StageGraph, microbatches: int) -> Program:
    """Return breadth-first pipelining for p devices with v chunks each, chunk s of the chain on device s mod p.

    All microbatches go forward, chunk by chunk, then all backward, the newest first. So each chunk's weights are used
    and its gradients summed in one go, while every activation is held. With p = 2, v = 2 and 3 microbatches, ``f`` and
    ``b`` in the second chunk (balanced chunks take (vm + p - 1)(F + B) from m = p on)::

        device 0  F0 F1 F2 f0 f1 f2 .  .  b2 b1 b0 B2 B1 B0
        device 1  .  F0 F1 F2 f0 f1 f2 b2 b1 b0 B2 B1 B0

    With r replicas of every stage it is r such pipelines side by side. Source: Lamy-Poirier 2023 (Breadth-First
    Pipeline Parallelism), section 4; torch's ``ScheduleLoopedBFS``.
    """
    refused = not_interleaved(graph, "breadth-first")
    if refused is not None:
        raise BadInput(refused)
    devices = len({stage.resource for stage in graph.stages})

    def passes(count: int) -> dict[int, list[Pass]]:
        found: dict[int, list[Pass]] = {}
        for d in range(devices):
            chunks = range(d, len(graph.stages), devices)
            forward: list[Pass] = [("F", s, m) for s in chunks for m in range(count)]
            found[graph.stages[d].resource] = [*forward, *(("B", s, m) for _, s, m in reversed(forward))]
        return found

    return explicit(graph, microbatches, passes, pipelines(graph, "breadth-first"))

"""What runs when under GPipe? All forwards of a mini-batch, then all backwards, then the update."""

from __future__ import annotations

from ...cost.stage_graph import StageGraph
from ..program import Program
from ..slots import staircase


def gpipe(graph: StageGraph, microbatches: int) -> Program:
    """Return GPipe's program for a drained mini-batch, for any stages on any devices.

    With 3 stages and 3 microbatches, one column per slot (balanced stages take (m + p - 1)(F + B))::

        device 0  F0 F1 F2 .  .  .  .  B0 B1 B2
        device 1  .  F0 F1 F2 .  .  B0 B1 B2
        device 2  .  .  F0 F1 F2 B0 B1 B2

    Source: Huang et al. 2019 (GPipe), with backwards in the order of the forwards, as torch runs them.
    """
    stages = len(graph.stages)

    def slot(kind: str, stage: int, m: int) -> int:
        return m + stage if kind == "F" else microbatches + 2 * stages - 1 + m - stage

    return staircase(graph, microbatches, slot)

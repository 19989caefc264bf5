"""What does a plan expect of a stage, in the terms in which a run measures it?"""

from __future__ import annotations

from dataclasses import dataclass

from ...cost.stage_graph import StageGraph
from ...plan import Plan
from ..lowering.instructions import Pass


@dataclass(frozen=True, slots=True)
class PlannedTimes:
    """What a plan expects of a stage per microbatch, in ns, each without the others: its passes, backwards also without
    their share of the update, the reading of data, and the overhead of messages."""

    forward_ns: int
    backward_ns: int
    data_ns: int
    exchange_ns: int


def planned_times(plan: Plan, graph: StageGraph) -> list[PlannedTimes]:
    """Return what ``plan`` expects of each stage, as a run measures it."""
    last, found = len(graph.stages) - 1, []
    sends = [planned_transfer_ns(graph, "F", s) > 0 for s in range(last + 1)]
    for s, cost in enumerate(graph.stages):
        reading = plan.chain.read_in_passes_ns * min((s == 0) + (s == last), len(plan.chain))
        held = plan.platform.overhead_ns * (sends[s] + (s > 0 and sends[s - 1]))  # in a forward, and in a backward
        forward, backward = cost.forward_ns - reading - held, cost.backward_ns - cost.update_share_ns - held
        found.append(PlannedTimes(max(0, forward), backward, reading, 2 * held))
    return found


def planned_transfer_ns(graph: StageGraph, kind: Pass, stage: int) -> int:
    """Return how long what ``stage`` sends after its pass ``kind`` takes as planned, 0 where a cut has no bytes."""
    position = graph.position.get(("SEND_F" if kind == "F" else "SEND_B", stage))
    return 0 if position is None else graph.operations[position].duration_ns

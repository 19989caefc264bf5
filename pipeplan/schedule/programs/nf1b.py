"""What runs when under nF1B? A mini-batch's forwards one microbatch at a time, its backward as one (TiMePReSt)."""

from __future__ import annotations

from collections.abc import Sequence

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ..program import Arrival, Decide, Program, make_program, not_one_each

DEFAULT_BATCH = 4  # microbatches of a mini-batch


def nf1b(graph: StageGraph, microbatches: int, batch: int = DEFAULT_BATCH, limit: int | None = None) -> Program:
    """Return TiMePReSt's program: ``batch`` (N) microbatches are one mini-batch, with one backward for all of them.

    A device runs a backward as soon as its gradient is there, and forwards in order otherwise; nothing drains between
    mini-batches. ``limit`` bounds the mini-batches admitted (default: the stages). With 3 devices, N = 2 and a backward
    as long as one forward, one column per time point; mini-batch 0 is microbatches A and B, 1 C and D, 2 E and F::

        device 0  A  B  C  D  E  F  b0 .  .  b1 .  .  b2
        device 1  .  A  B  C  D  b0 E  F  b1 .  .  b2
        device 2  .  .  A  B  b0 C  D  b1 E  F  b2

    Closed forms (time points, backward = b, W devices; see ALGORITHMS section 8): mini-batch k starts its backward on
    stage s, both from 1, at W - 1 + k(N + 1) + W - s for b = 1; stage s holds N + (W - s)(b + 1) microbatches at most.
    Source: TiMePReSt section 4.2.
    """
    refused = not_one_each(graph, "nf1b")
    if refused is not None:
        raise BadInput(refused)
    if batch < 1 or microbatches % batch:
        raise BadInput(f"nf1b: {microbatches} microbatches are not a whole number of mini-batches of {batch}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit: {limit} is not positive")
    rules = {(stage.resource, 0): backward_first for stage in graph.stages}
    return make_program(graph, microbatches, {}, rules=rules, batch=batch, limit=limit or len(graph.stages))


def backward_first() -> Decide:
    """Return the decision for the oldest backward that has come, else for the oldest forward.

    Both arrive in order. Since a backward never waits for a forward, those that have not been seen yet arrived after
    the last decision that left none behind, at the end of the queue; so a run is linear in its steps.
    """
    seen_ns = 0

    def decide(now_ns: int, announced: Sequence[Arrival]) -> Arrival | None:
        nonlocal seen_ns
        oldest, come = None, 0
        for arrival in reversed(announced):
            if arrival.at_ns < seen_ns:
                break
            if arrival.kind == "B" and arrival.has_come(now_ns):
                come += 1
                oldest = arrival if oldest is None or arrival.step < oldest.step else oldest
        if come <= 1:
            seen_ns = now_ns
        if oldest is not None:
            return oldest
        return next((arrival for arrival in announced if arrival.has_come(now_ns)), None)

    return decide

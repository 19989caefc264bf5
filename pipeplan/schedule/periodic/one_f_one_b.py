"""Which pattern is PipeDream's own 1F1B? The order that it settles to, as soon as everything allows it."""

from __future__ import annotations

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ...plan import Pattern
from ..program import replicas_of
from ..programs.one_f_one_b import ahead_of
from .retime import order_of, retime

SLOT = 10  # of time, of which a pass takes half


def one_f_one_b_pattern(graph: StageGraph, depth: int | None = None) -> Pattern:
    """Return the pattern of 1F1B with ``depth`` microbatches in flight at each input replica (None: NOAM).

    Unrolled, every device runs the passes of :func:`..one_f_one_b.one_f_one_b` in their order: forwards ahead, then one
    backward and one forward in turn. BadInput where stages share devices, or with fewer than NOAM, which alternates
    with nothing at times. Source: PipeDream section 3.2.
    """
    if not graph.contiguous:
        raise BadInput("pipedream: 1F1B gives each stage its GPUs for itself; in this plan some stages share GPUs")
    ahead = ahead_of(graph, depth)
    replicas = replicas_of(graph)
    slots = []  # of microbatch 0; of the next all come two slots later
    for op in graph.operations:
        early = SLOT * (1 - 2 * ahead[op.stage] * replicas[op.stage]) if op.kind.endswith("F") else 0
        slots.append(early - SLOT * op.stage + SLOT // 2 * op.kind.startswith("SEND"))
    pattern = retime(graph, order_of(graph, slots, 2 * SLOT, 1))
    assert pattern is not None, "every microbatch goes its way in increasing slots"
    return pattern

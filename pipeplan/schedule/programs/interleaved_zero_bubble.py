"""What runs when if interleaved 1F1B splits the backward, and weight gradients fill the bubbles?"""

from __future__ import annotations

from fractions import Fraction

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ..program import Program, pipelines
from ..slots import Pass, explicit
from .interleaved import in_groups, not_interleaved


def interleaved_zero_bubble(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Program:
    """Return interleaved ZB1P for p devices with v chunks each, chunk s of the chain on device s mod p.

    Microbatches go in the groups of interleaved 1F1B. Device d runs p - d - 1 + (v - 1)p forwards, then a forward, an
    input part and, d input parts late, a weight part in turn. With p = 2, v = 2 and 4 microbatches, lower case in the
    second chunk (balanced chunks, F = I = W and m a multiple of p take 3vm + p - 1 slots)::

        device 0  F0 F1 f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
        device 1  .  F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3

    With r replicas of every stage it is r such pipelines side by side. Source: Qi et al. 2024 (Zero Bubble Pipeline
    Parallelism), on interleaved chunks; torch's ``ScheduleInterleavedZeroBubble``.
    """
    refused = not_interleaved(graph, "interleaved-zb")
    if refused is not None:
        raise BadInput(refused)
    devices = len({stage.resource for stage in graph.stages})

    def passes(count: int) -> dict[int, list[Pass]]:
        return {
            graph.stages[d].resource: _order(d, devices, len(graph.stages) // devices, count) for d in range(devices)
        }

    return explicit(
        graph, microbatches, passes, pipelines(graph, "interleaved-zb"), split=True, weight_keeps=weight_keeps
    )


def _order(d: int, devices: int, chunks: int, microbatches: int) -> list[Pass]:
    forward, backward, largest = in_groups(d, devices, chunks, microbatches)
    ahead = devices - d - 1 + (chunks - 1) * largest
    order = forward[:ahead]
    weights: list[Pass] = [("W", stage, m) for _, stage, m in backward]
    for i, back in enumerate(backward):
        order += [*forward[ahead + i : ahead + i + 1], back, *(weights[i - d : i - d + 1] if i >= d else ())]
    return order + weights[max(0, len(weights) - d) :]

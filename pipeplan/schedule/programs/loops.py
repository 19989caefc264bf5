"""What runs when if the chain goes round and round the devices, several chunks on each? Interleaved 1F1B, as it is and
with split backward, and breadth-first.

Chunk s of the chain is on device s mod p; with r replicas of every stage it is r such pipelines side by side.
"""

from __future__ import annotations

from fractions import Fraction

from ...cost.stage_graph import StageGraph
from ..program import Program, unequal
from .slots import Pass, homes, listed


def not_interleaved(graph: StageGraph, schedule: str = "interleaved 1F1B") -> str | None:
    """Return why the stages of ``graph`` do not go round and round the devices, as ``schedule`` has them; or None."""
    found = [stage.resource for stage in graph.stages]
    devices = len(set(found))
    if found != list(range(devices)) * (len(found) // devices):
        return f"{schedule} puts stage s on GPU s mod p"
    return unequal(graph, schedule)


def breadth_first(graph: StageGraph, microbatches: int) -> Program:
    """Return breadth-first pipelining (looped BFS) for p devices with v chunks each.

    All microbatches go forward, chunk by chunk, then all backward, the newest first. So each chunk's weights are used
    and its gradients summed in one go, while every activation is held. With p = 2, v = 2 and 3 microbatches, ``f`` and
    ``b`` in the second chunk (balanced chunks take (vm + p - 1)(F + B) from m = p on)::

        device 0  F0 F1 F2 f0 f1 f2 .  .  b2 b1 b0 B2 B1 B0
        device 1  .  F0 F1 F2 f0 f1 f2 b2 b1 b0 B2 B1 B0

    Source: Lamy-Poirier 2023 (Breadth-First Pipeline Parallelism), section 4; torch's ``ScheduleLoopedBFS``.
    """
    devices = len(homes(graph))

    def order(d: int, count: int) -> list[Pass]:
        forward: list[Pass] = [("F", s, m) for s in range(d, len(graph.stages), devices) for m in range(count)]
        return [*forward, *(("B", s, m) for _, s, m in reversed(forward))]

    return listed(graph, microbatches, not_interleaved(graph, "breadth-first"), order)


def interleaved(graph: StageGraph, microbatches: int) -> Program:
    """Return interleaved 1F1B for p devices with v chunks each.

    Microbatches go in groups of p: a group through a device's first chunk, then through its second, and so on.
    Device d runs 2(p - d - 1) + (v - 1)p forwards, then a forward and a backward in turn. With p = 2, v = 2 and 4
    microbatches, ``f`` and ``b`` in the second chunk (balanced chunks take (vm + p - 1)(F + B))::

        device 0  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
        device 1  .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    Where p doesn't divide the microbatches, groups are larger, as equal as can be.
    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.
    """
    return _in_turn(graph, microbatches, not_interleaved(graph), False)


def interleaved_zero_bubble(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Program:
    """Return interleaved ZB1P for p devices with v chunks each: split backward, weight gradients fill the bubbles.

    Microbatches go in the groups of interleaved 1F1B. Device d runs p - d - 1 + (v - 1)p forwards, then a forward, an
    input part and, d input parts late, a weight part in turn. With p = 2, v = 2 and 4 microbatches, lower case in the
    second chunk (balanced chunks, F = I = W and m a multiple of p take 3vm + p - 1 slots)::

        device 0  F0 F1 f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
        device 1  .  F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3

    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), on interleaved chunks; torch's
    ``ScheduleInterleavedZeroBubble``.
    """
    return _in_turn(graph, microbatches, not_interleaved(graph, "interleaved-zb"), True, weight_keeps)


def _in_turn(
    graph: StageGraph, microbatches: int, refused: str | None, split: bool, weight_keeps: Fraction = Fraction(1)
) -> Program:
    """Return the program in which devices run some forwards ahead, then a forward and a backward in turn, and where
    that is ``split`` a weight part."""
    devices = len(homes(graph))
    chunks = len(graph.stages) // devices

    def order(d: int, count: int) -> list[Pass]:
        forward, backward, largest = _in_groups(d, devices, chunks, count)
        ahead = (1 if split else 2) * (devices - d - 1) + (chunks - 1) * largest
        found = forward[:ahead]
        weights: list[Pass] = [("W", stage, m) for _, stage, m in backward] if split else []
        for i, back in enumerate(backward):
            found += [*forward[ahead + i : ahead + i + 1], back, *(weights[i - d : i - d + 1] if i >= d else ())]
        return found + weights[max(0, len(weights) - d) :]

    return listed(graph, microbatches, refused, order, split=split, weight_keeps=weight_keeps)


def _in_groups(d: int, devices: int, chunks: int, microbatches: int) -> tuple[list[Pass], list[Pass], int]:
    """Return device d's forwards and its backwards, each in order, and the size of the largest group."""
    rounds = max(1, microbatches // devices)
    groups = [range(microbatches * i // rounds, microbatches * (i + 1) // rounds) for i in range(rounds)]
    forward: list[Pass] = []
    backward: list[Pass] = []
    for group in groups:
        forward += [("F", c * devices + d, m) for c in range(chunks) for m in group]
        backward += [("B", c * devices + d, m) for c in reversed(range(chunks)) for m in group]
    return forward, backward, max(map(len, groups))

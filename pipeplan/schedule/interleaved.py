"""What runs when under interleaved 1F1B? Each device holds several chunks, so the pipeline fills in smaller steps."""

from __future__ import annotations

from ..cost.stage_graph import StageGraph
from ..errors import BadInput
from .program import Program
from .slots import explicit


def interleaved(graph: StageGraph, microbatches: int) -> Program:
    """Return interleaved 1F1B for p devices with v chunks each, chunk s of the chain on device s mod p.

    Microbatches go in groups of p: a group through a device's first chunk, then through its second, and so on.
    Device d runs 2(p - d - 1) + (v - 1)p forwards, then a forward and a backward in turn. With p = 2, v = 2 and 4
    microbatches, ``f`` and ``b`` in the second chunk (balanced chunks take (vm + p - 1)(F + B))::

        device 0  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
        device 1  .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    Where p doesn't divide the microbatches, groups are larger, as equal as can be.
    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.
    """
    homes = [stage.resource for stage in graph.stages]
    devices = len(set(homes))
    chunks = len(homes) // devices
    if homes != list(range(devices)) * chunks or any(graph.resources[home].replicas > 1 for home in homes):
        raise BadInput("interleaved 1F1B puts stage s on GPU s mod p, and gives each stage one GPU")
    rounds = max(1, microbatches // devices)
    groups = [range(microbatches * i // rounds, microbatches * (i + 1) // rounds) for i in range(rounds)]
    passes = {}
    for d in range(devices):
        forward, backward = [], []
        for group in groups:
            forward += [("F", c * devices + d, m) for c in range(chunks) for m in group]
            backward += [("B", c * devices + d, m) for c in reversed(range(chunks)) for m in group]
        ahead = 2 * (devices - d - 1) + (chunks - 1) * max(map(len, groups)) + 1
        order = forward[:ahead]
        for i, back in enumerate(backward):
            order.append(back)
            order += forward[ahead + i : ahead + i + 1]
        passes[homes[d]] = order
    return explicit(graph, microbatches, passes)

"""What runs when under interleaved 1F1B? Each device holds several chunks, so the pipeline fills in smaller steps."""

from __future__ import annotations

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ..program import Program, pipelines, unequal
from ..slots import Pass, explicit


def interleaved(graph: StageGraph, microbatches: int) -> Program:
    """Return interleaved 1F1B for p devices with v chunks each, chunk s of the chain on device s mod p.

    With r replicas of every stage it is r such pipelines side by side.

    Microbatches go in groups of p: a group through a device's first chunk, then through its second, and so on.
    Device d runs 2(p - d - 1) + (v - 1)p forwards, then a forward and a backward in turn. With p = 2, v = 2 and 4
    microbatches, ``f`` and ``b`` in the second chunk (balanced chunks take (vm + p - 1)(F + B))::

        device 0  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
        device 1  .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    Where p doesn't divide the microbatches, groups are larger, as equal as can be.
    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2.
    """
    refused = not_interleaved(graph)
    if refused is not None:
        raise BadInput(refused)
    devices = len({stage.resource for stage in graph.stages})

    def passes(count: int) -> dict[int, list[Pass]]:
        return _passes(devices, len(graph.stages) // devices, count)

    return explicit(graph, microbatches, passes, pipelines(graph, "interleaved"))


def not_interleaved(graph: StageGraph, schedule: str = "interleaved 1F1B") -> str | None:
    """Return why the stages of ``graph`` do not go round and round the devices, as ``schedule`` has them; or None."""
    homes = [stage.resource for stage in graph.stages]
    devices = len(set(homes))
    if homes != list(range(devices)) * (len(homes) // devices):
        return f"{schedule} puts stage s on GPU s mod p"
    return unequal(graph, schedule)


def in_groups(d: int, devices: int, chunks: int, microbatches: int) -> tuple[list[Pass], list[Pass], int]:
    """Return device d's forwards and its backwards, each in order, and the size of the largest group."""
    rounds = max(1, microbatches // devices)
    groups = [range(microbatches * i // rounds, microbatches * (i + 1) // rounds) for i in range(rounds)]
    forward: list[Pass] = []
    backward: list[Pass] = []
    for group in groups:
        forward += [("F", c * devices + d, m) for c in range(chunks) for m in group]
        backward += [("B", c * devices + d, m) for c in reversed(range(chunks)) for m in group]
    return forward, backward, max(map(len, groups))


def _passes(devices: int, chunks: int, microbatches: int) -> dict[int, list[Pass]]:
    """Return what each device of one pipeline does."""
    passes: dict[int, list[Pass]] = {}
    for d in range(devices):
        forward, backward, largest = in_groups(d, devices, chunks, microbatches)
        ahead = 2 * (devices - d - 1) + (chunks - 1) * largest + 1
        order = forward[:ahead]
        for i, back in enumerate(backward):
            order.append(back)
            order += forward[ahead + i : ahead + i + 1]
        passes[d] = order
    return passes

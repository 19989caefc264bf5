"""What runs when under DualPipeV? Forwards run together with backwards of other microbatches, as one operation each."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from fractions import Fraction

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ..program import Program, pipelines
from ..slots import Pass, explicit, shares, step_of
from .zbv import no_vee


def dualpipev(
    graph: StageGraph, microbatches: int, overlap: Fraction = Fraction(0), weight_keeps: Fraction = Fraction(1)
) -> Program:
    """Return DualPipeV for p devices, stages d and 2p - 1 - d on device d; at most 2p + 1 chunk activations on each.

    In the steady state a device runs a forward of one chunk together with a whole backward of the other, as one
    operation, so that transfers inside a stage, as those to experts, hide behind the other's work. ``overlap`` is the
    share of the shorter of the two that this hides. In the fill and the drain backwards are split. With p = 2 and 5
    microbatches, lower case in the second chunk, operations of several passes in brackets (F = I = W, nothing hidden)::

        device 0  F0 F1 F2 f0 i0 w0 f1[F3 i1 w1] .[f2 I0 W0][F4 i2 w2][f3 I1 W1][i3 w3] .[f4 I2 W2][i4 w4]I3 W3 I4 W4
        device 1  .  F0 f0 F1 f1 F2[i0 w0][f2 I0 W0][F3 i1 w1][f3 I1 W1][F4 i2 w2][f4 I2 W2][i3 w3][I3 W3] . i4 I4 w4 W4

    The bubble is (p - 1)(F&B + B - 3W) from m = 2p on, where B = I + W and F&B is what the two take together. A
    heuristic for unequal parts. With r replicas of every stage it is r such pipelines side by side. Source: DeepSeek-V3
    (2024), section 3.2.1, and the public DualPipe; torch's ``ScheduleDualPipeV``.
    """
    refused = no_vee(graph, "dualpipev")
    if refused is not None:
        raise BadInput(refused)
    homes = list(dict.fromkeys(stage.resource for stage in graph.stages))
    count = pipelines(graph, "dualpipev")

    def passes(share: int) -> dict[int, list[Pass]]:
        return {
            home: [one for operation in _operations(d, len(homes), share) for one in operation]
            for d, home in enumerate(homes)
        }

    program = explicit(graph, microbatches, passes, count, split=True, weight_keeps=weight_keeps)
    fused = tuple(
        tuple(step_of(program.position, one, count, pipeline) for one in operation)
        for pipeline, share in enumerate(shares(microbatches, count))
        for d in range(len(homes))
        for operation in _operations(d, len(homes), share)
        if len(operation) > 1
    )
    return replace(program, fused=fused, overlap=overlap)


def _operations(d: int, devices: int, microbatches: int) -> list[list[Pass]]:
    """Return what device d does, each operation as the passes that run in it."""
    first, second, after = d, 2 * devices - 1 - d, devices - d - 1
    counts: Counter[tuple[str, int]] = Counter()
    due: deque[Pass] = deque()
    found: list[list[Pass]] = []

    def take(kind: str, stage: int) -> Pass:
        counts[kind, stage] += 1
        return kind, stage, counts[kind, stage] - 1

    def whole(stage: int) -> list[Pass]:
        _, _, m = back = take("B", stage)
        return [back, ("W", stage, m)]

    def forward(stage: int) -> None:
        found.append([take("F", stage)])

    def backward(stage: int, split: bool) -> None:
        back, weight = whole(stage)
        found.append([back] if split else [back, weight])
        if split:
            due.append(weight)

    def together(ahead: int, back: int) -> None:
        found.append([take("F", ahead), *whole(back)])

    def weight() -> None:
        if due:
            found.append([due.popleft()])

    for _ in range(2 * after):
        forward(first)
    for _ in range(d + 1):
        forward(first)
        forward(second)
    for _ in range(after):
        backward(second, True)
        weight()
        forward(second)
    for i in range(max(microbatches, 2 * devices) - 2 * devices + d + 1):
        if i == after == 0:  # the last device has nothing to wait for yet
            forward(first)
            backward(second, False)
        else:
            together(first, second)
        together(second, first)
    for _ in range(after):
        backward(second, False)
        together(second, first)
    for i in range(d + 1):  # 2 (d + 1) backwards, of which the second half is split
        backward(second, 2 * i >= d + 1)
        backward(first, 2 * i >= d)
    for _ in range(after):
        weight()
        backward(first, True)
    for _ in range(d + 1):
        weight()
    kept = ([one for one in operation if one[2] < microbatches] for operation in found)
    return [operation for operation in kept if operation]

"""What runs when if two chunks per device are placed like a V, down and up, with split backward? ZBV and DualPipeV.

ZBV has no bubble within 1F1B's memory; DualPipeV runs forwards together with backwards of other microbatches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from ...cost.stage_graph import StageGraph
from ..program import Arrival, Decide, Program, Step, make_program, refuse, side_by_side, unequal
from .slots import Pass, homes, listed, shares, step_of


def no_vee(graph: StageGraph, schedule: str = "zbv") -> str | None:
    """Return why the stages of ``graph`` are not placed like a V, two on each device, for ``schedule``; or None."""
    order = homes(graph)
    if [stage.resource for stage in graph.stages] != order + order[::-1]:
        return f"{schedule} puts stages d and 2p - 1 - d on GPU d"
    return unequal(graph, schedule)


def zbv(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Program:
    """Return ZBV for p devices, stages d and 2p - 1 - d on device d; at most 2p chunk activations on each.

    Forwards and input parts run in torch's fixed order. Weight parts fill the gaps: one runs when the next pass of the
    order won't arrive within half its length, and when the device holds all that it may. With p = 2 and 4 microbatches,
    lower case in the second chunk (balanced chunks and F = I = W take 6m slots, without a bubble, from m = 2p on)::

        device 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 I2 w3 I3 W2 W3
        device 1  .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3

    With r replicas of every stage it is r such pipelines side by side. A heuristic for unequal parts. Source: Qi et al.
    2024 (Pipeline Parallelism with Controllable Memory), section 4; the order of torch's ``ScheduleZBVZeroBubble``.
    """
    refuse(no_vee(graph))
    devices = len(homes(graph))
    count, most = side_by_side(graph), 2 * devices
    rules = {}
    for pipeline, share in enumerate(shares(microbatches, count)):
        for d, home in enumerate(homes(graph)):
            order = [step_of(graph.position, one, count, pipeline) for one in _passes(d, devices, share)]  # type: ignore[arg-type]
            rules[home, pipeline] = _filler(graph, order, most, weight_keeps)
    return make_program(graph, microbatches, {}, rules=rules, split=True, limit=most * count, weight_keeps=weight_keeps)


def _passes(d: int, devices: int, microbatches: int) -> list[Pass]:
    """Return device d's forwards and input parts: warm-up, a steady round of four, and the way down."""
    first, second = d, 2 * devices - 1 - d
    padded = max(microbatches, 2 * devices - 1)
    counts: Counter[tuple[str, int]] = Counter()
    passes: list[Pass] = []

    def run(kind: str, stage: int) -> None:
        m = counts[kind, stage]
        if m < padded:
            counts[kind, stage] += 1
            passes.append((kind, stage, m))

    for _ in range(2 * (devices - d) - 1):
        run("F", first)
    for _ in range(d):
        run("F", second)
        run("F", first)
    for _ in range(devices - d):
        run("F", second)
        run("B", second)
    while counts["F", second] < counts["F", first] or counts["F", first] < padded:
        run("F", first)
        run("B", first)
        run("F", second)
        run("B", second)
    for _ in range(d):
        run("B", first)
        run("B", second)
    for _ in range(devices - d):
        run("B", first)
    return [one for one in passes if one[2] < microbatches]


def _filler(graph: StageGraph, order: Sequence[Step], most: int, weight_keeps: Fraction) -> Callable[[], Decide]:
    """Return the rule that runs the steps of ``order`` and weight parts in between, oldest first."""
    keeps = {"F": Fraction(1), "B": weight_keeps - 1, "W": -weight_keeps}

    def rule() -> Decide:
        place = 0
        held = Fraction(0)

        def decide(now_ns: int, announced: Sequence[Arrival]) -> Arrival | None:
            nonlocal place, held
            wanted = order[place] if place < len(order) else None
            coming = next((arrival for arrival in announced if arrival.step == wanted), None)
            weight = next((a for a in announced if a.kind == "W" and a.has_come(now_ns)), None)
            full = wanted is not None and graph.operations[wanted.position].kind == "F" and held + 1 > most
            chosen = weight
            if coming is not None and not full:
                if coming.has_come(now_ns):
                    chosen = coming
                elif weight and 2 * (coming.at_ns - now_ns) <= graph.stages[weight.stage].backward_weight_ns:
                    chosen = None
            if chosen is not None:
                held += keeps[chosen.kind]
                place += chosen is coming
            return chosen

        return decide

    return rule


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
    devices, count = len(homes(graph)), side_by_side(graph)

    def order(d: int, share: int) -> list[Pass]:
        return [one for operation in _operations(d, devices, share) for one in operation]

    refused = no_vee(graph, "dualpipev")
    program = listed(graph, microbatches, refused, order, split=True, weight_keeps=weight_keeps)
    fused = tuple(
        tuple(step_of(program.position, one, count, pipeline) for one in operation)
        for pipeline, share in enumerate(shares(microbatches, count))
        for d in range(devices)
        for operation in _operations(d, devices, share)
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

    def forward(stage: int) -> None:
        found.append([take("F", stage)])

    def backward(stage: int, split: bool, *ahead: Pass) -> None:
        weight = ("W", *(back := take("B", stage))[1:])
        found.append([*ahead, back] if split else [*ahead, back, weight])
        due.extend([weight] * split)

    def together(ahead: int, back: int) -> None:
        backward(back, False, take("F", ahead))

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

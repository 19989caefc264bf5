"""What runs when under ZBV? Two chunks per device, down and up like a V, split backward: no bubble, 1F1B's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ..program import Arrival, Decide, Program, Step, make_program, pipelines, unequal
from ..slots import Pass, shares


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
    refused = no_vee(graph)
    if refused is not None:
        raise BadInput(refused)
    order = list(dict.fromkeys(stage.resource for stage in graph.stages))
    devices = len(order)
    count, most = pipelines(graph, "zbv"), 2 * devices
    rules = {
        (home, pipeline): _filler(graph, _steps(graph, d, devices, share, count, pipeline), most, weight_keeps)
        for pipeline, share in enumerate(shares(microbatches, count))
        for d, home in enumerate(order)
    }
    return make_program(graph, microbatches, {}, rules=rules, split=True, limit=most * count, weight_keeps=weight_keeps)


def no_vee(graph: StageGraph, schedule: str = "zbv") -> str | None:
    """Return why the stages of ``graph`` are not placed like a V, two on each device, for ``schedule``; or None."""
    homes = [stage.resource for stage in graph.stages]
    order = list(dict.fromkeys(homes))
    if homes != order + order[::-1]:
        return f"{schedule} puts stages d and 2p - 1 - d on GPU d"
    return unequal(graph, schedule)


def _steps(graph: StageGraph, d: int, devices: int, share: int, pipelines: int, pipeline: int) -> list[Step]:
    """Return the steps of :func:`_passes` for the microbatches of one of several pipelines."""
    return [
        Step(m * pipelines + pipeline, graph.position[kind, stage])  # type: ignore[index]  # F or B
        for kind, stage, m in _passes(d, devices, share)
    ]


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

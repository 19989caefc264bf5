"""Balanced stage graphs with exact unit times, and simulated runs drawn as staircases, for the schedules' tests."""

from __future__ import annotations

from dataclasses import replace

from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.timeline import Timeline, lane_use


def balanced(
    stages: int,
    forward: int,
    backward: int,
    transfer: int = 0,
    *,
    weight_part: int | None = None,
    homes: list[int] | None = None,
    duplex: bool = True,
    saved: int = 1,
    pipelines: int = 1,
) -> StageGraph:
    """Return equal stages, stage i on device ``homes[i]`` (i by default); transfers take ``transfer`` ns each way.

    With several ``pipelines`` each device is a group of as many. ``weight_part`` is the part of the backward that
    computes weight gradients. Nothing weighs anything but the ``saved`` bytes of each microbatch.
    """
    homes = homes or list(range(stages))
    layers = tuple(
        Layer(f"l{i}", forward, backward, 0, transfer, saved_bytes=saved, backward_weight_ns=weight_part)
        for i in range(stages)
    )
    platform = replace(Platform.flat((max(homes) + 1) * pipelines, 10**9, 10**9), full_duplex=duplex)
    groups = [tuple(range(home * pipelines, (home + 1) * pipelines)) for home in homes]
    placed = [Stage(i, i + 1, group) for i, group in enumerate(groups)]
    return stage_graph(Chain("balanced", layers, 0), platform, Policy(weights="flush"), placed)


def recomputing(
    graph: StageGraph,
    again: int | list[int],
    memory: int | None = None,
    *,
    kept: int = 1,
    inside: int = 4,
    whole: int = 4,
) -> StageGraph:
    """Return a graph whose stages run layers again for ``again`` ns: microbatches hold ``kept`` bytes, ``inside`` a
    backward that recomputes at most ``inside``, and ``whole`` where they have been recomputed apart."""
    times = again if isinstance(again, list) else [again] * len(graph.stages)
    stages = [
        replace(
            x,
            backward_ns=x.backward_ns + ns,
            recompute_ns=ns,
            kept_bytes=kept if ns else inside,
            peak_bytes=inside,
            saved_bytes=inside,
            recomputed_bytes=whole,
        )
        for x, ns in zip(graph.stages, times, strict=True)
    ]
    operations = [
        replace(op, duration_ns=op.duration_ns + times[op.stage]) if op.kind == "B" else op for op in graph.operations
    ]
    resources = [x if x.is_link else replace(x, memory_bytes=memory or x.memory_bytes) for x in graph.resources]
    return replace(graph, stages=tuple(stages), operations=tuple(operations), resources=tuple(resources))


def looped(devices: int, chunks: int) -> list[int]:
    """Return homes of ``chunks`` stages per device, stage i on device i mod p."""
    return list(range(devices)) * chunks


def vee(devices: int) -> list[int]:
    """Return homes of two stages per device, down and up again."""
    return [*range(devices), *reversed(range(devices))]


def picture(timeline: Timeline, unit: int = 1) -> list[str]:
    """Return one line per device, a column of two or three characters per unit of time, later stages in small letters.

    ``.`` is idle and ``--`` goes on with the operation before.
    """
    program = timeline.program
    lines = []
    for lane in program.lanes:
        if lane.device is None:
            continue
        first = min(program.operations[step.position].stage for step in lane.steps)
        cells: dict[int, str] = {}
        for step in lane.steps:
            work = program.operations[step.position]
            name = f"{'I' if program.split and work.kind == 'B' else work.kind}{step.microbatch}"
            begin, end = timeline.begin_ns(step) // unit, timeline.end_ns(step) // unit
            cells |= dict.fromkeys(range(begin, end), "--") | {begin: name.lower() if work.stage != first else name}
        lines.append(" ".join(f"{cells.get(i, '.'):2}" for i in range(max(cells) + 1)).rstrip())
    return lines


def staircase(text: str) -> list[str]:
    """Return the lines of a drawn staircase."""
    return [line.strip() for line in text.strip().splitlines()]


def held(timeline: Timeline) -> list[int]:
    """Return the most activations that each device holds at once, when every stage saves one byte."""
    lanes = timeline.program.lanes
    return [lane_use(timeline, i).activation_bytes for i, lane in enumerate(lanes) if lane.device is not None]

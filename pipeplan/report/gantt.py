"""Gantt charts in characters: rows of timed operations, drawn to any width, with or without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rich.text import Text

from ..plan import Plan
from ..simulate import Timeline
from ..stages import stage_graph

STYLES = {
    "F": "black on bright_blue",
    "B": "black on bright_green",
    "SEND_F": "black on cyan",
    "SEND_B": "black on yellow",
}
FILL = {"F": "=", "B": "#", "SEND_F": ">", "SEND_B": "<"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One operation in a row: [start, end) in ns."""

    start_ns: int
    end_ns: int
    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one device or link does."""

    name: str
    bars: tuple[Bar, ...]


def pattern_window(plan: Plan) -> tuple[list[Row], int, int]:
    """Return (rows, start, end) of one steady period; as many periods as the most replicas, so that each GPU is seen.

    Microbatches are numbered so that the one entering at the window's start is 0; earlier ones are negative.
    """
    assert plan.pattern is not None
    graph = stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)
    period = plan.pattern.period_ns
    end = period * max(resource.replicas for resource in graph.resources)
    rows = []
    for resource, indices in zip(graph.resources, graph.on_resource, strict=True):
        for replica in range(resource.replicas):
            bars = []
            for i in indices:
                op = plan.pattern.operations[i]
                first = -((op.start_ns + op.duration_ns) // period) - 1
                for m in range(first, (end - op.start_ns) // period + 1):
                    begin = op.start_ns + m * period
                    if m % resource.replicas == replica and begin < end and begin + op.duration_ns > 0:
                        bars.append(Bar(begin, begin + op.duration_ns, op.kind, op.stage, m))
            name = resource.name if resource.is_link else f"GPU {resource.devices[replica]}"
            rows.append(Row(name, tuple(sorted(bars, key=lambda bar: bar.start_ns))))
    return rows, 0, end


def timeline_rows(timeline: Timeline) -> list[Row]:
    """Return the rows of a simulated run, GPUs first."""
    operations = timeline.program.graph.operations
    return [
        Row(
            lane.name if lane.device is None else f"GPU {lane.device}",
            tuple(
                Bar(
                    timeline.start_ns[step.microbatch][step.position],
                    timeline.end_ns(step),
                    operations[step.position].kind,
                    operations[step.position].stage,
                    step.microbatch,
                )
                for step in lane.steps
            ),
        )
        for lane in timeline.program.lanes
    ]


def pattern_rows(plan: Plan) -> dict[str, Any]:
    """Return one steady period as plain data: window and rows of operations."""
    rows, start, end = pattern_window(plan)
    return {
        "start_ns": start,
        "end_ns": end,
        "rows": [
            {
                "name": row.name,
                "operations": [
                    {
                        "kind": b.kind,
                        "stage": b.stage,
                        "microbatch": b.microbatch,
                        "start_ns": b.start_ns,
                        "end_ns": b.end_ns,
                    }
                    for b in row.bars
                ],
            }
            for row in rows
        ],
    }


def draw(rows: Sequence[Row], start_ns: int, end_ns: int, width: int) -> list[Text]:
    """Return one line of ``width`` columns for each row, the window [start_ns, end_ns) drawn to scale.

    A bar shows its stage's kind and microbatch (``F12``) where there is room, filled with its kind's sign, so that it
    reads without colour too: = forward, # backward, > and < transfers, . idle.
    """
    margin = max((len(row.name) for row in rows), default=0) + 1
    columns = max(1, width - margin)
    lines = []
    for row in rows:
        cells: list[tuple[str, str]] = [(".", "dim")] * columns
        for bar in row.bars:
            left = _column(max(bar.start_ns, start_ns), start_ns, end_ns, columns)
            right = _column(min(bar.end_ns, end_ns), start_ns, end_ns, columns)
            right = max(right, left + 1)
            label = f"{bar.kind[-1] if bar.kind.startswith('SEND') else bar.kind}{bar.microbatch}"
            size = right - left
            text = (label if len(label) <= size else "").ljust(size, FILL[bar.kind])
            for offset, sign in enumerate(text[: max(0, columns - left)]):
                cells[left + offset] = (sign, STYLES[bar.kind])
        line = Text(row.name.ljust(margin), no_wrap=True)
        for sign, style in cells:
            line.append(sign, style)
        lines.append(line)
    return lines


def _column(time_ns: int, start_ns: int, end_ns: int, columns: int) -> int:
    return round(Fraction((time_ns - start_ns) * columns, max(1, end_ns - start_ns)))

"""What does a plan or a simulated run look like, as a picture? SVG, PNG or PDF, with memory over time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from ..errors import BadInput
from ..files.text import replaced
from ..names import shown
from ..plan import Plan
from ..planner.simulated.simulation import Simulation
from ..schedule.memory import activation_steps
from ..schedule.timeline import Timeline
from ..units import format_ns, gpu_name
from .gantt import NAMES, GanttRow, plan_window, timeline_rows, working_devices
from .tables.plan import headline
from .words import mean_delay

COLOURS = {"F": "#6ea8fe", "R": "#f2a07b", "B": "#63c08a", "W": "#c792d6", "SEND_F": "#3cc3d0", "SEND_B": "#e0b84c"}
LATER = {"F": "#2f6fd0", "R": "#c4602f", "B": "#2b8a57", "W": "#8f4fa3"}  # a device's second and later stages
SUFFIXES = (".svg", ".png", ".pdf")
INCH_PER_ROW = 0.28
MOST_BARS = 40_000  # beyond that a picture takes long and shows nothing
MOST_EDGES = 2000  # bars that get a white edge; more are too thin for one
LABEL_POINTS = 6.5
LABEL_SHARE = 0.45  # per cent of the chart's width that one character takes
MOST_LINES = 8  # of memory in one chart
MEMORY_COLUMNS = 1200


def save_pattern(plan: Plan, path: str) -> None:
    """Draw one steady period of a plan, or its one drained mini-batch, links too, into ``path``."""
    window = plan_window(plan)
    figure, (axes,) = make_figure([len(window.rows)])
    _draw(axes, window.rows, window.start_ns, window.end_ns)
    save_figure(figure, axes, f"{shown(plan.chain.name)}: {window.title}. {headline(plan)}", path)


def save_timeline(simulation: Simulation, path: str) -> None:
    """Draw a simulated run into ``path``: what the devices do, and each one's memory with its limit."""
    timeline, plan = simulation.timeline, simulation.plan
    rows = [row for row in timeline_rows(timeline) if row.device is not None]
    figure, (axes, memory) = make_figure([len(rows), max(4, len(rows) // 2)])
    _draw(axes, rows, 0, timeline.makespan_ns)
    if len(rows) > MOST_LINES:
        _memory_rows(figure, memory, simulation)
    else:
        _memory_lines(memory, simulation)
    memory.set_xlim(0, timeline.makespan_ns / 1e6)
    memory.set_xlabel("ms")
    memory.spines[["top", "right"]].set_visible(False)
    title = (
        f"{shown(plan.chain.name)}: {timeline.program.microbatches} microbatches, {simulation.name}, "
        f"{format_ns(simulation.makespan_ns)}, {format_ns(simulation.per_microbatch_ns)} per microbatch"
    )
    if (late := mean_delay(simulation.delays)) is not None:
        title += f", gradients late by {late}"
    save_figure(figure, axes, title, path)


def save_runs(runs: Sequence[tuple[str, Timeline]], path: str) -> None:
    """Draw simulated runs, each with a title, below each other on one time axis; what devices do."""
    drawn = [[row for row in timeline_rows(timeline) if row.device is not None] for _, timeline in runs]
    figure, charts = make_figure([len(rows) for rows in drawn])
    end = max(timeline.makespan_ns for _, timeline in runs)
    for axes, rows, (title, _) in zip(charts, drawn, runs, strict=True):
        _draw(axes, rows, 0, end)
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    save_figure(figure, charts[0], runs[0][0], path)


def _memory_lines(axes: Any, simulation: Simulation) -> None:
    timeline = simulation.timeline
    limit, width = 0, timeline.program.graph.resources[0].width
    for i, device in working_devices(simulation.timeline):
        static = simulation.uses[device].static_bytes
        steps = [*activation_steps(timeline, i), (timeline.makespan_ns, 0)]
        sizes = [(static + held) / 1e9 for _, held in steps]
        axes.step([at / 1e6 for at, _ in steps], sizes, where="post", linewidth=0.9, label=gpu_name(device, width))
        limit = max(limit, simulation.uses[device].memory_bytes)
    axes.axhline(limit / 1e9, color="#c0392b", linestyle="--", linewidth=1, label="memory")
    axes.set_ylim(0, None)
    axes.set_ylabel("GB")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)


def _memory_rows(figure: Figure, axes: Any, simulation: Simulation) -> None:
    """One coloured row per device, its memory in use as a share of what it has; many lines would hide each other."""
    timeline = simulation.timeline
    used = working_devices(simulation.timeline)
    instants = np.linspace(0, timeline.makespan_ns, MEMORY_COLUMNS, endpoint=False)
    shares = np.zeros((len(used), MEMORY_COLUMNS))
    for row, (i, device) in enumerate(used):
        times, held = np.array(list(activation_steps(timeline, i))).T
        at = np.searchsorted(times, instants, side="right") - 1
        shares[row] = 100 * (simulation.uses[device].static_bytes + held[at]) / simulation.uses[device].memory_bytes
    colours = mpl.colormaps["YlGnBu"].with_extremes(over="#c0392b")
    extent = (0, timeline.makespan_ns / 1e6, len(used) - 0.5, -0.5)
    shown = axes.imshow(shares, aspect="auto", cmap=colours, vmin=0, vmax=100, extent=extent, interpolation="nearest")
    step = 1 + len(used) // 16
    width = timeline.program.graph.resources[0].width
    axes.set_yticks(range(0, len(used), step), [gpu_name(device, width) for _, device in used[::step]], fontsize=7)
    bar = figure.colorbar(shown, ax=axes, extend="max", pad=0.01)
    bar.set_label("% of its memory", fontsize=8)


def make_figure(heights: Sequence[int]) -> tuple[Figure, list[Any]]:
    """Return a figure with one axes for each height, in rows of a Gantt chart."""
    figure = Figure(figsize=(16, 1.3 + INCH_PER_ROW * sum(heights) + 0.5 * (len(heights) - 1)), layout="constrained")
    return figure, list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])


def _draw(axes: Any, rows: Sequence[GanttRow], start_ns: int, end_ns: int) -> None:
    count = sum(len(row.bars) for row in rows)
    edge = 0.3 if count <= MOST_EDGES else 0
    if count > MOST_BARS:
        raise BadInput(f"a picture shows at most {MOST_BARS} operations; simulate fewer --microbatches")
    groups: dict[tuple[str, bool], list[list[tuple[float, float]]]] = {}
    span = end_ns - start_ns
    longest = max((len(bar.label) for row in rows for bar in row.bars), default=0)
    for i, row in enumerate(rows):
        for bar in row.bars:
            left, right = max(bar.start_ns, start_ns) / 1e6, min(bar.end_ns, end_ns) / 1e6
            corners = [(left, i - 0.42), (right, i - 0.42), (right, i + 0.42), (left, i + 0.42)]
            groups.setdefault((bar.kind, bar.chunk > 0), []).append(corners)
            if 100 * (right - left) * 1e6 >= LABEL_SHARE * longest * span:
                axes.text((left + right) / 2, i, bar.label, ha="center", va="center", fontsize=LABEL_POINTS)
    for (kind, later), shapes in sorted(groups.items(), key=lambda item: (list(NAMES).index(item[0][0]), item[0][1])):
        colour = LATER.get(kind, COLOURS[kind]) if later else COLOURS[kind]
        name = NAMES[kind] + (" (later stage)" if later else "")
        axes.add_collection(PolyCollection(shapes, facecolors=colour, edgecolors="white", linewidths=edge, label=name))
    axes.set_xlim(start_ns / 1e6, end_ns / 1e6)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("ms")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)


def save_figure(figure: Figure, axes: Any, title: str, path: str) -> None:
    """Write a figure with its title above ``axes``, the same bytes again for the same figure."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise BadInput(f"{path}: a picture is one of {', '.join(SUFFIXES)}")
    axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
    looks = mpl.rc_context({"svg.hashsalt": "pipeplan", "svg.fonttype": "none"})
    with looks, warnings.catch_warnings(), replaced(path) as file:
        warnings.filterwarnings("ignore", "Glyph")  # a letter of a name that the font lacks is drawn as a box
        figure.savefig(file, format=suffix[1:], dpi=130, metadata=metadata)

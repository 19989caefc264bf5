"""What does every GPU and link do when? Rows of timed operations, and their chart in characters or pictures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from ..cost.stage_graph import StageGraph
from ..errors import BadInput
from ..files.text import replaced
from ..names import shown
from ..plan import Pattern, Plan
from ..planner.simulated.simulation import Simulation
from ..schedule.kinds import graph_of, kind_of, plan_timeline
from ..schedule.timeline import Timeline, activation_steps
from ..units import format_ns, gpu_name
from .tables.plan import headline
from .words import mean_delay

if TYPE_CHECKING:  # pictures alone need it, which are an extra
    from matplotlib.figure import Figure

NAMES = {
    "F": "forward",
    "R": "recomputation",
    "B": "backward",
    "W": "weight gradient",
    "SEND_F": "activation sent",
    "SEND_B": "gradient sent",
}
HUES = ("bright_blue", "bright_red", "bright_green", "bright_magenta", "cyan", "yellow")
STYLES = {kind: f"black on {hue}" for kind, hue in zip(NAMES, HUES, strict=True)}
FILL = {"F": "=", "R": "~", "B": "#", "W": "+", "SEND_F": ">", "SEND_B": "<"}
SHOWN = ("kind", "stage", "microbatch", "start_ns", "end_ns")  # of an operation in JSON
MOST_SHOWN = 4  # mini-batches of a steady state
READABLE_COLUMNS = 4  # of a typical bar, in a chart that shows its operations one by one


class Bar(NamedTuple):
    """One operation in a row: [start, end) in ns. ``chunk`` counts the stages of its device before its own.

    A tuple, as a chart may have millions.
    """

    start_ns: int
    end_ns: int
    kind: str
    stage: int
    microbatch: int
    chunk: int = 0

    @property
    def label(self) -> str:
        """``F12``, in lower case for a device's second and later stages; a transfer's direction without SEND."""
        text = f"{self.kind.removeprefix('SEND_')}{self.microbatch}"
        return text.lower() if self.chunk else text


@dataclass(frozen=True, slots=True)
class GanttRow:
    """What one device or link does; ``device`` is None for a link."""

    name: str
    bars: tuple[Bar, ...]
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """What shows a plan: rows of bars, the part of them to draw, and what that is, in words."""

    rows: Sequence[GanttRow]
    start_ns: int
    end_ns: int
    title: str


def plan_window(plan: Plan) -> Window:
    """Return what shows how a plan runs: steady periods of a pattern or of nF1B, or a whole drained mini-batch.

    Microbatches are numbered so that the one entering at the start of a steady window is 0; earlier ones are negative.
    """
    if plan.pattern is not None:
        rows, start, end = _pattern_window(plan, plan.pattern)
        periods = (end - start) // plan.pattern.period_ns
        noun = "beat" if kind_of(plan).drains else "period"
        what = f"one {noun}" if periods == 1 else f"{periods} {noun}s"
        return Window(rows, start, end, f"{what} of {format_ns(plan.pattern.period_ns)}")
    schedule, find_steady = plan.schedule, kind_of(plan).steady
    if find_steady is None:
        timeline = plan_timeline(plan)
        title = f"one mini-batch of {timeline.program.microbatches} microbatches, {schedule.kind}"
        return Window(timeline_rows(timeline), 0, timeline.makespan_ns, title)
    batch = schedule.mini_batch
    steady = find_steady(graph_of(plan), batch, schedule.limit or len(plan.allocation.stages))
    entries = [row[0] for row in steady.timeline.start_ns[::batch]]
    count = min(steady.cycle, len(entries) - 1, MOST_SHOWN)
    first = len(entries) - 1 - count
    begin, end = entries[first], entries[-1]
    shifted = []
    for row in timeline_rows(steady.timeline):
        inside = (x for x in row.bars if x.start_ns < end and x.end_ns > begin)
        bars = (Bar(x[0] - begin, x[1] - begin, *x[2:4], x.microbatch - first * batch, x.chunk) for x in inside)
        shifted.append(replace(row, bars=tuple(bars)))
    what = "cycle" if count == steady.cycle and steady.repeats else "part"
    many = f"{count} mini-batch{'es' if count > 1 else ''} of {batch}"
    title = f"one {what} of {schedule.kind}, {many} in {format_ns(end - begin)}"
    return Window(shifted, 0, end - begin, title)


def _pattern_window(plan: Plan, pattern: Pattern) -> tuple[list[GanttRow], int, int]:
    """Return (rows, start, end) of as many steady periods as the most replicas, so that each GPU is seen."""
    graph, period = graph_of(plan), pattern.period_ns
    end = period * max(resource.replicas for resource in graph.resources if not resource.is_link)
    rows, chunk = [], chunks_of(graph)
    for resource, indices in zip(graph.resources, graph.on_resource, strict=True):
        seen: dict[int, list[Bar]] = {} if resource.is_link else {replica: [] for replica in range(resource.replicas)}
        for i in indices:
            op = pattern.operations[i]
            stop = op.start_ns + op.duration_ns
            for m in range(-((stop - 1) // period), -((op.start_ns - end) // period)):
                begin = op.start_ns + m * period
                place = 0 if resource.is_link else chunk[op.stage]
                bar = Bar(begin, begin + op.duration_ns, op.kind, op.stage, m, place)
                seen.setdefault(m % resource.replicas, []).append(bar)
        for replica, bars in sorted(seen.items()):
            device = None if resource.is_link else resource.devices[replica]
            name = resource.one_name(replica) if device is None else gpu_name(device, resource.width)
            rows.append(GanttRow(name, tuple(sorted(bars, key=lambda bar: bar.start_ns)), device))
    return sorted(rows, key=lambda row: (row.device is None, row.device or 0)), 0, end


def chunks_of(graph: StageGraph) -> list[int]:
    """Return of each stage how many of its device come before it."""
    return [graph.stages_on(stage.resource).index(s) for s, stage in enumerate(graph.stages)]


def timeline_rows(timeline: Timeline) -> list[GanttRow]:
    """Return the rows of a simulated run, GPUs first."""
    program, chunk = timeline.program, chunks_of(timeline.program.graph)
    rows, starts, given = [], timeline.start_ns, timeline.duration_ns
    width = program.graph.resources[0].width
    planned = [(work.duration_ns, work.kind, work.stage) for work in program.operations]
    for lane in program.lanes:
        bars = []
        for step in lane.steps:
            microbatch, position = step.microbatch, step.position
            length, kind, stage = planned[position]
            begin = starts[microbatch][position]
            end = begin + (length if given is None else given[microbatch][position])
            bars.append(Bar(begin, end, kind, stage, microbatch, 0 if lane.device is None else chunk[stage]))
        name = lane.name if lane.device is None else gpu_name(lane.device, width)
        rows.append(GanttRow(name, tuple(bars), lane.device))
    return rows


def working_devices(timeline: Timeline) -> list[tuple[int, int]]:
    """Return (lane, device) of the devices that do something in a simulated run."""
    lanes = timeline.program.lanes
    return [(i, lane.device) for i, lane in enumerate(lanes) if lane.device is not None and lane.steps]


def rows_data(rows: Sequence[GanttRow], start_ns: int, end_ns: int) -> dict[str, Any]:
    """Return a chart as plain data: window and rows of operations."""
    shown = [[{name: getattr(bar, name) for name in SHOWN} for bar in row.bars] for row in rows]
    listed = [{"name": row.name, "operations": own} for row, own in zip(rows, shown, strict=True)]
    return {"start_ns": start_ns, "end_ns": end_ns, "rows": listed}


def panels(timeline: Timeline, columns: int) -> list[tuple[str, int, int]]:
    """Return (title, start, end) of what to draw of a run: all of it where bars stay readable, else three pieces.

    The pieces, fill, middle and drain, are as long as makes a typical pass of a GPU four columns wide.
    """
    first, lanes = 4 * len(timeline.program.operations), timeline.program.lanes
    lengths = [timeline.length_ns(x) for lane in lanes if lane.device is not None for x in lane.steps[:first]]
    whole = timeline.makespan_ns
    readable = int(median(lengths) * columns) // READABLE_COLUMNS if lengths else whole
    if readable == 0 or readable * 2 >= whole:
        return [("all of it", 0, whole)]
    middle = (whole - readable) // 2
    return [("fill", 0, readable), ("middle", middle, middle + readable), ("drain", whole - readable, whole)]


def print_panels(
    out: Console, timeline: Timeline, rows: Sequence[GanttRow], time: Callable[[int], str] = format_ns
) -> None:
    """Print a run in :func:`panels`, each below what it shows."""
    columns = out.width - max(len(row.name) for row in rows) - 1
    for title, start, end in panels(timeline, columns):
        out.print(Text(f"{title}, {time(start)} to {time(end)}", "dim"))
        for line in draw(rows, start, end, out.width):
            out.print(line)
    out.print()


def draw(rows: Sequence[GanttRow], start_ns: int, end_ns: int, width: int) -> list[Text]:
    """Return one line of ``width`` columns for each row, the window [start_ns, end_ns) drawn to scale.

    A bar shows its kind and microbatch (``F12``) where there is room, filled with its kind's sign, so that it reads
    without colour too: = forward, # backward, + weight gradients, > and < transfers, . idle.
    """
    margin = max(len(row.name) for row in rows) + 1
    columns, span, lines = width - margin, end_ns - start_ns, []
    for row in rows:
        cells: list[tuple[str, str]] = [(".", "dim")] * columns
        for bar in row.bars:
            begin, end, kind, *_ = bar
            if begin >= end_ns or end < start_ns:
                continue
            left = _rounded((max(begin, start_ns) - start_ns) * columns, span)
            right = max(left + 1, _rounded((min(end, end_ns) - start_ns) * columns, span))
            if right == left + 1:  # no room for a label
                if left < columns:
                    cells[left] = (FILL[kind], STYLES[kind])
                continue
            size = right - left
            text = (bar.label if len(bar.label) <= size else "").ljust(size, FILL[kind])
            for offset, sign in enumerate(text):
                cells[left + offset] = (sign, STYLES[kind])
        line = Text(row.name.ljust(margin), no_wrap=True)
        for sign, style in cells:
            line.append(sign, style)
        lines.append(line)
    return lines


def _rounded(numerator: int, denominator: int) -> int:
    """Return the nearest whole number, of two the even one."""
    whole, rest = divmod(numerator, denominator)
    return whole + (2 * rest > denominator or (2 * rest == denominator and whole % 2 > 0))


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
    draw_bars(axes, window.rows, window.start_ns, window.end_ns)
    save_figure(figure, axes, f"{shown(plan.chain.name)}: {window.title}. {headline(plan)}", path)


def save_timeline(simulation: Simulation, path: str) -> None:
    """Draw a simulated run into ``path``: what the devices do, and each one's memory with its limit."""
    timeline, plan = simulation.timeline, simulation.plan
    rows = [row for row in timeline_rows(timeline) if row.device is not None]
    figure, (axes, memory) = make_figure([len(rows), max(4, len(rows) // 2)])
    draw_bars(axes, rows, 0, timeline.makespan_ns)
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
    import matplotlib as mpl

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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 1.3 + INCH_PER_ROW * sum(heights) + 0.5 * (len(heights) - 1)), layout="constrained")
    return figure, list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])


def draw_bars(axes: Any, rows: Sequence[GanttRow], start_ns: int, end_ns: int) -> None:
    """Draw bars of ``rows`` on ``axes``, from ``start_ns`` to ``end_ns``."""
    from matplotlib.collections import PolyCollection

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
    import matplotlib as mpl

    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise BadInput(f"{path}: a picture is one of {', '.join(SUFFIXES)}")
    axes.set_title(title, fontsize=9, loc="left", parse_math=False)
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
    looks = mpl.rc_context({"svg.hashsalt": "pipeplan", "svg.fonttype": "none"})
    with looks, warnings.catch_warnings(), replaced(path) as file:
        warnings.filterwarnings("ignore", "Glyph")  # a letter of a name that the font lacks is drawn as a box
        figure.savefig(file, format=suffix[1:], dpi=130, metadata=metadata)

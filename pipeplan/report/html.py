"""What is there to see of a plan, on one page? Table, pattern, a simulated run, memory and bounds, in plain HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from ..check.evaluate import Evaluation, evaluate, gap
from ..cost.memory_model import weights_of
from ..names import SENTENCE, shown
from ..plan import Bound, Plan, Stage
from ..planner.simulation import Simulation
from ..schedule.kinds import kind_of
from ..schedule.memory import activation_steps
from ..units import format_bytes, format_devices, format_ns
from .gantt import NAMES, GanttRow, plan_window, timeline_rows, working_devices
from .page import SCRIPT, STYLE
from .tables import alone_ns, bound_class, distance, group_column, machine, stage_figures

ROW_PIXELS = 20
LABEL_PIXELS = 7.0  # per character, on a chart about 1200 pixels wide
CHART_PIXELS = 1200.0
HALF = 28  # columns of each of two names in a cell
MOST_OPERATIONS = 8000  # of the GPUs, in the run that the page shows; more would make it slow


def microbatches_shown(plan: Plan, wanted: int, batch: int = 1) -> int:
    """Return how many microbatches the page's run has: ``wanted``, or fewer where that would be too many operations.

    Fewer are whole mini-batches of ``batch``.
    """
    most = MOST_OPERATIONS // (2 * len(plan.allocation.stages))
    return wanted if wanted <= most else max(1, most // batch) * batch


def report_html(simulation: Simulation) -> str:
    """Return the page for a plan and one simulated run of it; it needs nothing but itself.

    Every operation and every instant of memory answers to the mouse. Same input, same bytes.
    """
    plan, timeline = simulation.plan, simulation.timeline
    result = evaluate(plan)
    run = [row for row in timeline_rows(timeline) if row.device is not None and row.bars]
    data = {"makespan_ns": timeline.makespan_ns, "memory": _memory_data(simulation)}
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escape(shown(plan.chain.name))}: pipeline plan</title><style>{STYLE}</style></head><body>",
        _head(plan, result),
        "<h2>Period against lower bounds</h2>",
        _bounds(plan, result),
        "<h2>Stages</h2>",
        _stages(plan, result),
    ]
    if plan.pattern is not None or kind_of(plan).steady is not None:
        window = plan_window(plan)
        parts += [
            f"<h2>Steady state: {escape(window.title)}</h2>",
            '<p class="soft">Microbatch 0 enters at the left edge; negative ones entered before.</p>',
            _legend(window.rows),
            _chart("pattern", window.rows, window.start_ns, window.end_ns, labels=True),
        ]
    parts += [
        f"<h2>Run: {timeline.program.microbatches} microbatches, {escape(simulation.name)}</h2>",
        f'<p class="soft">{format_ns(simulation.makespan_ns)} in all, {format_ns(simulation.per_microbatch_ns)} per '
        f"microbatch, bubble {timeline.longest_stage_bubble():.1%} of the longest stage. "
        'Zoom <input type="range" data-zoom="run" min="1" max="20" step="0.5" value="1" aria-label="zoom"></p>',
        _legend(run),
        _chart("run", run, 0, timeline.makespan_ns, labels=False),
        "<h2>Memory over the run</h2>",
        '<p class="soft">Dark: weights and buffers. Light: activations. Dashed: the GPU\'s memory.</p>',
        _memory(simulation),
        _provenance(plan),
        '<div id="tip"></div>',
        f"<script>const DATA = {json.dumps(data, separators=(',', ':'))};{SCRIPT}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _head(plan: Plan, result: Evaluation) -> str:
    chain, platform = plan.chain, plan.platform
    alone = alone_ns(chain)
    used = len({device for stage in plan.allocation.stages for device in stage.devices})
    cards = [
        (format_ns(result.period_ns), "per microbatch"),
        (f"{1e9 * chain.microbatch / result.period_ns:.2f}/s", "microbatches" if chain.microbatch == 1 else "samples"),
        (f"{alone / result.period_ns:.2f}x", "as fast as one GPU (if that had the memory)"),
    ]
    gaps = [gap(result.period_ns, bound) for bound in plan.lower_bounds if not bound.claimed]
    if gaps:
        cards.append((f"{min(gaps):.2%}", "above the best lower bound"))
    boxes = "".join(f'<div class="card"><b>{escape(value)}</b>{escape(what)}</div>' for value, what in cards)
    return (
        f"<h1>{escape(shown(chain.name))} on {len(platform)} GPUs</h1>"
        f'<p class="soft">{len(chain)} layers, {format_bytes(weights_of(chain, 0, len(chain))[0])} of weights, '
        f"{format_ns(alone)} forward and backward; {escape(machine(platform))}; "
        f"{len(plan.allocation.stages)} stages on {used} GPUs; weights {plan.policy.weights}, an update every "
        f"{plan.interval} microbatches</p>"
        f'<div class="cards">{boxes}</div>'
    )


def _bounds(plan: Plan, result: Evaluation) -> str:
    entries = [("this plan", result.period_ns, "plan", "")]
    entries += [
        (f"bound, class {bound_class(bound)}", bound.period_ns, _fill(bound), f", {distance(bound, result.period_ns)}")
        for bound in plan.lower_bounds
    ]
    longest = max(period for _, period, _, _ in entries)
    rows = [
        f'<div class="left">{escape(name)}: {format_ns(period)}{extra}</div>'
        f'<div class="track"><div class="fill {kind}" style="width:{100 * period / longest:.3f}%"></div></div>'
        for name, period, kind, extra in entries
    ]
    return f'<div class="bounds">{"".join(rows)}</div>'


def _fill(bound: Bound) -> str:
    return "claimed" if bound.claimed else ""


def _stages(plan: Plan, result: Evaluation) -> str:
    column = group_column(plan, result.groups)
    title, places = ((column[0],), column[1]) if column else ((), [])
    head = ("stage", "layers", "GPUs", "forward ms", "backward ms", "recompute", *title, "in flight")
    memory = ("weights GB", "activations GB", "buffers GB", "peak GB", "of GB")
    rows = []
    for s, (stage, cost, use, in_flight, first) in enumerate(stage_figures(plan, result)):
        sizes = (use.weights_bytes, use.activation_bytes, use.buffer_bytes, use.peak_bytes, use.memory_bytes)
        cells = [
            str(s),
            _layers(plan, stage),
            format_devices(stage.devices, ", "),
            f"{cost.forward_ns / 1e6:.3f}",
            f"{cost.backward_ns / 1e6:.3f}",
            f"{sum(stop - start for start, stop in stage.checkpoint)} of {stage.stop - stage.start}",
            *places[s : s + 1],
            str(in_flight),
        ]
        if first == s:
            cells += [f"{size / 1e9:.3f}" for size in sizes]
        else:
            cells += [f"with stage {first}", "", "", "", ""]
        rows.append(
            "<tr>"
            + "".join(f"<td{' class=left' if i in (1, 2) else ''}>{escape(cell)}</td>" for i, cell in enumerate(cells))
            + "</tr>"
        )
    titles = "".join(
        f"<th{' class=left' if i in (1, 2) else ''}>{escape(name)}</th>" for i, name in enumerate((*head, *memory))
    )
    return f'<div class="wide"><table id="stages"><tr>{titles}</tr>{"".join(rows)}</table></div>'


def _layers(plan: Plan, stage: Stage) -> str:
    first, last = plan.chain.layers[stage.start].name, plan.chain.layers[stage.stop - 1].name
    names = shown(first) if first == last else f"{shown(first, HALF)} to {shown(last, HALF)}"
    return f"{stage.start}-{stage.stop - 1}  {names}"


def _legend(rows: Sequence[GanttRow]) -> str:
    found = {(bar.kind, bar.chunk > 0) for row in rows for bar in row.bars}
    spans = [
        f'<span><i style="background:var(--{kind}{"2" if later else ""})"></i>{name}'
        f"{', later stages of the GPU' if later else ''}</span>"
        for kind, name in NAMES.items()
        for later in (False, True)
        if (kind, later) in found
    ]
    return f'<div class="legend">{"".join(spans)}</div>'


def _chart(name: str, rows: Sequence[GanttRow], start_ns: int, end_ns: int, labels: bool) -> str:
    """One SVG with coordinates in per cent of its width, so that zooming it stretches bars and not letters."""
    span = max(1, end_ns - start_ns)
    shapes = []
    for i, row in enumerate(rows):
        for bar in row.bars:
            left = max(bar.start_ns, start_ns)
            width = min(bar.end_ns, end_ns) - left
            x, share = 100 * (left - start_ns) / span, 100 * width / span
            later = " later" if bar.chunk else ""
            shapes.append(
                f'<rect class="op {bar.kind}{later}" x="{x:.4f}%" y="{i * ROW_PIXELS + 2}" width="{share:.4f}%" '
                f'height="{ROW_PIXELS - 4}" data-row="{i}" '
                f'data-op="{bar.kind},{bar.stage},{bar.microbatch},{bar.start_ns},{bar.end_ns - bar.start_ns}"/>'
            )
            if labels and share / 100 * CHART_PIXELS > LABEL_PIXELS * len(bar.label) + 4:
                shapes.append(
                    f'<text class="{later.strip()}" x="{x + share / 2:.4f}%" y="{i * ROW_PIXELS + ROW_PIXELS / 2}">'
                    f"{bar.label}</text>"
                )
    height = ROW_PIXELS * len(rows)
    names = "".join(f"<div>{escape(row.name)}</div>" for row in rows)
    ticks = "".join(
        f'<span style="left:{100 * k / 8:.2f}%">{(start_ns + span * k / 8) / 1e6:.2f} ms</span>' for k in range(8)
    )
    return (
        f'<div class="chart" data-rows="{escape("|".join(row.name for row in rows))}">'
        f'<div class="names">{names}</div><div class="scroll"><div class="stretch" id="{name}">'
        f'<svg height="{height}" role="img" aria-label="{name}">{"".join(shapes)}</svg>'
        f'<div class="axis">{ticks}</div></div></div></div>'
    )


def _memory_data(simulation: Simulation) -> dict[str, dict[str, object]]:
    return {
        str(device): {
            "static": simulation.uses[device].static_bytes,
            "limit": simulation.uses[device].memory_bytes,
            "steps": list(activation_steps(simulation.timeline, lane)),
        }
        for lane, device in working_devices(simulation.timeline)
    }


def _memory(simulation: Simulation) -> str:
    """One small chart per GPU, all on one scale: 100 units wide, 1000 units for the highest peak or limit."""
    timeline = simulation.timeline
    figures = []
    lanes = working_devices(timeline)
    uses = [simulation.uses[device] for _, device in lanes]
    top = max((max(use.peak_bytes, use.memory_bytes) for use in uses), default=1) * 1.05
    span = max(1, timeline.makespan_ns)
    for (i, device), use in zip(lanes, uses, strict=True):
        static, peak, memory = use.static_bytes, use.peak_bytes, use.memory_bytes
        path: list[str] = []
        last = 0.0
        for at, held in activation_steps(timeline, i):
            x, y = 100 * at / span, 1000 * (1 - (static + held) / top)
            path.append(f"L{x:.3f} {last:.1f}L{x:.3f} {y:.1f}" if path else f"M{x:.3f} 1000L{x:.3f} {y:.1f}")
            last = y
        path.append(f"L100 {last:.1f}L100 1000Z")
        limit = 1000 * (1 - memory / top)
        over = ' class="over"' if peak > memory else ""
        figures.append(
            f"<figure><figcaption{over}>GPU {device}: peak {format_bytes(peak)} of {format_bytes(memory)}"
            f'</figcaption><svg data-device="{device}" viewBox="0 0 100 1000" preserveAspectRatio="none">'
            f'<path class="held" d="{"".join(path)}"/>'
            f'<rect class="static" x="0" width="100" y="{1000 * (1 - static / top):.1f}" '
            f'height="{1000 * static / top:.1f}"/>'
            f'<line class="limit" x1="0" x2="100" y1="{limit:.1f}" y2="{limit:.1f}"/></svg></figure>'
        )
    return f'<div class="memory">{"".join(figures)}</div>'


def _provenance(plan: Plan) -> str:
    origin = plan.provenance
    facts = [f"by the plan's own account: planned by {shown(origin.algorithm)}"]
    facts += [shown(f"{name} {value}", SENTENCE) for name, value in origin.options.items()]
    facts += [
        f"{name} {shown(value)}"
        for name, value in (("solver", origin.solver), ("status", origin.solver_status))
        if value
    ]
    facts += [f"pipeplan {shown(origin.version)}"] if origin.version else []
    facts += [f"profile from {shown(plan.chain.source, SENTENCE)}"] if plan.chain.source else []
    return f'<p class="soft" style="margin-top:32px">{escape("; ".join(facts))}</p>'

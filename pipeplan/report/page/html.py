"""What is there to see of a plan, on one page? Table, pattern, runs, memory and bounds, in plain HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from ...check.evaluate import Evaluation, evaluate, gap
from ...check.lateness import plan_delays
from ...cost.memory_model import weights_of
from ...files.plans import gpus_of
from ...names import SENTENCE, format_devices, shown
from ...plan import Plan, Stage
from ...planner.simulated.other_schedules import drains
from ...planner.simulated.simulation import Refused, Simulation
from ...runtime.measure.times import OpTime
from ...runtime.measure.trace_file import MeasuredRun
from ...schedule.kinds import kind_of
from ...schedule.timeline import activation_steps
from ...schedule.weight_versions import average_delay
from ...units import format_bytes, format_ns, gpu_name
from ..gantt import Window, plan_window, working_devices
from ..tables.plan import group_column, stage_figures
from ..tables.simulations import SCHEDULE_COLUMNS, column_words, schedule_cells
from ..words import alone_ns, bound_class, distance, machine
from .charts import Chart, folded, measured_chart, run_chart, toolbar

FAR = 8  # times the highest peak, a GPU's memory is left out of the charts of what it holds
SIZES = (("GB", 10**9), ("MB", 10**6), ("B", 1))
HALF = 28  # columns of each of two names in a cell
MOST_OPERATIONS = 20_000  # of GPUs, in all runs that a page shows; more would make it slow to open


@dataclass(frozen=True)
class Measured:
    """A run by the plan: its figures, and what every device did."""

    figures: MeasuredRun
    operations: dict[int, tuple[OpTime, ...]]


def microbatches_shown(plan: Plan, wanted: int, batch: int = 1, runs: int = 1) -> int:
    """Return how many microbatches each of a page's ``runs`` has: ``wanted``, or fewer of too many operations.

    Fewer are whole mini-batches of ``batch``.
    """
    most = MOST_OPERATIONS // (2 * len(plan.allocation.stages) * runs)
    return wanted if wanted <= most else max(1, most // batch) * batch


def report_html(
    simulation: Simulation,
    beside: Sequence[Simulation] = (),
    refused: Sequence[Refused] = (),
    measured: Measured | None = None,
) -> str:
    """Return the page for a plan and one simulated run of it; it needs nothing but itself.

    ``beside`` are its runs under several schedules, to be compared, and ``refused`` the schedules that it cannot run
    under; ``measured`` is a run of it, to be set under the simulated one. Every operation and every instant of memory
    answers to the mouse. Same input, same bytes.
    """
    plan, timeline = simulation.plan, simulation.timeline
    result = evaluate(plan)
    twins = _twins(beside)
    runs = [
        (same, run_chart(f"run-{same[0].schedule}", "run", same[0].timeline))
        for same in twins
        if simulation.schedule not in [x.schedule for x in same]
    ]
    others = [chart for _, chart in runs]
    names = [f"{escape(', '.join(x.name for x in same))}, {format_ns(same[0].makespan_ns)}" for same, _ in runs]
    titled = [f"<h3>{name}</h3>{chart.html()}" for name, chart in zip(names, others, strict=True)]
    shown_charts, parts = [], []
    for charts, html in (
        _steady(plan, result),
        _run(simulation, measured, others),
        (others, [*_schedules(twins, refused), *titled]),
    ):
        shown_charts += charts
        parts += html
    parts = [
        _head(plan, result),
        "<h2>Period against lower bounds</h2>",
        _bounds(plan, result),
        "<h2>Stages</h2>",
        _stages(plan, result),
        *parts,
        "<h2>Memory over the run</h2>",
        '<p class="soft">Below: weights and buffers. Above: activations. Dashed: the GPU\'s memory, if near.</p>',
        _memory(simulation),
        _provenance(plan),
    ]
    return _page(plan, shown_charts, parts, {"makespan_ns": timeline.makespan_ns, "memory": _memory_data(simulation)})


def chart_html(plan: Plan) -> str:
    """Return the chart of :func:`.gantt.plan_window` for a notebook: a frame of its own, in which it zooms."""
    chart = _window_chart(plan, plan_window(plan))
    page = _page(plan, [chart], [toolbar([chart]), chart.html()], {"memory": {}})
    height = 110 + 20 * len(chart.rows)
    return f'<iframe srcdoc="{escape(page)}" style="width:100%;height:{height}px;border:0"></iframe>'


def _page(plan: Plan, charts: Iterable[Chart], parts: Iterable[str], data: dict[str, object]) -> str:
    """Return a page of ``parts`` that opens offline, with the ``charts`` that its script draws."""
    data = {**data, "charts": {chart.name: chart.data() for chart in charts}}
    script = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no name in it can end the script
    title, text = escape(shown(plan.chain.name)), "\n".join(parts)
    beside = {"style": _beside("page.css"), "script": _beside("page.js")}
    return Template(_beside("page.html")).substitute(title=title, parts=text, data=script, **beside)


Section = tuple[list[Chart], list[str]]  # the charts in it, and its HTML


def _steady(plan: Plan, result: Evaluation) -> Section:
    """Return a period of a plan that has a steady state, nothing of another."""
    if plan.pattern is None and kind_of(plan).steady is None:
        return [], []
    window = plan_window(plan)
    chart = _window_chart(plan, window)
    longer = plan.pattern is not None and plan.pattern.period_ns < result.period_ns
    why = "filling and draining" if kind_of(plan).drains else "updates"
    whole = f" Including {why}, a microbatch takes {format_ns(result.period_ns)}." if longer else ""
    return [chart], [
        f"<h2>Steady state: {escape(window.title)}</h2>",
        f'<p class="soft">Microbatch 0 enters at the left edge; negative ones entered before.{whole}</p>',
        toolbar([chart]),
        chart.html(),
    ]


def _window_chart(plan: Plan, window: Window) -> Chart:
    batch = 1 if plan.pattern is not None else plan.schedule.mini_batch or 1
    return Chart("pattern", "pattern", window.rows, window.start_ns, window.end_ns, batch)


def _run(simulation: Simulation, measured: Measured | None, others: Sequence[Chart]) -> Section:
    """Return the run, what was measured under it, and what zooms both and ``others``."""
    plan, timeline = simulation.plan, simulation.timeline
    charts = [run_chart("run", "run", timeline)]
    titles = [""]
    if measured is not None:
        second = plan.interval if drains(plan, simulation.schedule) else 0  # mini-batch: the first warms everything up
        first, program = second if second < measured.figures.microbatches else 0, timeline.program
        seen = first, program.microbatches, program.batch
        trained = measured_chart("measured", "run", measured.operations, *seen)
        charts.append(trained)
        titles = ["<h3>Planned</h3>", f"<h3>Measured: {_measured_words(measured, trained, plan)}</h3>"]
    return charts, [
        f"<h2>Run: {timeline.program.microbatches} microbatches, {escape(simulation.name)}</h2>",
        f'<p class="soft">{format_ns(simulation.makespan_ns)} in all, {format_ns(simulation.per_microbatch_ns)} per '
        f"microbatch, bubble {timeline.longest_stage_bubble():.1%} on the busiest GPU. The wheel zooms, dragging "
        "moves, a double click shows all; pointing at a microbatch shows its way.</p>",
        toolbar([*charts, *others]),
        *(f"{title}{chart.html()}" for title, chart in zip(titles, charts, strict=True)),
    ]


def _beside(name: str) -> str:
    """Return the page's frame, its style, or the script that draws ``DATA``: inlined, so that it opens offline."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _head(plan: Plan, result: Evaluation) -> str:
    chain, platform = plan.chain, plan.platform
    alone = alone_ns(chain)
    used = len({device for stage in plan.allocation.stages for device in stage.devices})
    cards = [
        (format_ns(result.period_ns), "per microbatch"),
        (f"{1e9 * chain.microbatch / result.period_ns:.2f}/s", "microbatches" if chain.microbatch == 1 else "samples"),
        (f"{alone / result.period_ns:.2f}x", "as fast as one GPU (if that had the memory)"),
    ]
    delays = plan_delays(plan, result.graph)
    if any(x.most for x in delays):
        cards.append(
            (f"{average_delay(delays):.2f} updates", f"late on average, {max(x.most for x in delays)} at most")
        )
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
        (
            f"bound, class {bound_class(bound)}",
            bound.period_ns,
            "claimed" * bound.claimed,
            f", {distance(bound, result.period_ns)}",
        )
        for bound in plan.lower_bounds
    ]
    longest = max(period for _, period, _, _ in entries)
    rows = [
        f'<div class="left">{escape(name)}: {format_ns(period)}{extra}</div>'
        f'<div class="track"><div class="fill {kind}" style="width:{100 * period / longest:.3f}%"></div>'
        f"{_gap(period, result.period_ns, longest)}</div>"
        for name, period, kind, extra in entries
    ]
    return f'<div class="bounds">{"".join(rows)}</div>'


def _gap(bound_ns: int, period_ns: int, longest_ns: int) -> str:
    """Return what lies between a bound and the plan, drawn; nothing where that can't be seen."""
    share, text = (period_ns - bound_ns) / longest_ns, f"{period_ns / bound_ns - 1:.1%}"
    return f'<div class="gap" style="width:{100 * share:.3f}%">{text if share > 0.1 else ""}</div>' if share > 0 else ""


def _stages(plan: Plan, result: Evaluation) -> str:
    column = group_column(plan, result.groups)
    title, places = ((column[0],), column[1]) if column else ((), [])
    head = ("stage", "layers", "GPUs", "forward ms", "backward ms", "recompute", *title, "in flight")
    unit, size_of = next((x, n) for x, n in SIZES if any(use.peak_bytes >= n for use in result.devices) or n == 1)
    memory = [f"{name} {unit}" for name in ("weights", "activations", "buffers", "peak", "of")]
    rows: list[list[str]] = []
    for s, (stage, cost, use, in_flight, first) in enumerate(stage_figures(plan, result)):
        sizes = (use.weights_bytes, use.activation_bytes, use.buffer_bytes, use.peak_bytes, use.memory_bytes)
        cells = [
            str(s),
            _layers(plan, stage),
            format_devices(gpus_of(plan.platform, stage), ", "),
            f"{cost.forward_ns / 1e6:.3f}",
            f"{cost.backward_ns / 1e6:.3f}",
            f"{sum(stop - start for start, stop in stage.checkpoint)} of {stage.stop - stage.start}",
            *places[s : s + 1],
            str(in_flight),
        ]
        if first == s:
            cells += [f"{size / size_of:.2f}" for size in sizes]
        else:
            cells += [f"with stage {first}", "", "", "", ""]
        rows.append(cells)
    return _table("stages", (*head, *memory), rows, ("layers", "GPUs"))


def _table(name: str, columns: Sequence[str], rows: Iterable[Iterable[str]], left: Sequence[str]) -> str:
    """Return a table of cells, the columns ``left`` to the left."""
    sides = [" class=left" if column in left else "" for column in columns]

    def row(tag: str, cells: Iterable[str]) -> str:
        return "".join(f"<{tag}{side}>{escape(x)}</{tag}>" for side, x in zip(sides, cells, strict=True))

    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    return f'<div class="wide"><table id="{name}"><tr>{row("th", columns)}</tr>{body}</table></div>'


def _layers(plan: Plan, stage: Stage) -> str:
    first, last = plan.chain.layers[stage.start].name, plan.chain.layers[stage.stop - 1].name
    names = shown(first) if first == last else f"{shown(first, HALF)} to {shown(last, HALF)}"
    return f"{stage.start}-{stage.stop - 1}  {names}"


def _twins(runs: Iterable[Simulation]) -> list[list[Simulation]]:
    """Return the runs, those with the same figures together."""
    found: dict[tuple[object, ...], list[Simulation]] = {}
    for run in runs:
        _, *figures = schedule_cells(run).values()
        found.setdefault((run.makespan_ns, *map(str, figures)), []).append(run)
    return list(found.values())


def _schedules(twins: Sequence[Sequence[Simulation]], refused: Sequence[Refused]) -> list[str]:
    """Return the table of ``simulate`` with several schedules, best first; nothing without any."""
    if not twins and not refused:
        return []
    rows = [[", ".join(x.schedule for x in same), *list(schedule_cells(same[0]).values())[1:]] for same in twins]
    notes = [
        "; ".join(column_words(all(run.barrier for same in twins for run in same))),
        *(f"{refusal.schedule}: not possible: {refusal.reason}" for refusal in refused),
    ]
    return [
        "<h2>Schedules side by side</h2>",
        _table("schedules", SCHEDULE_COLUMNS, rows, ("schedule", "weights")),
        *(f'<p class="soft">{escape(note)}</p>' for note in notes),
    ]


def _measured_words(measured: Measured, chart: Chart, plan: Plan) -> str:
    period, planned = measured.figures.measured_period_ns, evaluate(plan).period_ns
    spent = f"{format_ns(chart.end_ns)} in all"
    if period is None:
        return f"{spent}; the run was too short for a steady state"
    return f"{spent}; {format_ns(period)} per microbatch in the steady state, {period / planned:.2f} x planned"


def _memory_data(simulation: Simulation) -> dict[str, dict[str, object]]:
    return {
        str(device): {
            "static": simulation.uses[device].static_bytes,
            "limit": simulation.uses[device].memory_bytes,
            "steps": list(activation_steps(simulation.timeline, lane)),
        }
        for lane, device, _ in _fullest(simulation)
    }


def _fullest(simulation: Simulation) -> list[tuple[int, int, str]]:
    """Return the lane, the device and the name of each GPU; of many replicas of a stage the fullest stands for all."""
    program, found = simulation.timeline.program, list[tuple[int, int, str]]()
    lanes, width = working_devices(simulation.timeline), program.graph.resources[0].width
    stages = [frozenset(program.operations[x.position].stage for x in program.lanes[i].steps) for i, _ in lanes]
    for places in folded(stages):
        lane, device = max((lanes[x] for x in places), key=lambda x: (simulation.uses[x[1]].peak_bytes, -x[1]))
        devices = format_devices([lanes[x][1] for x in places], ", ")
        found.append((lane, device, f"GPU {devices} x{len(places)}" if len(places) > 1 else gpu_name(device, width)))
    return found


def _memory(simulation: Simulation) -> str:
    """One small chart per GPU, all on one scale: 100 units wide, 1000 for the highest peak, or limit unless far off."""
    timeline = simulation.timeline
    figures = []
    lanes = _fullest(simulation)
    uses = [simulation.uses[device] for _, device, _ in lanes]
    highest, limits = max(use.peak_bytes for use in uses), max(use.memory_bytes for use in uses)
    top = 1.05 * (highest if 0 < FAR * highest <= limits else max(highest, limits))
    for (i, device, name), use in zip(lanes, uses, strict=True):
        static, peak, memory = use.static_bytes, use.peak_bytes, use.memory_bytes
        path: list[str] = []
        last = 0.0
        for at, held in activation_steps(timeline, i):
            x, y = 100 * at / timeline.makespan_ns, 1000 * (1 - (static + held) / top)
            path.append(f"L{x:.3f} {last:.1f}L{x:.3f} {y:.1f}" if path else f"M{x:.3f} 1000L{x:.3f} {y:.1f}")
            last = y
        path.append(f"L100 {last:.1f}L100 1000Z")
        limit = max(-10, 1000 * (1 - memory / top))  # just outside where it is far off
        over = ' class="over"' if peak > memory else ""
        figures.append(
            f"<figure><figcaption{over}>{name}: peak {format_bytes(peak)} of {format_bytes(memory)}"
            f'</figcaption><svg data-device="{device}" viewBox="0 0 100 1000" preserveAspectRatio="none">'
            f'<path class="held" d="{"".join(path)}"/>'
            f'<rect class="static" x="0" width="100" y="{1000 * (1 - static / top):.1f}" '
            f'height="{1000 * static / top:.1f}"/>'
            f'<line class="limit" x1="0" x2="100" y1="{limit:.1f}" y2="{limit:.1f}"/></svg></figure>'
        )
    return f'<div class="memory">{"".join(figures)}</div>'


def _provenance(plan: Plan) -> str:
    origin = plan.provenance
    facts = [f"The plan's file says: algorithm {shown(origin.algorithm)}"]
    typed = ((name, value) for name, value in origin.options.items() if name != "arguments" and name[-3:] != "_ns")
    facts += [shown(f"{name} {value}", SENTENCE) for name, value in typed if not isinstance(value, dict)]
    facts += [
        f"{name} {shown(value)}"
        for name, value in (("solver", origin.solver), ("status", origin.solver_status))
        if value
    ]
    facts += [f"pipeplan {shown(origin.version)}"] if origin.version else []
    facts += [f"profile {shown(plan.chain.source, SENTENCE)}"] if plan.chain.source else []
    return f'<p class="soft" style="margin-top:32px">{escape("; ".join(facts))}</p>'

"""How does a plan run in simulation? Patterns and runs in the terminal with their figures, schedules side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ...plan import Plan
from ...planner.simulated.simulation import Refused, Simulation, percentile_95
from ...units import format_bytes, format_ns
from ..gantt import GanttRow, draw, plan_window, print_panels, timeline_rows
from ..looks import console, make_table, print_fitted
from ..words import mean_delay, unknown_between
from .plan import groups_line, headline

if TYPE_CHECKING:
    from ...schedule.synthesis.synthesize import Synthesis

SCHEDULE_COLUMNS = ("schedule", "stages", "weights", "period", "makespan", "bubble", "held", "peak", "links")
WIDE = 100  # columns from which a comparison under jitter shows everything


def print_pattern(plan: Plan, width: int | None = None, links: bool = True) -> None:
    """Print one steady period of a plan, or its one drained mini-batch, as a Gantt chart with its legend."""
    out = console(width)
    window = plan_window(plan)
    rows, start, end = window.rows, window.start_ns, window.end_ns
    out.print(headline(plan))
    places = groups_line(plan)
    if places is not None:
        out.print(places)
    out.print(
        f"{window.title}; {_legend(rows)}{_shared(rows)}"
        f"{', 0 enters now' if any(bar.microbatch < 0 for row in rows for bar in row.bars) else ''}"
    )
    for line in draw(_shown(rows, links), start, end, out.width):
        out.print(line)


def print_simulation(simulation: Simulation, width: int | None = None, links: bool = False) -> None:
    """Print a simulated run: Gantt, makespan, the period reached beside the plan's, one row per GPU and per link."""
    out = console(width)
    timeline = simulation.timeline
    figures = simulation.figures()
    rows = timeline_rows(timeline)
    out.print(f"{figures['microbatches']} microbatches, {simulation.name}; {_legend(rows)}{_shared(rows)}")
    print_panels(out, timeline, _shown(rows, links))
    out.print(
        f"makespan {format_ns(simulation.makespan_ns)} (fill {format_ns(timeline.fill_ns)}), "
        f"bubble {figures['longest_stage_bubble']:.1%} on the busiest GPU"
    )
    if simulation.span_ns is not None:
        out.print(
            f"span     {format_ns(simulation.span_ns)} of one GPU at most "
            f"({format_ns(simulation.span_ns / figures['microbatches'])} per microbatch): what a batch takes without a "
            "barrier between updates"
        )
    for rate in _rates(simulation, figures):
        out.print(rate)
    late = mean_delay(simulation.delays)
    if late is not None:
        out.print(f"late     gradients by {late}")
    if simulation.order is not None:
        out.print(f"bound    {order_bound(simulation.order)}")
    steady = simulation.steady
    if steady is not None:
        kept = (", ".join(map(str, simulation.versions(sync))) for sync in (False, True))
        out.print("weights  versions by stage: {}; with vertical sync {}".format(*kept))
    if simulation.jitter_ns:
        out.print(
            f"jitter   {format_ns(statistics.median(simulation.jitter_ns))} per microbatch in the median of "
            f"{len(simulation.jitter_ns)} runs, {format_ns(percentile_95(simulation.jitter_ns))} at p95"
        )
    program = timeline.program
    unknown = unknown_between(simulation.plan.chain) if program.split and program.weight_keeps == 1 else None
    if unknown is not None:
        out.print(f"note     {unknown}")
    out.print()
    print_fitted(out, _device_table(simulation, figures["devices"]))
    table = make_table("link", "use", left=("link",))
    for row in figures["links"]:
        table.add_row(row["link"].removeprefix("link "), f"{row['use']:.1%}")
    if figures["links"]:
        out.print()
        print_fitted(out, table)


def order_bound(order: Synthesis) -> str:
    """Return in words how good an order is at least."""
    what = "makespan" if order.barrier else "longest span"
    gap = "proved best" if order.optimal else f"gap {order.gap:.2%}"
    cut = "" if order.cut is None else f"; the search ended early: {order.cut}"
    return f"no order of these stages has a {what} below {format_ns(order.bound_ns)}: {gap}{cut}"


def _rates(simulation: Simulation, figures: Mapping[str, Any]) -> list[str]:
    """Return the lines of the period, which of a drained run has its share of filling and draining, and of the beat."""
    plan, steady, own = simulation.plan, simulation.steady, simulation.own
    period_ns, beat_ns = figures["period_ns"], figures["beat_ns"]
    if steady is not None:
        where = "in the steady state" if steady.repeats else "on average of a long run, which finds no steady state"
        return [f"period   {format_ns(period_ns)} {where}"]
    planned = f", {format_ns(plan.pattern.period_ns)} planned" if own and plan.pattern else ""
    if not simulation.drained:
        if period_ns is None:
            return ["period   too few microbatches for a steady state"]
        planned = f", {format_ns(simulation.promised.period_ns)} planned" if own else ""
        return [f"period   {format_ns(period_ns)} reached in the middle{planned}"]
    whole = simulation.timeline.program.microbatches == plan.schedule.microbatches
    promised = f", {format_ns(simulation.promised.period_ns)} planned" if own and whole else ""
    what = "filled and drained" if simulation.barrier else "of the longest span"
    lines = [f"period   {format_ns(period_ns)} per microbatch, {what}{promised if simulation.barrier else ''}"]
    if beat_ns is not None:
        lines.append(f"beat     {format_ns(beat_ns)} while the pipeline is full{planned}")
    return lines


def column_words(barrier: bool) -> tuple[str, str]:
    """Return what the columns of schedules side by side say, with or without a barrier between updates."""
    how = "filled, drained and with its weight synchronisation" if barrier else "of the longest span of a GPU"
    return (
        f"period: ms per microbatch, of a drained run {how}",
        "held: microbatches on one GPU at most; peak: GB on the fullest GPU (! more than it has); links: the busiest",
    )


def print_schedules(
    runs: Sequence[Simulation], refused: Sequence[Refused], plan: Plan, width: int | None = None
) -> None:
    """Print schedules side by side, best first: time per microbatch, makespan, bubble, in flight, memory, links."""
    out = console(width)
    count = runs[0].timeline.program.microbatches if runs else 0
    out.print(headline(plan))
    first, *others = column_words(all(run.barrier for run in runs))
    out.print(f"{count} microbatches; {first}")
    for words in others:
        out.print(words)
    if any(run.jitter_ns for run in runs):
        out.print(f"median and p95: the period under jitter, over {len(runs[0].jitter_ns)} runs")
    out.print()
    jitter = any(run.jitter_ns for run in runs)
    spread = ("median", "p95") if jitter else ()
    shown = [*SCHEDULE_COLUMNS[:4], *spread, *SCHEDULE_COLUMNS[4:]]
    if jitter and out.width < WIDE:
        shown = [name for name in shown if name not in ("stages", "weights", "links")]
    table = make_table(*shown, left=("schedule", "weights"))
    for run in runs:
        plain = schedule_cells(run)
        cells: dict[str, str | Text] = dict(plain)
        if jitter:
            cells["median"] = f"{statistics.median(run.jitter_ns) / 1e6:.2f}"
            cells["p95"] = f"{percentile_95(run.jitter_ns) / 1e6:.2f}"
        cells["peak"] = Text.assemble(plain["peak"].rstrip("!"), " " if run.fits else ("!", "bold red"))
        table.add_row(*(cells[name] for name in shown))
    print_fitted(out, table)
    for run in runs:
        if run.order is not None:
            out.print(f"{run.schedule}: {order_bound(run.order)}")
    for refusal in refused:
        out.print(f"{refusal.schedule}: not possible: {refusal.reason}")


def schedule_cells(run: Simulation) -> dict[str, str]:
    """Return a run's row in a table of schedules: times in ms, the peak in GB, with ! where that is too much."""
    program, figures = run.timeline.program, run.figures()
    peak = max(row["peak_bytes"] for row in figures["devices"])
    cells = (
        run.schedule,
        str(len(program.graph.stages)),
        program.graph.policy.weights,
        f"{run.per_microbatch_ns / 1e6:.2f}",
        f"{run.makespan_ns / 1e6:.2f}",
        f"{figures['longest_stage_bubble']:.1%}",
        str(max(row["most_held"] for row in figures["devices"])),
        f"{peak / 1e9:.2f}{'' if run.fits else '!'}",
        f"{max((row['use'] for row in figures['links']), default=0.0):.1%}",
    )
    return dict(zip(SCHEDULE_COLUMNS, cells, strict=True))


def _device_table(simulation: Simulation, devices: Sequence[Mapping[str, Any]]) -> Table:
    """One row per GPU; the predicted peak is the plan's, for its own pattern."""
    own = simulation.own
    table = make_table("GPU", "busy", "bubble", "in flight", "peak", *(["predicted peak"] if own else []), "memory")
    for row in devices:
        busy = row["busy_ns"] / max(1, simulation.timeline.makespan_ns)
        inside = ",".join(str(n) for _, n in sorted(row["in_flight"].items()))
        sizes = (row[f"{x}_bytes"] for x in ("peak", *["predicted_peak"] * own, "memory"))
        table.add_row(str(row["device"]), f"{busy:.1%}", f"{row['bubble']:.1%}", inside, *map(format_bytes, sizes))
    return table


def _shown(rows: Sequence[GanttRow], links: bool) -> list[GanttRow]:
    return [row for row in rows if links or row.device is not None]


def _legend(rows: Sequence[GanttRow]) -> str:
    found = {bar.kind for row in rows for bar in row.bars}
    parts = ["F forward ="]
    parts += ["R recomputation ~"] if "R" in found else []
    parts += ["B input gradient #", "W weight gradient +"] if "W" in found else ["B backward #"]
    return f"{', '.join(parts)}, transfers > and <, idle .; the number is the microbatch"


def _shared(rows: Sequence[GanttRow]) -> str:
    return ", small letters a GPU's later stages" if any(bar.chunk for row in rows for bar in row.bars) else ""

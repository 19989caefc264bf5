"""What did a search find beside the plan that it chose? The tables of ``compare``, of grids, and of ``import``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import exp, log
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ...check.evaluate import gap
from ...check.targets import TARGETS, express
from ...names import shown
from ...plan import Plan
from ...problem import Problem
from ...units import format_bytes, format_ns
from ..looks import console, make_table, print_fitted
from ..words import assumed
from .plan import print_plan

if TYPE_CHECKING:
    from ...planner.plan import Planned
    from ...planner.what_if.compare import OnePlatform, Reached
    from ...planner.what_if.target import Judged


def print_rows(
    problem: Problem, rows: Sequence[OnePlatform], assumptions: Sequence[str] = (), width: int | None = None
) -> None:
    """Print periods in ms, one row per platform and one column per algorithm, and a line of means.

    The best of a row is bold; ``dp`` marks plain data parallelism. The last lines count feasible cases and give the
    geometric mean of the ratio to the row's best, over the rows where both are feasible, by how many updates gradients
    are late on average, and CPU seconds at most.
    """
    out = console(width)
    counted = "samples" if problem.chain.microbatch > 1 else "microbatches"
    what = f": period in ms per microbatch, an update every so many {counted}, - where nothing fits"
    out.print(Text.assemble((shown(problem.chain.name), "bold"), what))
    for line in assumed(assumptions):
        out.print(line)
    names = [cell.algorithm for cell in rows[0].cells]
    degrees = len({row.variant for row in rows}) > 1 or rows[0].tensor > 1
    table = make_table(*["tensor"] * degrees, "GPUs", "memory", counted, "bound", *names)
    for row in rows:
        table.add_row(
            *[row.variant] * degrees,
            str(row.gpus),
            format_bytes(row.memory_bytes),
            str(row.update_samples),
            f"{row.bound_ns / 1e6:.2f}",
            *(_period(cell, row) for cell in row.cells),
        )
    table.add_section()
    columns, blank = [[row.cells[i] for row in rows] for i in range(len(names))], [""] * (3 + degrees)
    feasible = (sum(cell.period_ns is not None for cell in column) for column in columns)
    table.add_row("feasible", *blank, *map(str, feasible))
    table.add_row("over best", *blank, *(_mean_ratio(column, rows) for column in columns))
    late = ([cell.late_updates for cell in column if cell.late_updates is not None] for column in columns)
    table.add_row("updates late", *blank, *(f"{fmean(x):.2f}" if x else "-" for x in late))
    table.add_row("most CPU s", *blank, *(f"{max(cell.seconds for cell in column):.2f}" for column in columns))
    print_fitted(out, table)


def _period(cell: Reached, row: OnePlatform) -> Text:
    if cell.period_ns is None:
        return Text("-")
    text = f"{'dp ' if cell.data_parallel else ''}{cell.period_ns / 1e6:.2f}"
    return Text(text, "bold" if cell.period_ns == row.best_ns else "")


def _mean_ratio(column: Sequence[Reached], rows: Sequence[OnePlatform]) -> str:
    ratios = [
        cell.period_ns / row.best_ns
        for cell, row in zip(column, rows, strict=True)
        if cell.period_ns is not None and row.best_ns is not None
    ]
    return f"{exp(sum(map(log, ratios)) / len(ratios)):.3f}" if ratios else "-"


def print_grids(plan: Plan, assumptions: Sequence[str] = (), width: int | None = None, *more: Any) -> None:
    """Print the plan of a grid: the grid in one line, the other grids, then the plan as any other, which takes more."""
    out = console(width)
    options = plan.provenance.options
    chosen, batch = options["grid"], options["batch"]
    used, count = chosen["inter"] * chosen["data"], len(plan.platform)
    gap = chosen["batch_ns"] / options["bound_ns"] - 1
    out.print(
        Text.assemble(
            "grid ",
            (f"{chosen['inter']} x {chosen['data']}", "bold"),
            f", {_settings(chosen)}: ",
            (seconds(chosen["batch_ns"]), "bold"),
            f" per batch of {batch} (bound {seconds(options['bound_ns'])}, gap {gap:.2%})",
        )
    )
    out.print(
        f"bound: no grid of up to {count} GPUs with contiguous stages and microbatches of "
        f"{', '.join(map(str, options['microbatches']))}, whatever its limit, takes less"
    )
    if used < count:
        out.print(f"{count - used} of the {count} GPUs stay unused: no grid of all of them is faster")
    out.print()
    print_fitted(out, _grid_table(options["grids"], chosen))
    out.print()
    print_plan(plan, assumptions, width, *more)


def seconds(nanoseconds: int) -> str:
    """Return a time in seconds with three decimals, or in ms below a tenth of a second."""
    return f"{nanoseconds / 1e9:.3f} s" if nanoseconds >= 10**8 else format_ns(nanoseconds)


def _settings(figures: dict[str, Any]) -> str:
    ac = "no recomputation" if figures["ac"] is None else f"ac {figures['ac']}"
    parts = [f"microbatch {figures['microbatch']}", ac, *(["offload"] if figures["offload"] else [])]
    if figures["placement"] == "pipeline":
        parts.append("GPUs of a pipeline side by side")
    return ", ".join([*parts, f"limit {figures['limit']}"])


def _grid_table(grids: Sequence[dict[str, Any]], chosen: dict[str, Any]) -> Table:
    alike = any(figures.get("simulated") == "one pipeline" for figures in grids)
    caption = "~ one pipeline was simulated for all" if alike else None
    table = make_table("grid", "per batch", left=("grid",), space=2, caption=caption)
    table.add_column("with, or why not")
    for figures in sorted(grids, key=lambda x: (x.get("batch_ns") or 2**62, x["inter"])):
        best = (figures["inter"], figures["data"]) == (chosen["inter"], chosen["data"])
        name = f"{figures['inter']} x {figures['data']}"
        about = "" if figures.get("simulated") == "in full" else "~"
        if "batch_ns" in figures:
            table.add_row(Text(name, "bold" if best else ""), about + seconds(figures["batch_ns"]), _settings(figures))
        else:
            table.add_row(name, "-", figures["reason"])
    return table


def judged_figures(judged: Judged, target: str) -> dict[str, Any]:
    """Return what is run today and the best plan of the target for scripts; times in ns, sizes in bytes."""
    return {"target": target, "today": _judged(judged.today, target), "best": _judged(judged.best, target)}


def print_change(judged: Judged, target: str) -> None:
    """Print both plans below each other, and how much shorter the best one is."""
    out = console()
    today, samples = judged.today.evaluation.period_ns, judged.today.plan.chain.microbatch
    best = judged.best.evaluation.period_ns * samples // judged.best.plan.chain.microbatch
    out.print()
    if judged.best is judged.today:
        out.print(f"change      no shorter plan that {TARGETS[target].what} can express was found")
        return
    out.print(
        Text.assemble(
            "change      ",
            (f"{1 - best / today:.1%} shorter", "bold"),
            f": {format_ns(best)} with what pipeplan finds for {TARGETS[target].what} and the same updates",
        )
    )
    degrees = any(x.plan.chain.width > 1 for x in (judged.today, judged.best))
    shape = [*["tensor"] * degrees, "ranks x\npipelines"]
    columns = ("plan", *shape, "schedule", "recomputed", "units of\neach stage", "period", "peak", "gap")
    table = make_table(*columns, left=("plan", "schedule", "recomputed", "units of\neach stage"), space=2)
    for name, planned in (("today", judged.today), ("best", judged.best)):
        found = _judged(planned, target)
        table.add_row(
            name,
            *[found["variant"]] * degrees,
            f"{found['ranks']} x {found['pipelines']}",
            found["schedule"],
            found["recomputed"],
            _counts(found["units"]),
            format_ns(found["period_ns"]),
            format_bytes(found["peak_bytes"]),
            f"{found['gap']:.1%}",
        )
    print_fitted(out, table)


def _judged(planned: Planned, target: str) -> dict[str, Any]:
    plan, result = planned.plan, planned.evaluation
    found = express(plan.chain, plan.allocation.stages, target)
    return {
        "period_ns": result.period_ns,
        "makespan_ns": result.makespan_ns,
        "peak_bytes": max(use.peak_bytes for use in result.devices),
        "bound_ns": plan.lower_bounds[0].period_ns,
        "gap": gap(result.period_ns, plan.lower_bounds[0]),
        "tensor": plan.chain.tensor,
        "variant": plan.chain.variant,
        "ranks": found.shape.ranks,
        "pipelines": found.shape.pipelines,
        "schedule": plan.schedule.kind,
        "recomputed": "attention's core" if plan.chain.selective else str(found.recompute),
        "units": [len(part) for part in found.units],
    }


def _counts(units: list[int]) -> str:
    """Return ``7, 6 x 3`` for 7, 6, 6, 6."""
    runs = [(count, len(list(run))) for count, run in groupby(units)]
    return ", ".join(str(count) if times == 1 else f"{count} x {times}" for count, times in runs)

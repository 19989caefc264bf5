"""What would each hybrid grid take for a batch, or what rules it out? The table of ``pipeplan grid``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ...check.evaluate import Evaluation
from ...plan import Plan
from ...units import format_ns
from ..looks import console, make_table, print_fitted
from .plan import print_plan


def print_grids(
    plan: Plan, assumptions: Sequence[str] = (), width: int | None = None, result: Evaluation | None = None
) -> None:
    """Print the plan of a grid: the grid in one line, the other grids, then the plan as any other."""
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
    print_fitted(out, _table(options["grids"], chosen))
    out.print()
    print_plan(plan, assumptions, width, result)


def seconds(nanoseconds: int) -> str:
    """Return a time in seconds with three decimals, or in ms below a tenth of a second."""
    return f"{nanoseconds / 1e9:.3f} s" if nanoseconds >= 10**8 else format_ns(nanoseconds)


def _settings(figures: dict[str, Any]) -> str:
    ac = "no recomputation" if figures["ac"] is None else f"ac {figures['ac']}"
    parts = [f"microbatch {figures['microbatch']}", ac, *(["offload"] if figures["offload"] else [])]
    if figures["placement"] == "pipeline":
        parts.append("GPUs of a pipeline side by side")
    return ", ".join([*parts, f"limit {figures['limit']}"])


def _table(grids: Sequence[dict[str, Any]], chosen: dict[str, Any]) -> Table:
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

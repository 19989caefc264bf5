"""What would the best plan of a target change of the one that is run today?"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.text import Text

from ...check.evaluate import gap
from ...check.targets import TARGETS, express
from ...planner.plan import Planned
from ...planner.what_if.imported import Judged
from ...units import format_bytes, format_ns
from ..looks import console, make_table, print_fitted


def judged_figures(judged: Judged, target: str) -> dict[str, Any]:
    """Return what is run today and the best plan of the target for scripts; times in ns, sizes in bytes."""
    return {"target": target, "today": _figures(judged.today, target), "best": _figures(judged.best, target)}


def print_change(judged: Judged, target: str) -> None:
    """Print both plans below each other, and how much shorter the best one is."""
    out = console()
    today, best = judged.today.evaluation.period_ns, judged.best.evaluation.period_ns
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
    degrees = any(x.plan.chain.tensor > 1 for x in (judged.today, judged.best))
    shape = [*["tensor"] * degrees, "ranks x\npipelines"]
    columns = ("plan", *shape, "schedule", "recomputed", "units of\neach stage", "period", "peak", "gap")
    table = make_table(*columns, left=("plan", "schedule", "recomputed", "units of\neach stage"), space=2)
    for name, planned in (("today", judged.today), ("best", judged.best)):
        found = _figures(planned, target)
        table.add_row(
            name,
            *[str(found["tensor"])] * degrees,
            f"{found['ranks']} x {found['pipelines']}",
            found["schedule"],
            found["recomputed"],
            _counts(found["units"]),
            format_ns(found["period_ns"]),
            format_bytes(found["peak_bytes"]),
            f"{found['gap']:.1%}",
        )
    print_fitted(out, table)


def _figures(planned: Planned, target: str) -> dict[str, Any]:
    plan, result = planned.plan, planned.evaluation
    found = express(plan.chain, plan.allocation.stages, target)
    return {
        "period_ns": result.period_ns,
        "makespan_ns": result.makespan_ns,
        "peak_bytes": max(use.peak_bytes for use in result.devices),
        "bound_ns": plan.lower_bounds[0].period_ns,
        "gap": gap(result.period_ns, plan.lower_bounds[0]),
        "tensor": plan.chain.tensor,
        "ranks": found.shape.ranks,
        "pipelines": found.shape.pipelines,
        "schedule": plan.schedule.kind,
        "recomputed": str(found.recompute),
        "units": [len(part) for part in found.units],
    }


def _counts(units: list[int]) -> str:
    """Return ``7, 6 x 3`` for 7, 6, 6, 6."""
    runs = [(count, len(list(run))) for count, run in groupby(units)]
    return ", ".join(str(count) if times == 1 else f"{count} x {times}" for count, times in runs)

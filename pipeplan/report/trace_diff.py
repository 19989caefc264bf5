"""What was predicted, and what was measured? A plan beside a run of it, by operation, device and period."""

from __future__ import annotations

from typing import Any

from ..check.evaluate import evaluate
from ..cost.time_model import step_ns
from ..plan import Plan
from ..runtime.measure.report import planned_transfer_ns
from ..runtime.measure.trace_file import Measured
from ..units import format_bytes, format_ns
from .tables import console, make_table


def comparison(plan: Plan, run: Measured) -> dict[str, Any]:
    """Return the figures: operations by kind and stage, devices, and the period, each predicted and measured.

    A backward is without its share of the update on both sides. Activations are the pattern's in the steady state.
    """
    result = evaluate(plan)
    graph = result.graph
    operations = []
    for s, (stage, cost, found) in enumerate(zip(plan.allocation.stages, graph.stages, run.stages, strict=True)):
        step = int(step_ns(plan.chain, stage.start, stage.stop, plan.platform.slowest(stage.devices).speed))
        operations += [
            _row("F", s, cost.forward_ns, found.forward_ns),
            _row("B", s, cost.backward_ns - cost.update_share_ns, found.backward_ns),
            _row("update", s, step, found.update_ns),
        ]
    for transfer in run.transfers:
        planned = planned_transfer_ns(graph, transfer.kind, transfer.stage)
        operations.append(_row(f"SEND_{transfer.kind}", transfer.stage, planned, transfer.measured_ns))
    return {
        "period": {
            "planned_ns": result.period_ns,
            "calibrated_ns": run.calibrated_period_ns,
            "measured_ns": run.measured_period_ns,
        },
        "operations": operations,
        "devices": [
            {
                "device": x.device,
                "planned_activation_bytes": result.devices[x.device].activation_bytes,
                "measured_activation_bytes": x.measured_bytes,
            }
            for x in run.devices
        ],
    }


def _row(kind: str, stage: int, planned_ns: int, measured_ns: int) -> dict[str, Any]:
    ratio = round(measured_ns / planned_ns, 4) if planned_ns else None
    return {"kind": kind, "stage": stage, "planned_ns": planned_ns, "measured_ns": measured_ns, "ratio": ratio}


def print_comparison(plan: Plan, run: Measured, width: int | None = None) -> None:
    """Print :func:`comparison` as tables."""
    figures, out = comparison(plan, run), console(width)
    period = figures["period"]
    out.print(f"period      {format_ns(period['planned_ns'])} planned")
    if period["measured_ns"] is None or period["calibrated_ns"] is None:
        out.print("            not measured: the run was too short for a steady state")
    else:
        for name, what in (("calibrated_ns", "predicted with the run's own times"), ("measured_ns", "measured")):
            out.print(
                f"            {format_ns(period[name])} {what}, {period[name] / period['planned_ns']:.2f} x planned"
            )
    out.print()
    table = make_table("operation", "stage", "planned", "measured", "ratio", left=("operation",))
    for row in figures["operations"]:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        table.add_row(
            row["kind"], str(row["stage"]), format_ns(row["planned_ns"]), format_ns(row["measured_ns"]), ratio
        )
    out.print(table)
    out.print()
    for device in figures["devices"]:
        out.print(
            f"GPU {device['device']}: activations at most {format_bytes(device['measured_activation_bytes'])} "
            f"measured, {format_bytes(device['planned_activation_bytes'])} planned"
        )

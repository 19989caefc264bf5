"""What was fitted to measured iterations, and what error does it leave? A table of the constants tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...cost.roofline import Constants
from ...names import shown
from ...planner.calibrate.calibration import FEWEST, Calibration
from ..looks import console, make_table

SHOWN_ROWS = 20  # of runs, worst first
Memory = tuple[str, float, float]  # a run, and the GB predicted and measured of its fullest GPU


def print_calibration(found: Calibration, memory: Sequence[Memory] = ()) -> None:
    """Print the sets of constants that were tried with their errors, the one chosen, and the runs worst predicted."""
    out = console()
    chosen = found.chosen
    out.print(f"{len(found.names)} measured times; error before: {found.error_before:.1%} on average")
    table = make_table("constants fitted", "error", "left out", "", left=("constants fitted",))
    for fit in found.tried:
        left_out = "-" if fit.left_out is None else f"{fit.left_out:.1%}"
        mark = "chosen" if fit is chosen else ""
        table.add_row(", ".join(fit.freedom.names), f"{fit.error:.1%}", left_out, mark)
    out.print(table)
    if chosen.left_out is not None:
        out.print("left out: of each run, predicted by constants that were fitted to the others")
    out.print(f"before  {said(found.start)}")
    out.print(f"fitted  {said(chosen.constants)}")
    spans = []
    for name, (low, high) in found.ranges.items():
        times, unit = (1e-3, "us") if name.endswith("ns") else (100, "%")
        spans.append(f"{name.rpartition('_')[0].replace('_', ' ')} {low * times:.3g} to {high * times:.3g}{unit}")
    out.print(f"ranges  {', '.join(spans)}: what 9 of 10 draws of the runs lead to")
    if not found.enough:
        out.print(f"{len(found.names)} measured times only adjust constants: a calibration needs {FEWEST}")
    out.print()
    rows = sorted(_beside(found), key=lambda row: -abs(row[3] - 1))
    table = make_table("run", "measured", "predicted", "ratio", left=("run",))
    for name, measured, predicted, ratio in rows[:SHOWN_ROWS]:
        table.add_row(shown(name), f"{measured / 1e6:.2f}", f"{predicted / 1e6:.2f}", f"{ratio:.3f}")
    out.print(table)
    more = f", the {SHOWN_ROWS} worst of {len(rows)}" if len(rows) > SHOWN_ROWS else ""
    out.print(f"times in ms, each run left out{more}" if chosen.left_out is not None else "times in ms")
    if memory:
        error = sum(abs(predicted / measured - 1) for _, predicted, measured in memory) / len(memory)
        out.print(f"memory: {error:.1%} off on average over {len(memory)} runs; nothing is fitted to it")


def said(constants: Constants) -> str:
    """Return constants in words."""
    forward, backward = constants.forward_host_ns / 1000, constants.backward_host_ns / 1000
    return (
        f"{constants.compute_share:.1%} of peak, {constants.bandwidth_share:.1%} of bandwidth, "
        f"{constants.kernel_ns / 1000:.3g}us per kernel, {forward:.3g}us of the host per operation forward, "
        f"{backward:.3g}us backward"
    )


def calibration_figures(found: Calibration, memory: Sequence[Memory] = ()) -> dict[str, Any]:
    """Return every figure under a name with its unit."""
    return {
        "error_before": found.error_before,
        "error": found.chosen.error,
        "error_left_out": found.chosen.left_out,
        "fitted": list(found.chosen.freedom.names),
        "constants": asdict(found.chosen.constants),
        "calibrated": found.enough,
        "ranges": found.ranges,
        "tried": [
            {"fitted": list(fit.freedom.names), "error": fit.error, "error_left_out": fit.left_out}
            for fit in found.tried
        ],
        "runs": [
            {"run": name, "measured_ns": measured, "predicted_ns": predicted}
            for name, measured, predicted, _ in _beside(found)
        ],
        "memory": [{"run": name, "predicted_gb": one, "measured_gb": other} for name, one, other in memory],
    }


def _beside(found: Calibration) -> list[tuple[str, float, float, float]]:
    pairs = zip(found.names, found.measured_ns, found.chosen.predicted_ns, strict=True)
    return [(name, measured, predicted, predicted / measured) for name, measured, predicted in pairs]

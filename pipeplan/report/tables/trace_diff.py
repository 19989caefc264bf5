"""What was predicted, and what was measured? A plan beside a run of it, by operation, device and period."""

from __future__ import annotations

from dataclasses import dataclass

from ...check.evaluate import evaluate
from ...cost.time_model import step_ns
from ...plan import Plan
from ...runtime.measure.times import planned_times, planned_transfer_ns
from ...runtime.measure.trace_file import MeasuredRun
from ...units import format_bytes, format_ns
from ..looks import console, make_table, print_fitted


@dataclass(frozen=True, slots=True)
class PeriodBeside:
    """The period in ns per microbatch: planned, simulated with the run's own times, measured; None for a short run."""

    planned_ns: int
    calibrated_ns: float | None
    measured_ns: float | None


@dataclass(frozen=True, slots=True)
class OperationBeside:
    """What an operation of a stage takes in ns; ``ratio`` is measured over planned, None where nothing was planned."""

    kind: str
    stage: int
    planned_ns: int
    measured_ns: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class DeviceBeside:
    """Most activation bytes that a device holds."""

    device: int
    planned_activation_bytes: int
    measured_activation_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan beside a run of it: the period, operations by kind and stage, and devices."""

    period: PeriodBeside
    operations: tuple[OperationBeside, ...]
    devices: tuple[DeviceBeside, ...]


def comparison(plan: Plan, run: MeasuredRun) -> Comparison:
    """Return what was planned beside what was measured.

    A backward is without its share of the update on both sides, and passes are without the reading of data and the
    overhead of messages, which are named where they were planned. Activations are the pattern's in the steady state.
    """
    result = evaluate(plan)
    graph = result.graph
    operations = []
    planned_stages = planned_times(plan, graph)
    for s, (stage, expected, found) in enumerate(zip(plan.allocation.stages, planned_stages, run.stages, strict=True)):
        device = plan.platform.slowest(stage.devices)
        timed = plan.chain.timed(device.times)
        step = int(step_ns(timed, plan.policy, stage.start, stage.stop, stage.replicas, device.speed))
        operations += [
            _operation("F", s, expected.forward_ns, found.forward_ns),
            _operation("B", s, expected.backward_ns, found.backward_ns),
            _operation("update", s, step, found.update_ns),
        ]
        beside = {"reading": (expected.data_ns, found.data_ns), "messages": (expected.exchange_ns, found.exchange_ns)}
        operations += [_operation(kind, s, *both) for kind, both in beside.items() if both[0]]
    for transfer in run.transfers:
        planned = planned_transfer_ns(graph, transfer.kind, transfer.stage)
        operations.append(_operation(f"SEND_{transfer.kind}", transfer.stage, planned, transfer.measured_ns))
    return Comparison(
        PeriodBeside(result.period_ns, run.calibrated_period_ns, run.measured_period_ns),
        tuple(operations),
        tuple(DeviceBeside(x.device, result.devices[x.device].activation_bytes, x.measured_bytes) for x in run.devices),
    )


def _operation(kind: str, stage: int, planned_ns: int, measured_ns: int) -> OperationBeside:
    ratio = round(measured_ns / planned_ns, 4) if planned_ns else None
    return OperationBeside(kind, stage, planned_ns, measured_ns, ratio)


def print_comparison(plan: Plan, run: MeasuredRun, width: int | None = None) -> None:
    """Print :func:`comparison` as tables."""
    found, out = comparison(plan, run), console(width)
    period = found.period
    out.print(f"period      {format_ns(period.planned_ns)} planned")
    if period.measured_ns is None or period.calibrated_ns is None:
        out.print("            not measured: the run was too short for a steady state")
    else:
        shown = {"predicted with the run's own times": period.calibrated_ns, "measured": period.measured_ns}
        for what, ns in shown.items():
            out.print(f"            {format_ns(ns)} {what}, {ns / period.planned_ns:.2f} x planned")
    out.print()
    table = make_table("operation", "stage", "planned", "measured", "ratio", left=("operation",))
    for x in found.operations:
        ratio = "-" if x.ratio is None else f"{x.ratio:.2f}"
        table.add_row(x.kind, str(x.stage), format_ns(x.planned_ns), format_ns(x.measured_ns), ratio)
    print_fitted(out, table)
    out.print()
    for device in found.devices:
        out.print(
            f"GPU {device.device}: activations at most {format_bytes(device.measured_activation_bytes)} "
            f"measured, {format_bytes(device.planned_activation_bytes)} planned"
        )

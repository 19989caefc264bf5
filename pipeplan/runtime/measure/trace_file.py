"""What does a run leave in a file? A Chrome trace of every operation, with figures that a plan can be compared with.

The trace opens in ui.perfetto.dev; its ``otherData`` is versioned and read back. Times in the events are microseconds,
everywhere else ns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ...errors import BadInput
from ...files.forms import converted, form, read_json
from ...files.profiles import digest
from ...files.text import read_text
from ...plan import Plan
from ...problem import Chain
from .report import DeviceActivations, RunReport, StageTimes, TransferTime

if TYPE_CHECKING:  # a form has the fields of its noun that its keys name
    from .report import DeviceActivations as MeasuredDevice
    from .report import StageTimes as MeasuredStage
    from .report import TransferTime as MeasuredTransfer
else:
    MeasuredStage = form(
        StageTimes, ("stage", "forward_ns", "backward_ns", "update_ns", "data_ns", "exchange_ns", "versions")
    )
    MeasuredTransfer = form(
        TransferTime, ("kind", "stage", "measured_ns", "count"), optional=(), rename={"measured_ns": "transfer_ns"}
    )
    MeasuredDevice = form(
        DeviceActivations, ("device", "measured_bytes"), rename={"measured_bytes": "activation_bytes"}
    )


class MeasuredRun(msgspec.Struct, forbid_unknown_fields=True):
    """What a trace keeps of a run's report: all that was measured, but for losses, memory and states.

    ``profile`` is the digest of the plan's profile, ``cuts`` its (start, stop, devices).
    """

    format: Literal["pipeplan-measured/2"]
    forgotten_operations: int
    profile: str
    cuts: tuple[tuple[int, int, tuple[int, ...]], ...]
    steps: int
    microbatches: int
    measured_period_ns: float | None
    calibrated_period_ns: float | None
    stages: tuple[MeasuredStage, ...]
    transfers: tuple[MeasuredTransfer, ...]
    devices: tuple[MeasuredDevice, ...]


class _Trace(msgspec.Struct):
    """A run's trace without its events."""

    about: MeasuredRun = msgspec.field(name="otherData")


def measured_of(plan: Plan, report: RunReport) -> MeasuredRun:
    """Return what the trace of a run by ``plan`` keeps of its report."""
    keys = vars(report) | {
        "format": "pipeplan-measured/2",
        "forgotten_operations": report.forgotten,
        "profile": digest(plan.chain),
        "cuts": _cuts(plan),
        "devices": report.activations,
    }
    return converted({key: keys[key] for key in MeasuredRun.__struct_fields__}, MeasuredRun)


def _cuts(plan: Plan) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    return tuple((stage.start, stage.stop, tuple(stage.devices)) for stage in plan.allocation.stages)


def measured_trace(plan: Plan, report: RunReport) -> str:
    """Return the JSON of a run's trace: one thread for each rank, every operation with its stage and microbatch.

    A long run keeps those of its begin and its end.
    """
    devices = [x.device for x in report.activations]
    origin = min(time.start_ns for times in report.times for time in times)
    events: list[dict[str, Any]] = []
    for rank, (device, times) in enumerate(zip(devices, report.times, strict=True)):
        name = f"GPU {device} (rank {rank})"
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": rank, "args": {"name": name}})
        sums = len(devices) + rank  # a thread of their own: they are beside what the rank does
        if any(x.activity == "REDUCE" for x in times):
            about_sums = {"name": f"{name}, sums of gradients"}
            events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": sums, "args": about_sums})
        for x in times:
            events.append(
                {
                    "ph": "X",
                    "name": f"{x.stage if x.stage >= 0 else ''}{x.activity}{x.microbatch}",
                    "cat": x.activity,
                    "pid": 1,
                    "tid": sums if x.activity == "REDUCE" else rank,
                    "ts": (x.start_ns - origin) / 1000,
                    "dur": x.duration_ns / 1000,
                    "args": {"stage": x.stage, "microbatch": x.microbatch},
                }
            )
    about = msgspec.to_builtins(measured_of(plan, report))
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}) + "\n"


def is_measured(text: str) -> bool:
    """Whether ``text`` looks like a trace of a run, and not like a profile."""
    return '"otherData"' in text[:200]


def read_measured(path: str, text: str | None = None) -> MeasuredRun:
    """Return the figures in a run's trace; BadInput when it is none, or of another version."""
    return read_json(read_text(path) if text is None else text, _Trace, f"{path}: is no trace of a run").about


def check_same_plan(plan: Plan, run: MeasuredRun, path: str) -> None:
    """Raise BadInput unless ``run`` trained by ``plan``: the same profile, stages and devices."""
    if run.profile != digest(plan.chain):
        raise BadInput(f"{path}: is the run of a plan that was made from another profile")
    if run.cuts != _cuts(plan):
        raise BadInput(f"{path}: is the run of a plan with other stages or devices")
    if not any(stage.backward_ns for stage in run.stages):
        raise BadInput(f"{path}: has no backwards; an evaluation cannot be compared with a plan to train")


def recalibrated(plan: Plan, run: MeasuredRun) -> Chain:
    """Return the plan's profile with every stage's layers scaled to the times that the run measured.

    What a stage's forward, backward (without recomputation) and update took is shared among its layers as in the
    profile, or evenly where the profile says 0; sums are exact. The new profile has the times of layers that run
    beside each other, and of the plan's own cuts.
    """
    chain = plan.chain
    layers = list(chain.layers)
    for stage, found in zip(plan.allocation.stages, run.stages, strict=True):
        own = range(stage.start, stage.stop)
        forward = _shares([layers[i].forward_ns for i in own], found.forward_ns)
        again = sum(forward[i - stage.start] for first, last in stage.checkpoint for i in range(first, last))
        backward = _shares([layers[i].backward_ns for i in own], max(found.backward_ns - again, 0))
        update = _shares([layers[i].optimizer_ns or layers[i].weight_bytes for i in own], found.update_ns)
        for i, f, b, u in zip(own, forward, backward, update, strict=True):
            part = layers[i].backward_weight_ns
            if part is not None:
                part = part * b // layers[i].backward_ns if layers[i].backward_ns else 0
            layers[i] = replace(layers[i], forward_ns=f, backward_ns=b, optimizer_ns=u, backward_weight_ns=part)
    source = f"{chain.source}; scaled to the stages of a run".removeprefix("; ")
    return replace(chain, layers=tuple(layers), source=source)


def _shares(weights: Sequence[int], total: int) -> list[int]:
    """Split ``total`` in proportion to ``weights``, evenly when all are 0; the parts add up to it exactly."""
    weights = weights if sum(weights) else [1] * len(weights)
    whole, given, seen, shares = sum(weights), 0, 0, []
    for weight in weights:
        seen += weight
        shares.append(total * seen // whole - given)
        given += shares[-1]
    return shares

"""What does a run leave in a file? A Chrome trace of every operation, with figures that a plan can be compared with.

Its ``otherData`` is versioned. Times in the events are microseconds, everywhere else ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from ...errors import BadInput
from ...files.forms import Count, Positive, converted, form, read_json
from ...files.profile_rules import check_chain
from ...files.profiles import digest
from ...files.text import read_text
from ...names import shown
from ...plan import Plan
from ...problem import Chain
from .report import DeviceActivations, RunReport, StageTimes, TransferTime
from .times import Activity, OpTime

MOST_BYTES = 256 * 10**6  # of a file that may be a trace: a rank of a long run leaves 20 MB

if TYPE_CHECKING:  # a form has the fields of its noun that its keys name
    from .report import DeviceActivations as MeasuredDevice
    from .report import StageTimes as MeasuredStage
    from .report import TransferTime as MeasuredTransfer
else:
    _STAGE = ("stage", "forward_ns", "backward_ns", "update_ns", "data_ns", "exchange_ns", "versions")
    MeasuredStage = form(StageTimes, _STAGE, **dict.fromkeys(_STAGE, Count))
    MeasuredTransfer = form(
        TransferTime,
        ("kind", "stage", "measured_ns", "count"),
        optional=(),
        rename={"measured_ns": "transfer_ns"},
        **dict.fromkeys(("stage", "measured_ns", "count"), Count),
    )
    MeasuredDevice = form(
        DeviceActivations,
        ("device", "measured_bytes"),
        rename={"measured_bytes": "activation_bytes"},
        **dict.fromkeys(("device", "measured_bytes"), Count),
    )
Period = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class MeasuredRun(msgspec.Struct, forbid_unknown_fields=True):
    """What a trace keeps of a run's report: all that was measured, but for losses, memory and states.

    ``profile`` is the digest of the plan's profile, ``cuts`` its (start, stop, devices).
    """

    format: Literal["pipeplan-measured/2"]
    forgotten_operations: Count
    profile: str
    cuts: tuple[tuple[Count, Count, tuple[Count, ...]], ...]
    steps: Positive
    microbatches: Positive
    measured_period_ns: Period | None
    calibrated_period_ns: Period | None
    stages: tuple[MeasuredStage, ...]
    transfers: tuple[MeasuredTransfer, ...]
    devices: tuple[MeasuredDevice, ...]


class TraceFile(msgspec.Struct):
    """A run's trace; of its events those that are operations can be read."""

    about: MeasuredRun = msgspec.field(name="otherData")


class _Where(msgspec.Struct):
    """What an operation belongs to."""

    stage: Annotated[int, msgspec.Meta(ge=-1)] = -1
    microbatch: Count = 0
    device: Count | None = None


class _Event(msgspec.Struct):
    """One event, with what an operation has."""

    phase: str = msgspec.field(name="ph", default="")
    activity: str = msgspec.field(name="cat", default="")
    start_us: Period = msgspec.field(name="ts", default=0.0)
    length_us: Period = msgspec.field(name="dur", default=0.0)
    where: _Where = msgspec.field(name="args", default_factory=_Where)


class _Events(msgspec.Struct):
    """A trace's events."""

    events: tuple[_Event, ...] = msgspec.field(name="traceEvents", default=())


class _Keys(msgspec.Struct):
    """What tells a Chrome trace from other JSON, unread."""

    about: msgspec.Raw | msgspec.UnsetType = msgspec.field(name="otherData", default=msgspec.UNSET)
    events: msgspec.Raw | msgspec.UnsetType = msgspec.field(name="traceEvents", default=msgspec.UNSET)


class _Format(msgspec.Struct):
    """What tells the trace of a run from those that other tools write, and ``pipeplan simulate``."""

    format: str = ""


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


def figures_of(plan: Plan, report: RunReport) -> dict[str, Any]:
    """Return :func:`measured_of` as plain data."""
    figures: dict[str, Any] = msgspec.to_builtins(measured_of(plan, report))
    return figures


def _cuts(plan: Plan) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    return tuple((stage.start, stage.stop, tuple(stage.devices)) for stage in plan.allocation.stages)


def read_measured(path: str, text: str) -> MeasuredRun | None:
    """Return the figures in the trace of a run that ``text`` holds, None where ``text`` is no Chrome trace at all.

    BadInput when it is another tool's, or of another version, or JSON that breaks off.
    """
    start = text.lstrip()[:1]
    if start not in ("{", "["):
        return None
    keys = read_json(text, _Keys, path) if start == "{" else _Keys(events=msgspec.Raw())
    if isinstance(keys.about, msgspec.Raw):
        with suppress(msgspec.ValidationError):
            if msgspec.json.decode(keys.about, type=_Format).format.startswith("pipeplan-measured/"):
                about = bytes(keys.about).decode()
                return read_json(f'{{"otherData": {about}}}', TraceFile, path).about
    elif keys.events is msgspec.UNSET:
        return None
    raise BadInput(
        f"{path}: is not the trace of a run: $.otherData.format is missing, which `pipeplan run --trace` writes"
    )


def read_run_of(plan: Plan, path: str) -> tuple[MeasuredRun, str]:
    """Return the figures in the file of a run by ``plan``, and the file's text; BadInput when it is of no such run."""
    text = read_text(path, MOST_BYTES)
    run = read_measured(path, text)
    if run is None:
        raise BadInput(f"{path}: is not the trace of a run, which `pipeplan run --trace` writes")
    check_same_plan(plan, run, path)
    return run, text


def read_operations(plan: Plan, path: str, text: str) -> dict[int, tuple[OpTime, ...]]:
    """Return what every device did in the trace of a run by ``plan``, in ns from its begin; BadInput says why not."""
    found: dict[int, list[OpTime]] = {
        device: [] for device in sorted({device for stage in plan.allocation.stages for device in stage.devices})
    }
    for i, event in enumerate(read_json(text, _Events, path).events):
        if event.phase != "X":
            continue
        place, where = f"{path}: $.traceEvents[{i}]", event.where
        if event.activity not in get_args(Activity):
            raise BadInput(f"{place}.cat: is '{shown(event.activity)}', which no operation of a run is called")
        if where.device is None:
            raise BadInput(f"{place}.args.device: is missing; this trace is of an earlier version of `pipeplan run`")
        if where.device not in found:
            raise BadInput(f"{place}.args.device: is {where.device}, which the plan does not use")
        if where.stage >= len(plan.allocation.stages):
            raise BadInput(f"{place}.args.stage: is {where.stage}; the plan has {len(plan.allocation.stages)} stages")
        start = round(event.start_us * 1000)
        end = start + round(event.length_us * 1000)
        found[where.device].append(OpTime(event.activity, where.stage, where.microbatch, start, end))  # type: ignore[arg-type]
    return {device: tuple(times) for device, times in found.items()}


def check_same_plan(plan: Plan, run: MeasuredRun, path: str) -> None:
    """Raise BadInput unless ``run`` trained by ``plan``: the same profile, and the same stages on the same devices."""
    place = f"{path}: $.otherData"
    if run.profile != digest(plan.chain):
        raise BadInput(f"{place}.profile: is another than that of the plan")
    if run.cuts != _cuts(plan):
        raise BadInput(f"{place}.cuts: are other stages or devices than those of the plan")
    stages = len(plan.allocation.stages)
    if len(run.stages) != stages:
        raise BadInput(f"{place}.stages: lists {len(run.stages)}; the plan has {stages}")
    for s, found in enumerate(run.stages):
        if found.stage != s:
            raise BadInput(f"{place}.stages[{s}].stage: is {found.stage} where {s} comes next")
    for t, transfer in enumerate(run.transfers):
        if transfer.stage >= stages:
            raise BadInput(f"{place}.transfers[{t}].stage: is {transfer.stage}; the plan has {stages} stages")
    devices = {device for stage in plan.allocation.stages for device in stage.devices}
    for d, held in enumerate(run.devices):
        if held.device not in devices:
            raise BadInput(f"{place}.devices[{d}].device: is {held.device}, which the plan does not use")
    if not any(stage.backward_ns for stage in run.stages):
        raise BadInput(f"{path}: has no backwards; an evaluation cannot be compared with a plan to train")


def recalibrated(plan: Plan, run: MeasuredRun, place: str) -> Chain:
    """Return the plan's profile with every stage's layers scaled to the times that the run measured.

    BadInput, starting with ``place``, where these make no profile.

    What a stage's forward, backward (without recomputation) and update took is shared among its layers as in the
    profile, or evenly where the profile says 0; sums are exact. The new profile has the times of layers that run
    beside each other, and of the plan's own cuts. Reading is part of its first layer's forward and of its last one's,
    as it was measured on the two stages; of one that has both, halves are. Of GPUs these are what they wait for it.
    """
    chain = plan.chain
    layers = list(chain.layers)
    ends = sorted({0, len(chain) - 1})
    for i in ends:
        layers[i] = replace(layers[i], forward_ns=layers[i].forward_ns - chain.read_in_passes_ns)
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
    read = [run.stages[0].data_ns, run.stages[-1].data_ns]
    if len(run.stages) == 1:
        read = [read[0] // 2, read[0] - read[0] // 2] if len(ends) > 1 else read[:1]
    for i, ns in zip(ends, read, strict=True):
        layers[i] = replace(layers[i], forward_ns=layers[i].forward_ns + ns)
    reading = chain.reading_ns if chain.reads_beside else min(read)
    source = f"{chain.source}; scaled to the stages of a run".removeprefix("; ")
    scaled = replace(chain, layers=tuple(layers), source=source, reading_ns=reading)
    check_chain(scaled, f"{place}: makes no profile")
    return scaled


def _shares(weights: Sequence[int], total: int) -> list[int]:
    """Split ``total`` in proportion to ``weights``, evenly when all are 0; the parts add up to it exactly."""
    weights = weights if sum(weights) else [1] * len(weights)
    whole, given, seen, shares = sum(weights), 0, 0, []
    for weight in weights:
        seen += weight
        shares.append(total * seen // whole - given)
        given += shares[-1]
    return shares

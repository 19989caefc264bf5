"""What a run measured, beside what the plan and the run's own times predict: the RunReport.

Periods are in ns per microbatch. Nothing here needs torch, so that reports can be read anywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..groups import ceil_div
from ..program import Program
from ..simulate import simulate
from ..stages import StageGraph
from .instructions import Edge, Forward, Pass
from .prepare import Script

Activity = Literal["F", "B", "DATA", "WAIT", "REDUCE", "UPDATE", "SAVE"]


@dataclass(frozen=True, slots=True)
class OpTime:
    """When a rank did something, in ns of its monotonic clock.

    DATA is making the input or target of a microbatch, WAIT the wait of a pass for what another rank sends. Of REDUCE
    and UPDATE ``microbatch`` is the version that is made, of SAVE (of no stage) the updates that a checkpoint has.
    """

    activity: Activity
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """What one rank reports: its operations, losses by microbatch, peak activations, and transfers by edge.

    ``versions`` maps its stages to the weight versions that were live at once.
    """

    rank: int
    times: tuple[OpTime, ...]
    losses: dict[int, float]
    peak_activation_bytes: int
    transfer_ns: dict[Edge, int]
    versions: dict[int, int]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage's times in ns, planned and measured (medians; ``update_ns`` per update, ``data_ns`` per microbatch).

    ``planned_backward_ns`` includes the microbatch's share of the update, the measured one doesn't.
    """

    stage: int
    planned_forward_ns: int
    planned_backward_ns: int
    forward_ns: int
    backward_ns: int
    update_ns: int
    data_ns: int
    versions: int


@dataclass(frozen=True, slots=True)
class DeviceActivations:
    """Most activation bytes that a device held: as simulated for the plan's order, and as accounted."""

    device: int
    rank: int
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True)
class TransferTime:
    """How long what ``stage`` sends takes one way, planned and measured; planned is 0 where a cut has no bytes."""

    kind: Literal["F", "B"]
    stage: int
    planned_ns: int
    measured_ns: int


@dataclass(frozen=True)
class RunReport:
    """A finished run. Periods are ns per microbatch, None where the run was too short to have a steady state.

    ``planned_period_ns`` is the plan's; ``calibrated_period_ns`` is the simulation of the same program with the times
    that the operations took in this run, so that what is left is the model's error; ``measured_period_ns`` is the
    median over all windows of one update in the middle of the run, ``mean_period_ns`` their mean. ``losses`` has one
    value per microbatch, ``times`` every rank's operations.
    """

    steps: int
    microbatches: int
    batch: int
    seconds: float
    planned_period_ns: float
    calibrated_period_ns: float | None
    measured_period_ns: float | None
    mean_period_ns: float | None
    losses: tuple[float, ...]
    stages: tuple[StageTimes, ...]
    activations: tuple[DeviceActivations, ...]
    transfers: tuple[TransferTime, ...]
    times: tuple[tuple[OpTime, ...], ...]

    @property
    def samples_per_s(self) -> float:
        """Samples per second in the steady state, over the whole run where there is none."""
        if self.measured_period_ns is None:
            return self.batch * self.microbatches / self.seconds
        return self.batch * 1e9 / self.measured_period_ns

    @property
    def step_losses(self) -> tuple[float, ...]:
        """Mean loss of the microbatches of each update."""
        size = self.microbatches // self.steps
        return tuple(statistics.fmean(self.losses[t * size : (t + 1) * size]) for t in range(self.steps))


def make_report(script: Script, measurements: Sequence[RankMeasurement]) -> RunReport:
    """Return the report of a run of ``script`` from what its ranks measured, in rank order."""
    plan, graph = script.plan, script.graph
    losses = {m: loss for x in measurements for m, loss in sorted(x.losses.items())}
    steps = len(losses) // script.interval
    durations = _durations(script, measurements)
    transfers = {edge: ns for x in measurements for edge, ns in x.transfer_ns.items()}
    stages = tuple(
        StageTimes(
            stage=s,
            planned_forward_ns=cost.forward_ns,
            planned_backward_ns=cost.backward_ns,
            forward_ns=durations["F", s],
            backward_ns=durations["B", s],
            update_ns=durations["UPDATE", s],
            data_ns=durations["DATA", s],
            versions=max(x.versions.get(s, 0) for x in measurements),
        )
        for s, cost in enumerate(graph.stages)
    )
    lanes = {lane.device: index for index, lane in enumerate(script.program.lanes) if lane.device is not None}
    measured, mean = _periods(script, measurements)
    everything = [time for x in measurements for time in x.times]
    spans = [max(t.end_ns for t in x.times) - min(t.start_ns for t in x.times) for x in measurements]
    assert everything, "a run has operations"
    passes = any(time.activity == "F" for time in everything)  # torch's engine doesn't tell of them
    again = simulate(calibrated(script.program, stages, transfers, script.interval)) if passes else None
    return RunReport(
        steps=steps,
        microbatches=len(losses),
        batch=plan.chain.microbatch,
        seconds=max(spans) / 1e9,
        planned_period_ns=script.planned_period_ns,
        calibrated_period_ns=None if again is None else script.period_of(again),
        measured_period_ns=measured,
        mean_period_ns=mean,
        losses=tuple(losses[m] for m in sorted(losses)),
        stages=stages,
        activations=tuple(
            DeviceActivations(
                device=device,
                rank=rank,
                planned_bytes=script.timeline.peak_activation_bytes(lanes[device]),
                measured_bytes=measurements[rank].peak_activation_bytes,
            )
            for rank, device in enumerate(script.devices)
            if passes
        ),
        transfers=tuple(
            TransferTime(kind, stage, _planned_transfer(graph, kind, stage), ns)
            for (kind, stage), ns in sorted(transfers.items())
        ),
        times=tuple(x.times for x in measurements),
    )


def _planned_transfer(graph: StageGraph, kind: Pass, stage: int) -> int:
    position = graph.position.get(("SEND_F" if kind == "F" else "SEND_B", stage))
    return 0 if position is None else graph.operations[position].duration_ns


def calibrated(
    program: Program, stages: Sequence[StageTimes], transfer_ns: Mapping[Edge, int], interval: int
) -> Program:
    """Return ``program``, in the same order, with measured durations.

    A forward includes making the microbatch's data, a backward its share of the update, as costs charge it.
    """
    graph = program.graph
    costs = []
    for cost, times in zip(graph.stages, stages, strict=True):
        replicas = graph.resources[cost.resource].replicas
        update = ceil_div(times.update_ns * replicas, max(replicas, interval))
        costs.append(replace(cost, forward_ns=times.forward_ns + times.data_ns, backward_ns=times.backward_ns + update))
    operations = []
    for op in graph.operations:
        match op.kind:
            case "F":
                duration = costs[op.stage].forward_ns
            case "B":
                duration = costs[op.stage].backward_ns
            case "SEND_F":
                duration = transfer_ns.get(("F", op.stage), op.duration_ns)
            case "SEND_B":
                duration = transfer_ns.get(("B", op.stage), op.duration_ns)
        operations.append(replace(op, duration_ns=duration))
    measured: StageGraph = replace(graph, stages=tuple(costs), operations=tuple(operations))
    return replace(program, graph=measured)


def _durations(script: Script, measurements: Sequence[RankMeasurement]) -> dict[tuple[Activity, int], int]:
    """Return the median duration of each activity of each stage over the middle half of the run, 0 for none.

    The middle leaves out the first microbatches, whose accounting takes time of its own.
    """
    first = script.first.microbatch + max(script.microbatches // 4, min(script.filled, script.microbatches - 1))
    samples: dict[tuple[Activity, int], list[int]] = {}
    early: dict[tuple[Activity, int], list[int]] = {}
    for x in measurements:
        for t in x.times:
            counts = t.activity in ("UPDATE", "REDUCE", "SAVE") or first <= t.microbatch
            (samples if counts else early).setdefault((t.activity, t.stage), []).append(t.duration_ns)
    kinds: tuple[Activity, ...] = ("F", "B", "DATA", "UPDATE")
    stages = range(len(script.graph.stages))
    return {(kind, s): _median(samples.get((kind, s)) or early.get((kind, s), [])) for kind in kinds for s in stages}


def _median(values: Iterable[int]) -> int:
    values = list(values)
    return round(statistics.median(values)) if values else 0


def _periods(script: Script, measurements: Sequence[RankMeasurement]) -> tuple[float | None, float | None]:
    """Return median and mean time per microbatch in the steady state, seen where microbatches leave the pipeline.

    Windows span whole updates and whole rounds of the replicas, so both ends of each are read from one clock, and
    none spans a checkpoint. A drained schedule repeats its mini-batch; the first one, which warms everything up, is
    left out.
    """
    gaps: list[float] = []
    if script.drains:
        marks = _marks(measurements, "UPDATE", script.ranks_of(0)[0])
        warm = script.first.step + 1
        for first, size in script.segments:
            start = script.minibatch(Forward(0, first, 0))
            versions = range(max(start + 1, warm), start + size // script.interval)
            gaps += [(marks[v + 1] - marks[v]) / script.interval for v in versions if v in marks and v + 1 in marks]
        gaps = gaps[1:] or gaps
    else:
        marks = {}
        for rank in script.ranks_of(0):
            marks |= _marks(measurements, "B", rank)
        window = -(-script.interval // script.round) * script.round
        for first, count in script.segments:
            begin = first + max(count // 4, min(script.filled, count // 2))
            end = first + count - script.filled - window  # then the drain begins
            gaps += [
                (marks[m + window] - marks[m]) / window for m in range(begin, end) if m in marks and m + window in marks
            ]
    return (statistics.median(gaps), statistics.fmean(gaps)) if gaps else (None, None)


def _marks(measurements: Sequence[RankMeasurement], activity: Activity, rank: int) -> dict[int, int]:
    return {t.microbatch: t.end_ns for t in measurements[rank].times if t.stage == 0 and t.activity == activity}

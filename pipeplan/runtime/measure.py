"""What a run measured, beside what the plan and the run's own times predict: the RunReport.

Periods are in ns per microbatch. Nothing here needs torch, so that reports can be read anywhere.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from .. import costs
from ..groups import ceil_div
from ..program import Program, make_program
from ..simulate import simulate
from ..stages import StageGraph
from .instructions import Edge, Forward, Pass, edge_into, most_versions
from .prepare import Script

Activity = Literal["F", "B", "DATA", "WAIT_F", "WAIT_B", "SEND_F", "SEND_B", "REDUCE", "UPDATE", "AGREE", "SAVE"]


@dataclass(frozen=True, slots=True)
class OpTime:
    """When a rank did something, in ns of the monotonic clock of rank 0.

    DATA is making the input or target of a microbatch, SEND_F (SEND_B) a process's own work to send what a stage's
    forward (backward) made, WAIT_F (WAIT_B) the wait of a stage's forward (backward) for what another rank sends. Of
    REDUCE and UPDATE, of which there is one for each chunk of the gradient, and of AGREE ``microbatch`` is the version
    that is made, of SAVE the updates of a checkpoint; AGREE and SAVE are of no stage. A REDUCE goes on beside others.
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
    """What one rank reports: its operations, losses by microbatch, and peak activations.

    ``transfer_ns`` are the times of transfers by edge, before the run, ``versions`` maps its stages to the weight
    versions that were live at once. ``device`` and ``exchange`` name what it ran on and how its tensors travelled;
    ``peak_device_bytes`` is what they took at most on a GPU, None on a CPU. ``state_bytes`` is the most that weights,
    gradients and optimizer state took on the device, ``host_bytes`` in host memory. In mixed precision ``skipped`` are
    the versions whose updates overflowed, ``loss_scale`` is the last one.
    """

    rank: int
    times: tuple[OpTime, ...]
    losses: dict[int, float]
    peak_activation_bytes: int
    transfer_ns: dict[Edge, int]
    versions: dict[int, int]
    device: str = "cpu"
    exchange: str = "gloo"
    peak_device_bytes: int | None = None
    state_bytes: int = 0
    host_bytes: int = 0
    skipped: tuple[int, ...] = ()
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage's times in ns, planned and measured (medians; ``update_ns`` per update, all else per microbatch).

    ``planned_backward_ns`` includes the microbatch's share of the update, the measured one doesn't. ``exchange_ns`` is
    what its process works per microbatch beside all that: posting receives, issuing sends, going from one to the next.
    ``versions`` of the weights were live at once, ``planned_versions`` follow from the order.
    """

    stage: int
    planned_forward_ns: int
    planned_backward_ns: int
    forward_ns: int
    backward_ns: int
    update_ns: int
    data_ns: int
    exchange_ns: int
    versions: int
    planned_versions: int


@dataclass(frozen=True, slots=True)
class DeviceActivations:
    """Most activation bytes that a device held: as simulated for the plan's order, and as accounted."""

    device: int
    rank: int
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Most bytes that a GPU held for a rank's tensors, weights and all: as simulated, and as torch counted."""

    device: int
    rank: int
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Most bytes of weights, gradients and optimizer state that a device, and its host for it, held: as the memory
    model says, with a bucket for each stage where state is offloaded, and as counted."""

    device: int
    rank: int
    planned_bytes: int
    measured_bytes: int
    planned_host_bytes: int
    measured_host_bytes: int


@dataclass(frozen=True, slots=True)
class TransferTime:
    """How long what ``stage`` sends takes one way, planned and measured; planned is 0 where a cut has no bytes.

    Measured from the start of the send to the end of the wait, the median over the ``count`` messages whose receiver
    waited already; where ``count`` is 0, by a ping-pong before the run. Of a message for several microbatches, the
    share of one.
    """

    kind: Literal["F", "B"]
    stage: int
    planned_ns: int
    measured_ns: int
    count: int = 0


@dataclass(frozen=True)
class RunReport:
    """A finished run. Periods are ns per microbatch, None where the run was too short to have a steady state.

    ``planned_period_ns`` is the plan's; ``calibrated_period_ns`` is the simulation of the same program with the times
    that the operations took in this run, so that what is left is the model's error; ``measured_period_ns`` is the
    median over all windows of one update in the middle of the run, ``mean_period_ns`` their mean. ``losses`` has one
    value per microbatch, ``times`` every rank's operations. ``hardware`` is what each rank ran on, ``exchange`` how
    tensors travelled (gloo, nccl, or staged: over gloo through the hosts of GPUs), ``memory`` is of GPUs alone.
    ``skipped`` are the updates that changed nothing, and ``loss_scale`` is the last one, None in fp32.
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
    memory: tuple[DeviceMemory, ...] = ()
    hardware: tuple[str, ...] = ()
    exchange: str = "gloo"
    states: tuple[DeviceState, ...] = ()
    skipped: tuple[int, ...] = ()
    loss_scale: float | None = None

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
    occupied = _occupied(script, measurements)
    handed = _handed_over(script, measurements)
    idle = {edge: ns for x in measurements for edge, ns in x.transfer_ns.items()}
    stages = tuple(
        StageTimes(
            stage=s,
            planned_forward_ns=cost.forward_ns,
            planned_backward_ns=cost.backward_ns,
            forward_ns=durations["F", s],
            backward_ns=durations["B", s],
            update_ns=durations["UPDATE", s],
            data_ns=durations["DATA", s],
            exchange_ns=max(0, sum(occupied[k, s] - durations[k, s] for k in ("F", "B")) - durations["DATA", s]),
            versions=max(x.versions.get(s, 0) for x in measurements),
            planned_versions=max(most_versions(script.instructions[rank].short(), s) for rank in script.ranks_of(s)),
        )
        for s, cost in enumerate(graph.stages)
    )
    lanes = {lane.device: index for index, lane in enumerate(script.program.lanes) if lane.device is not None}
    measured, mean = _periods(script, measurements)
    everything = [time for x in measurements for time in x.times]
    spans = [max(t.end_ns for t in x.times) - min(t.start_ns for t in x.times) for x in measurements]
    assert everything, "a run has operations"
    passes = any(time.activity == "F" for time in everything)  # torch's engine doesn't tell of them
    latency_ns = {edge: handed[edge].after_send_ns if edge in handed else ns for edge, ns in idle.items()}
    decides = script.plan.schedule.kind == "message-driven"
    again = calibrated(script.program, occupied, latency_ns, script.interval, decides) if passes else None
    return RunReport(
        steps=steps,
        microbatches=len(losses),
        batch=plan.chain.microbatch,
        seconds=max(spans) / 1e9,
        planned_period_ns=script.planned_period_ns,
        calibrated_period_ns=None if again is None else script.period_of(simulate(again)),
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
            if (kind, stage) not in handed
            else TransferTime(
                kind,
                stage,
                _planned_transfer(graph, kind, stage),
                handed[kind, stage].whole_ns,
                handed[kind, stage].count,
            )
            for (kind, stage), ns in sorted(idle.items())
        ),
        times=tuple(x.times for x in measurements),
        memory=tuple(
            DeviceMemory(device, rank, script.timeline.peak_bytes(lanes[device]), peak)
            for rank, device in enumerate(script.devices)
            if (peak := measurements[rank].peak_device_bytes) is not None
        ),
        hardware=tuple(x.device for x in measurements),
        exchange=measurements[0].exchange,
        states=tuple(
            DeviceState(
                device,
                rank,
                planned_bytes=script.timeline.weights_bytes(lanes[device]),
                measured_bytes=measurements[rank].state_bytes,
                planned_host_bytes=_host_bytes(graph, script.stages_of(rank)),
                measured_host_bytes=measurements[rank].host_bytes,
            )
            for rank, device in enumerate(script.devices)
            if measurements[rank].state_bytes
        ),
        skipped=measurements[0].skipped,
        loss_scale=measurements[0].loss_scale,
    )


def _host_bytes(graph: StageGraph, stages: Sequence[int]) -> int:
    return sum(costs.host_bytes(graph.policy, graph.stages[s].weight_bytes, graph.stages[s].parameters) for s in stages)


def _planned_transfer(graph: StageGraph, kind: Pass, stage: int) -> int:
    position = graph.position.get(("SEND_F" if kind == "F" else "SEND_B", stage))
    return 0 if position is None else graph.operations[position].duration_ns


def calibrated(
    program: Program,
    occupied: Mapping[tuple[Activity, int], int],
    latency_ns: Mapping[Edge, int],
    interval: int,
    decides: bool = False,
) -> Program:
    """Return ``program``, its devices in the same order (under the same rules if it ``decides``), as long as measured.

    ``occupied`` is what each stage's passes and updates take of their process, sends included; a backward is charged
    its share of the update, as costs charge it. ``latency_ns`` is how long after a send its message is there. As that
    was measured beside everything else that travels, transfers don't wait for each other.
    """
    graph = program.graph
    stages = []
    for s, cost in enumerate(graph.stages):
        replicas = graph.resources[cost.resource].replicas
        update = ceil_div(occupied["UPDATE", s] * replicas, max(replicas, interval))
        stages.append(replace(cost, forward_ns=occupied["F", s], backward_ns=occupied["B", s] + update))
    operations = []
    resources = list(graph.resources[: 1 + max(cost.resource for cost in graph.stages)])
    for op in graph.operations:
        match op.kind:
            case "F":
                operations.append(replace(op, duration_ns=stages[op.stage].forward_ns))
            case "B":
                operations.append(replace(op, duration_ns=stages[op.stage].backward_ns))
            case "SEND_F" | "SEND_B":
                duration = latency_ns.get(("F" if op.kind == "SEND_F" else "B", op.stage), op.duration_ns)
                operations.append(replace(op, duration_ns=duration, resource=len(resources)))
                resources.append(graph.resources[op.resource])
    measured = replace(graph, stages=tuple(stages), operations=tuple(operations), resources=tuple(resources))
    lanes = {lane.device: lane for lane in program.lanes if lane.device is not None}
    orders, rules = {}, {}
    for index, resource in enumerate(resources):
        for replica, device in enumerate(resource.devices if not resource.is_link else ()):
            lane = lanes[device]
            if decides and lane.rule is not None:
                rules[index, replica] = lane.rule
            else:
                orders[index, replica] = lane.steps
    limit = program.limit if decides else None
    return make_program(measured, program.microbatches, orders, rules=rules, batch=program.batch, limit=limit)


@dataclass(frozen=True, slots=True)
class _HandOver:
    """Medians over ``count`` hand-overs to a receiver that waited: from the start and from the end of the send."""

    whole_ns: int
    after_send_ns: int
    count: int


def _handed_over(script: Script, measurements: Sequence[RankMeasurement]) -> dict[Edge, _HandOver]:
    """Return how long hand-overs took on each edge where a receiver waited before the send began."""
    sends = {
        (t.activity, t.stage, t.microbatch): t
        for x in measurements
        for t in x.times
        if t.activity in ("SEND_F", "SEND_B")
    }
    found: dict[Edge, list[tuple[int, int]]] = {}
    first = _settled(script)
    for x in measurements:
        for t in x.times:
            if t.activity not in ("WAIT_F", "WAIT_B") or t.microbatch < first:
                continue
            kind: Pass = "F" if t.activity == "WAIT_F" else "B"
            edge = edge_into(kind, t.stage)
            send = sends.get(("SEND_F" if kind == "F" else "SEND_B", edge[1], t.microbatch))
            if send is not None and t.start_ns <= send.start_ns:
                found.setdefault(edge, []).append((t.end_ns - send.start_ns, max(0, t.end_ns - send.end_ns)))
    return {
        edge: _HandOver(
            _median(whole for whole, _ in pairs) // _covers(script, edge[0]),
            _median(after for _, after in pairs) // _covers(script, edge[0]),
            len(pairs),
        )
        for edge, pairs in found.items()
    }


def _occupied(script: Script, measurements: Sequence[RankMeasurement]) -> dict[tuple[Activity, int], int]:
    """Return how long a microbatch's passes and updates occupy each stage's process in the settled part (medians).

    That is all of its time but waits, sums over replicas and checkpoints: a pass with the making of its data, the
    sending of its result and what lies between; an update with the telling of it.
    """
    first = _settled(script)
    samples: dict[tuple[Activity, int], list[int]] = {}
    early: dict[tuple[Activity, int], list[int]] = {}
    for x in measurements:
        spent: dict[tuple[Activity, int, int], int] = {}
        before = 0  # the next pass
        for t, following in zip_longest(x.times, x.times[1:]):
            until = t.end_ns if following is None else max(t.end_ns, following.start_ns)  # a sum may have begun before
            match t.activity:
                case "WAIT_F" | "WAIT_B":
                    before += until - t.end_ns
                case "DATA":
                    before += until - t.start_ns
                case "F" | "B":
                    spent[t.activity, t.stage, t.microbatch] = before + until - t.start_ns
                    before = 0
                case "SEND_F" | "SEND_B":
                    kind: Activity = "F" if t.activity == "SEND_F" else "B"
                    spent[kind, t.stage, t.microbatch] += until - t.start_ns
                case "UPDATE":
                    key: tuple[Activity, int, int] = "UPDATE", t.stage, t.microbatch
                    spent[key] = spent.get(key, 0) + until - t.start_ns
        for (activity, stage, m), ns in spent.items():
            counts = activity == "UPDATE" or first <= m
            (samples if counts else early).setdefault((activity, stage), []).append(ns)
    kinds: tuple[Activity, ...] = ("F", "B", "UPDATE")
    stages = range(len(script.graph.stages))
    return {
        (kind, s): _median(samples.get((kind, s)) or early.get((kind, s), [])) // _covers(script, kind)
        for kind in kinds
        for s in stages
    }


def _covers(script: Script, activity: Activity) -> int:
    """Return how many microbatches an operation of this kind is for; times are reported for one of them."""
    return script.program.batch if activity == "B" else 1


def _settled(script: Script) -> int:
    """Return the first microbatch that counts: the first ones' accounting takes time of its own."""
    return script.first.microbatch + max(script.microbatches // 4, min(script.filled, script.microbatches - 1))


def _durations(script: Script, measurements: Sequence[RankMeasurement]) -> dict[tuple[Activity, int], int]:
    """Return the median duration of each activity of each stage, per microbatch, in the settled part; 0 for none."""
    first = _settled(script)
    samples: dict[tuple[Activity, int], list[int]] = {}
    early: dict[tuple[Activity, int], list[int]] = {}
    updates: Counter[tuple[int, int, int]] = Counter()  # one has a part for each chunk of the gradient
    for x in measurements:
        for t in x.times:
            if t.activity == "UPDATE":
                updates[x.rank, t.stage, t.microbatch] += t.duration_ns
                continue
            counts = t.activity in ("REDUCE", "AGREE", "SAVE") or first <= t.microbatch
            (samples if counts else early).setdefault((t.activity, t.stage), []).append(t.duration_ns)
    for (_, stage, _), duration in updates.items():
        samples.setdefault(("UPDATE", stage), []).append(duration)
    kinds: tuple[Activity, ...] = ("F", "B", "DATA", "UPDATE")
    stages = range(len(script.graph.stages))
    return {
        (kind, s): _median(samples.get((kind, s)) or early.get((kind, s), [])) // _covers(script, kind)
        for kind in kinds
        for s in stages
    }


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

"""What did a run measure, beside what the plan and the run's own times predict? The RunReport.

Periods are in ns per microbatch. Nothing here needs torch, so that reports can be read anywhere.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...check.evaluate import under_way_bytes
from ...cost.memory_model import gradient_bytes
from ...schedule.pattern import DeviceUse
from ...schedule.program import PASSES
from ...schedule.simulate import simulate
from ...schedule.timeline import run_uses
from ..lowering.instructions import Forward, most_versions
from ..lowering.lowered_run import LoweredRun
from .calibrate import calibrated, handed_over, occupied, sums_ns, waits_at_updates
from .times import Activity, OpTime, RankMeasurement, mean_wait_for_data, planned_times, planned_transfer_ns, typical

PROMISE = 0.05  # by which a run may be apart from what its layers took before and after it
Verdict = Literal["as planned", "times moved", "other load", "the run itself"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage's times in ns, planned and measured (:func:`.times.typical`; ``update_ns`` per update, all else per
    microbatch).

    Backwards are without the microbatch's share of the update, planned and measured. ``exchange_ns`` is what its
    process works per microbatch beside all that: posting receives, issuing sends, going from one to the next;
    ``planned_exchange_ns`` is the overhead of messages that was planned, which is no part of passes here either.
    ``versions`` of the weights were live at once, ``planned_versions`` follow from the order. Making a microbatch's
    data took the stage ``data_ns``, ``planned_data_ns`` as profiled, which are part of no pass here; where a loader's
    workers do that it waited ``data_wait_ns`` for them (the mean). Gradients are summed over its replicas in
    ``sum_ns``, of which its update waits ``sum_wait_ns``.
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
    data_wait_ns: int = 0
    planned_data_ns: int = 0
    planned_exchange_ns: int = 0
    sum_ns: int = 0
    sum_wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class DeviceActivations:
    """Most activation bytes that a device held: as simulated for the plan's order, and as counted.

    Where messages decide the order it is let hold ``allowed_bytes``; as much as is planned where the order is fixed.
    Of activations that wait in host memory those of two layers count, and the host holds the others.
    """

    device: int
    rank: int
    planned_bytes: int
    measured_bytes: int
    allowed_bytes: int
    planned_host_bytes: int = 0
    measured_host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Most bytes that a GPU held for a rank's tensors, weights and all: as simulated, and as torch counted.

    Torch had ``reserved_bytes`` for them, what it keeps for later and gaps between them included. In use were
    ``used_bytes``, with CUDA's context, NCCL's buffers, and whoever shares the GPU. ``retries`` tells how often torch
    had to give memory back to get other.
    """

    device: int
    rank: int
    planned_bytes: int
    measured_bytes: int
    reserved_bytes: int
    used_bytes: int
    retries: int


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
class ReadingTime:
    """How long a loader took to read a microbatch for a rank's stages (the mean), in each of so many ``workers``.

    Without workers the rank reads by itself.
    """

    device: int
    rank: int
    workers: int
    read_ns: int


@dataclass(frozen=True, slots=True)
class TransferTime:
    """How long what ``stage`` sends takes one way, planned and measured; planned is 0 where a cut has no bytes.

    Measured from the start of the send to the end of the wait, the median over the ``count`` messages whose receiver
    waited already. Of a message for several microbatches, the share of one.
    """

    kind: Literal["F", "B"]
    stage: int
    planned_ns: int
    measured_ns: int
    count: int


@dataclass(frozen=True)
class RunReport:
    """A finished run of ``steps`` updates from ``microbatches`` in all, of ``batch`` samples each, in ``seconds``.

    Periods are ns per microbatch, None where the run was too short to have a steady state.
    ``planned_period_ns`` is the plan's; ``calibrated_period_ns`` is the simulation of the same program with the times
    that the operations took in this run, so that what is left is the model's error; ``measured_period_ns`` is the
    median over all windows of one update in the middle of the run, ``mean_period_ns`` their mean. ``losses`` has one
    value per microbatch, ``times`` every rank's operations.
    Planned beside measured: ``stages`` have their times, ``transfers`` one way of each message, ``activations`` the
    most that each device held of them, ``states`` of weights, gradients and optimizer state, all in bytes; ``compared``
    says how the first microbatch compared with plain training, where it was.

    ``hardware`` is what each rank ran on, ``exchange`` how messages travelled (nccl, or gloo between CPUs, or staged
    through the hosts of GPUs; within one machine the latter two are shared memory but where threads receive), ``sums``
    how those of gradients did; ``memory`` is of GPUs alone.
    ``skipped`` are the updates that changed nothing, and ``loss_scale`` is the last one, None in fp32. Of a long run
    ``times``, and so the figures, are those of its begin and its end: ``forgotten`` operations are left out. ``notes``
    say what the author's module gave up to be run by stages, ``reading`` is that of loaders. What stages wait for it is
    in ``calibrated_period_ns``. Where gradients are clipped ``gradient_norms`` has that of each update before, None
    where it was skipped. ``evaluations`` on held-out data are by update, that after ``best_step`` is the best; the run
    has ``ended_early`` where they got no better. Of ``width`` GPUs that run each layer together bytes are the most.
    ``bracket`` has by what the planned period is to be multiplied with the layers' times right before the run and right
    after it, where these were measured; the rank that lacked a core most did so for the share ``kept_off`` of the run.
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
    sums: str = "gloo"
    states: tuple[DeviceState, ...] = ()
    skipped: tuple[int, ...] = ()
    loss_scale: float | None = None
    forgotten: int = 0
    notes: tuple[str, ...] = ()
    compared: str = ""
    reading: tuple[ReadingTime, ...] = ()
    gradient_norms: tuple[float | None, ...] = ()
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    best_step: int | None = None
    ended_early: bool = False
    width: int = 1
    bracket: tuple[float, float] | None = None
    kept_off: float = 0.0

    @property
    def verdict(self) -> Verdict | None:
        """Why the measured period is apart from the planned one, if it is; None without a bracket or a period.

        Within :data:`PROMISE` of the bracket the run is what its layers let it be: as planned, or the layers' times
        have moved since the plan's profile. Outside of it others had its cores, or it is the run itself.
        """
        if self.bracket is None or self.measured_period_ns is None:
            return None
        low, high = min(self.bracket) * (1 - PROMISE), max(self.bracket) * (1 + PROMISE)
        if low <= self.measured_period_ns / self.planned_period_ns <= high:
            return "as planned" if low <= 1 <= high else "times moved"
        return "other load" if self.kept_off > PROMISE else "the run itself"

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


def make_report(lowered: LoweredRun, measurements: Sequence[RankMeasurement]) -> RunReport:
    """Return the report of a run of ``lowered`` from what its ranks measured, in rank order."""
    plan, first = lowered.plan, measurements[0]
    losses = {m: loss for x in measurements for m, loss in sorted(x.losses.items())}
    steps = len(losses) // lowered.interval
    measured, mean = _periods(lowered, measurements)
    assert all(x.times for x in measurements), "a run has operations"
    spans = [max(t.end_ns for t in x.times) - min(t.start_ns for t in x.times) for x in measurements]
    stages, transfers, again = _by_stage(lowered, measurements)
    activations, memory, states = _by_device(lowered, measurements)
    return RunReport(
        width=plan.chain.tensor,
        steps=steps,
        microbatches=len(losses),
        batch=plan.chain.microbatch,
        seconds=max(spans) / 1e9,
        planned_period_ns=lowered.planned_period_ns,
        calibrated_period_ns=again,
        measured_period_ns=measured,
        mean_period_ns=mean,
        losses=tuple(losses[m] for m in sorted(losses)),
        stages=stages,
        activations=activations,
        transfers=transfers,
        times=tuple(x.times for x in measurements),
        memory=memory,
        hardware=tuple(x.device for x in measurements),
        exchange=first.exchange,
        sums=first.sums,
        states=states,
        skipped=first.skipped,
        loss_scale=first.loss_scale,
        forgotten=sum(x.forgotten for x in measurements),
        kept_off=max(x.kept_off for x in measurements),
        reading=tuple(
            ReadingTime(device, rank, *read)
            for rank, device in enumerate(lowered.devices)
            if (read := measurements[rank].reading) is not None
        ),
        gradient_norms=tuple(
            first.norms.get(lowered.first.step + 1 + step) for step in range(steps if first.norms else 0)
        ),
    )


def _by_stage(
    lowered: LoweredRun, measurements: Sequence[RankMeasurement]
) -> tuple[tuple[StageTimes, ...], tuple[TransferTime, ...], float | None]:
    """Return the times of stages and messages, and the period by these."""
    graph, stages = lowered.graph, range(len(lowered.graph.stages))
    durations, busy = _durations(lowered, measurements), occupied(lowered, measurements)
    handed = handed_over(lowered, measurements)
    waits = [mean_wait_for_data(lowered, measurements, s) for s in stages]
    kept_waiting, summing = waits_at_updates(lowered, measurements), sums_ns(lowered, measurements)
    found = tuple(
        StageTimes(
            stage=s,
            planned_forward_ns=planned.forward_ns,
            planned_backward_ns=planned.backward_ns,
            forward_ns=durations["F", s],
            backward_ns=sum(durations[k, s] for k in ("R", "B", "W")),
            update_ns=durations["UPDATE", s],
            data_ns=durations["DATA", s],
            exchange_ns=max(0, sum(busy[k, s] - durations[k, s] for k in PASSES) - durations["DATA", s]),
            versions=max(x.versions.get(s, 0) for x in measurements),
            planned_versions=max(most_versions(lowered.instructions[rank].short(), s) for rank in lowered.ranks_of(s)),
            data_wait_ns=waits[s],
            planned_data_ns=planned.data_ns,
            planned_exchange_ns=planned.exchange_ns,
            sum_ns=summing[s],
            sum_wait_ns=min(summing[s], kept_waiting[s]),
        )
        for s, planned in enumerate(planned_times(lowered.plan, graph))
    )
    transfers = tuple(
        TransferTime(*edge, planned_ns=planned_transfer_ns(graph, *edge), measured_ns=took.whole_ns, count=took.count)
        for edge, took in sorted(handed.items())
    )
    again = calibrated(lowered, busy | {("F", s): busy["F", s] + waits[s] for s in stages}, handed, kept_waiting)
    return found, transfers, None if again is None else lowered.period_of(simulate(again))


def _by_device(
    lowered: LoweredRun, measurements: Sequence[RankMeasurement]
) -> tuple[tuple[DeviceActivations, ...], tuple[DeviceMemory, ...], tuple[DeviceState, ...]]:
    """Return what devices held: of activations, in all, and of weights, gradients and optimizer."""
    uses = run_uses(lowered.timeline, lowered.plan.platform)
    activations, memory, states = list[DeviceActivations](), list[DeviceMemory](), list[DeviceState]()
    for rank, device in enumerate(lowered.devices):
        use, x, own = uses[device], measurements[rank], lowered.stages_of(rank)
        coming, waiting = lowered.waiting_bytes(rank)
        planned, allowed = (coming + size for size in (use.activation_bytes, lowered.most_activation_bytes(rank)))
        figures = planned, x.peak_activation_bytes, max(planned, allowed), waiting, x.waiting_bytes
        activations.append(DeviceActivations(device, rank, *figures))
        if x.gpu is not None:
            allocated, reserved, others, retries = x.gpu
            gpu = allocated, reserved, reserved + others, retries
            memory.append(DeviceMemory(device, rank, _planned_bytes(lowered, rank, use), *gpu))
        if x.state_bytes:
            planned = use.weights_bytes + sum(_more_beside(lowered, rank, s) for s in own)
            host = sum(map(lowered.graph.host_bytes, own))
            states.append(DeviceState(device, rank, planned, x.state_bytes, host, x.host_bytes))
    return tuple(activations), tuple(memory), tuple(states)


def _more_beside(lowered: LoweredRun, rank: int, stage: int) -> int:
    """Return the bytes that a stage takes beside the plan's because its sums go on beside passes: a second gradient,
    less the second version where it isn't needed any more, as updates come right before what they make is used."""
    second = lowered.beside.get(stage, 0)
    return second and second * (most_versions(lowered.instructions[rank].short(), stage) - 1)


def _planned_bytes(lowered: LoweredRun, rank: int, use: DeviceUse) -> int:
    """Return the most bytes that a rank's device is expected to have allocated.

    What sums exchange comes on top where passes go on beside them; elsewhere they have the room of activations.
    """
    policy, stages = lowered.plan.policy, lowered.graph.stages
    peak, weights, buffers = use.peak_bytes, use.weights_bytes, 0
    for s in lowered.stages_of(rank):
        if lowered.plan.allocation.stages[s].replicas > 1:
            count = int(stages[s].parameters)
            under_way = under_way_bytes(policy, int(gradient_bytes(policy, stages[s].weight_bytes, count)), count)
            peak += _more_beside(lowered, rank, s) + under_way * (s in lowered.beside)
            buffers += under_way
    return max(peak, weights + buffers)


def _durations(lowered: LoweredRun, measurements: Sequence[RankMeasurement]) -> dict[tuple[Activity, int], int]:
    """Return the duration of each activity of each stage, per microbatch, in the settled part; 0 for none."""
    ranks: list[Counter[tuple[Activity, int, int]]] = []
    for x in measurements:
        ranks.append(Counter())
        for t in x.times:  # an update has a part for each chunk of the gradient
            ranks[-1][t.activity, t.stage, t.microbatch] += t.duration_ns
    return typical(lowered, (*PASSES, "DATA", "UPDATE"), ranks)


def _periods(lowered: LoweredRun, measurements: Sequence[RankMeasurement]) -> tuple[float | None, float | None]:
    """Return median and mean time per microbatch in the steady state, seen where microbatches leave the pipeline.

    Windows span whole updates and whole rounds of the replicas, so both ends of each are read from one clock, and
    none spans a checkpoint. A drained schedule repeats its mini-batch; the first one, which warms everything up, is
    left out.
    """
    gaps: list[float] = []
    if lowered.drains:
        marks = _marks(measurements, "UPDATE", lowered.ranks_of(0)[0])
        warm = lowered.first.step + 1
        for first, size in lowered.segments:
            start = lowered.minibatch(Forward(0, first, 0))
            versions = range(max(start + 1, warm), start + size // lowered.interval)
            gaps += [(marks[v + 1] - marks[v]) / lowered.interval for v in versions if v in marks and v + 1 in marks]
        gaps = gaps[1:] or gaps
    else:
        marks = {}
        for rank in lowered.ranks_of(0):
            marks |= _marks(measurements, "B", rank)
        window = lowered.window
        for first, count in lowered.segments:
            begin = first + max(count // 4, min(lowered.filled, count // 2))
            end = first + count - lowered.filled - window  # then the drain begins
            gaps += [
                (marks[m + window] - marks[m]) / window for m in range(begin, end) if m in marks and m + window in marks
            ]
    return (statistics.median(gaps), statistics.fmean(gaps)) if gaps else (None, None)


def _marks(measurements: Sequence[RankMeasurement], activity: Activity, rank: int) -> dict[int, int]:
    return {t.microbatch: t.end_ns for t in measurements[rank].times if t.stage == 0 and t.activity == activity}

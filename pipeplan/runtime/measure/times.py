"""When did a rank do what? That and its other figures are what a run's report is made from."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...cost.stage_graph import StageGraph
from ...plan import Plan
from ..lowering.instructions import Pass
from ..lowering.lowered_run import LoweredRun

Messaging = Literal["WAIT_F", "WAIT_B", "ROOM_F", "ROOM_B", "SEND_F", "SEND_B"]
Activity = Literal["F", "R", "B", "W", "DATA", "WAIT_DATA", Messaging, "REDUCE", "NORM", "UPDATE", "AGREE", "SAVE"]


@dataclass(frozen=True, slots=True)
class OpTime:
    """When a rank did something, in ns of the monotonic clock of rank 0.

    DATA is making the input or target of a microbatch, WAIT_DATA the wait for workers that do, SEND_F (SEND_B) a
    process's own work to send what a stage's forward (backward) made, ROOM_F (ROOM_B) the wait before it until what was
    sent last along the edge is through, WAIT_F (WAIT_B) the wait of a stage's forward (backward) for what another rank
    sends. Of REDUCE and UPDATE, of which there is one for each chunk of the gradient, of NORM, the measuring of
    gradients and the wait for the others', and of AGREE ``microbatch`` is the version that is made, of SAVE the updates
    of a checkpoint; NORM, AGREE and SAVE are of no stage. A REDUCE goes on beside others.
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

    ``versions`` maps its stages to the weight versions that were live at once. ``device``, ``exchange`` and ``sums``
    name what it ran on and how messages and sums of gradients travelled; ``gpu`` has the figures of
    :func:`..device.peak_bytes`, None on a CPU. ``state_bytes`` is the most that weights, gradients and optimizer state
    took on the device, ``host_bytes`` in host memory, where ``waiting_bytes`` of activations were at most. In mixed
    precision ``skipped`` are the versions whose updates overflowed, ``loss_scale`` is the last one. ``forgotten``
    operations in the middle of the run are not among ``times``. ``reading`` has the workers of its loader (0: the rank
    itself) and the ns that each took for a microbatch, None where no loader reads. ``norms`` are those of all
    gradients, by version, where they are clipped.
    ``kept_off`` is the share of the run in which it could have gone on and others had its core.
    """

    rank: int
    times: tuple[OpTime, ...]
    losses: dict[int, float]
    peak_activation_bytes: int
    versions: dict[int, int]
    device: str = "cpu"
    exchange: str = "gloo"
    sums: str = "gloo"
    gpu: tuple[int, ...] | None = None
    state_bytes: int = 0
    host_bytes: int = 0
    waiting_bytes: int = 0
    skipped: tuple[int, ...] = ()
    loss_scale: float | None = None
    forgotten: int = 0
    reading: tuple[int, int] | None = None
    norms: dict[int, float] = field(default_factory=dict)
    kept_off: float = 0.0


@dataclass(frozen=True, slots=True)
class Compared:
    """At ``at_ns`` of its host's clock the one that times are told by lacked ``offset_ns`` to rank 0's."""

    offset_ns: int
    at_ns: int


def straightened(times: Iterable[OpTime], before: Compared, after: Compared) -> list[OpTime]:
    """Return ``times`` that were told with the offset ``before`` as they are if it grew evenly to that ``after``.

    Clocks of hosts, and of GPUs and their hosts, run apart by up to 50 us in a second.
    """
    grown, elapsed = after.offset_ns - before.offset_ns, after.at_ns - before.at_ns
    if not grown or elapsed <= 0:
        return list(times)
    begin = before.at_ns + before.offset_ns

    def right(at_ns: int) -> int:
        return at_ns + grown * (at_ns - begin) // elapsed

    return [OpTime(t.activity, t.stage, t.microbatch, right(t.start_ns), right(t.end_ns)) for t in times]


def covers(lowered: LoweredRun, activity: Activity) -> int:
    """Return how many microbatches an operation of this kind is for; times are reported for one of them."""
    return lowered.program.batch if activity == "B" else 1


def settled(lowered: LoweredRun) -> int:
    """Return the first microbatch that counts: the first ones' accounting takes time of its own."""
    return lowered.first.microbatch + max(lowered.microbatches // 4, min(lowered.filled, lowered.microbatches - 1))


def median(values: Iterable[int]) -> int:
    """Return the median in whole ns, 0 of nothing."""
    values = list(values)
    return round(statistics.median(values)) if values else 0


def mean_wait_for_data(lowered: LoweredRun, measurements: Iterable[RankMeasurement], stage: int) -> int:
    """Return how long ``stage`` waits for a microbatch to be read, in ns: the mean, as workers give several at once."""
    waits = [t for x in measurements for t in x.times if t.activity == "WAIT_DATA" and t.stage == stage]
    late = [t for t in waits if t.microbatch >= settled(lowered)] or waits
    return round(statistics.fmean(t.duration_ns for t in late)) if late else 0


def typical(
    lowered: LoweredRun, kinds: Iterable[Activity], ranks: Iterable[Mapping[tuple[Activity, int, int], int]]
) -> dict[tuple[Activity, int], int]:
    """Return what each kind of activity of each stage takes, per microbatch; 0 where there is none.

    Each of ``ranks`` has what (activity, stage, microbatch) took there, in ns. Means over as many microbatches as those
    of an update, and of these the median, as periods are measured: what now and then takes longer holds the pipeline
    up, and a single disturbance of the machine doesn't. Only microbatches of the settled part count, unless a stage has
    no others; of updates, which always do, it is the median.
    """
    first = settled(lowered)
    samples: dict[tuple[Activity, int], dict[int, list[int]]] = {}  # by window
    early: dict[tuple[Activity, int], dict[int, list[int]]] = {}
    for spent in ranks:
        for (kind, s, m), ns in spent.items():
            window = m if kind == "UPDATE" else (m - first) // lowered.window
            of = samples if kind == "UPDATE" or window >= 0 else early
            of.setdefault((kind, s), {}).setdefault(window, []).append(ns)
    return {
        (kind, s): _median_of_means(samples.get((kind, s)) or early.get((kind, s), {})) // covers(lowered, kind)
        for kind in kinds
        for s in range(len(lowered.graph.stages))
    }


def _median_of_means(windows: Mapping[int, list[int]]) -> int:
    """Return the median of the means of those that are full."""
    full = max(map(len, windows.values()), default=0)
    return median(round(statistics.fmean(found)) for found in windows.values() if len(found) == full)


# --- what a plan expects, in the terms in which a run measures it -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedTimes:
    """What a plan expects of a stage per microbatch, in ns, each without the others: its passes, backwards also without
    their share of the update, the reading of data, and the overhead of messages."""

    forward_ns: int
    backward_ns: int
    data_ns: int
    exchange_ns: int


def planned_times(plan: Plan, graph: StageGraph) -> list[PlannedTimes]:
    """Return what ``plan`` expects of each stage, as a run measures it."""
    last, found = len(graph.stages) - 1, []
    sends = [planned_transfer_ns(graph, "F", s) > 0 for s in range(last + 1)]
    for s, cost in enumerate(graph.stages):
        reading = plan.chain.read_in_passes_ns * min((s == 0) + (s == last), len(plan.chain))
        held = plan.platform.overhead_ns * (sends[s] + (s > 0 and sends[s - 1]))  # in a forward, and in a backward
        forward, backward = cost.forward_ns - reading - held, cost.backward_ns - cost.update_share_ns - held
        found.append(PlannedTimes(max(0, forward), backward, reading, 2 * held))
    return found


def planned_transfer_ns(graph: StageGraph, kind: Pass, stage: int) -> int:
    """Return how long what ``stage`` sends after its pass ``kind`` takes as planned, 0 where a cut has no bytes."""
    position = graph.position.get(("SEND_F" if kind == "F" else "SEND_B", stage))
    return 0 if position is None else graph.operations[position].duration_ns

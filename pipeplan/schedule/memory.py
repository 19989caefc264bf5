"""What does each device hold in a simulated run? Activations over time, microbatches in flight, weights, the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil

from ..problem import Platform
from ..registry import Late
from .pattern import DeviceUse, unused
from .program import Program
from .timeline import Timeline

kept_by_stages: Callable[..., list[int]] = Late("schedule.weight_versions:kept_by_stages")
weight_policy = Late("schedule.weight_versions:weight_policy")

# --- the peak -------------------------------------------------------------------------------------------------------


def run_uses(timeline: Timeline, platform: Platform) -> list[DeviceUse]:
    """Return what every device of the platform holds at most in a run; a device without a lane holds nothing."""
    uses, versions = unused(platform), _versions(timeline)
    for lane, work in enumerate(timeline.program.lanes):
        if work.device is not None:
            memory = platform.devices[work.device].memory_bytes
            uses[work.device] = replace(_use(timeline, lane, versions), memory_bytes=memory)
    return uses


def lane_use(timeline: Timeline, lane: int) -> DeviceUse:
    """Return what the device of a lane holds at most in a run; ``memory_bytes`` is the least of its group."""
    return _use(timeline, lane, _versions(timeline))


Versions = Callable[[int, int], int]  # (stage, its microbatches in flight on a device) -> versions that this keeps


def _versions(timeline: Timeline) -> Versions:
    """Return how many versions of the weights are kept; under nF1B with vertical sync those that the run needs."""
    program, graph = timeline.program, timeline.program.graph
    policy = graph.policy
    if policy.rules.reads_newest and policy.vertical_sync and program.limit is not None:
        kept = kept_by_stages(timeline, weight_policy(policy), program.batch)
        return lambda stage, _: kept[stage]
    lanes = range(len(program.lanes)) if policy.vertical_sync else ()
    of_first = max((in_flight(timeline, lane).get(0, 0) for lane in lanes), default=0)
    return lambda stage, count: graph.versions(stage, count, of_first)


def _use(timeline: Timeline, lane: int, versions: Versions) -> DeviceUse:
    program, graph = timeline.program, timeline.program.graph
    stages, held = program.stages_of(lane), in_flight(timeline, lane)
    memory = graph.resources[graph.stages[stages[0]].resource].memory_bytes
    assert memory is not None, "stages are on devices"
    counts = tuple(held.get(s, 0) for s in stages)
    weights = 0
    for s, count in zip(stages, counts, strict=True):
        weights += graph.weights_bytes(s, versions(s, count))
        weights += graph.lent_bytes(s, partial(_turning, timeline, lane, s))
    peak = max(bytes_held for _, bytes_held in activation_steps(timeline, lane))
    return DeviceUse(memory, weights, peak, sum(map(program.buffer_bytes, stages)), counts)


def _turning(timeline: Timeline, lane: int, stage: int, later: int) -> int:
    """Return how many microbatches, at most, have begun their backward in stage ``later`` and not ended it in
    ``stage``, both on a device."""
    program, held, most = timeline.program, 0, 0
    for step in program.lanes[lane].steps:
        work = program.operations[step.position]
        held += work.covers * (work.kind == "B" and work.stage == later)
        most = max(most, held)
        held -= work.covers * (step.position == program.release[stage])
    return most


# --- activations over time ------------------------------------------------------------------------------------------


Change = tuple[int, int]  # when in ns, and by how many bytes


def activation_changes(timeline: Timeline, lane: int) -> list[Change]:
    """Return the changes of a device's activations in the order in which they take effect: at once, releases first."""
    program, changes = timeline.program, list[Change]()
    known: dict[int, list[Change]] = {}  # of each position, at its start (0) or its end (1)
    for step in program.lanes[lane].steps:
        if step.position not in known:
            known[step.position] = [c for c in step_changes(program, step.position, 0, 1) if c[1]]
        for at_end, change in known[step.position]:
            changes.append((timeline.end_ns(step) if at_end else timeline.begin_ns(step), change))
    return sorted(changes)


def step_changes(program: Program, position: int, start: int, end: int) -> list[Change]:
    """Return the changes of a device's activations by one of its steps, from ``start`` to ``end`` ns.

    A microbatch is held from the start of its F to the end of its B; a stage that recomputes holds its transient during
    its B, or, where it does so in a pass of its own, all that it recomputes from the start of that on. When the
    backward is split, recomputed activations stay after it, and what the weight part needs is held to the end of its W:
    the share of everything that the program says, or, if that is all, what the profile says, with gradients that B
    makes.
    """
    work = program.operations[position]
    stage = program.graph.stages[work.stage]
    apart = work.stage in program.apart
    whole = stage.recomputed_bytes if apart else stage.saved_bytes if program.split else stage.peak_bytes
    transient = whole - stage.kept_bytes
    later, made = ceil(stage.saved_bytes * program.weight_keeps), 0
    if program.weight_keeps == 1 and stage.held_between_bytes is not None:
        later, made = stage.held_between_bytes, stage.gradient_bytes
    match work.kind:
        case "F":
            return [(start, stage.kept_bytes)]
        case "R":
            return [(start, transient)]
        case "B" if program.split:
            more, less = transient * (not apart) + made, whole + made - later
            return [(start, work.covers * more), (end, -work.covers * less)]
        case "B" if apart:
            return [(end, -whole)]
        case "B":
            return [(start, transient), (end, -transient), (end, -work.covers * stage.kept_bytes)]
        case "W":
            return [(end, -work.covers * later)]
    return []


def activation_steps(timeline: Timeline, lane: int) -> Iterator[tuple[int, int]]:
    """Yield (time, bytes held from then on) of a device's activations, one pair for each time of a change."""
    held, at = 0, 0
    for time, change in activation_changes(timeline, lane):
        if time != at:
            yield at, held
            at = time
        held += change
    yield at, held


# --- microbatches ---------------------------------------------------------------------------------------------------


def in_flight(timeline: Timeline, lane: int) -> dict[int, int]:
    """Return, for each stage on a device, the most microbatches that it holds at a forward's start.

    Held until all of their backward has run, the weight part too.
    """
    counts: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for stage, change in _holds(timeline, lane):
        counts[stage] = counts.get(stage, 0) + change
        peaks[stage] = max(peaks.get(stage, 0), counts[stage])
    return peaks


def most_held(timeline: Timeline, lane: int) -> int:
    """Return the most microbatches that a device holds at once, counted in each of its stages."""
    held = most = 0
    for _, change in _holds(timeline, lane):
        held += change
        most = max(most, held)
    return most


def _holds(timeline: Timeline, lane: int) -> Iterator[tuple[int, int]]:
    """Yield (stage, change of the microbatches held) for each step of a device."""
    program = timeline.program
    for step in program.lanes[lane].steps:
        work = program.operations[step.position]
        frees = step.position == program.release[work.stage]
        yield work.stage, 1 if work.kind == "F" else -work.covers if frees else 0

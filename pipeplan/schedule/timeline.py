"""When did every step of a simulated run start and end, and what did each device hold meanwhile?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from math import ceil, lcm

from ..cost.stage_graph import updates_end_ns
from ..problem import Platform
from ..registry import Late
from .pattern import DeviceUse, alike, unused
from .program import Program, Step


def flush_makespan_ns(timeline: Timeline) -> int:
    """Return the time of a drained mini-batch: every stage's last backward, then its all-reduce, then the next one."""
    program = timeline.program
    graph = program.graph
    leaders = range(program.batch - 1, program.microbatches, program.batch)
    done = [
        max(timeline.end_ns(Step(m, program.release[s])) for m in leaders)
        if timeline.duration_ns is not None
        else max(timeline.start_ns[m][program.release[s]] for m in leaders)
        + program.operations[program.release[s]].duration_ns
        for s in range(len(graph.stages))
    ]
    return updates_end_ns(graph, done)


def longest_span_ns(timeline: Timeline) -> int:
    """Return the time of a mini-batch where no barrier stands between two: the longest that one device takes, from its
    first start to the end of its stages' all-reduces and steps.

    Such runs check the optimizer's step afterwards (Qi et al. 2024, section 4), so that a device begins the next
    mini-batch when it is done with this one.
    """
    program = timeline.program
    stages = program.graph.stages
    return max(
        timeline.span_ns(i) + sum(stages[s].update_ns + stages[s].step_ns for s in program.stages_of(i))
        for i, lane in enumerate(program.lanes)
        if lane.device is not None and lane.steps
    )


def worth(timeline: Timeline, barrier: bool) -> int:
    """Return what a drained mini-batch takes: its makespan, or without a barrier the longest span of one device."""
    return flush_makespan_ns(timeline) if barrier else longest_span_ns(timeline)


Times = tuple[tuple[int, ...], ...]  # [microbatch][position], in ns


Turn = tuple[int, int, Step]  # a place in a run's one total order


@dataclass(frozen=True)
class Timeline:
    """When every step of ``program`` ran: ``start_ns[microbatch][position]``; lanes are in the order in which they ran.

    A backward that covers several microbatches has its start at each of them. ``duration_ns`` is given where steps did
    not take as long as planned.
    """

    program: Program
    start_ns: Times
    duration_ns: Times | None = None

    def length_ns(self, step: Step) -> int:
        """Return how long ``step`` took."""
        if self.duration_ns is not None:
            return self.duration_ns[step.microbatch][step.position]
        return self.program.operations[step.position].duration_ns

    def begin_ns(self, step: Step) -> int:
        """Return when ``step`` started."""
        return self.start_ns[step.microbatch][step.position]

    def end_ns(self, step: Step) -> int:
        """Return when ``step`` ended."""
        return self.start_ns[step.microbatch][step.position] + self.length_ns(step)

    def turn(self, step: Step) -> Turn:
        """Return the place of ``step`` in the run's one total order: by start, then what takes less time by plan."""
        return self.begin_ns(step), self.program.operations[step.position].duration_ns, step

    @cached_property
    def makespan_ns(self) -> int:
        """Time from the first start to the last end."""
        return max((self.end_ns(lane.steps[-1]) for lane in self.program.lanes if lane.steps), default=0)

    @cached_property
    def fill_ns(self) -> int:
        """When the first microbatch has left the pipeline."""
        return self._left_ns[0]

    def left_ns(self, microbatch: int) -> int:
        """Return when the first stage's backward of ``microbatch`` ended."""
        program = self.program
        return self.end_ns(Step(program.leader(microbatch), len(program.graph.operations) - 1))

    def period_ns(self, first: int, last: int) -> float:
        """Return the mean time between two microbatches leaving the pipeline, from the ``first``-th that does on."""
        return (self._left_ns[last] - self._left_ns[first]) / (last - first)

    @cached_property
    def _left_ns(self) -> list[int]:
        """When microbatches left the pipeline, whichever those were."""
        return sorted(map(self.left_ns, range(self.program.microbatches)))

    def steady_period_ns(self) -> float | None:
        """Return the mean period of the middle of the run, or None when there are too few microbatches for one.

        The window leaves out a quarter at each end and spans whole rounds of the replicas. Where updates wait for sums
        it is a round of updates in the middle, and the period that of the operation that is slowest there: others can
        be ahead of it for some time.
        """
        count = self.program.microbatches
        if self.program.sums:
            return self._slowest_ns()
        window = (count // 2) // self._round * self._round
        if window == 0:
            return None
        first = count // 4
        return self.period_ns(first, first + window)

    def _slowest_ns(self) -> float | None:
        """Return the longest time between equal operations of two rounds of updates, per microbatch."""
        ends = {x.after[-1].microbatch + 1 for x in self.program.sums}
        again, count = lcm(min(ends), self._round), self.program.microbatches
        first = (count - 2 * again) * 3 // 4
        if first < 0:
            return None
        rows = zip(self.start_ns[first : first + again], self.start_ns[first + again : first + 2 * again], strict=True)
        return max(there - here for one, other in rows for here, there in zip(one, other, strict=True)) / again

    @cached_property
    def _round(self) -> int:
        return lcm(self.program.batch, *(resource.replicas for resource in self.program.graph.resources))

    def busy_ns(self, lane: int) -> int:
        """Return the time that a lane works."""
        return self._busy_ns[lane]

    @cached_property
    def _busy_ns(self) -> list[int]:
        if self.duration_ns is not None:
            return [sum(map(self.length_ns, lane.steps)) for lane in self.program.lanes]
        planned = [work.duration_ns for work in self.program.operations]
        return [sum([planned[step.position] for step in lane.steps]) for lane in self.program.lanes]

    def span_ns(self, lane: int) -> int:
        """Return the time from a lane's first start to its last end."""
        steps = self.program.lanes[lane].steps
        return self.end_ns(steps[-1]) - self.begin_ns(steps[0]) if steps else 0

    def bubble(self, lane: int) -> float:
        """Return the share of a device's time, from its first start to its last end, in which it waits."""
        span = self.span_ns(lane)
        return 1 - self.busy_ns(lane) / span if span else 0.0

    def longest_stage_bubble(self) -> float:
        """Return 1 - the most work / the longest span of a device: the bubble of the longest stage."""
        lanes = [i for i, lane in enumerate(self.program.lanes) if lane.device is not None and lane.steps]
        longest = max(map(self.span_ns, lanes), default=0)
        return 1 - max(map(self.busy_ns, lanes)) / longest if longest else 0.0


kept_by_stages: Callable[..., list[int]] = Late("schedule.weight_versions:kept_by_stages")
weight_policy = Late("schedule.weight_versions:weight_policy")


def run_uses(timeline: Timeline, platform: Platform) -> list[DeviceUse]:
    """Return what every device of the platform holds at most in a run; a device without a lane holds nothing."""
    uses, versions = unused(platform), _versions(timeline)
    for lane, work in enumerate(timeline.program.lanes):
        if work.device is not None:
            memory = platform.devices[work.device].memory_bytes
            uses[work.device] = replace(_use(timeline, lane, versions), memory_bytes=memory)
    return alike(timeline.program.graph, uses, platform)


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
    return DeviceUse(memory, weights, peak, program.buffers(stages), counts)


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
    return max(accumulate((change for _, change in _holds(timeline, lane)), initial=0))


def _holds(timeline: Timeline, lane: int) -> Iterator[tuple[int, int]]:
    """Yield (stage, change of the microbatches held) for each step of a device."""
    program = timeline.program
    for step in program.lanes[lane].steps:
        work = program.operations[step.position]
        frees = step.position == program.release[work.stage]
        yield work.stage, 1 if work.kind == "F" else -work.covers if frees else 0

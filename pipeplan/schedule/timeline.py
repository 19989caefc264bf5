"""When every step of a simulated run started and ended, and what its devices held: the Timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, lcm

from ..cost import memory_model
from ..cost.stage_graph import updates_end_ns, versions_of_first
from .program import Program, Step
from .weight_versions import Used, live_versions, versions_used


def flush_makespan_ns(timeline: Timeline) -> int:
    """Return the time of a drained mini-batch: every stage's last backward, then its all-reduce, then the next one."""
    program = timeline.program
    graph = program.graph
    done = [
        max(timeline.end_ns(Step(program.leader(m), program.release[s])) for m in range(program.microbatches))
        for s in range(len(graph.stages))
    ]
    return updates_end_ns(graph, done)


Times = tuple[tuple[int, ...], ...]  # [microbatch][position], in ns


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

    @cached_property
    def makespan_ns(self) -> int:
        """Time from the first start to the last end."""
        return max((self.end_ns(lane.steps[-1]) for lane in self.program.lanes if lane.steps), default=0)

    @cached_property
    def fill_ns(self) -> int:
        """When the first microbatch has left the pipeline."""
        return self.left_ns(0)

    def left_ns(self, microbatch: int) -> int:
        """Return when the first stage's backward of ``microbatch`` ended."""
        program = self.program
        return self.end_ns(Step(program.leader(microbatch), len(program.graph.operations) - 1))

    def period_ns(self, first: int, last: int) -> float:
        """Return the mean time between microbatches ``first`` and ``last`` leaving the pipeline."""
        return (self.left_ns(last) - self.left_ns(first)) / (last - first)

    def steady_period_ns(self) -> float | None:
        """Return the mean period of the middle of the run, or None when there are too few microbatches for one.

        The window leaves out a quarter at each end and spans whole rounds of the replicas.
        """
        count = self.program.microbatches
        window = (count // 2) // self._round * self._round
        if window == 0:
            return None
        first = count // 4
        return self.period_ns(first, first + window)

    @cached_property
    def _round(self) -> int:
        return lcm(self.program.batch, *(resource.replicas for resource in self.program.graph.resources))

    def busy_ns(self, lane: int) -> int:
        """Return the time that a lane works."""
        return sum(map(self.length_ns, self.program.lanes[lane].steps))

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

    def activation_changes(self, lane: int) -> list[tuple[int, int]]:
        """Return (time, change in bytes) of a device's activations, in the order in which they take effect.

        A microbatch is held from the start of its F to the end of its B; a stage that recomputes holds its transient
        during its B. When the backward is split, recomputed activations stay after it, and the share of everything that
        the weight part needs (all, unless the program says less) is held to the end of its W. At equal times releases
        come first.
        """
        program = self.program
        changes: list[tuple[int, int]] = []
        for step in program.lanes[lane].steps:
            work = program.operations[step.position]
            start, end, stage = self.begin_ns(step), self.end_ns(step), program.graph.stages[work.stage]
            transient = (stage.saved_bytes if program.split else stage.peak_bytes) - stage.kept_bytes
            later = ceil(stage.saved_bytes * program.weight_keeps)
            match work.kind:
                case "F":
                    changes.append((start, stage.kept_bytes))
                case "B" if program.split:
                    changes += [(start, work.covers * transient), (end, -work.covers * (stage.saved_bytes - later))]
                case "B":
                    changes += [(start, transient), (end, -transient), (end, -work.covers * stage.kept_bytes)]
                case "W":
                    changes.append((end, -work.covers * later))
        return sorted((c for c in changes if c[1]), key=lambda change: (change[0], change[1]))

    def memory_steps(self, lane: int) -> Iterator[tuple[int, int]]:
        """Yield (time, bytes held from then on) of a device's activations, one pair for each time of a change."""
        held, at = 0, 0
        for time, change in self.activation_changes(lane):
            if time != at:
                yield at, held
                at = time
            held += change
        yield at, held

    def peak_activation_bytes(self, lane: int) -> int:
        """Return the most activation bytes that a device holds at once."""
        held = peak = 0
        for _, change in self.activation_changes(lane):
            held += change
            peak = max(peak, held)
        return peak

    def in_flight(self, lane: int) -> dict[int, int]:
        """Return, for each stage on a device, the most microbatches that it holds at a forward's start.

        Held until all of their backward has run, the weight part too.
        """
        counts: dict[int, int] = {}
        peaks: dict[int, int] = {}
        for stage, change in self._holds(lane):
            counts[stage] = counts.get(stage, 0) + change
            peaks[stage] = max(peaks.get(stage, 0), counts[stage])
        return peaks

    def most_held(self, lane: int) -> int:
        """Return the most microbatches that a device holds at once, counted in each of its stages."""
        held = most = 0
        for _, change in self._holds(lane):
            held += change
            most = max(most, held)
        return most

    def _holds(self, lane: int) -> Iterator[tuple[int, int]]:
        """Yield (stage, change of the microbatches held) for each step of a device."""
        program = self.program
        for step in program.lanes[lane].steps:
            work = program.operations[step.position]
            frees = step.position == program.release[work.stage]
            yield work.stage, 1 if work.kind == "F" else -work.covers if frees else 0

    def static_bytes(self, lane: int) -> int:
        """Return what a device holds all the time: buffers, and weights for its in-flight microbatches."""
        return self.weights_bytes(lane) + self.buffer_bytes(lane)

    def weights_bytes(self, lane: int) -> int:
        """Return what the weights on a device take in all the versions that it keeps, with gradients and state."""
        graph, counts = self.program.graph, self.in_flight(lane)
        total = 0
        for s in self.program.stages_of(lane):
            stage = graph.stages[s]
            kept = self.kept_versions(s, counts.get(s, 0))
            total += memory_model.versioned_bytes(graph.policy, stage.weight_bytes, stage.parameters, kept)
        return total

    def buffer_bytes(self, lane: int) -> int:
        """Return what the send and receive buffers of the stages on a device take."""
        return sum(map(self.program.buffer_bytes, self.program.stages_of(lane)))

    def kept_versions(self, stage: int, in_flight: int) -> int:
        """Return the versions of its weights that ``stage`` keeps with ``in_flight`` microbatches at most.

        Under nF1B with vertical sync they are those that this run needs at once.
        """
        policy = self.program.graph.policy
        if policy.weights == "latest" and policy.vertical_sync and self.program.limit is not None:
            return live_versions(self, self._used, stage)
        graph = self.program.graph
        entered = [self.in_flight(i).get(0, 0) for i in range(len(self.program.lanes))] if policy.vertical_sync else [0]
        kept = memory_model.versions(policy, max(1, in_flight), graph.resources[graph.stages[stage].resource].replicas)
        return max(int(kept), versions_of_first(graph, max(entered)))

    @cached_property
    def _used(self) -> Used:
        return versions_used(self, vertical_sync=True)

    def peak_bytes(self, lane: int) -> int:
        """Return a device's peak: weights for its in-flight microbatches, buffers, and the activations' peak."""
        return self.static_bytes(lane) + self.peak_activation_bytes(lane)

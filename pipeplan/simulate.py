"""Simulate a program with real durations: every step starts as soon as its lane and its predecessor on the path allow.

The result, a Timeline, is what tables, Gantt charts and traces are drawn from. Cost is linear in the steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from . import costs
from .errors import PipeplanError
from .program import Program, Step, step_name


@dataclass(frozen=True)
class Timeline:
    """When every step of ``program`` ran: ``start_ns[microbatch][position]``; ends follow from the durations."""

    program: Program
    start_ns: tuple[tuple[int, ...], ...]

    def end_ns(self, step: Step) -> int:
        """Return when ``step`` ended."""
        duration = self.program.graph.operations[step.position].duration_ns
        return self.start_ns[step.microbatch][step.position] + duration

    @cached_property
    def makespan_ns(self) -> int:
        """Time from the first start to the last end."""
        last = len(self.program.graph.operations) - 1
        return max((self.end_ns(Step(m, last)) for m in range(self.program.microbatches)), default=0)

    @cached_property
    def fill_ns(self) -> int:
        """When the first microbatch has left the pipeline."""
        return self.end_ns(Step(0, len(self.program.graph.operations) - 1))

    def period_ns(self, first: int, last: int) -> float:
        """Return the mean time between microbatches ``first`` and ``last`` leaving the pipeline."""
        end = len(self.program.graph.operations) - 1
        return (self.end_ns(Step(last, end)) - self.end_ns(Step(first, end))) / (last - first)

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
        return lcm(*(resource.replicas for resource in self.program.graph.resources))

    def busy_ns(self, lane: int) -> int:
        """Return the time that a lane works."""
        operations = self.program.graph.operations
        return sum(operations[step.position].duration_ns for step in self.program.lanes[lane].steps)

    def bubble(self, lane: int) -> float:
        """Return the share of a device's time, from its first start to its last end, in which it waits."""
        steps = self.program.lanes[lane].steps
        if not steps:
            return 0.0
        span = self.end_ns(steps[-1]) - self.start_ns[steps[0].microbatch][steps[0].position]
        return 1 - self.busy_ns(lane) / span if span else 0.0

    def activation_changes(self, lane: int) -> list[tuple[int, int]]:
        """Return (time, change in bytes) of a device's activations, in the order in which they take effect.

        A microbatch is held from the start of its F to the end of its B; a stage that recomputes holds its transient
        during its B. At equal times releases come first.
        """
        graph = self.program.graph
        changes = []
        for step in self.program.lanes[lane].steps:
            op, start, end = graph.operations[step.position], self._start(step), self.end_ns(step)
            stage = graph.stages[op.stage]
            if op.kind == "F":
                changes.append((start, stage.kept_bytes))
            elif op.kind == "B":
                transient = stage.peak_bytes - stage.kept_bytes
                changes += [(start, transient), (end, -transient), (end, -stage.kept_bytes)]
        return sorted((c for c in changes if c[1]), key=lambda change: (change[0], change[1]))

    def _start(self, step: Step) -> int:
        return self.start_ns[step.microbatch][step.position]

    def peak_activation_bytes(self, lane: int) -> int:
        """Return the most activation bytes that a device holds at once."""
        held = peak = 0
        for _, change in self.activation_changes(lane):
            held += change
            peak = max(peak, held)
        return peak

    def in_flight(self, lane: int) -> dict[int, int]:
        """Return, for each stage on a device, the most microbatches that it holds at a forward's start."""
        counts: dict[int, int] = {}
        peaks: dict[int, int] = {}
        for step in self.program.lanes[lane].steps:
            op = self.program.graph.operations[step.position]
            counts[op.stage] = counts.get(op.stage, 0) + (1 if op.kind == "F" else -1)
            peaks[op.stage] = max(peaks.get(op.stage, 0), counts[op.stage])
        return peaks

    def peak_bytes(self, lane: int) -> int:
        """Return a device's peak: weights for its in-flight microbatches, buffers, and the activations' peak."""
        graph = self.program.graph
        total = self.peak_activation_bytes(lane)
        for s, count in self.in_flight(lane).items():
            stage = graph.stages[s]
            total += stage.buffer_bytes
            total += costs.weights_bytes(graph.policy, stage.weight_bytes, stage.parameters, max(1, count))
        return total


def simulate(program: Program) -> Timeline:
    """Return the as-soon-as-possible timeline of ``program``.

    A stage with replicas starts at most ``update_interval`` forwards per ``update_interval * sync_period``: its
    all-reduces overlap with work but share one network. Raises PipeplanError when the order deadlocks.
    """
    graph, count = program.graph, program.microbatches
    operations = graph.operations
    length = len(operations)
    durations = [op.duration_ns for op in operations]
    total = length * count
    following = [-1] * total  # the next step on the same lane
    waiting = [0] * total  # predecessors that have not run yet
    for lane in program.lanes:
        previous = -1
        for step in lane.steps:
            index = step.microbatch * length + step.position
            if previous >= 0:
                following[previous] = index
                waiting[index] += 1
            previous = index
    for index in range(total):
        waiting[index] += index % length > 0
    paced = {
        graph.position["F", s]: (stage.update_interval, stage.sync_period_ns * stage.update_interval)
        for s, stage in enumerate(graph.stages)
        if stage.sync_period_ns
    }
    for position, (interval, _) in paced.items():
        for m in range(interval, count):
            waiting[m * length + position] += 1
    starts = [0] * total
    ready = deque(index for index in range(total) if not waiting[index])
    done = 0
    while ready:
        index = ready.popleft()
        done += 1
        position = index % length
        end = starts[index] + durations[position]
        after = []
        if position + 1 < length:
            after.append((index + 1, end))
        if following[index] >= 0:
            after.append((following[index], end))
        if position in paced:
            interval, load = paced[position]
            if index + interval * length < total:
                after.append((index + interval * length, starts[index] + load))
        for other, earliest in after:
            starts[other] = max(starts[other], earliest)
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    if done < total:
        stuck = next(i for i in range(total) if waiting[i])
        raise PipeplanError(
            f"the program deadlocks: {done} of {total} steps can run; "
            f"{step_name(graph, Step(*divmod(stuck, length)))} waits for ever"
        )
    return Timeline(program, tuple(tuple(starts[m * length : (m + 1) * length]) for m in range(count)))

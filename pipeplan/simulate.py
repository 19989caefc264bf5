"""Simulate a program with real durations: every step starts as soon as its lane and what it needs allow.

The result, a Timeline, is what tables, Gantt charts and traces are drawn from. Cost is linear in the steps (lanes that
decide as they go add a logarithm).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from math import ceil, lcm

from . import costs
from .errors import PipeplanError
from .program import Arrival, Decide, Program, Step
from .stages import versions_of_first
from .weight_versions import Used, live_versions, versions_used

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
            total += costs.versioned_bytes(graph.policy, stage.weight_bytes, stage.parameters, kept)
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
        kept = costs.versions(policy, max(1, in_flight), graph.resources[graph.stages[stage].resource].replicas)
        return max(int(kept), versions_of_first(graph, max(entered)))

    @cached_property
    def _used(self) -> Used:
        return versions_used(self, vertical_sync=True)

    def peak_bytes(self, lane: int) -> int:
        """Return a device's peak: weights for its in-flight microbatches, buffers, and the activations' peak."""
        return self.static_bytes(lane) + self.peak_activation_bytes(lane)


def simulate(program: Program, duration_ns: Times | None = None) -> Timeline:
    """Return the as-soon-as-possible timeline of ``program``; ``duration_ns`` replaces the planned durations.

    A step needs its predecessor on the path (the backward of a batch all of its microbatches' last forwards, the weight
    part its input part), a place under the program's ``limit``, and its lane. A stage with replicas starts at most
    ``update_interval`` forwards per ``update_interval * sync_period`` of its devices: their all-reduces overlap with
    work but share one network. A lane that decides hears of steps as soon as their arrival is known. Raises
    PipeplanError when the order deadlocks.
    """
    return _Run(program, duration_ns).timeline()


class _Run:
    """One simulation: for each step its earliest start so far and how many of its predecessors have not started.

    Once the last of them has, the step's arrival is known. In a lane with a fixed order the previous step is one of
    them, so it starts on arrival; a lane with a rule is asked at every arrival and at every end, in order of time.
    """

    def __init__(self, program: Program, duration_ns: Times | None) -> None:
        self.program = program
        self.length = len(program.operations)
        self.total = self.length * program.microbatches
        planned = tuple(work.duration_ns for work in program.operations)
        self.given = duration_ns
        self.durations = (
            planned * program.microbatches
            if duration_ns is None
            else tuple(duration for row in duration_ns for duration in row)
        )
        self.starts = [0] * self.total
        self.waiting = [0] * self.total
        self.following = [-1] * self.total  # the next step of the same fixed lane
        self.deciding = [-1] * self.total  # the lane, where it has a rule
        self.queue: deque[int] = deque()
        self.events: list[tuple[int, int]] = []  # (time, lane to ask)
        self.announced: list[list[Arrival]] = [[] for _ in program.lanes]
        self.expected: dict[int, Arrival] = {}  # steps whose last transfer waits for its link
        self.ran: list[list[Step]] = [[] for _ in program.lanes]
        self.steps = 0
        self._prepare_lanes()
        self._prepare_rules()

    def _prepare_lanes(self) -> None:
        listed = bytearray(self.total)
        for number, lane in enumerate(self.program.lanes):
            previous = -1
            self.steps += len(lane.steps)
            for step in lane.steps:
                index = step.microbatch * self.length + step.position
                if listed[index]:
                    raise PipeplanError(f"the program runs {self.program.name(step)} twice")
                listed[index] = 1
                if lane.rule is not None:
                    self.deciding[index] = number
                elif previous >= 0:
                    self.following[previous] = index
                    self.waiting[index] += 1
                previous = index
        expected = sum(self.program.microbatches // work.covers for work in self.program.operations)
        if self.steps != expected:
            raise PipeplanError(f"the program runs {self.steps} steps; its microbatches have {expected}")

    def _prepare_rules(self) -> None:
        """List what a step's start sets off, as (position after, step in microbatches, delay from the start or None).

        Index arithmetic keeps it independent of the microbatch, but for the first backward of a batch, which all its
        microbatches' forwards set off.
        """
        program, graph, length, batch = self.program, self.program.graph, self.length, self.program.batch
        path, half, count = len(graph.operations), len(graph.operations) // 2, program.microbatches
        self.after: list[list[tuple[int, int | None]]] = [[] for _ in range(length)]
        self.joins = half if batch > 1 else -1
        needed = [0] * length  # predecessors of every microbatch's step
        for position in range(path - 1):
            if position + 1 != self.joins:
                self.after[position].append((1, None))
            needed[position + 1] = batch if position + 1 == self.joins else 1
        for position in range(path, length):
            source = program.position["B", program.operations[position].stage]
            self.after[source].append((position - source, None))
            needed[position] = 1
        leaders = range(batch - 1, count, batch)
        for position in range(length):
            for m in range(count) if program.operations[position].covers == 1 else leaders:
                self.waiting[m * length + position] += needed[position]
        if program.limit is not None:
            done = program.release[0]
            for place in range(batch):
                distance = program.limit * batch - (batch - 1) + place
                self.after[done].append((distance * length - done, None))
            for m in range(program.limit * batch, count):
                self.waiting[m * length] += 1
        for s, stage in enumerate(graph.stages):
            period = graph.sync_periods_ns[stage.resource]
            if period:
                position, interval = graph.position["F", s], stage.update_interval
                self.after[position].append((interval * length, period * interval))
                for m in range(interval, count):
                    self.waiting[m * length + position] += 1

    def timeline(self) -> Timeline:
        length, covers = self.length, [work.covers for work in self.program.operations]
        rules: list[Decide | None] = [lane.rule() if lane.rule else None for lane in self.program.lanes]
        for lane in self.program.lanes:
            for step in lane.steps:
                index = step.microbatch * length + step.position
                if not self.waiting[index]:
                    self._arrives(index)
        done = self._settle()
        free = [0] * len(rules)
        while self.events:
            now, number = heappop(self.events)
            decide, announced = rules[number], self.announced[number]
            if free[number] > now or not announced:
                continue
            assert decide is not None, "only lanes with a rule are asked"
            chosen = decide(now, announced)
            if chosen is None:
                continue
            assert chosen.has_come(now), "a rule may only choose what has come"
            del announced[bisect_left(announced, chosen)]
            index = chosen.step.microbatch * length + chosen.step.position
            self.starts[index] = now
            self.ran[number].append(chosen.step)
            free[number] = now + self.durations[index]
            heappush(self.events, (free[number], number))
            self.queue.append(index)
            done += self._settle()
        if done < self.steps:
            self._explain(done)
        lanes = tuple(
            lane if lane.rule is None else replace(lane, steps=tuple(order))
            for lane, order in zip(self.program.lanes, self.ran, strict=True)
        )
        program, starts = self.program, self.starts
        if program.batch > 1:
            for m in range(program.microbatches):
                for position in range(length):
                    if covers[position] > 1:
                        starts[m * length + position] = starts[program.leader(m) * length + position]
        rows = tuple(tuple(starts[m * length : (m + 1) * length]) for m in range(program.microbatches))
        return Timeline(replace(program, lanes=lanes), rows, self.given)

    def _settle(self) -> int:
        """Start everything whose start is known, and return how many steps that were."""
        length, total, batch = self.length, self.total, self.program.batch
        starts, waiting, durations, following = self.starts, self.waiting, self.durations, self.following
        after, joins, queue = self.after, self.joins, self.queue
        done = 0
        while queue:
            index = queue.popleft()
            done += 1
            position = index % length
            start = starts[index]
            end = start + durations[index]
            other = following[index]
            if other >= 0:
                if starts[other] < end:
                    starts[other] = end
                waiting[other] -= 1
                if not waiting[other]:
                    self._arrives(other)
            for step, delay in after[position]:
                other = index + step
                if other >= total:
                    continue
                earliest = end if delay is None else start + delay
                if starts[other] < earliest:
                    starts[other] = earliest
                waiting[other] -= 1
                if not waiting[other]:
                    self._arrives(other)
            if position + 1 == joins:
                m = index // length
                other = (m - m % batch + batch - 1) * length + joins
                if starts[other] < end:
                    starts[other] = end
                waiting[other] -= 1
                if not waiting[other]:
                    self._arrives(other)
        return done

    def _arrives(self, index: int) -> None:
        number = self.deciding[index]
        if number < 0:
            self.queue.append(index)
            return
        expected = self.expected.pop(index, None)
        if expected is not None:
            del self.announced[number][bisect_left(self.announced[number], expected)]
        insort(self.announced[number], self._arrival(index, self.starts[index], True))
        heappush(self.events, (self.starts[index], number))
        if self.program.lanes[number].device is None:  # a transfer; what it brings to is next on the path
            self._expect(index + 1, self.starts[index] + self.durations[index])

    def _expect(self, index: int, at_ns: int) -> None:
        number = self.deciding[index]
        if number >= 0 and self.waiting[index] == 1:
            self.expected[index] = self._arrival(index, at_ns, False)
            insort(self.announced[number], self.expected[index])

    def _arrival(self, index: int, at_ns: int, sure: bool) -> Arrival:
        step = Step(*divmod(index, self.length))
        work = self.program.operations[step.position]
        return Arrival(at_ns, step, work.kind, work.stage, sure)

    def _explain(self, done: int) -> None:
        for lane in self.program.lanes:
            for step in lane.steps:
                if self.waiting[step.microbatch * self.length + step.position]:
                    raise PipeplanError(
                        f"the program deadlocks: {done} of {self.steps} steps can run; "
                        f"{self.program.name(step)} waits for ever"
                    )
        raise PipeplanError("the program stops: a lane's rule waits although nothing else will arrive")

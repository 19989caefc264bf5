"""When does each step of a program run, if all start as soon as they can?

By the planned durations, or by others: those that were measured, or random ones around the planned (jitter), to see
which schedules stand unsteady machines.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from ..deadline import NEVER, Deadline
from ..errors import PipeplanError
from .program import Arrival, Decide, Program, Step, StepKind, first_come
from .timeline import Timeline, Times

STEP_S = 5e-6  # what a step takes at least to be made and simulated
_CHECKED = 4096  # steps between two looks at the clock


Comers = list[tuple[int, bool, int]]  # a heap of arrivals, whether they are forwards, and steps


def simulate(program: Program, duration_ns: Times | None = None, deadline: Deadline = NEVER) -> Timeline:
    """Return the as-soon-as-possible timeline of ``program``; ``duration_ns`` replaces the planned durations.

    A step needs its predecessor on the path (the backward of a batch all of its microbatches' last forwards, the weight
    part its input part, a recomputation the forward and the backward that), a place under the program's ``limit``, and
    its lane. A stage with replicas starts at most ``update_interval`` forwards per ``update_interval * sync_period`` of
    its devices: their all-reduces overlap with work but share one network. What waits for one of the program's ``sums``
    starts when that is over. A lane that decides hears of steps as soon
    as their arrival is known. Raises PipeplanError when the order deadlocks, OutOfTime at the ``deadline``.
    """
    return _ProgramRun(program, duration_ns, deadline).timeline()


def _shared(total: int, among: Sequence[int]) -> list[int]:
    """Return ``total`` dealt out in proportion to ``among``, in whole numbers."""
    bounds = [total * taken // max(1, sum(among)) for taken in accumulate(among, initial=0)]
    return [end - start for start, end in pairwise(bounds)]


class _ProgramRun:
    """One simulation: for each step its earliest start so far and how many of its predecessors have not started.

    Once the last of them has, the step's arrival is known. In a lane with a fixed order the previous step is one of
    them, so it starts on arrival; a lane with a rule is asked at every arrival and at every end, in order of time.
    """

    def __init__(self, program: Program, duration_ns: Times | None, deadline: Deadline) -> None:
        self.program, self.deadline = program, deadline
        self.length = len(program.operations)
        self.total = self.length * program.microbatches
        planned = tuple(work.duration_ns for work in program.operations)
        self.given = duration_ns
        self.durations = (
            planned * program.microbatches
            if duration_ns is None
            else tuple(duration for row in duration_ns for duration in row)
        )
        self._prepare_fused()
        self.starts = array("q", [0]) * self.total
        self.waiting = array("i", [0]) * self.total  # arrays, as there may be millions
        self.following = array("i", [-1]) * self.total  # the next step of the same fixed lane
        self.deciding = array("i", [-1]) * self.total  # the lane, where it has a rule
        self.queue: deque[int] = deque()
        self.events: list[tuple[int, int]] = []  # (time, lane to ask)
        self.announced: list[list[Arrival]] = [[] for _ in program.lanes]
        self.free = [0] * len(program.lanes)  # when each lane that decides has done what it chose
        self.expected: dict[int, Arrival] = {}  # steps whose last transfer waits for its link
        self.rules: list[Decide | None] = [lane.rule() if lane.rule else None for lane in program.lanes]
        self.first: list[Callable[[StepKind, int], bool] | None] = [getattr(rule, "first", None) for rule in self.rules]
        self.comers: list[tuple[Comers, Comers] | None] = [  # what goes first, and the rest
            ([], []) if rule is first_come or first else None
            for rule, first in zip(self.rules, self.first, strict=True)
        ]
        self.ran: list[list[Step]] = [[] for _ in program.lanes]
        self.steps = 0
        self._prepare_lanes()
        self._prepare_rules()
        self._prepare_sums()

    def _prepare_fused(self) -> None:
        """List the steps of each operation that has several, and shorten those where it hides one behind another."""
        program = self.program
        self.groups = [[step.microbatch * self.length + step.position for step in group] for group in program.fused]
        self.leaders = {index: group[0] for group in self.groups for index in group}
        self.members = {group[0]: group for group in self.groups}
        self.inner = {  # what needs another of its operation, and nothing else
            index
            for group, steps in zip(self.groups, program.fused, strict=True)
            for index, step in zip(group, steps, strict=True)
            if any(step.microbatch * self.length + source in group for source in program.needs[step.position])
        }
        self.ends: dict[int, int] = {}  # of operations with several steps, at each of these
        if not program.overlap or not self.groups:
            return
        durations = list(self.durations)
        for group, steps in zip(self.groups, program.fused, strict=True):
            taken = [durations[index] for index in group]
            ahead = sum(
                t for t, step in zip(taken, steps, strict=True) if program.operations[step.position].kind == "F"
            )
            whole = sum(taken)
            lasts = whole - int(program.overlap * min(ahead, whole - ahead))
            for index, share in zip(group, _shared(lasts, taken), strict=True):
                durations[index] = share
        self.durations = tuple(durations)
        rows = range(0, self.total, self.length)
        self.given = tuple(self.durations[row : row + self.length] for row in rows)

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
                elif self.leaders.get(index, index) != index:
                    self.waiting[self.leaders[index]] += index not in self.inner
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
        half, count = len(graph.round_trips), program.microbatches
        self.after: list[list[tuple[int, int | None]]] = [[] for _ in range(length)]
        self.joins = half if batch > 1 else -1
        needed = [0] * length  # predecessors of every microbatch's step
        for position, sources in enumerate(program.needs):
            needed[position] = batch if position == self.joins else len(sources)
            for source in sources if position != self.joins else ():
                self.after[source].append((position - source, None))
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

    def _prepare_sums(self) -> None:
        """List which sums each step comes before, and how many steps each waits for."""
        self.summed: dict[int, list[int]] = {}
        self.missing, self.summed_ns = [len(x.after) for x in self.program.sums], [0] * len(self.program.sums)
        for number, one in enumerate(self.program.sums):
            for step in one.after:
                self.summed.setdefault(step.microbatch * self.length + step.position, []).append(number)
            for step in one.before:
                self.waiting[step.microbatch * self.length + step.position] += 1

    def _sum(self, index: int, end: int) -> None:
        """Let what waits for sums go on whose last gradient is made at ``end``."""
        for number in self.summed[index]:
            self.missing[number] -= 1
            self.summed_ns[number] = max(self.summed_ns[number], end)
            if self.missing[number]:
                continue
            one = self.program.sums[number]
            for step in one.before:
                other = step.microbatch * self.length + step.position
                self.starts[other] = max(self.starts[other], self.summed_ns[number] + one.ns)
                self.waiting[other] -= 1
                if not self.waiting[other]:
                    self._arrives(other)

    def timeline(self) -> Timeline:
        length, covers = self.length, [work.covers for work in self.program.operations]
        for lane in self.program.lanes:
            for step in lane.steps:
                index = step.microbatch * length + step.position
                if not self.waiting[index]:
                    self._arrives(index)
        done, free, rules = self._settle(), self.free, self.rules
        while self.events:  # of a lane with a rule of its own
            self.deadline.check()
            now, number = heappop(self.events)
            decide, announced = rules[number], self.announced[number]
            assert decide is not None, "only lanes with a rule are asked"
            chosen = decide(now, announced) if announced and free[number] <= now else None
            if chosen is not None:
                assert chosen.has_come(now), "a rule may only choose what has come"
                del announced[0 if announced[0] is chosen else bisect_left(announced, chosen)]
                index = chosen.step.microbatch * length + chosen.step.position
                self.starts[index] = now
                self.ran[number].append(chosen.step)
                free[number] = now + self.durations[index]
                if announced:
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
        for group in self.groups:
            at = starts[group[0]]
            for index in group:
                starts[index], at = at, at + self.durations[index]
        if program.batch > 1:
            for m in range(program.microbatches):
                for position in range(length):
                    if covers[position] > 1:
                        starts[m * length + position] = starts[program.leader(m) * length + position]
        rows = tuple(tuple(starts[m * length : (m + 1) * length]) for m in range(program.microbatches))
        return Timeline(replace(program, lanes=lanes), rows, self.given)

    def _settle(self) -> int:
        """Start everything whose start is known, and what comes first where nothing else decides; return how many steps
        that were. It ends where a lane with another rule is the next to be asked."""
        length, total, batch = self.length, self.total, self.program.batch
        starts, waiting, durations, following = self.starts, self.waiting, self.durations, self.following
        after, joins, queue, leaders = self.after, self.joins, self.queue, self.leaders
        deciding, summed = self.deciding, self.summed
        done = 0
        while True:
            index = queue.popleft() if queue else self._first_come()
            if index < 0:
                return done
            done += 1
            if not done % _CHECKED:
                self.deadline.check()
            position = index % length
            start = starts[index]
            end = start + durations[index]
            if leaders and index in leaders:
                end = self._end_together(index)
            if summed and index in summed:
                self._sum(index, end)
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
                if waiting[other]:
                    continue
                if deciding[other] < 0 and not leaders:
                    queue.append(other)
                else:
                    self._arrives(other)
            if position + 1 == joins:
                m = index // length
                other = (m - m % batch + batch - 1) * length + joins
                if starts[other] < end:
                    starts[other] = end
                waiting[other] -= 1
                if not waiting[other]:
                    self._arrives(other)

    def _first_come(self) -> int:
        """Start and return the step that comes first; -1 where there is none, or another rule decides before."""
        events, free = self.events, self.free
        while events:
            now, number = events[0]
            waits = self.comers[number]
            if waits is None:
                break
            heappop(events)
            queue = waits[0] if waits[0] and waits[0][0][0] <= now else waits[1]
            if free[number] <= now and queue and queue[0][0] <= now:
                index = heappop(queue)[2]
                self.starts[index] = now
                self.ran[number].append(Step(*divmod(index, self.length)))
                free[number] = now + self.durations[index]
                if waits[0] or waits[1]:
                    heappush(events, (free[number], number))
                return index
        return -1

    def _end_together(self, index: int) -> int:
        """Return when the operation ends that has this step and others; the first of them has the others follow."""
        if index in self.members:
            others = self.members[index]
            end = self.starts[index] + sum(self.durations[other] for other in others)
            self.ends.update(dict.fromkeys(others, end))
            self.queue.extend(others[1:])
        return self.ends[index]

    def _arrives(self, index: int) -> None:
        first = self.leaders.get(index, index)
        if first != index:
            if index not in self.ends:  # else it waited for another of its operation, which has started
                self.starts[first] = max(self.starts[first], self.starts[index])
                self.waiting[first] -= 1
                if not self.waiting[first]:
                    self._arrives(first)
            return
        number = self.deciding[index]
        if number < 0:
            self.queue.append(index)
            return
        waits, at = self.comers[number], self.starts[index]
        if waits is not None:
            before, work = self.first[number], self.program.operations[index % self.length]
            ahead = before is not None and work.kind != "B"
            heappush(waits[before is None or not before(work.kind, work.stage)], (at, ahead, index))
        else:
            expected = self.expected.pop(index, None)
            if expected is not None:
                del self.announced[number][bisect_left(self.announced[number], expected)]
            insort(self.announced[number], self._arrival(index, at, True))
        heappush(self.events, (max(at, self.free[number]), number))
        if self.program.lanes[number].device is None:  # a transfer; what it brings to is next on the path
            other = self.deciding[index + 1]
            if other >= 0 and self.comers[other] is None and self.waiting[index + 1] == 1:
                self.expected[index + 1] = self._arrival(index + 1, at + self.durations[index], False)
                insort(self.announced[other], self.expected[index + 1])

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

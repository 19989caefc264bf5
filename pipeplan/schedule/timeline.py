"""When did every step of a simulated run start and end?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm

from ..cost.stage_graph import updates_end_ns
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
    first start to the end of its stages' all-reduces.

    Such runs check the optimizer's step afterwards (Qi et al. 2024, section 4), so that a device begins the next
    mini-batch when it is done with this one.
    """
    program = timeline.program
    stages = program.graph.stages
    return max(
        timeline.span_ns(i) + sum(stages[s].update_ns for s in program.stages_of(i))
        for i, lane in enumerate(program.lanes)
        if lane.device is not None and lane.steps
    )


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

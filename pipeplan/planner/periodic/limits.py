"""How much should be admitted at once where GPUs decide as they go, and what do stages cost then?

Such a schedule has no pattern to place operations in; its limit is all that a planner decides, and its cost comes from
its simulated run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from ...check.evaluate import evaluate_simulated
from ...cost.stage_graph import StageGraph
from ...deadline import NEVER, Deadline
from ...integers import ceil_div, smallest
from ...plan import Schedule, ScheduleKind
from ...problem import Platform
from ...schedule.kinds import KINDS, refused
from ...schedule.registered import Kind

Choice = tuple[int, Schedule]  # a cost in ns: nF1B's period, message-driven's makespan
ENOUGH = 1000  # a cost within a thousandth of its lower bound needs no other limit


def cost_and_excess(
    graph: StageGraph, schedule: Schedule, platform: Platform, deadline: Deadline = NEVER
) -> tuple[int, int]:
    """Return the cost (ns) of stages under a schedule with its limit, and the bytes that the fullest device lacks.

    The cost is the makespan of a drained mini-batch with its weight synchronisation, or the period of nF1B; everything
    fits where the fullest device lacks nothing or less.
    """
    result = evaluate_simulated(graph, schedule, platform, deadline)
    cost = result.period_ns if result.makespan_ns is None else result.makespan_ns
    return cost, max(use.over_bytes for use in result.devices)


def drained_floor_ns(graph: StageGraph, kind: ScheduleKind, microbatches: int) -> int:
    """Return a time below which no mini-batch of ``graph`` is over under a ``kind`` that drains: what its busiest link
    or all-reduce needs, or a device, with the way to its first stage and, where backwards are whole, back from it."""
    ends = list(accumulate((op.duration_ns for op in graph.operations), initial=0))
    floor = microbatches * (graph.period_floor_ns - 1)
    for resource, own in zip(graph.resources, graph.on_resource, strict=True):
        if not resource.is_link:
            way = ends[own[0]] + (0 if KINDS[kind].splits else ends[-1] - ends[own[-1] + 1])
            load = sum(graph.operations[i].duration_ns for i in own)
            floor = max(floor, way + ceil_div(microbatches, resource.replicas) * load)
    return floor


@dataclass(frozen=True)
class LimitSearch:
    """A kind of schedule to plan for: ``schedule.limit`` is the user's, or None for the planner to choose."""

    schedule: Schedule
    platform: Platform

    @property
    def kind(self) -> Kind:
        """The row of the kind."""
        return KINDS[self.schedule.kind]

    @property
    def places(self) -> bool:
        """Whether the schedule says itself which GPU has which stage."""
        return self.kind.homes is not None

    def refuses(self, graph: StageGraph) -> str | None:
        """Return why ``graph`` cannot run under the schedule at all, or None."""
        return refused(graph, self.schedule)

    def load_ns(self, graph: StageGraph) -> int:
        """Return what the busiest device, link or all-reduce of ``graph`` needs: it costs no less."""
        return self.schedule.mini_batch * (graph.period_floor_ns - 1) if self.kind.drains else graph.period_floor_ns

    def floor_ns(self, graph: StageGraph) -> int:
        """Return a cost that ``graph`` cannot go below; of what drains that of :func:`drained_floor_ns`."""
        if not self.kind.drains:
            return self.load_ns(graph)
        return drained_floor_ns(graph, self.schedule.kind, self.schedule.mini_batch)

    def choose(self, graph: StageGraph, deadline: Deadline = NEVER, below_ns: int | None = None) -> Choice | None:
        """Return the schedule with the best limit for ``graph`` and its cost, or None when no limit fits the memory, or
        none of those that may cost less than ``below_ns``.

        Without a limit of the user's: the usual ones, the shortest cost of those that fit, and below them the largest
        that fits. More admitted needs more memory, up to the interplay of arrivals, so this last one is a heuristic.
        """
        if self.schedule.limit is not None:
            alone = self.kind.drains and len(graph.stages) == 1
            limit = 1 if alone else self.schedule.limit  # a stage alone has nothing to wait for
            return self._tried(graph, limit, deadline)
        if self.kind.limit is None:
            return self._tried(graph, None, deadline)
        least = 1 if below_ns is None else self._least(graph, below_ns)
        usual = [limit for limit in self.kind.limit.usual(graph) if limit >= least]
        best: Choice | None = None
        for limit in usual:
            found = self._tried(graph, limit, deadline)
            if found is not None and (best is None or found[0] < best[0] - best[0] // ENOUGH):
                best = found
            if best is None or best[0] <= self.floor_ns(graph) * (ENOUGH + 1) // ENOUGH:
                break
        if best is None and usual:
            found_less = smallest(lambda less: self._tried(graph, usual[0] - less, deadline), 1, usual[0] - least)
            best = None if found_less is None else found_less[1]
        return best

    def _least(self, graph: StageGraph, below_ns: int) -> int:
        """Return the least limit with which a mini-batch may be over in less: each microbatch is inside for all of its
        way, as many of them at a time as each of the pipelines admits."""
        if not self.kind.drains:
            return 1
        pipelines = graph.resources[graph.stages[0].resource].replicas
        return self.schedule.mini_batch * graph.path_ns // (pipelines * below_ns) + 1

    def excess_bytes(self, graph: StageGraph, deadline: Deadline = NEVER) -> int:
        """Return how much the device that is most over its memory lacks under the limit of the user, or the least."""
        admitted = replace(self.schedule, limit=self.schedule.limit or (1 if self.kind.limit else None))
        return cost_and_excess(graph, admitted, self.platform, deadline)[1]

    def _tried(self, graph: StageGraph, limit: int | None, deadline: Deadline) -> Choice | None:
        schedule = replace(self.schedule, limit=limit)
        cost, excess = cost_and_excess(graph, schedule, self.platform, deadline)
        return (cost, schedule) if excess <= 0 else None

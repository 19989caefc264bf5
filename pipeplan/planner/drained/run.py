"""How long does a mini-batch of some stages take, drained under a kind of schedule, if they fit the memory?"""

from __future__ import annotations

from dataclasses import dataclass

from ...check.validate import structure_violations
from ...cost.stage_graph import StageGraph, stage_graph
from ...plan import Allocation, Pattern, Schedule, ScheduleKind, Stage
from ...problem import Platform, Problem
from ...schedule.kinds import KINDS, program_of_kind, refused
from ...schedule.memory import run_uses
from ...schedule.pattern import DeviceUse, in_flight, starts_of
from ...schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from ...schedule.simulate import STEP_S, simulate
from ...schedule.timeline import Timeline, flush_makespan_ns
from ..periodic.incumbent import Scheduled


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated mini-batch of stages: its time (ns), the kind of schedule, the pattern that this has, if any, or what
    every device holds, of equal pipelines those of the first."""

    makespan_ns: int
    stages: tuple[Stage, ...]
    kind: ScheduleKind
    pattern: Pattern | None
    timeline: Timeline
    uses: tuple[DeviceUse, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether no device holds more than it can."""
        return all(x.peak_bytes <= x.memory_bytes for x in self.uses)

    @property
    def graph(self) -> StageGraph:
        """The stages' graph."""
        return self.timeline.program.graph

    @property
    def held(self) -> tuple[int, ...]:
        """What the replicas of stages hold in the pattern."""
        graph, pattern = self.graph, self.pattern
        assert pattern is not None, "without one the schedule says it"
        starts = starts_of(pattern)
        places = (graph.position["F", s] for s in range(len(self.stages)))
        return tuple(in_flight(graph, starts, pattern.period_ns, s, starts[at]) for s, at in enumerate(places))

    @property
    def scheduled(self) -> Scheduled:
        """The stages with their schedule."""
        schedule = Schedule(self.kind, self.graph.policy.accumulate)
        return Scheduled(self.makespan_ns, Allocation(self.stages), self.pattern, schedule=schedule)


def drained_run(problem: Problem, stages: tuple[Stage, ...], kind: ScheduleKind) -> Run | None:
    """Return the run of a mini-batch under a kind of schedule without a limit; None where the stages cannot run so, or
    don't fit."""
    run = any_run(problem, stages, kind)
    return run if run is not None and run.fits else None


def any_run(problem: Problem, stages: tuple[Stage, ...], kind: ScheduleKind) -> Run | None:
    """Do the same, whether or not the stages fit; those of a pattern always do."""
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    count = problem.policy.accumulate or 1
    problem.deadline.check(count * len(graph.operations) * STEP_S)
    pattern = None
    if KINDS[kind].simulated is None:
        pattern = best_one_f_one_b_star(graph) if graph.separate else None
        if pattern is None:
            return None
    elif refused(graph, Schedule(kind, count)) is not None:
        return None
    if structure_violations(problem.chain, problem.platform, problem.policy, stages):
        return None
    if pattern is None and problem.platform.shared_level is None:
        graph, count = _alone(graph, count, problem.platform)
    timeline = simulate(program_of_kind(graph, Schedule(kind, count), pattern, count), deadline=problem.deadline)
    uses = () if pattern is not None else tuple(run_uses(timeline, problem.platform))
    return Run(flush_makespan_ns(timeline), stages, kind, pattern, timeline, uses)


def _alone(graph: StageGraph, microbatches: int, platform: Platform) -> tuple[StageGraph, int]:
    """Return one of equal pipelines with its share of the microbatches, if stages make some that are alike."""
    resources = [graph.resources[stage.resource] for stage in graph.stages]
    counts = {resource.replicas for resource in resources}
    memories = [{platform.devices[d].memory_bytes for d in resource.devices} for resource in resources]
    if len(counts) > 1 or microbatches % max(counts) or max(map(len, memories)) > 1:
        return graph, microbatches
    return graph.first_replicas(), microbatches // max(counts)

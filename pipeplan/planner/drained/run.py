"""How long does a mini-batch of some stages take, drained under a kind of schedule, if they fit the memory?

And which layers do stages recompute, so that the run fits and takes little more? A schedule holds most of some stages
at an instant at which it holds little of others on the same GPU, so what each may keep is seen only in a run. Where a
GPU lacks memory the stage on it recomputes more that wins most bytes for its time, until all fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ...check.validate import structure_violations
from ...cost.stage_cost import StageCost
from ...cost.stage_graph import StageGraph, stage_graph
from ...partition.tables.stages import Ranges
from ...plan import Allocation, Pattern, Schedule, ScheduleKind, Stage
from ...problem import Platform, Problem
from ...schedule.kinds import KINDS, program_of_kind, refused
from ...schedule.pattern import DeviceUse
from ...schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from ...schedule.simulate import STEP_S, simulate
from ...schedule.timeline import Timeline, flush_makespan_ns, run_uses
from ..periodic.incumbent import Scheduled
from ..periodic.limits import drained_floor_ns


@dataclass(frozen=True)
class Run:
    """A simulated mini-batch of stages: its time (ns), the kind of schedule, and the pattern that this has, if any."""

    makespan_ns: int
    stages: tuple[Stage, ...]
    kind: ScheduleKind
    pattern: Pattern | None
    timeline: Timeline
    platform: Platform

    @cached_property
    def uses(self) -> list[DeviceUse]:
        """What every device holds, of equal pipelines those of the first; nothing is said where a pattern fits."""
        return [] if self.pattern is not None else run_uses(self.timeline, self.platform)

    @property
    def fits(self) -> bool:
        """Whether no device holds more than it can."""
        return all(x.over_bytes <= 0 for x in self.uses)

    @property
    def graph(self) -> StageGraph:
        """The stages' graph."""
        return self.timeline.program.graph

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


def any_run(problem: Problem, stages: tuple[Stage, ...], kind: ScheduleKind, below_ns: int | None = None) -> Run | None:
    """Do the same, whether or not the stages fit; those of a pattern always do. None, too, for some that are not over
    ``below_ns``, and that are not simulated."""
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    count = problem.policy.accumulate or 1
    if below_ns is not None and drained_floor_ns(graph, kind, count) >= below_ns:
        return None
    problem.deadline.check(count * len(graph.operations) * STEP_S)
    pattern = None
    if KINDS[kind].build is None:
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
    return Run(flush_makespan_ns(timeline), stages, kind, pattern, timeline, problem.platform)


def _alone(graph: StageGraph, microbatches: int, platform: Platform) -> tuple[StageGraph, int]:
    """Return one of equal pipelines with its share of the microbatches, if stages make some that are alike."""
    resources = [graph.resources[stage.resource] for stage in graph.stages]
    counts = {resource.replicas for resource in resources}
    memories = [{platform.devices[d].memory_bytes for d in resource.devices} for resource in resources]
    if len(counts) > 1 or microbatches % max(counts) or max(map(len, memories)) > 1:
        return graph, microbatches
    return graph.first_replicas(), microbatches // max(counts)


_ROUNDS = 8  # of simulated runs in which more is recomputed
_WAYS = 24  # to recompute a stage that are looked at

Simulate = Callable[[tuple[Stage, ...]], Run | None]  # None: no such run, or no more of them


def fitting_run(problem: Problem, known: Run, ways: Sequence[Sequence[Ranges]], run: Simulate) -> Run | None:
    """Return a run of a ``known`` one's stages that fits the memory, each recomputing one of its ``ways``, quickest
    first; None where none is found. A heuristic."""
    if not all(ways):
        return None
    stages, rungs = known.stages, [0] * len(ways)
    ways = [_fewer(own) for own in ways]

    def at(rungs: Sequence[int]) -> tuple[Stage, ...]:
        return tuple(replace(x, checkpoint=own[rung]) for x, own, rung in zip(stages, ways, rungs, strict=True))

    @cache
    def costs(rung: int) -> tuple[StageCost, ...]:
        """Return what all stages cost so many rungs up, as far as they go."""
        some = at([min(rung, len(own) - 1) for own in ways])
        return stage_graph(problem.chain, problem.platform, problem.policy, some).stages

    def saves(s: int, held: int) -> tuple[int, int]:
        """Return about how many bytes a stage of which so many microbatches are held takes less a rung higher, and how
        much longer its backward."""
        low, high = costs(rungs[s])[s], costs(rungs[s] + 1)[s]
        more = (low.peak_bytes - low.kept_bytes) - (high.peak_bytes - high.kept_bytes)
        return held * (low.kept_bytes - high.kept_bytes) + more, high.backward_ns - low.backward_ns

    def ratio(s: int, held: int) -> float:
        fewer, longer = saves(s, held)
        return fewer / max(1, longer)

    def recompute_more(lane: Sequence[int], use: DeviceUse) -> bool:
        """Recompute more of the stages of a device, about as much as it lacks; return whether anything was left."""
        before, lacks = list(rungs), use.over_bytes
        held = dict(zip(lane, use.in_flight, strict=True))
        while lacks > 0 and (left := [s for s in lane if rungs[s] + 1 < len(ways[s])]):
            best = max(left, key=lambda s: (ratio(s, held[s]), -s))
            lacks -= max(1, saves(best, held[best])[0])
            rungs[best] += 1
        return lacks <= 0 or rungs != before

    for _ in range(_ROUNDS):
        some = at(rungs)
        found = known if some == stages else run(some)
        if found is None or found.fits:
            return found
        if not all(recompute_more(lane, use) for lane, use in uses_by_group(found)):
            return None
    return None


def uses_by_group(run: Run) -> list[tuple[list[int], DeviceUse]]:
    """Return the stages of each group of devices, and what its fullest device holds in a run."""
    graph = run.graph
    return [
        (graph.stages_on(i), max((run.uses[d] for d in x.devices), key=lambda use: use.over_bytes))
        for i, x in enumerate(graph.resources)
        if not x.is_link
    ]


def _fewer(ways: Sequence[Ranges]) -> Sequence[Ranges]:
    """Return some of the ways, the first and the last among them."""
    if len(ways) <= _WAYS:
        return ways
    return [ways[i * (len(ways) - 1) // (_WAYS - 1)] for i in range(_WAYS)]

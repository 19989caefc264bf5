"""How long does a mini-batch of some stages take, drained under a kind of schedule, if they fit the memory?

And which layers do stages recompute, so that the run fits and takes little more? A schedule holds most of some stages
at an instant at which it holds little of others on the same GPU, so what each may keep is seen only in a run. Where a
GPU lacks memory the stage on it recomputes more that wins most bytes for its time, until all fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
        return all(x.peak_bytes <= x.memory_bytes for x in self.uses)

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
    return _Choice(problem, known.stages, ways, run).found(known)


class _Choice:
    """One of the ways of each stage, by ``rungs``."""

    def __init__(
        self, problem: Problem, stages: tuple[Stage, ...], ways: Sequence[Sequence[Ranges]], run: Simulate
    ) -> None:
        self.stages, self.ways, self.run = stages, [_fewer(own) for own in ways], run
        self.rungs = [0] * len(stages)
        self.problem, self._known = problem, dict[int, StageGraph]()

    def _cost(self, s: int, rung: int) -> StageCost:
        """Return what a stage costs on one of its rungs."""
        if rung not in self._known:  # of all stages at once, as far as they go
            stages = self._at([min(rung, len(own) - 1) for own in self.ways])
            self._known[rung] = stage_graph(self.problem.chain, self.problem.platform, self.problem.policy, stages)
        return self._known[rung].stages[s]

    def found(self, known: Run) -> Run | None:
        """Return the first run that fits; one is ``known``."""
        for _ in range(_ROUNDS):
            stages = self._at(self.rungs)
            run = known if stages == known.stages else self.run(stages)
            if run is None or run.fits:
                return run
            for lane, use in uses_by_group(run):
                if not self._recompute_more(lane, use):
                    return None
        return None

    def _at(self, rungs: Sequence[int]) -> tuple[Stage, ...]:
        rows = zip(self.stages, self.ways, rungs, strict=True)
        return tuple(replace(stage, checkpoint=own[rung]) for stage, own, rung in rows)

    def _saves(self, s: int, held: int, rung: int) -> int:
        """Return about how many bytes a stage of which so many microbatches are held takes less a rung higher."""
        low, high = self._cost(s, rung), self._cost(s, rung + 1)
        return (
            held * (low.kept_bytes - high.kept_bytes)
            + (low.peak_bytes - low.kept_bytes)
            - (high.peak_bytes - high.kept_bytes)
        )

    def _recompute_more(self, stages: Sequence[int], use: DeviceUse) -> bool:
        """Recompute more of the ``stages`` of a device, about as much as it lacks; return whether anything was left."""
        before, lacks = list(self.rungs), use.peak_bytes - use.memory_bytes
        held = dict(zip(stages, use.in_flight, strict=True))
        while lacks > 0:
            left = [s for s in stages if self.rungs[s] + 1 < len(self.ways[s])]
            if not left:
                break
            best = max(left, key=lambda s: (self._ratio(s, held[s]), -s))
            lacks -= max(1, self._saves(best, held[best], self.rungs[best]))
            self.rungs[best] += 1
        return lacks <= 0 or self.rungs != before

    def _ratio(self, s: int, held: int) -> float:
        rung = self.rungs[s]
        longer = self._cost(s, rung + 1).backward_ns - self._cost(s, rung).backward_ns
        return self._saves(s, held, rung) / max(1, longer)


def uses_by_group(run: Run) -> list[tuple[list[int], DeviceUse]]:
    """Return the stages of each group of devices, and what its fullest device holds in a run."""
    graph, found = run.graph, []
    for index, resource in enumerate(graph.resources):
        if not resource.is_link:
            uses = (run.uses[device] for device in resource.devices)
            found.append((graph.stages_on(index), max(uses, key=lambda x: x.peak_bytes - x.memory_bytes)))
    return found


def _fewer(ways: Sequence[Ranges]) -> Sequence[Ranges]:
    """Return some of the ways, the first and the last among them."""
    if len(ways) <= _WAYS:
        return ways
    return [ways[i * (len(ways) - 1) // (_WAYS - 1)] for i in range(_WAYS)]

"""Which stages of equal pipelines, several on each GPU where the schedule has chunks, drain soonest under which kind?

For every kind of schedule that drains and every shape of pipelines: splits whose longest stage is shortest, each within
all of a GPU's memory or an equal part of it, and from the best local moves of cuts, timed many at once. A heuristic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from ..check.bounds import work_ns
from ..check.targets import Shape
from ..cost import time_model
from ..cost.stage_graph import stage_graph
from ..partition.contiguous.options import NEVER
from ..plan import Schedule, ScheduleKind, Stage
from ..problem import Chain, Layer, Platform, Policy, Problem
from ..schedule.kinds import KINDS, program_of_kind, too_long
from ..schedule.memory import in_flight
from ..schedule.simulate import simulate
from .drained_run import Run, drained_run
from .incumbent import MARGIN
from .shared_gpus import Placed, Split, Tables, near, tables_of

_MORE = (0, 1, 2, 4, 8)  # microbatches beyond those that a schedule holds for which room may have to be made
_TRIED = 4  # splits that are simulated at a time
_STARTS = 2  # of a shape, from which cuts are moved
_SIMULATE = 600  # what a step to be simulated costs, in steps of a split that is timed
_SEARCH = 30_000  # and where its order is searched for


@dataclass(frozen=True, slots=True)
class PlacedEffort:
    """How many stages a GPU may have, how many shapes of pipelines have their cuts moved, and the steps to be timed in
    all, of which a simulated one is many."""

    chunks: int
    climbs: int
    steps: int


EFFORTS = {
    "quick": PlacedEffort(2, 1, 4 * 10**7),
    "normal": PlacedEffort(3, 5, 2 * 10**8),
    "high": PlacedEffort(4, 16, 2 * 10**9),
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Pipelines of a shape under a kind of schedule, and a time (ns) below which no mini-batch of them is done."""

    floor_ns: int
    kind: ScheduleKind
    shape: Shape

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each stage."""
        shape = self.shape
        own = Shape(shape.ranks, shape.pipelines).groups()
        return tuple(own[rank] for rank in homes_of(self.kind, shape.ranks, shape.chunks))


@dataclass(frozen=True, slots=True)
class _Found:
    run: Run
    placed: Placed
    split: Split


class PlacedSearch:
    """The search for pipelines under some ``kinds`` that drain sooner than in ``cutoff_ns``; ``best`` is the best."""

    def __init__(
        self, problem: Problem, kinds: Sequence[ScheduleKind], effort: PlacedEffort, cutoff_ns: int | None
    ) -> None:
        self.problem, self.effort, self.cutoff_ns = problem, effort, cutoff_ns
        self.microbatches = problem.policy.accumulate or 1
        self.placements = sorted(self._placements(kinds), key=_most_hopeful)
        self.best: Run | None = None
        self.steps = 0
        self._tables: dict[int, Tables | None] = {}

    def run(self) -> None:
        """Search; the ``best`` is there all the time."""
        found: list[_Found] = []
        for placement in self.placements:
            if 2 * self.steps > self.effort.steps:
                break
            if self.cutoff_ns is None or placement.floor_ns < self.cutoff_ns:
                probed = sorted(self._probe(placement), key=lambda x: x.run.makespan_ns)
                found += probed[:_STARTS]
        found.sort(key=lambda x: x.run.makespan_ns)
        for start in found[: self.effort.climbs]:
            self._climb(start)

    def _placements(self, kinds: Sequence[ScheduleKind]) -> Iterator[Placement]:
        count, gpus = self.microbatches, len(self.problem.platform)
        relaxed = time_model.relative(self.problem)
        speed = max(device.speed for device in relaxed.platform.devices)
        for kind in kinds:
            for ranks in range(2, min(gpus, len(self.problem.chain)) + 1):
                for chunks in self._chunks(kind, ranks):
                    if too_long(4 * ranks * chunks - 2, Schedule(kind, count)) is not None:
                        continue
                    for pipelines in range(1, gpus // ranks + 1 if self.problem.replicas else 2):
                        if count % pipelines == 0:
                            floor = int(count * work_ns(relaxed) / speed / (ranks * pipelines))
                            yield Placement(floor, kind, Shape(ranks, pipelines, chunks))

    def _chunks(self, kind: ScheduleKind, ranks: int) -> Iterator[int]:
        simulated = KINDS[kind].simulated
        several = simulated is not None and simulated.homes is not None
        for chunks in range(2, self.effort.chunks + 1) if several else (1,):
            stages = len(homes_of(kind, ranks, chunks))
            if stages == ranks * chunks and stages <= len(self.problem.chain):
                yield chunks

    def _probe(self, placement: Placement) -> list[_Found]:
        """Return some splits that fit the memory, simulated."""
        shape = placement.shape
        holds = most_held(placement.kind, shape.ranks, shape.chunks, self.microbatches // shape.pipelines)
        found: list[_Found] = []
        for parts in dict.fromkeys((1, shape.chunks)):
            tables = self._of(parts)
            if tables is None:
                continue
            for more in _MORE:
                placed = Placed(tables, placement.groups(), tuple(held + more for held in holds))
                fitting = self._simulated(
                    placement.kind, placed, list(islice(dict.fromkeys((*placed.even(), *placed.starts())), _TRIED))
                )
                found += fitting
                if fitting:
                    break
        return found

    def _simulated(self, kind: ScheduleKind, placed: Placed, splits: Sequence[Split]) -> list[_Found]:
        found = []
        simulated, own = KINDS[kind].simulated, self.microbatches // len(placed.groups[0])
        cost = _SEARCH if simulated is not None and simulated.searches else _SIMULATE
        steps = cost * own * 4 * len(placed.groups)
        for split in splits:
            if self.steps + steps > self.effort.steps:
                break
            self.steps += steps
            run = drained_run(self.problem, placed.stages(split), kind)
            if run is not None:
                found.append(_Found(run, placed, split))
                self._keep(run)
        return found

    def _keep(self, run: Run) -> None:
        """Keep a run that is the best; more stages have to pay."""
        best = self.best
        more = best is not None and len(run.stages) > len(best.stages)
        if best is None or run.makespan_ns < best.makespan_ns - more * (best.makespan_ns // MARGIN):
            self.best = run
            self.cutoff_ns = min(run.makespan_ns, self.cutoff_ns or run.makespan_ns)

    def _climb(self, start: _Found) -> None:
        """Move the cuts of a run about as long as that helps."""
        better: _Found | None = start
        while better is not None:
            here, placed = better, better.placed
            splits = list(near(here.split, placed.tables.size))
            if not splits:
                return
            times = placed.makespans([here.split, *splits], here.run).tolist()
            self.steps += len(times) * len(here.run.timeline.program.operations) * self.microbatches
            hopeful = sorted(
                (ns, split) for ns, split in zip(times[1:], splits, strict=True) if ns < min(times[0], NEVER)
            )
            found = self._simulated(here.run.kind, placed, [split for _, split in hopeful[:_TRIED]])
            better = min(found, key=lambda x: x.run.makespan_ns, default=None)
            if better is not None and better.run.makespan_ns >= here.run.makespan_ns:
                return

    def _of(self, parts: int) -> Tables | None:
        if parts not in self._tables:
            self._tables[parts] = tables_of(self.problem, parts)
        return self._tables[parts]


def _most_hopeful(placement: Placement) -> tuple[int, bool, int]:
    """Order placements by their floors, and then by whether backwards are split and how little there is to simulate."""
    shape = placement.shape
    return placement.floor_ns, not KINDS[placement.kind].splits, shape.ranks * shape.chunks // shape.pipelines


def homes_of(kind: ScheduleKind, ranks: int, chunks: int) -> list[int]:
    """Return which of ``ranks`` has each stage where they have ``chunks`` each; one each where a kind places none."""
    simulated = KINDS[kind].simulated
    homes = None if simulated is None else simulated.homes
    return list(range(ranks)) if homes is None else homes(ranks, chunks)


@lru_cache(maxsize=512)
def most_held(kind: ScheduleKind, ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """Return how many of ``microbatches`` each stage of one pipeline holds at most, if all take the same."""
    homes = homes_of(kind, ranks, chunks)
    chain = Chain("even", tuple(Layer(str(i), 20, 40, 1, 0, backward_weight_ns=20) for i in range(len(homes))), 0)
    policy = Policy(weights="flush", accumulate=microbatches)
    stages = [Stage(s, s + 1, (home,)) for s, home in enumerate(homes)]
    graph = stage_graph(chain, Platform.flat(ranks, 10**9, 10**9), policy, stages)
    timeline = simulate(program_of_kind(graph, Schedule(kind, microbatches), None, microbatches))
    counts = [in_flight(timeline, lane) for lane, _ in enumerate(timeline.program.lanes)]
    return tuple(max(count.get(s, 0) for count in counts) for s in range(len(homes)))

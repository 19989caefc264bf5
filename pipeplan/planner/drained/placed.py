"""Which stages of equal pipelines, several on each GPU where the schedule has chunks, drain soonest under which kind?

For every kind of schedule that drains and every shape of pipelines: splits whose longest stage is shortest, and where
cuts lead from them if memory didn't matter, timed many at once; then recomputation until they fit, and from the best
local moves of cuts. A heuristic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ...check.bounds import work_ns
from ...check.targets import Shape
from ...cost import time_model
from ...cost.saved import saved_bytes
from ...integers import NEVER, Ints
from ...plan import Schedule, ScheduleKind, Stage
from ...problem import Problem
from ...schedule.kinds import KINDS, too_long
from ...schedule.occupancy import homes_of
from ..periodic.incumbent import MARGIN
from .recompute import fitting_run, uses_by_group
from .run import Run, any_run
from .tables import Placed, Split, Tables, near, tables_of

_TRIED = 4  # splits that are simulated at a time
_MOVES = 6  # of its cuts, about the best ones, that are simulated of a run
_HOPE = 64  # a part of the best by which a run may take longer to be looked at
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

    def _probe(self, placement: Placement) -> Iterator[_Found]:
        """Yield some splits, made to fit the memory: those of stages as equal as can be, and where cuts go from the
        best of them."""
        tables = next((found for parts in (1, placement.shape.chunks) if (found := self._of(parts)) is not None), None)
        if tables is None:
            return
        groups = placement.groups()
        placed = Placed(tables, groups, (1,) * len(groups))  # what their memory asks for is seen in runs
        starts = list(islice(dict.fromkeys((*placed.even(), *placed.starts())), _TRIED))
        runs = ((self._run(placement.kind, placed.stages(split)), split) for split in starts)
        bare = [_Found(run, placed, split) for run, split in runs if run is not None]
        bare.sort(key=lambda x: x.run.makespan_ns)
        moved = [self._moved(x) for x in bare[:1]]
        for start in dict.fromkeys((*(x.split for x in moved if x is not None), *(x.split for x in bare[:_STARTS]))):
            fitting = self._fitting(placement.kind, placed, start)
            if fitting is not None:
                yield fitting

    def _moved(self, start: _Found) -> _Found | None:
        """Return where a walk of the cuts leads that keeps the order of a run, whatever the memory."""
        placed, at, run = start.placed, start.split, start.run
        here = int(placed.makespans([at], run)[0])
        while here < NEVER:
            splits = list(near(at, placed.tables.size))
            if not splits:
                break
            times = placed.makespans(splits, run)
            self.steps += len(splits) * len(run.timeline.program.operations) * self.microbatches
            best = int(times.argmin())
            if int(times[best]) >= here or 2 * self.steps > self.effort.steps:
                break
            at, here = splits[best], int(times[best])
        return replace(start, split=at) if at != start.split else None

    def _fitting(self, kind: ScheduleKind, placed: Placed, split: Split) -> _Found | None:
        """Return the run of a split that recomputes what its memory asks for; None where it doesn't help to know."""

        def run(stages: tuple[Stage, ...]) -> Run | None:
            found = self._run(kind, stages)
            return None if found is None or found.makespan_ns >= self._worth else found

        found = fitting_run(self.problem, placed.stages(split), placed.ways(split), run)
        if found is None:
            return None
        self._keep(found)
        return _Found(found, placed, split)

    @property
    def _worth(self) -> int:
        """A time (ns) from which on no run matters: some of those that are no better have better neighbours."""
        return NEVER if self.cutoff_ns is None else self.cutoff_ns + self.cutoff_ns // _HOPE

    def _run(self, kind: ScheduleKind, stages: tuple[Stage, ...]) -> Run | None:
        simulated = KINDS[kind].simulated
        own = self.microbatches // len(stages[0].devices)
        self.steps += (_SEARCH if simulated is not None and simulated.searches else _SIMULATE) * own * 4 * len(stages)
        return None if self.steps > self.effort.steps else any_run(self.problem, stages, kind)

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
        tried = {start.split}
        while better is not None:
            here, placed = better, better.placed
            splits = [split for split in near(here.split, placed.tables.size) if split not in tried]
            if not splits:
                return
            again = self._again(here, [here.split, *splits])
            times = placed.makespans([here.split, *splits], here.run, again).tolist()
            self.steps += len(times) * len(here.run.timeline.program.operations) * self.microbatches
            hopeful = sorted((ns, split) for ns, split in zip(times[1:], splits, strict=True) if ns < NEVER)
            tried |= {split for _, split in hopeful[:_MOVES]}
            found = [x for _, split in hopeful[:_MOVES] if (x := self._fitting(here.run.kind, placed, split))]
            better = min(found, key=lambda x: x.run.makespan_ns, default=None)
            if better is not None and better.run.makespan_ns >= here.run.makespan_ns:
                return

    def _again(self, here: _Found, splits: Sequence[Split]) -> Ints:
        """Return about what the stages of splits near a run's recompute of a microbatch, shape (stages, splits).

        That is what the run's do, and for bytes that stages keep more than their GPU has left, or less, as much more or
        less as bytes take in the mean of the stage of which it holds most.
        """
        placed, run, count = here.placed, here.run, len(here.run.stages)
        bare, _, _ = placed.durations([here.split], run.timeline.program.split)
        at = {work.stage: work.duration_ns for work in run.timeline.program.operations if work.kind == "B"}
        own = np.array([at[s] - int(bare[count + s, 0]) for s in range(count)], dtype=np.int64)
        cuts = placed.tables.found.cuts[np.array(splits, dtype=np.int64).T]
        saved = np.asarray(saved_bytes(self.problem.chain, cuts[:-1], cuts[1:]))
        forward = np.asarray(self.problem.chain.sums.forward_ns)
        found = np.repeat(own[:, None], len(splits), axis=1)
        for stages, use in uses_by_group(run):
            held = np.array(use.in_flight)[:, None]
            change = (held * (saved[stages] - saved[stages, :1])).sum(axis=0)
            lacks = np.where(change > 0, np.maximum(change - (use.memory_bytes - use.peak_bytes), 0), change)
            most = stages[int(held.argmax())]
            price = (forward[cuts[most + 1]] - forward[cuts[most]]) / np.maximum(saved[most], 1) / held.max()
            more, total = (lacks * price).astype(np.int64), int(own[stages].sum())
            found[most] += np.maximum(more, 0)
            found[stages] += own[stages][:, None] * np.minimum(np.maximum(more, -total), 0) // max(total, 1)
        return found

    def _of(self, parts: int) -> Tables | None:
        if parts not in self._tables:
            self._tables[parts] = tables_of(self.problem, parts)
        return self._tables[parts]


def _most_hopeful(placement: Placement) -> tuple[int, bool, int]:
    """Order placements by their floors, and then by whether backwards are split and how little there is to simulate."""
    shape = placement.shape
    return placement.floor_ns, not KINDS[placement.kind].splits, shape.ranks * shape.chunks // shape.pipelines

"""Which stages of equal pipelines, several on each GPU where the schedule has chunks, drain soonest under which kind?

For every kind of schedule that drains and every shape of pipelines: splits whose longest stage is shortest, and where
cuts lead from them if memory didn't matter, timed many at once; then recomputation until they fit, and from the best
local moves of cuts. A heuristic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ...check.bounds import work_ns
from ...check.targets import Shape
from ...cost import time_model
from ...cost.saved import saved_bytes
from ...integers import NEVER, Ints
from ...plan import Schedule, ScheduleKind, Stage
from ...schedule.kinds import KINDS, too_long
from ...schedule.occupancy import homes_of
from ..periodic.incumbent import Incumbent
from .recompute import fitting_run, uses_by_group
from .run import Run
from .search import EFFORTS, Found, Memo, Space
from .tables import Layout, Split, near

_TRIED = 4  # splits that are simulated at a time
_MOVES = 6  # of its cuts, about the best ones, that are simulated of a run
_HOPE = 64  # a part of the best by which a run may take longer to be looked at
_STARTS = 2  # of a shape, from which cuts are moved
_SIMULATE = 600  # what a step to be simulated costs, in steps of a split that is timed
_SEARCH = 30_000  # and where its order is searched for


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


def search_chunks(incumbent: Incumbent, kinds: Iterable[ScheduleKind], effort: str, tables: Memo | None = None) -> None:
    """Let equal pipelines under some kinds of schedules be the best."""
    row = EFFORTS[effort]
    Chunks(incumbent, kinds, row.chunk_steps, tables, row.chunks).search(row.chunk_climbs)


def searches(kind: ScheduleKind) -> bool:
    """Whether a kind of schedule searches for its order, which takes long."""
    simulated = KINDS[kind].simulated
    return simulated is not None and simulated.searches


class Chunks(Space):
    """Equal pipelines, with at most ``chunks`` stages on each GPU where the schedule has several."""

    def __init__(
        self, incumbent: Incumbent, kinds: Iterable[ScheduleKind], most: int, tables: Memo | None, chunks: int
    ) -> None:
        super().__init__(incumbent, kinds, most, tables)
        self.chunks = chunks

    def starts(self) -> list[Found]:
        """Return the soonest few of every placement, of those that have hope."""
        found: list[Found] = []
        for placement in sorted(self._placements(), key=_most_hopeful):
            if 2 * self.steps > self.most:
                break
            if self._cutoff is None or placement.floor_ns < self._cutoff:
                found += sorted(self._probe(placement), key=lambda x: x.makespan_ns)[:_STARTS]
        return found

    @property
    def _cutoff(self) -> int | None:
        return self.incumbent.best_ns

    def _placements(self) -> Iterator[Placement]:
        count, gpus = self.microbatches, len(self.problem.platform)
        relaxed = time_model.relative(self.problem)
        speed = max(device.speed for device in relaxed.platform.devices)
        for kind in self.kinds:
            for ranks in range(1, min(gpus, len(self.problem.chain)) + 1):
                for chunks in self._chunks(kind, ranks):
                    if too_long(4 * ranks * chunks - 2, Schedule(kind, count)) is not None:
                        continue
                    least = 2 if ranks == 1 else 1  # where sums of gradients may be hidden
                    for pipelines in range(least, gpus // ranks + 1 if self.problem.replicas else 2):
                        if count % pipelines == 0:
                            floor = int(count * work_ns(relaxed) / speed / (ranks * pipelines))
                            yield Placement(floor, kind, Shape(ranks, pipelines, chunks))

    def _chunks(self, kind: ScheduleKind, ranks: int) -> Iterator[int]:
        simulated = KINDS[kind].simulated
        several = simulated is not None and simulated.homes is not None
        for chunks in range(2, self.chunks + 1) if several else (1,):
            stages = len(homes_of(kind, ranks, chunks))
            if stages == ranks * chunks > 1 and stages <= len(self.problem.chain):
                yield chunks

    def _probe(self, placement: Placement) -> Iterator[Found]:
        """Yield some splits, made to fit the memory: those of stages as equal as can be, and where cuts go from the
        best of them."""
        tables = next(
            (found for parts in (1, placement.shape.chunks) if (found := self.tables(parts)) is not None), None
        )
        if tables is None:
            return
        groups = placement.groups()
        layout = Layout(tables, groups, (1,) * len(groups))  # what their memory asks for is seen in runs
        starts = list(islice(dict.fromkeys((*layout.even(), *layout.starts())), _TRIED))
        runs = ((self._run(placement.kind, layout.stages(split)), split) for split in starts)
        bare = [Found(run, layout, split) for run, split in runs if run is not None]
        bare.sort(key=lambda x: x.makespan_ns)
        moved = [self._moved(x) for x in bare[:1]]
        for start in dict.fromkeys((*(x.split for x in moved if x is not None), *(x.split for x in bare[:_STARTS]))):
            fitting = self._fitting(placement.kind, layout, start)
            if fitting is not None:
                yield fitting

    def _moved(self, start: Found) -> Found | None:
        """Return where a walk of the cuts leads that keeps the order of a run, whatever the memory."""
        layout, at, run = start.layout, start.split, start.run
        here = int(layout.makespans([at], run)[0])
        while here < NEVER:
            splits = list(near(at, layout.tables.size))
            if not splits:
                break
            times = layout.makespans(splits, run)
            self.steps += len(splits) * len(run.timeline.program.operations) * self.microbatches
            best = int(times.argmin())
            if int(times[best]) >= here or 2 * self.steps > self.most:
                break
            at, here = splits[best], int(times[best])
        return replace(start, split=at) if at != start.split else None

    def _fitting(self, kind: ScheduleKind, layout: Layout, split: Split) -> Found | None:
        """Return the run of a split that recomputes what its memory asks for; None where it doesn't help to know."""

        def run(stages: tuple[Stage, ...]) -> Run | None:
            found = self._run(kind, stages)
            return None if found is None or found.makespan_ns >= self._worth else found

        found = fitting_run(self.problem, layout.stages(split), layout.ways(split), run)
        if found is None:
            return None
        self.keep(found)
        return Found(found, layout, split)

    @property
    def _worth(self) -> int:
        """A time (ns) from which on no run matters: some of those that are no better have better neighbours."""
        return NEVER if self._cutoff is None else self._cutoff + self._cutoff // _HOPE

    def _run(self, kind: ScheduleKind, stages: tuple[Stage, ...]) -> Run | None:
        each = _SEARCH if searches(kind) else _SIMULATE
        return self.simulated(stages, kind, each * (self.microbatches // len(stages[0].devices)) * 4 * len(stages))

    def near(self, here: Found, tried: set[Split]) -> Iterator[Found]:
        """Yield the soonest of the most hopeful neighbours."""
        layout, run = here.layout, here.run
        splits = [split for split in near(here.split, layout.tables.size) if split not in tried]
        if not splits:
            return
        again = self._again(here, [here.split, *splits])
        times = layout.makespans([here.split, *splits], run, again).tolist()
        self.steps += len(times) * len(run.timeline.program.operations) * self.microbatches
        hopeful = sorted((ns, split) for ns, split in zip(times[1:], splits, strict=True) if ns < NEVER)[:_MOVES]
        tried |= {split for _, split in hopeful}
        found = [x for _, split in hopeful if (x := self._fitting(run.kind, layout, split))]
        yield from sorted(found, key=lambda x: x.makespan_ns)[:1]

    def _again(self, here: Found, splits: Sequence[Split]) -> Ints:
        """Return about what the stages of splits near a run's recompute of a microbatch, shape (stages, splits).

        That is what the run's do, and for bytes that stages keep more than their GPU has left, or less, as much more or
        less as bytes take in the mean of the stage of which it holds most.
        """
        layout, run, count = here.layout, here.run, len(here.run.stages)
        bare, _, _ = layout.durations([here.split], run.timeline.program.split)
        at = {work.stage: work.duration_ns for work in run.timeline.program.operations if work.kind == "B"}
        own = np.array([at[s] - int(bare[count + s, 0]) for s in range(count)], dtype=np.int64)
        cuts = layout.tables.found.cuts[np.array(splits, dtype=np.int64).T]
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


def _most_hopeful(placement: Placement) -> tuple[int, bool, int]:
    """Order placements by their floors, and then by whether backwards are split and how little there is to simulate."""
    shape = placement.shape
    return placement.floor_ns, not KINDS[placement.kind].splits, shape.ranks * shape.chunks // shape.pipelines

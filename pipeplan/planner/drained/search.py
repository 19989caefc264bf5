"""Which stages drain a mini-batch soonest under some kinds of schedules? A heuristic.

Under 1F1B, in the order of a pattern or not, each has GPUs of its own, as many as it needs; under others there are
equal pipelines, with several stages on each GPU where the schedule has chunks. First come splits whose longest stage is
shortest for every way to share the GPUs; then local moves of cuts from the best, of which those are simulated that
should take least; stages recompute what lets the run fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, combinations, islice, pairwise, permutations, product
from typing import Protocol, TypeVar

from ...check.bounds import work_ns
from ...check.shapes import shapes
from ...check.targets import Shape
from ...cost import relaxations
from ...deadline import OutOfTime
from ...integers import NEVER
from ...partition.tables.split_paths import near
from ...plan import Allocation, ScheduleKind, Stage
from ...problem import Problem
from ...schedule.kinds import KINDS
from ..periodic.incumbent import Incumbent
from .layout import Layout
from .run import Run, any_run, fitting_run
from .tables import Split, Tables, tables_of

Groups = tuple[tuple[int, ...], ...]  # the GPUs of each stage
_FEW = 8  # GPUs of which every way to share them is looked at
_FEW_ORDERED = 4  # GPUs that differ of which every order is looked at


def shared_gpus(problem: Problem, most: int, known: Allocation | None = None) -> Iterator[Groups]:
    """Yield the GPUs of at most ``most`` stages: those of a ``known`` allocation first, and ways to share all GPUs.

    In the listed order, and where they differ slowest or fastest first, and of few in every order.
    """
    devices, seen = problem.platform.devices, set()
    kinds = [devices.index(x) for x in devices]
    listed = tuple(range(len(devices)))
    slowest = tuple(sorted(listed, key=lambda d: (devices[d].speed, devices[d].memory_bytes)))
    every = permutations(listed) if len(listed) <= _FEW_ORDERED else ()
    orders = (listed, slowest, slowest[::-1], *every)[: None if len(set(kinds)) > 1 else 1]

    def shared() -> Iterator[Groups]:
        own = () if known is None else tuple(stage.devices for stage in known.stages)
        if own and sum(map(len, own)) == len(set().union(*own)):
            yield own
        for order, replicas in product(orders, list(_replicas(problem, most))):
            yield tuple(tuple(sorted(order[low:high])) for low, high in pairwise(accumulate(replicas, initial=0)))

    for groups in shared():
        alike = tuple(tuple(sorted(kinds[d] for d in group)) for group in groups)
        if alike not in seen:
            seen.add(alike)
            yield groups


def _replicas(problem: Problem, most: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of replicas of the stages: one each, and every way to share a few devices over stages, as often as
    there are so many devices; as few pipelines as can be first."""
    count = len(problem.platform)
    if count > _FEW or not problem.replicas:
        yield from ((1,) * stages for stages in range(min(count, most), 0, -1))
    if problem.replicas:
        for few in range(min(_FEW, count), 0, -1):
            for stages in range(min(few, most), 0, -1):
                for ends in combinations(range(1, few), stages - 1):
                    shares = (high - low for low, high in pairwise((0, *ends, few)))
                    yield tuple(count // few * r for r in shares)


ALTERNATING: tuple[ScheduleKind, ...] = ("flush", "1f1b")  # stages on GPUs of their own, one F, one B in turn
_EACH = 2  # splits of each way to share the GPUs that may be simulated
_TRIED = 4  # splits of equal pipelines that are simulated at a time
_FAR = 4  # places by which one cut moves
_MOVES = 12  # of its cuts, about the best ones, that are simulated of a run
_HOPE = 16  # a part of the best by which a run may take longer to be looked at
_STARTS = 2  # of equal pipelines, from which cuts are moved
_SEARCH = 50  # what a step costs where its order is searched for


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is searched.

    Of ways to share GPUs among stages so many ``starts`` are simulated, of which cuts are moved of ``climbs``; of equal
    pipelines with at most ``chunks`` stages on a GPU they are moved of ``placed_climbs``. Both may simulate so many
    steps, as may local moves of a target's blocks, and of grids.
    """

    starts: int
    climbs: int
    own_steps: int
    chunks: int
    placed_climbs: int
    placed_steps: int
    block_steps: int
    grid_steps: int


EFFORTS = {
    "quick": Effort(10, 2, 10**5, 2, 1, 7 * 10**4, 0, 0),
    "normal": Effort(60, 12, 7 * 10**5, 3, 5, 3 * 10**5, 2 * 10**5, 10**6),
    "high": Effort(400, 60, 7 * 10**6, 4, 16, 3 * 10**6, 4 * 10**6, 2 * 10**7),
}


class Drained(Protocol):
    """What takes some time (ns) to drain a mini-batch."""

    @property
    def makespan_ns(self) -> int:
        """That time."""


F = TypeVar("F", bound=Drained)


def climbed(start: F, near: Callable[[F], Iterable[F]]) -> F:
    """Return where a walk from ``start`` leads that always goes on with the first that is ``near`` and takes less."""
    better: F | None = start
    while better is not None:
        here = better
        better = next((x for x in near(here) if x.makespan_ns < here.makespan_ns), None)
    return here


def until_ended(problem: Problem, search: Callable[[], None], found: Callable[[], bool]) -> str | None:
    """Run a search; return why it ended early, or None. An interrupt goes on to the caller where nothing is found."""
    try:
        with problem.deadline.insist():
            search()
    except OutOfTime:
        return "time limit"
    except KeyboardInterrupt:
        if not found():
            raise
        return "interrupted"
    return None


def search_stages(incumbent: Incumbent, kinds: Iterable[ScheduleKind], effort: str) -> None:
    """Let the stages that drain soonest under some ``kinds`` of schedules without a limit be the best."""
    _Search(incumbent, tuple(kinds), EFFORTS[effort]).run()


@dataclass(frozen=True, slots=True)
class _Found:
    """A run of the split of a layout."""

    run: Run
    layout: Layout
    split: Split

    @property
    def makespan_ns(self) -> int:
        return self.run.makespan_ns


@dataclass(frozen=True, slots=True)
class Config:
    """Pipelines of a shape under a kind of schedule, and a time (ns) below which no mini-batch of them is done."""

    bound_ns: int
    kind: ScheduleKind
    shape: Shape

    @property
    def hope(self) -> tuple[int, bool, int]:
        """What comes first is least: by its floor, and then by whether backwards are split and what is to simulate."""
        return self.bound_ns, not KINDS[self.kind].splits, self.shape.ranks * self.shape.chunks // self.shape.pipelines


class _Search:
    def __init__(self, incumbent: Incumbent, kinds: Sequence[ScheduleKind], row: Effort) -> None:
        self.incumbent, self.problem, self.kinds, self.row = incumbent, incumbent.problem, kinds, row
        self.microbatches = self.problem.policy.accumulate or 1
        self.tables: Callable[[int], Tables | None] = cache(partial(tables_of, self.problem))
        self.steps = self.most = 0

    def run(self) -> None:
        """Run what promises most, and move the cuts of the best few about as long as that helps."""
        row = self.row
        self._search(self._on_own_gpus, row.climbs, row.own_steps)
        self._search(self._placed, row.placed_climbs, row.placed_steps)

    def _search(self, starts: Callable[[], Iterable[_Found]], climbs: int, most: int) -> None:
        self.steps, self.most = 0, most
        for start in sorted(starts(), key=lambda x: x.makespan_ns)[:climbs]:
            tried = {start.split}
            climbed(start, lambda here, tried=tried: self._near(here, tried))  # type: ignore[misc]

    def _on_own_gpus(self) -> Iterable[_Found]:
        """Return the best run of each way to share the GPUs that promises most."""
        kinds = [kind for kind in self.kinds if kind in ALTERNATING]
        tables = self.tables(1) if kinds else None
        if tables is None:
            return []
        best, guessed = self.incumbent.best, list[tuple[int, int, Split, Layout]]()
        for groups in shared_gpus(self.problem, tables.size - 1, None if best is None else best.allocation):
            layout = Layout.ahead(tables, groups)
            own = sorted((layout.guess_ns(split), len(groups), split) for split in layout.starts())
            guessed += [(*x, layout) for x in own[:_EACH]]
        ran: dict[Groups, _Found] = {}
        for _, _, split, layout in sorted(guessed, key=lambda x: x[:3])[: self.row.starts]:
            for found in filter(None, (self._fitting(kind, layout, split) for kind in kinds)):
                known = ran.get(layout.groups)
                if known is None or found.makespan_ns < known.makespan_ns:
                    ran[layout.groups] = found
        return ran.values()

    def _placed(self) -> list[_Found]:
        """Return the soonest few of every placement, of those that have hope."""
        found: list[_Found] = []
        for placement in sorted(self._placements(), key=lambda x: x.hope):
            if 2 * self.steps > self.most:
                break
            if self.incumbent.best_ns is None or placement.bound_ns < self.incumbent.best_ns:
                found += sorted(self._probe(placement), key=lambda x: x.makespan_ns)[:_STARTS]
        return found

    def _placements(self) -> Iterator[Config]:
        count, relaxed = self.microbatches, relaxations.relative(self.problem)
        speed = max(device.speed for device in relaxed.platform.devices)
        for kind in (kind for kind in self.kinds if kind not in ALTERNATING):
            several = (1,) if KINDS[kind].homes is None else range(2, self.row.chunks + 1)
            for shape in shapes(self.problem, kind, len(self.problem.chain), lambda _, several=several: several):  # type: ignore[misc]
                hidden = shape.ranks > 1 or shape.pipelines > 1  # where sums of gradients may be
                if hidden and shape.ranks * shape.chunks > 1 and count % shape.pipelines == 0:
                    floor = int(count * work_ns(relaxed) / speed / (shape.ranks * shape.pipelines))
                    yield Config(floor, kind, shape)

    def _probe(self, placement: Config) -> Iterator[_Found]:
        """Yield some splits of stages as equal as can be, made to fit the memory."""
        parts = (1, placement.shape.chunks)
        tables = next((found for part in parts if (found := self.tables(part)) is not None), None)
        if tables is None:
            return
        groups = placement.shape.groups()
        layout = Layout(tables, groups, (1,) * len(groups))  # what their memory asks for is seen in runs
        starts = list(islice(dict.fromkeys((*layout.even(), *layout.starts())), _TRIED))
        runs = ((self._run(placement.kind, layout.stages(split)), split) for split in starts)
        bare = sorted((_Found(x, layout, split) for x, split in runs if x is not None), key=lambda x: x.makespan_ns)
        for start in bare[:_STARTS]:
            fitting = self._fitting(placement.kind, layout, start.split, start.run)
            if fitting is not None:
                yield fitting

    def _fitting(self, kind: ScheduleKind, layout: Layout, split: Split, known: Run | None = None) -> _Found | None:
        """Return the run of a split, which may be ``known``, that recomputes what its memory asks for; None where it
        doesn't help to know."""

        def hopeful(run: Run | None) -> Run | None:
            below = self._below
            return run if below is None or (run is not None and run.makespan_ns < below) else None

        run = hopeful(known or self._run(kind, layout.stages(split)))
        if run is not None and not run.fits:
            run = fitting_run(self.problem, run, layout.ways(split), lambda stages: hopeful(self._run(kind, stages)))
        if run is None:
            return None
        self.incumbent.take(run.scheduled)
        return _Found(run, layout, split)

    @property
    def _below(self) -> int | None:
        """The time that a run must stay below to be looked at; None while nothing fits."""
        best = self.incumbent.best_ns
        return None if best is None else best + best // _HOPE

    def _run(self, kind: ScheduleKind, stages: tuple[Stage, ...]) -> Run | None:
        """Return a run, fitting or not; None where there is none, it surely takes too long, or no steps are left."""
        each = _SEARCH if KINDS[kind].searches else 1
        self.steps += each * (self.microbatches // len(stages[0].devices)) * 4 * len(stages)
        return None if self.steps > self.most else any_run(self.problem, stages, kind, self._below)

    def _near(self, here: _Found, tried: set[Split]) -> Iterator[_Found]:
        """Yield the soonest of the most hopeful neighbours; ``tried`` are the splits that were since the walk began."""
        if self.steps > self.most:
            return
        splits = (split for split in near(here.split, _FAR, True) if split not in tried)
        hopeful = sorted((ns, split) for split in splits if (ns := here.layout.guess_ns(split)) < NEVER)[:_MOVES]
        tried.update(split for _, split in hopeful)
        runs = [x for _, split in hopeful if (x := self._fitting(here.run.kind, here.layout, split))]
        yield from sorted(runs, key=lambda x: x.makespan_ns)[:1]

"""What do all searches for stages that drain soonest have in common? Effort, budgets, walks, and ways to be ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, TypeVar

from ...deadline import OutOfTime
from ...plan import ScheduleKind, Stage
from ...problem import Problem
from ..periodic.incumbent import Incumbent
from .run import Run, any_run
from .tables import Layout, Split, Tables, tables_of


@dataclass(frozen=True, slots=True)
class Effort:
    """How much each space is searched.

    Of stages on GPUs of their own so many ``starts`` are simulated, of which cuts are moved of ``climbs``; of equal
    pipelines with at most ``chunks`` stages on a GPU they are moved of ``chunk_climbs``. Both count steps: of a split
    that is timed, of which a simulated one is many. Of a target's blocks, and of grids, local moves may simulate so
    many steps.
    """

    starts: int
    climbs: int
    own_steps: int
    chunks: int
    chunk_climbs: int
    chunk_steps: int
    block_steps: int
    grid_steps: int


EFFORTS = {
    "quick": Effort(10, 2, 6 * 10**7, 2, 1, 4 * 10**7, 0, 0),
    "normal": Effort(60, 12, 4 * 10**8, 3, 5, 2 * 10**8, 2 * 10**5, 10**6),
    "high": Effort(400, 60, 4 * 10**9, 4, 16, 2 * 10**9, 4 * 10**6, 2 * 10**7),
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


@dataclass(frozen=True, slots=True)
class Found:
    """A run of the split of a layout."""

    run: Run
    layout: Layout
    split: Split

    @property
    def makespan_ns(self) -> int:
        """Time of the mini-batch."""
        return self.run.makespan_ns


Memo = Callable[[int], Tables | None]


def once(problem: Problem) -> Memo:
    """Return the tables by the parts of a GPU's memory that a stage may fill, each made when first asked for."""
    return cache(partial(tables_of, problem))


class Space:
    """Configurations of stages that run under some ``kinds`` of schedules, and the steps that were spent on them, of
    ``most`` in all; what runs is the ``incumbent``'s to keep. Some share their ``tables``."""

    def __init__(
        self, incumbent: Incumbent, kinds: Iterable[ScheduleKind], most: int, tables: Memo | None = None
    ) -> None:
        self.tables = tables or once(incumbent.problem)
        self.incumbent, self.problem, self.kinds, self.most = incumbent, incumbent.problem, tuple(kinds), most
        self.microbatches = self.problem.policy.accumulate or 1
        self.steps = 0

    def starts(self) -> list[Found]:
        """Return what some configurations run."""
        raise NotImplementedError

    def near(self, here: Found, tried: set[Split]) -> Iterable[Found]:
        """Yield what is near a run; ``tried`` are the splits that were since the walk began."""
        raise NotImplementedError

    def search(self, climbs: int) -> None:
        """Run the starts, and move the cuts of the best few about as long as that helps."""
        for start in sorted(self.starts(), key=lambda x: x.makespan_ns)[:climbs]:
            tried = {start.split}
            climbed(start, lambda here, tried=tried: self.near(here, tried))  # type: ignore[misc]

    def simulated(self, stages: tuple[Stage, ...], kind: ScheduleKind, steps: int) -> Run | None:
        """Return a run, fitting or not, that costs so many steps; None where there is none, or no more steps."""
        self.steps += steps
        return None if self.steps > self.most else any_run(self.problem, stages, kind)

    def keep(self, run: Run) -> None:
        """Let a run that fits be the incumbent's best."""
        self.incumbent.take(run.scheduled)

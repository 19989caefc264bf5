"""What is said of a schedule? How it makes programs, what it needs of stages, and what it means to plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cost.stage_graph import StageGraph
from ..integers import ceil_div
from ..plan import Schedule
from ..problem import Weights
from .program import Program
from .timeline import Timeline

DEFAULT_BATCH = 4  # microbatches of a mini-batch, all of which one backward covers
Homes = Callable[[int, int], list[int]]  # (devices, chunks per device) -> which device has each stage


@dataclass(frozen=True)
class SteadyRun:
    """An nF1B run from the empty pipeline into its steady state, in which ``cycle`` mini-batches take ``cycle_ns``.

    It ``repeats`` when the state of the pipeline has come again: from then on the run goes on as before, so its peaks
    are those of any longer run. Otherwise the cycle is the mean of its second half.
    """

    timeline: Timeline
    cycle: int
    cycle_ns: int
    repeats: bool

    @property
    def period_ns(self) -> int:
        """Time per microbatch in the steady state, rounded up; never less than the busiest device or link needs."""
        program = self.timeline.program
        return max(program.graph.period_floor_ns, ceil_div(self.cycle_ns, self.cycle * program.batch))


@dataclass(frozen=True, slots=True)
class Limit:
    """What a schedule's ``limit`` counts: ``nouns``, in each ``where``. ``usual(graph)`` are limits to try, from low to
    high.

    Without the user's a planner takes the best of them, and one below the least where none fits the memory.
    """

    noun: str
    nouns: str
    where: str
    usual: Callable[[StageGraph], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A schedule that stages can be simulated under, and that plans can have if it is a row of :data:`.kinds.KINDS`.

    ``weights`` are the policies that it goes with, ``refusal`` says why no others do. ``drains``: empties the pipeline
    after every mini-batch. ``headline(schedule)`` is what reports say of it: a name and a sentence.

    Without ``build(graph, microbatches, **options)``, which gives its program, a plan has a pattern. Otherwise it has
    none, and is judged by its simulated run, which admits no more than ``limit`` at once: one mini-batch if it drains,
    else its steady state, which ``steady(graph, microbatches of a mini-batch, limit)`` finds. ``homes`` places its
    stages where they cannot be the plan's own; ``refuses(graph)`` says why stages cannot run so. ``replicas``: whether
    stages may have some. ``searches``: its program takes a search of many simulated runs. With ``by_arrival`` the GPUs
    of a real run decide anew what comes next.
    """

    weights: tuple[Weights, ...]
    build: Callable[..., Program] | None = None
    summary: str = ""
    source: str = ""
    refusal: str = ""
    drains: bool = False
    homes: Homes | None = None
    refuses: Callable[[StageGraph], str | None] = lambda graph: None
    replicas: bool = True
    options: tuple[str, ...] = ()
    steady: Callable[..., SteadyRun] | None = None
    searches: bool = False
    limit: Limit | None = None
    by_arrival: bool = False
    headline: Callable[[Schedule], tuple[str, str]] | None = None

    @property
    def own_weights(self) -> Weights | None:
        """The one policy of weights that it runs with; None where plans choose."""
        return self.weights[0] if len(self.weights) == 1 else None

    @property
    def splits(self) -> bool:
        """Whether the gradients of weights come apart from those of inputs, later."""
        return "weight_keeps" in self.options

    @property
    def written(self) -> bool:
        """Whether the order of passes is written in a plan's schedule."""
        return "order" in self.options

    @property
    def joins(self) -> bool:
        """Whether one backward covers all microbatches of a mini-batch."""
        return "batch" in self.options

    @property
    def in_mini_batches(self) -> bool:
        """Whether the schedule, not the weights policy alone, knows mini-batches."""
        return self.drains or self.joins

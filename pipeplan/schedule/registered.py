"""What is said of a schedule? How it makes programs, what it needs of stages, and what it means to plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..choices import DRAINED
from ..cost.stage_graph import StageGraph
from ..integers import ceil_div
from ..plan import Pattern, Schedule
from ..problem import WEIGHTS, Weights
from .program import Program
from .timeline import Timeline

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
class ProgramSchedule:
    """A registered schedule: ``build(graph, microbatches, **options)`` gives its program, None is the plan's pattern.

    ``weights`` is the weight policy that it runs with; under ``flush`` it drains after every mini-batch. ``homes``
    places its stages where they cannot be the plan's own; ``refuses(graph)`` says why stages cannot run so.
    ``replicas``: whether stages may have some.
    ``steady(graph, microbatches of a mini-batch, limit)`` finds the steady state of what plans can be judged by.
    ``searches``: its program takes a search of many simulated runs.
    """

    build: Callable[..., Program] | None
    summary: str
    source: str
    weights: Weights | None = DRAINED
    homes: Homes | None = None
    refuses: Callable[[StageGraph], str | None] = lambda graph: None
    replicas: bool = True
    options: tuple[str, ...] = ()
    steady: Callable[..., SteadyRun] | None = None
    searches: bool = False

    @property
    def drains(self) -> bool:
        """Whether it empties the pipeline after every mini-batch, whatever a plan says."""
        return self.weights is not None and WEIGHTS[self.weights].drains


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
    """A kind of schedule, as plans have it.

    ``weights`` are the policies that it goes with, ``refusal`` says why no others do. ``shown(graph, schedule,
    pattern)`` is how many microbatches show all that matters. ``judged(schedule, operations)`` gives the steps of the
    shortest run that a plan can be judged by, with ``operations`` on the path of a microbatch, and what it runs; None
    where nothing is simulated. ``drains``: empties the pipeline after every mini-batch.

    Without ``simulated`` a plan has a pattern. Otherwise it has none, and is judged by its simulated run under this
    schedule, which admits no more than ``limit`` at once: one mini-batch if it drains, else its steady state. With
    ``by_arrival`` the GPUs of a real run decide anew what comes next.
    ``headline(schedule)`` is what reports say of it: a name and a sentence.
    """

    weights: tuple[Weights, ...]
    refusal: str
    shown: Callable[[StageGraph, Schedule, Pattern | None], int]
    judged: Callable[[Schedule, int], tuple[int, str]] | None = None
    drains: bool = False
    simulated: ProgramSchedule | None = None
    limit: Limit | None = None
    by_arrival: bool = False
    headline: Callable[[Schedule], tuple[str, str]] | None = None

    @property
    def splits(self) -> bool:
        """Whether the gradients of weights come apart from those of inputs, later."""
        return self.simulated is not None and "weight_keeps" in self.simulated.options

    @property
    def written(self) -> bool:
        """Whether the order of passes is written in a plan's schedule."""
        return self.simulated is not None and "order" in self.simulated.options

    @property
    def steady(self) -> Callable[..., SteadyRun] | None:
        """What finds the steady state of a simulated schedule that doesn't drain, like ``steady_nf1b``."""
        return None if self.simulated is None else self.simulated.steady

    @property
    def joins(self) -> bool:
        """Whether one backward covers all microbatches of a mini-batch."""
        return self.simulated is not None and "batch" in self.simulated.options

    @property
    def in_mini_batches(self) -> bool:
        """Whether the schedule, not the weights policy alone, knows mini-batches."""
        return self.drains or self.joins

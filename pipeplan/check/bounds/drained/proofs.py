"""Which search proves a bound on drained plans, of a class and under a schedule? ``plan`` quotes what these find, and
``check`` runs them anew for what a file claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from ....deadline import OutOfTime
from ....integers import Ints, ceil_div
from ....plan import AllocationClass, Bound, ScheduleKind
from ....problem import Problem
from ....schedule.kinds import KINDS, vee
from ...targets import Shape
from .separate import drained_bound
from .shapes import Loop, Vee
from .tables import LeastTables, Placed, shapes

MOST_LOOP, MOST_VEE = 4 * 10**6, 2 * 10**7  # layers to the third, times GPUs, beyond which nothing is bounded


def proved(problem: Problem, allocation: AllocationClass, kind: ScheduleKind | None) -> Bound | None:
    """Return the bound of a class on all plans under a ``kind`` of schedule, None: under any; None where nothing proves
    such, that would take too long, or nothing fits. OutOfTime at the problem's deadline."""
    if allocation == "contiguous":
        return drained_bound(problem, kind)
    simulated = None if kind is None else KINDS[kind].simulated
    placed = allocation == "any" and simulated is not None and simulated.homes is not None
    return placed_bound(problem, kind) if placed and kind is not None else None


def placed_bound(problem: Problem, kind: ScheduleKind) -> Bound | None:
    """Return the bound on all plans under a ``kind`` that places stages, as many on each GPU as there may be; None
    where that would take too long, or nothing fits. Every number of ranks and of pipelines is looked at."""
    simulated, count, gpus = KINDS[kind].simulated, len(problem.chain), len(problem.platform)
    like_vee, microbatches = simulated is not None and simulated.homes is vee, problem.policy.accumulate or 1
    if count**3 * gpus > (MOST_VEE if like_vee else MOST_LOOP):
        return None
    every = shapes(problem, kind, count, lambda ranks: (2,) if like_vee else range(1, count // ranks + 1))
    best: int | None = None
    for one in sorted(
        (_placed(problem, kind, x) for x in every), key=lambda one: (one.floor_ns, one.shape.ranks, one.shape.chunks)
    ):
        problem.deadline.check()
        if best is None or one.floor_ns < best:
            best = one.least(best)
    if best is None:
        return None
    return Bound("any", problem.replicas, problem.checkpointing, ceil_div(best, microbatches), schedule=kind)


def shape_bound(problem: Problem, kind: ScheduleKind, shape: Shape, cuts: Ints) -> int | None:
    """Return a time (ns) below which no stages of a shape between some ``cuts`` run a mini-batch under a kind that
    places them; None where they fit in no way."""
    return _placed(problem, kind, shape, cuts).least()


def _placed(problem: Problem, kind: ScheduleKind, shape: Shape, cuts: Ints | None = None) -> Placed:
    microbatches = ceil_div(problem.policy.accumulate or 1, shape.pipelines)
    return (Vee if shape.vee else Loop)(LeastTables.of(problem, kind, microbatches, cuts), kind, shape)


def quoted(problem: Problem, kind: ScheduleKind) -> Iterator[Bound]:
    """Yield the bounds that a plan under ``kind`` quotes, as far as there is time for them, that on placed stages
    without replicas where it says more. An interrupt ends them, too, as there is a plan already."""
    with suppress(OutOfTime, KeyboardInterrupt):
        free = (proved(problem, "contiguous", one) for one in (None, kind))
        yield from (bound for bound in free if bound is not None)
        found = proved(problem, "any", kind)
        alone = proved(replace(problem, replicas=False), "any", kind) if problem.replicas and found else None
        if alone is not None and found is not None and alone.period_ns > found.period_ns:
            yield alone
        if found is not None:
            yield found

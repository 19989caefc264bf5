"""Which search proves a bound on drained plans, of a class and under a schedule? ``plan`` quotes what these find, and
``check`` runs them anew for what a file claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from ....deadline import OutOfTime
from ....plan import AllocationClass, Bound, ScheduleKind
from ....problem import Problem
from ....schedule.kinds import KINDS, loop, vee
from .loop import loop_bound
from .separate import drained_bound
from .vee import vee_bound

PROOFS: dict[tuple[AllocationClass, object], Callable[[Problem, ScheduleKind], Bound | None]] = {
    ("any", vee): vee_bound,
    ("any", loop): loop_bound,
}  # by the class and how the schedule places stages


def proved(problem: Problem, allocation: AllocationClass, kind: ScheduleKind | None) -> Bound | None:
    """Return the bound of a class on all plans under a ``kind`` of schedule, None: under any; None where nothing proves
    such, that would take too long, or nothing fits. OutOfTime at the problem's deadline."""
    if allocation == "contiguous":
        return drained_bound(problem, kind)
    simulated = None if kind is None else KINDS[kind].simulated
    prove = None if simulated is None else PROOFS.get((allocation, simulated.homes))
    return None if prove is None or kind is None else prove(problem, kind)


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

"""How soon can a mini-batch be over under a schedule that places several stages on each GPU, like a V or round and
round? Wherever layers are cut, whatever they recompute, on however many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from ....deadline import OutOfTime
from ....plan import Bound, ScheduleKind
from ....problem import Problem
from ....schedule.kinds import KINDS, loop, vee
from .loop import loop_bound
from .vee import vee_bound

PROOFS: dict[object, Callable[[Problem, ScheduleKind], Bound | None]] = {vee: vee_bound, loop: loop_bound}


def placed_bound(problem: Problem, kind: ScheduleKind) -> Bound | None:
    """Return the bound on all plans under a ``kind`` that places stages; None where it doesn't, that would take too
    long, or nothing fits. OutOfTime at the problem's deadline."""
    simulated = KINDS[kind].simulated
    prove = None if simulated is None else PROOFS.get(simulated.homes)
    return None if prove is None else prove(problem, kind)


def placed_bounds(problem: Problem, kind: ScheduleKind) -> Iterator[Bound]:
    """Yield the bounds on plans under ``kind`` without replicas, where that says more, and on all, if it places stages
    and there is time to find them."""
    with suppress(OutOfTime, KeyboardInterrupt):
        found = placed_bound(problem, kind)
        alone = placed_bound(replace(problem, replicas=False), kind) if problem.replicas and found else None
        if alone is not None and found is not None and alone.period_ns > found.period_ns:
            yield alone
        if found is not None:
            yield found

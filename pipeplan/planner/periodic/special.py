"""Can a plan win in which one GPU has several stages, without replicas and recomputation? MadPipe's, near its bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...check.bounds import proof
from ...partition.cuts import legal_cuts
from ...partition.madpipe.exact import MOST_CUTS, Charge, decide, madpipe, one_special_bound, smallest_period
from ...plan import Allocation
from ...problem import Problem
from .incumbent import Incumbent


def proved_special(problem: Problem, known_ns: int | None = None) -> int | None:
    """Return the best lower bound (ns) that is known of class one-special, without replicas and recomputation: its own,
    sooner from a period ``known_ns``, or that of all plans; None when no such plan exists."""
    low = one_special_bound(problem, known_ns=known_ns)
    every = proof(replace(problem, replicas=False, checkpointing="none"))
    return None if low is None or every.infeasible else max(low, every.period_ns)


def try_smallest(incumbent: Incumbent) -> None:
    """Try MadPipe's own allocation, unless there are too many cuts for its tables."""
    if len(legal_cuts(incumbent.problem, several=True)) <= MOST_CUTS + 1:
        incumbent.try_all(madpipe(incumbent.problem))


_CHARGES: tuple[tuple[Charge, bool], ...] = (("full", False), ("full", True), ("tight", False))


def one_special(incumbent: Incumbent, periods: int) -> Iterator[Allocation]:
    """Yield MadPipe's allocations at so many ``periods`` between its lower bound and the incumbent, the most hopeful
    first; without any MadPipe's own.

    Nothing when the bound says that none can win. ``full`` at its own least period nearly always schedules there;
    shorter periods propose allocations that may, and ``tight`` those that only just might.
    """
    problem = incumbent.problem
    if len(legal_cuts(problem, several=True)) > MOST_CUTS + 1:
        return
    wider = problem.replicas or problem.checkpointing != "none"
    if wider and incumbent.best_ns is not None and decide(problem, incumbent.best_ns - 1, "tight", True) is None:
        return  # one decision tells that plans without replicas and recomputation cannot win; the bound takes tens
    if not periods:
        yield from madpipe(problem)
        return
    low = proved_special(problem, incumbent.best_ns)
    if low is None:
        return
    incumbent.bound("one-special", False, "none", low)
    if incumbent.best_ns is not None and low >= incumbent.best_ns:
        return
    first = smallest_period(problem, "full")
    if first is not None:
        yield first
    high = incumbent.best_ns
    if high is None:
        if first is None or first.claimed_period_ns is None:
            return
        high = 2 * first.claimed_period_ns
    for step in range(periods):
        period = round(low * (high / low) ** (step / periods))
        if incumbent.best_ns is not None and period >= incumbent.best_ns:
            return
        for charge, split in _CHARGES:
            found = decide(problem, period, charge, split)
            if found is not None:
                yield found

"""What is tried beside a partitioner's own where a plan's cost is a run? More contiguous plans, grids, and walks.

Partitioners seek the shortest period of a pattern, one stage at a time. A drained or simulated run may cost least on
other stages, and so may a pattern whose stages all keep as many versions of the weights as the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...check.bounds import any_bound
from ...cost.stage_graph import stage_graph
from ...partition import ALGORITHMS
from ...partition.contiguous.claims import longest_period_ns
from ...partition.contiguous.contiguous import feasible
from ...plan import Allocation, Stage
from ...problem import Problem
from ...registry import Late
from ..periodic.incumbent import Incumbent, Propose
from ..periodic.limits import LimitSearch
from ..periodic.portfolio import on_less_memory
from .layout import Layout, held
from .tables import tables_of_pipelines

BESIDE = (Late("planner.grids.pipelines:try_each"), Late("planner.periodic.special:try_smallest"))  # the best of others
WALKS = (Late("partition.moves.wander:wander"),)  # what goes from an allocation to better ones
DRAINED_STEPS = 3000  # of a walk from a plan whose cost is a simulated run
QUICK_RUN = 200  # operations that a run has which is simulated in the time that scheduling takes


def widened(propose: Propose, walks: bool = True) -> Propose:
    """Return ``propose``, then more contiguous plans, and with ``walks`` grids and walks from the best.

    The shortest period of a pattern need not drain fastest, nor be the shortest of nF1B.
    """

    def proposed(incumbent: Incumbent) -> None:
        propose(incumbent)
        limits = incumbent.limits
        if incumbent.best is None or limits is None or not limits.kind.by_arrival:  # whose grids hold better ones
            incumbent.try_all(_others(incumbent))
        if walks:
            move(incumbent)
            walked = incumbent.best
            for beside in BESIDE:
                beside(incumbent)
            if incumbent.best is not walked:
                move(incumbent)

    return proposed


def move(incumbent: Incumbent) -> None:
    """Walk from the best allocation so far, if there is one, to better ones."""
    best = incumbent.best
    if best is None:
        return
    start, try_ = best.allocation, incumbent.try_

    def misfit(stages: tuple[Stage, ...], enough: float) -> float:
        return float(stages != start.stages and incumbent.lower_bound(Allocation(stages)) is None)

    def times(stages: tuple[Stage, ...]) -> int:
        return max(1, 4 * len(stages) * (incumbent.problem.policy.accumulate or 1) // QUICK_RUN)

    for walk in WALKS:
        walk(incumbent.problem, start, misfit, try_, DRAINED_STEPS, lambda: incumbent.expired, hot=0.0, times=times)


def _others(incumbent: Incumbent) -> Iterator[Allocation]:
    """Yield the splits of simple partitioners, those that hold what a limit admits, then the best contiguous plans of
    periods longer than the best so far has; the last are also what fits little memory, or has replicas."""
    problem = incumbent.problem
    for row in (row for row in reversed(ALGORITHMS.values()) if row.simple):
        for values in product(*row.options.values()):
            yield from row.partition(problem, **dict(zip(row.options, values, strict=True)))
    if incumbent.limits is not None:
        yield from holding(problem, incumbent.limits)
        if incumbent.best is not None and not problem.replicas:
            return
    elif incumbent.best is None:
        return
    for period in _longer_periods(_period(incumbent), longest_period_ns(problem)):
        slower = feasible(problem, period)
        if slower is not None:
            yield slower


def holding(problem: Problem, limits: LimitSearch) -> Iterator[Allocation]:
    """Yield splits into one stage per GPU that recompute no more than they must to hold what a limit admits.

    For the limit that was asked for, or for some.
    """
    count, size = min(len(problem.platform), len(problem.chain)), limits.schedule.mini_batch
    groups = tuple((device,) for device in range(count))
    tables = tables_of_pipelines(problem, groups, size)
    if tables is None:
        return
    batch = size if limits.kind.joins else 1
    asked = limits.schedule.limit
    for limit in [asked] if asked else dict.fromkeys((count, 2 * count - 1, max(1, count // 2), 1)):
        for in_flight in dict.fromkeys(held(count, limit, batch)):
            layout = Layout(tables, groups, in_flight)
            yield from (Allocation(layout.stages(cuts)) for cuts in layout.starts())


def _period(incumbent: Incumbent) -> int:
    """Return the period of the best so far, without a pattern that of its busiest resource; first a lower bound."""
    problem, best = incumbent.problem, incumbent.best
    if best is None:
        return any_bound(problem).period_ns
    if best.pattern is not None:
        return best.pattern.period_ns
    return stage_graph(problem.chain, problem.platform, problem.policy, best.allocation.stages).period_floor_ns


def _longer_periods(period: int, longest: int, parts: int = 4) -> Iterator[int]:
    """Yield periods above ``period``, ``parts`` to an octave, the last at least ``longest``."""
    step = 0
    while period * 2 ** (step / parts) < longest:
        step += 1
        yield int(period * 2 ** (step / parts)) + 1


def synced(propose: Propose) -> Propose:
    """Return ``propose``, then contiguous plans of periods up to that of the best, and for less memory; a heuristic.

    Partitioners see one stage at a time, but under vertical sync the first one decides how many versions all keep. So
    their split may run only at a long period where others, made for a longer one or with room to spare, fit.
    """

    def proposed(incumbent: Incumbent) -> None:
        problem = incumbent.problem
        propose(incumbent)
        longest = incumbent.best_ns or longest_period_ns(problem)
        for period in _longer_periods(any_bound(problem).period_ns, longest, 16):
            if incumbent.expired or (incumbent.best_ns is not None and period >= incumbent.best_ns):
                return
            for share in range(16, 8, -2):
                found = feasible(on_less_memory(problem, share), period)
                if found is not None:
                    incumbent.try_(found)

    return proposed

"""Which plan is best where the cost is a simulated run: drained mini-batches, nF1B and message-driven pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile

from ..check.bounds import any_bound
from ..cost.stage_graph import StageGraph, stage_graph
from ..partition.balance import balance
from ..partition.contiguous.batch import held, pipeline_tables, splits
from ..partition.contiguous.contiguous import feasible, longest_period_ns
from ..partition.local_search import local_search
from ..partition.pipedream.paper import pipedream
from ..plan import Allocation, Pattern, Schedule, ScheduleKind
from ..problem import Problem
from ..schedule.kinds import KINDS
from ..schedule.program import unroll
from ..schedule.simulate import simulate
from ..schedule.timeline import flush_makespan_ns
from .grid.problem import GridConfig
from .incumbent import Incumbent, Propose, Settings, run_search
from .limits import ENOUGH, LimitSearch
from .pipelines import Pipelines

MINI_BATCH_PER_DEVICE = 4  # default microbatches of a drained mini-batch for each device, GPipe's rule of thumb
DRAINED_MOVES = 300  # local moves of a plan whose cost is a simulated run


def plan_drained(
    problem: Problem, propose: Propose, settings: Settings, widen: bool, kind: ScheduleKind, limit: int | None
) -> tuple[Problem, Incumbent, str | None]:
    """Plan for the shortest drained mini-batch, in a pattern's order or message-driven. A heuristic."""
    if problem.policy.accumulate is None:
        microbatches = MINI_BATCH_PER_DEVICE * len(problem.platform)
        problem = problem.with_policy(replace(problem.policy, accumulate=microbatches))
    count = problem.policy.accumulate or 1
    if KINDS[kind].simulated is None:
        incumbent = Incumbent(problem, settings, partial(_drained, count))
    else:
        incumbent = Incumbent(problem, settings, limits=LimitSearch(Schedule(kind, count, limit), problem.platform))
    return problem, incumbent, run_search(_widened(propose) if widen else propose, problem, incumbent)


def plan_nf1b(
    problem: Problem, propose: Propose, settings: Settings, widen: bool, kind: ScheduleKind, limit: int | None
) -> tuple[Problem, Incumbent, str | None]:
    """Plan for the shortest period of nF1B, whose stages have one GPU each. A heuristic.

    Of several sizes of mini-batches the one with the shortest period is taken, the largest of those that differ by no
    more than a thousandth (the smallest where none fits), and its plan improved by local moves. The allocations
    proposed for the first size are tried with the others too.
    """
    problem = replace(problem, replicas=False)
    sizes = [problem.policy.accumulate] if problem.policy.accumulate else _mini_batches(len(problem.platform))
    chosen: Incumbent | None = None
    status = None
    proposals = _proposed_around(propose) if widen else propose
    for size in sizes:
        here = problem.with_policy(replace(problem.policy, accumulate=size))
        incumbent = Incumbent(
            here, _naming(settings, size), limits=LimitSearch(Schedule(kind, size, limit), here.platform)
        )
        status = run_search(proposals, here, incumbent, chosen is not None)
        if chosen is None:
            proposals = _again(incumbent, widen)
        if incumbent.best_ns is not None and chosen is not None and chosen.best_ns is not None:
            shorter = incumbent.best_ns < chosen.best_ns - chosen.best_ns // ENOUGH
        else:
            shorter = incumbent.best_ns is not None
        chosen = incumbent if chosen is None or chosen.best is None or shorter else chosen
        if status is not None:
            break
    assert chosen is not None
    if widen and status is None:
        status = run_search(_moved, chosen.problem, chosen)
    return chosen.problem, chosen, status


def _naming(settings: Settings, size: int) -> Settings:
    """Return the settings with a progress that says the size of mini-batches which its lines are about."""
    progress = settings.progress
    if progress is None:
        return settings
    return replace(settings, progress=lambda line: progress(f"{line}, in mini-batches of {size}"))


def _again(earlier: Incumbent, widen: bool) -> Propose:
    """Return what proposes the allocations that ``earlier`` has tried, and those that hold other mini-batches."""

    def proposed(problem: Problem, incumbent: Incumbent) -> None:
        assert incumbent.limits is not None
        more = _holding(problem, incumbent.limits) if widen else ()
        _try_all(incumbent, chain(map(Allocation, earlier.seen), more))

    return proposed


def _mini_batches(devices: int) -> list[int]:
    """Return the sizes of nF1B's mini-batches to choose from: W - 1, its half, the half of that, .., 1.

    W - 1 is the fewest microbatches whose gradients are taken at weights that miss no more than one update (the paper's
    version difference of 1), for its backward of one time point and vertical sync. Stages hold in proportion to them.
    """
    sizes = [max(1, devices - 1)]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def _widened(propose: Propose) -> Propose:
    """Return ``propose``, then more contiguous plans, then local moves.

    The shortest period of a pattern need not drain fastest, nor be the shortest of nF1B, so others are tried too: see
    :func:`_around`.
    """

    def widened(problem: Problem, incumbent: Incumbent) -> None:
        _proposed_around(propose)(problem, incumbent)
        _moved(problem, incumbent)
        walked = incumbent.best
        if incumbent.limits is not None:
            _try_all(incumbent, _grids(problem, incumbent))
            if incumbent.best is not walked:
                _moved(problem, incumbent)

    return widened


def _proposed_around(propose: Propose) -> Propose:
    def proposed(problem: Problem, incumbent: Incumbent) -> None:
        propose(problem, incumbent)
        _try_all(incumbent, _around(problem, incumbent))

    return proposed


def _try_all(incumbent: Incumbent, allocations: Iterable[Allocation]) -> None:
    for allocation in allocations:
        if incumbent.expired:
            return
        incumbent.try_(allocation)


def _moved(problem: Problem, incumbent: Incumbent) -> None:
    """Walk from the best allocation so far, if there is one, to better ones."""
    if incumbent.best is not None:
        start = incumbent.best.allocation
        local_search(problem, start, incumbent.lower_bound, incumbent.try_, DRAINED_MOVES, lambda: incumbent.expired)


def _around(problem: Problem, incumbent: Incumbent) -> Iterator[Allocation]:
    """Yield the baselines' splits, those that hold what a limit admits, then the best contiguous plans of periods
    longer than the best so far has; the last are also what fits little memory, or has replicas."""
    yield from chain(balance(problem), pipedream(problem), pipedream(problem, straight=True))
    if incumbent.limits is not None:
        yield from _holding(problem, incumbent.limits)
        if incumbent.best is not None and not problem.replicas:
            return
    elif incumbent.best is None:
        return
    for period in longer_periods(_period(problem, incumbent), longest_period_ns(problem)):
        slower = feasible(problem, period)
        if slower is not None:
            yield slower


def _grids(problem: Problem, incumbent: Incumbent) -> Iterator[Allocation]:
    """Yield the best split of every grid of equal pipelines that may drain sooner than the best so far."""
    assert incumbent.limits is not None
    count = problem.policy.accumulate or 1
    for stages in range(min(len(problem.platform), len(problem.chain)), 0, -1):
        pipelines = len(problem.platform) // stages if problem.replicas else 1
        if count % pipelines:
            continue
        groups = GridConfig(stages, pipelines, 1).groups()
        grid = Pipelines(problem, groups, count // pipelines, incumbent.limits.schedule.limit)
        grid.bound(incumbent.best_ns)
        if incumbent.best_ns is not None and grid.bound_ns >= incumbent.best_ns:
            continue
        proposals = (proposal for limit in grid.limits() for proposal in grid.splits(limit))
        for _ in grid.try_(takewhile(lambda _: not incumbent.expired, proposals)):
            pass  # the last is the best
        if grid.best is not None:
            yield Allocation(grid.best.stages)


def _holding(problem: Problem, limits: LimitSearch) -> Iterator[Allocation]:
    """Yield splits into one stage per GPU that recompute no more than they must to hold what a limit admits.

    For the limit that was asked for, or for some: see :func:`..partition.contiguous.batch.splits`.
    """
    count, size = min(len(problem.platform), len(problem.chain)), problem.policy.accumulate or 1
    offer = pipeline_tables(problem, [(device,) for device in range(count)], size)
    if offer is None:
        return
    batch = size if limits.kind.joins else 1
    asked = limits.schedule.limit
    for limit in [asked] if asked else dict.fromkeys((count, 2 * count - 1, max(1, count // 2), 1)):
        for in_flight in dict.fromkeys(held(count, limit, batch)):
            for cuts in splits(offer, in_flight):
                stages = offer.stages(cuts, in_flight)
                assert stages is not None, "splits only yields what fits"
                yield Allocation(stages)


def _period(problem: Problem, incumbent: Incumbent) -> int:
    """Return the period of the best so far, without a pattern that of its busiest resource; first a lower bound."""
    if incumbent.best is None:
        return any_bound(problem).period_ns
    if incumbent.best.pattern is not None:
        return incumbent.best.pattern.period_ns
    return stage_graph(
        problem.chain, problem.platform, problem.policy, incumbent.best.allocation.stages
    ).period_floor_ns


def longer_periods(period: int, longest: int, parts: int = 4) -> Iterator[int]:
    """Yield periods above ``period``, ``parts`` to an octave, the last at least ``longest``."""
    step = 0
    while period * 2 ** (step / parts) < longest:
        step += 1
        yield int(period * 2 ** (step / parts)) + 1


def _drained(microbatches: int, graph: StageGraph, pattern: Pattern) -> int:
    return flush_makespan_ns(simulate(unroll(graph, pattern, microbatches)))

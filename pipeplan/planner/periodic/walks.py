"""Which allocations, whatever stages share GPUs, beat those that exact searches find? All of few are tried, else walks.

A budget counts candidates; where a walk starts, and how wild it is, follows from what was found so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice, pairwise, product, repeat
from math import ceil

from ...check.bounds import proof, quick_proof
from ...partition.balance import balance
from ...partition.contiguous.claims import longest_period_ns
from ...partition.contiguous.contiguous import contiguous
from ...partition.cuts import legal_cuts
from ...partition.moves.every import every_allocation
from ...partition.moves.misfits import Misfits
from ...partition.moves.wander import HOT, kept, wander
from ...plan import Allocation, Stage
from ...problem import Checkpointing, Problem
from ...schedule.periodic.ilp import IlpStatus
from ...status import Status
from .incumbent import Incumbent, Scheduled, Settings
from .jobs import in_order
from .portfolio import MOST_PLACES, SearchEffort, evenly_shared, on_less_memory, places, search

FEW_LAYERS = 500  # with more a walk makes fewer moves
QUICK_STAGES = 16  # with twice as many, that share GPUs, an order takes 16 times as long
STEPS_EACH = 200  # of a walk at most, for each layer on each GPU: more find nothing new
LESS = 9, 10  # of the memory, in which plans leave room for moves
MUCH = 0.2  # of the bound by averages, which a plan may be above it
SHORTER = 8  # times as short are walks that start wilder, some round after round
CLOSE = 0.01  # of the bound of all plans: from there on these are not worth their time
FAR = 0.1  # of the bound of all plans: from there walks among fewer kinds of plans are worth their time
BESIDE = 2  # plans with a stage on one GPU, from which walks start where the best plan is data-parallel
NEARLY = 0.01  # of what there is: what such plans may miss
FEW_PLACES = 2000  # up to which a second search takes about a second


def try_further(incumbent: Incumbent, effort: SearchEffort) -> None:
    """Try all allocations of a small problem, and of others those that walks from good ones come by."""
    problem, status = incumbent.problem, incumbent.settings.status
    every = every_allocation(problem) if effort.rounds else None
    if every is not None:
        status.phase = "all allocations"
        _try_every(incumbent, every)
        return
    status.phase = "where walks start"
    _widen(incumbent, effort)
    _walk_stored(incumbent, effort)
    if incumbent.done():
        return
    if incumbent.best is not None and evenly_shared(problem, incumbent.best.allocation):
        status.phase = "stages beside data parallelism"
        if not effort.walks or not _walked(incumbent, effort.steps, enumerate(_beside(incumbent))):
            return
    status.phase, averaged = "walks", quick_proof(problem).period_ns
    for round_ in range(effort.rounds):
        steps = _steps(effort, problem)
        if incumbent.best_ns is not None:
            steps = ceil(steps * min(1.0, (incumbent.best_ns / averaged - 1) / MUCH))
        if incumbent.done():
            return
        seeds = range(round_ * effort.walks, (round_ + 1) * effort.walks)
        start = next(balance(problem)) if incumbent.best is None else incumbent.best.allocation
        if not _walked(incumbent, steps, ((seed, start) for seed in seeds)):
            break
    if effort.deep:
        _walk_hotter(incumbent, effort)
    few = effort.deep and places(problem) <= FEW_PLACES and not incumbent.done()
    if few and problem.policy.open and problem.checkpointing == "segments":  # whose steps take apart what is whole
        _elsewhere(incumbent, replace(problem, checkpointing="stages"), effort)


def _try_every(incumbent: Incumbent, every: Iterable[tuple[Stage, ...]]) -> None:
    """Try all that may reach a shorter period than the best so far."""
    misfits = Misfits(incumbent.problem)
    longest = longest_period_ns(incumbent.problem)
    for stages in every:
        if incumbent.done():
            return
        if not misfits.of(stages, longest if incumbent.best is None else incumbent.to_beat, 0):
            incumbent.try_(Allocation(stages))


def _beside(incumbent: Incumbent) -> list[Allocation]:
    """Return what nearly reaches a shorter period, where one GPU has the last layers and all others have the rest, in
    stages that end where segments do, if the best plan is data-parallel and recomputes: fewer weights and stages that
    end earlier save memory, but no small step leads there.
    """
    problem, best = incumbent.problem, incumbent.best
    if best is None or not best.allocation.stages[0].checkpoint:
        return []
    stage, misfits, found = best.allocation.stages[0], Misfits(problem), []
    ends = {0, *chain.from_iterable(stage.checkpoint)}
    for first in legal_cuts(problem).tolist()[1:-1]:
        parts = [*sorted(x for x in ends if x < first), first]
        front = [replace(kept(stage, *part), devices=stage.devices[:-1]) for part in pairwise(parts)]
        stages = (*front, replace(kept(stage, first, stage.stop), devices=stage.devices[-1:]))
        found.append((misfits.of(stages, incumbent.to_beat), first, Allocation(stages)))
    return [allocation for missing, _, allocation in sorted(found, key=lambda x: x[:2])[:BESIDE] if missing <= NEARLY]


def _walk_hotter(incumbent: Incumbent, effort: SearchEffort) -> None:
    """Walk short ways, by turns hotter and as ever, one round behind the other, until two rounds find nothing: what
    longer ways end in is often left by small steps that make it much worse at first."""
    steps, failed, seed = _steps(effort, incumbent.problem) // SHORTER, 0, effort.rounds * effort.walks
    for hot in cycle((2 * HOT, HOT)):
        best = incumbent.best
        if failed > 1 or best is None or incumbent.done() or best.cost <= (incumbent.floor_ns or 0) * (1 + CLOSE):
            return
        seeds = range(seed, seed + effort.walks)
        failed = 0 if _walked(incumbent, steps, zip(seeds, repeat(best.allocation)), hot) else failed + 1
        seed += effort.walks


def _walked(incumbent: Incumbent, steps: int, starts: Iterable[tuple[int, Allocation]], hot: float = HOT) -> bool:
    """Take the best of some walks, each with a seed and from its own start; return whether it was better.

    They don't see what others find, so they may be made in processes of their own.
    """
    misfits = Misfits(incumbent.problem)
    before, settings = incumbent.best, incumbent.settings
    alone = replace(settings, progress=None, status=Status())
    arguments = [(misfits, alone, start, before, incumbent.floor_ns, steps, seed, hot) for seed, start in starts]
    for found, stopped, unsolved in in_order(settings.jobs, _walk, arguments):
        incumbent.stopped = incumbent.stopped or stopped
        settings.status.unsolved += unsolved
        if found is not None and not incumbent.near_bound:
            incumbent.take(found)
        if incumbent.done():
            break
    return incumbent.best is not before


def _walk(
    misfits: Misfits,
    settings: Settings,
    start: Allocation,
    best: Scheduled | None,
    floor_ns: int | None,
    steps: int,
    seed: int,
    hot: float,
) -> tuple[Scheduled | None, IlpStatus | None, int]:
    """Return the best that a walk from ``start`` finds, if it beats ``best``, what cut anything short, and how many
    allocations it met that the solver failed on."""
    problem, before = misfits.problem, settings.status.unsolved
    incumbent = Incumbent(problem, settings, start=best)
    incumbent.floor_ns = floor_ns
    longest = longest_period_ns(problem)

    def misfit(stages: tuple[Stage, ...], enough: float) -> float:
        return misfits.of(stages, longest if incumbent.best is None else incumbent.to_beat, enough)

    wander(problem, start, misfit, incumbent.try_, steps, incumbent.done, seed, hot, _times)
    unsolved = settings.status.unsolved - before
    return None if incumbent.best is best else incumbent.best, incumbent.stopped, unsolved


def _steps(effort: SearchEffort, problem: Problem) -> int:
    """Return how many steps a walk may make: fewer where each takes long, with very many layers."""
    most = effort.steps * FEW_LAYERS // max(FEW_LAYERS, len(problem.chain))
    return min(most, STEPS_EACH * len(problem.chain) * len(problem.platform))


def _times(stages: Sequence[Stage]) -> int:
    """Return how many times as long as of few stages the search for the order of these takes."""
    shared = len({stage.devices for stage in stages}) < len(stages)
    return max(1, len(stages) // QUICK_STAGES) ** 4 if shared else 1


def _widen(incumbent: Incumbent, effort: SearchEffort) -> None:
    """Try more places from which walks may start: the evenest split over single devices where there is nothing; else
    the best plan that recomputes whole stages, as steps seldom bring these about, also without replicas, which steps
    seldom take apart; last what is found in less memory, so that more of it is seldom worse."""
    problem = incumbent.problem
    if incumbent.best is None:
        incumbent.try_all(islice(balance(problem), 1))
        return
    whole: Checkpointing = "none" if problem.checkpointing == "none" else "stages"
    quick = places(problem) <= MOST_PLACES
    for replicas in (True, False)[: 2 if quick else 1] if problem.replicas else (False,):
        incumbent.try_all(contiguous(replace(problem, checkpointing=whole, replicas=replicas)))
    if not (quick and effort.deep) or problem.policy.open or incumbent.done():
        return
    if evenly_shared(problem, incumbent.best.allocation):
        return
    _elsewhere(incumbent, on_less_memory(problem, *LESS), effort)


def _walk_stored(incumbent: Incumbent, effort: SearchEffort) -> None:
    """Walk without replicas and recomputation from the contiguous plan of that kind, where its bound says that it can
    win, and much: no small step leads there from better stages that recompute."""
    problem, best = incumbent.problem, incumbent.best
    stored = replace(problem, replicas=False, checkpointing="none")
    far = best is not None and best.cost >= (incumbent.floor_ns or 0) * (1 + FAR)
    few = stored != problem and effort.deep and places(problem) <= MOST_PLACES
    if not (few and far) or proof(stored).period_ns > incumbent.to_beat:
        return
    other = Incumbent(stored, replace(incumbent.settings, progress=None), start=best)
    other.floor_ns = incumbent.floor_ns
    if _walked(other, _steps(effort, stored), product(range(effort.walks), contiguous(stored))) and other.best:
        incumbent.take(other.best)


def _elsewhere(incumbent: Incumbent, problem: Problem, effort: SearchEffort) -> None:
    """Try what a shorter search finds of a problem whose plans are among those of ``incumbent``'s."""
    other = Incumbent(problem, replace(incumbent.settings, progress=None, status=Status()))
    other.floor_ns = incumbent.floor_ns  # fewer plans make none shorter
    search(other, effort.again)
    if other.best is not None:
        incumbent.try_(other.best.allocation)

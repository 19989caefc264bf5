"""What does ``plan`` try by default? The exact contiguous plan first, then everything that might beat it: a portfolio.

Never worse than exact contiguous. Budgets count candidates, so equal inputs give equal plans; the clock only aborts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, pairwise, product, repeat
from math import ceil

from ...check.bounds import all_contiguous, proof, quick_proof
from ...cost.stage_graph import stage_graph
from ...partition.balance import balance
from ...partition.contiguous.claims import longest_period_ns
from ...partition.contiguous.contiguous import contiguous
from ...partition.cuts import legal_cuts
from ...partition.moves.every import every_allocation
from ...partition.moves.misfits import Misfits
from ...partition.moves.wander import HOT, kept, wander
from ...plan import Allocation, Stage
from ...problem import Checkpointing, Problem
from ...registry import Late
from ...schedule.periodic.ilp import IlpStatus
from ...schedule.update_sums import waiting_floor_ns
from ...status import Status
from .incumbent import Incumbent, Scheduled, Settings
from .jobs import in_order

one_special = Late("planner.periodic.special:one_special")
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
MOST_PLACES = 5 * 10**6  # above, the exact contiguous search takes about a second, and nothing is searched twice


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """How many candidates to try: periods tried between the one-special bound and the incumbent, and walks; ``deep``:
    whether bounds that take seconds, and plans in less memory, are looked for.

    There are ``rounds`` of ``walks``, which may become worse meanwhile, as long as a round has found something better:
    each of ``steps`` where the best plan is :data:`MUCH` or more above the bound by averages, else of as many less.
    Where it stays :data:`CLOSE` above that of all plans, short ones that start hotter follow (:func:`_walk_hotter`).
    ``nodes`` end the integer program of one candidate, ``solver_s`` one that takes long for them; a plan whose search
    they cut short says ``node limit`` or ``time limit``.
    """

    periods: int
    rounds: int
    walks: int
    steps: int
    nodes: int
    solver_s: float
    deep: bool

    @property
    def again(self) -> SearchEffort:
        """The same for a second search of nearly the same problem."""
        few = min(self.periods, 1), min(self.rounds, 1), min(self.walks, 2)
        return replace(self, periods=few[0], rounds=few[1], walks=few[2], deep=False)


EFFORTS = {
    "quick": SearchEffort(0, 0, 0, 0, 50, 20, False),
    "normal": SearchEffort(8, 3, 5, 12000, 50, 20, True),
    "high": SearchEffort(24, 8, 20, 40000, 3000, 300, True),
}


def search(incumbent: Incumbent, effort: SearchEffort) -> None:
    """Propose allocations to ``incumbent`` until its best is near the bound of class ``any`` or ``effort`` is spent.

    Where the cost is not the period of a pattern only the contiguous plan is proposed.
    """
    problem, status = incumbent.problem, incumbent.settings.status
    averaged, known_ns = quick_proof(problem).period_ns, incumbent.floor_ns or 0

    def bounded(period: int) -> None:
        incumbent.floor_ns = status.floor_ns = max(known_ns, period)

    if incumbent.periodic:
        bounded(averaged)

    status.phase = "exact contiguous"
    for allocation in propose_contiguous(incumbent):
        incumbent.try_(allocation)
    if not incumbent.periodic or len(problem.platform) < 2 or len(problem.chain) < 2 or incumbent.done():
        return
    if problem.chain.variants:  # of which the other searches know nothing
        return
    proved = proof(problem, incumbent.best_ns if all_contiguous(problem) else None)
    bounded(proved.period_ns)
    if proved.infeasible or incumbent.done():
        return
    status.phase = "one GPU with several stages"
    for allocation in one_special(incumbent, effort.periods) if places(problem) <= MOST_PLACES else ():
        incumbent.try_(allocation)
        if incumbent.done():
            return
    if incumbent.best_ns is not None and effort.deep:
        incumbent.bounded_up_to = incumbent.best_ns
        bounded(proof(problem, up_to=incumbent.best_ns).period_ns)
        if incumbent.done():
            return
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
    status.phase = "walks"
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


def evenly_shared(problem: Problem, allocation: Allocation) -> bool:
    """Whether all layers are on all of equal devices, bound by their work alone: what is near takes more."""
    stages, platform = allocation.stages, problem.platform
    if len(stages) > 1 or stages[0].replicas < len(platform) or len(set(platform.devices)) > 1:
        return False
    graph = stage_graph(problem.chain, platform, problem.policy, stages)
    floor, waits = graph.period_floor_ns, not problem.policy.updates_together and waiting_floor_ns(graph)
    return floor > max(graph.sync_periods_ns) and floor >= waits


def places(problem: Problem) -> int:
    """Return the cuts squared times GPUs, by which searches take their time."""
    return len(legal_cuts(problem)) ** 2 * len(problem.platform)


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


def propose_contiguous(incumbent: Incumbent) -> Iterator[Allocation]:
    """Yield the best contiguous allocation and leave with ``incumbent`` the bound that its search has proved.

    Where segments are too many for a proof, the exact optimum of whole-stage recomputation is proposed as well; and
    where updates wait for replicas' sums, which the search doesn't know, that of single GPUs.
    """
    problem, proved = incumbent.problem, False
    for allocation in contiguous(problem):
        assert allocation.lower_bound_ns is not None
        incumbent.bound("contiguous", problem.replicas, problem.checkpointing, allocation.lower_bound_ns)
        proved = allocation.lower_bound_ns == allocation.claimed_period_ns
        yield allocation
    if problem.checkpointing == "segments" and not proved:
        yield from contiguous(replace(problem, checkpointing="stages"))
    best = incumbent.best
    waits = best is not None and best.pattern is not None and incumbent.periodic and best.cost > best.pattern.period_ns
    if waits and places(problem) <= MOST_PLACES:
        yield from contiguous(replace(problem, replicas=False))


def on_less_memory(problem: Problem, share: int, parts: int = 16) -> Problem:
    """Return the problem on devices with ``share`` in so many ``parts`` of their memory."""
    platform = problem.platform
    devices = tuple(replace(device, memory_bytes=device.memory_bytes * share // parts) for device in platform.devices)
    return replace(problem, platform=replace(platform, devices=devices))

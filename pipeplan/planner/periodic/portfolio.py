"""What does ``plan`` try by default? The exact contiguous plan first, then everything that might beat it: a portfolio.

Never worse than exact contiguous. Budgets count candidates, so equal inputs give equal plans; the clock only aborts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...check.bounds import all_contiguous, proof, quick_proof
from ...cost.stage_graph import stage_graph
from ...partition.contiguous.contiguous import contiguous
from ...partition.cuts import legal_cuts
from ...plan import Allocation
from ...problem import Problem
from ...registry import Late
from ...schedule.update_sums import waiting_floor_ns
from .incumbent import Incumbent

BESIDE = {"one GPU with several stages": Late("planner.periodic.special:one_special")}  # what proposes more, by phase
FURTHER = (Late("planner.periodic.walks:try_further"),)  # what goes on from the best of these
MOST_PLACES = 5 * 10**6  # above, the exact contiguous search takes about a second, and nothing is searched twice


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """How many candidates to try: periods tried between the one-special bound and the incumbent, and walks; ``deep``:
    whether bounds that take seconds, and plans in less memory, are looked for.

    There are ``rounds`` of ``walks``, which may become worse meanwhile, as long as a round has found something better:
    each of ``steps`` where the best plan is far above the bound by averages (:mod:`.walks`), else of as many less.
    Where it stays above that of all plans, short ones that start hotter follow.
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
    for status.phase, propose in BESIDE.items():
        for allocation in propose(incumbent, effort.periods) if places(problem) <= MOST_PLACES else ():
            incumbent.try_(allocation)
            if incumbent.done():
                return
    if incumbent.best_ns is not None and effort.deep:
        incumbent.bounded_up_to = incumbent.best_ns
        bounded(proof(problem, up_to=incumbent.best_ns).period_ns)
        if incumbent.done():
            return
    for further in FURTHER:
        further(incumbent, effort)


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

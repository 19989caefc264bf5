"""Which allocation is the best so far, how is it scheduled, and can another one beat it?

Searches propose allocations and never schedule; the incumbent schedules and never proposes. Contiguous allocations go
to 1F1B*, which is exact and instant; others are settled by propagation, with the best period so far as the cutoff, and
the few that it leaves open by the integer program. Where GPUs decide as they go there is no pattern, and the simulated
run decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ...check.evaluate import may_sum_beside, waiting_period_ns
from ...check.validate import structure_violations
from ...cost.group_bound import group_bound, may_reach
from ...cost.stage_cost import Known, least_load_ns
from ...cost.stage_graph import StageGraph, stage_graph
from ...deadline import Deadline, OutOfTime
from ...partition.balance import simplest
from ...plan import Allocation, AllocationClass, Bound, Pattern, Schedule, Stage
from ...problem import Checkpointing, Problem
from ...schedule.pattern import one_at_a_time
from ...schedule.periodic.ilp import IlpStatus, schedule_ilp
from ...schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from ...schedule.periodic.solvers import Solver, SolverLimits
from ...schedule.periodic.turns import settle
from ...schedule.update_sums import waiting_floor_ns
from ...status import Status
from .limits import LimitSearch

SPLITS = 20  # of a period's orders for each node of the integer program, which mostly isn't needed then
MOST_SPLITS = 5000
SPLIT_WORK = 2 * 10**9  # of all splits, in operations to the fourth: about half a second; more seldom find an order
NODE_WORK = 26  # operations squared for each node of an integer program, above which so few nodes found no pattern
GAP = 0.001  # a plan this near to a bound on all plans is good enough
MOST_KNOWN = 50_000  # stages whose costs are remembered
GRACE_S = 2.0  # for simple plans where the time limit left none
Cost = Callable[[StageGraph, Pattern, Deadline], int]


def unsolved(status: Status) -> str | None:
    """Return in words how many allocations the solver has failed on; None for none."""
    count = status.unsolved
    several = f"{count} candidates" if count > 1 else "one candidate"
    return f"the integer program's solver failed on {several}, so a better order may be missed" if count else None


@dataclass(frozen=True, slots=True)
class Settings:
    """How to schedule: the integer program's solver, and its limits for one allocation: nodes and seconds of its own.

    The portfolio stops at a plan within ``gap`` of the bound of class ``any``, and a plan of more stages, or of layers
    in another order, must win by as much, or by :data:`GAP` where that is less. ``simplest``: where time is up before
    there is a plan, the simplest ones are tried. ``jobs`` processes may search at a time, where one search needn't wait
    for another: plans are the same with any number. ``progress`` receives a line at each improvement; ``status`` says
    at any time what is going on. ``explained``: where there is no plan, why, which may take longer than the search.
    ``bounded``: plans have lower bounds, which may, too.
    """

    solver: Solver = "cbc"
    time_limit_s: float = 60.0
    node_limit: int | None = None
    gap: float = GAP
    simplest: bool = True
    jobs: int = 1
    explained: bool = True
    bounded: bool = True
    progress: Callable[[str], None] | None = None
    status: Status = field(default_factory=Status)

    def to_pay(self, cost_ns: int) -> int:
        """Return the cost that what is less simple must stay below, beside that of what is simpler."""
        return cost_ns - int(cost_ns * min(self.gap, GAP))


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A scheduled allocation: its cost (ns), its pattern, and what the solver said (None for 1F1B*).

    Without a pattern there is the ``schedule`` instead, its limit decided.
    """

    cost: int
    allocation: Allocation
    pattern: Pattern | None
    status: IlpStatus | None = None
    schedule: Schedule | None = None


class Incumbent:
    """Scores allocations of one problem by ``cost`` and keeps the best; ties go to the one seen first.

    Without ``cost`` it is what a microbatch takes under the pattern, with the sums that updates wait for.

    ``start`` is a plan to begin with. With ``limits`` they run without a pattern, and their cost is that of the limit
    that is chosen.

    More stages than the best so far has must pay (:meth:`Settings.to_pay`), because every stage costs a real run
    something that the model doesn't know.

    ``rejected`` holds the first allocation that no period makes fit, or of those that no limit makes fit the one that
    lacks least memory, ``broken`` the first rule that one breaks whatever its period (a cut between tied layers, say);
    ``stopped`` says which limit cut anything short, ``time limit`` where a clock did, so that another run might find
    more, ``late`` whether that was the caller's, ``exhausted`` whether the simplest were all tried then. Searches leave
    the lower bounds that they prove in ``bounds``, and that of class ``any`` in ``floor_ns``; up to which period (ns)
    it was looked for is ``bounded_up_to``.
    """

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        cost: Cost | None = None,
        limits: LimitSearch | None = None,
        start: Scheduled | None = None,
    ) -> None:
        self.problem, self.settings, self.cost, self.limits = problem, settings, cost, limits
        self.best = start
        self.rejected: Allocation | None = None
        self._excess_bytes = 0  # of ``rejected``, with limits
        self.broken: str | None = None
        self.stopped: IlpStatus | None = None
        self.late = self.exhausted = False
        self.bounds: list[Bound] = []
        self.floor_ns: int | None = None
        self.bounded_up_to: int | None = None
        self._known: Known = {}
        self.seen: dict[tuple[Stage, ...], int | None] = {}  # in the order in which they were tried, with their claims

    @property
    def expired(self) -> bool:
        """Whether the caller's time is up; searches stop then, and ``stopped`` tells it."""
        self.late |= self.problem.deadline.passed
        if self.late:
            self.stopped = "time limit"
        return self.late

    @property
    def periodic(self) -> bool:
        """Whether an allocation costs the period of its pattern, so that bounds on periods are bounds on costs."""
        return self.cost is None and self.limits is None

    def cost_ns(self, graph: StageGraph, pattern: Pattern) -> int:
        """Return the cost of a scheduled graph of the problem."""
        if self.cost is not None:
            return self.cost(graph, pattern, self.problem.deadline)
        return waiting_period_ns(graph, self.problem.chain.tied, pattern, self.problem.platform)

    @property
    def near_bound(self) -> bool:
        """Whether the best is within the gap of the bound on all plans."""
        enough = None if self.floor_ns is None else int(self.floor_ns * (1 + self.settings.gap))
        return self.best is not None and enough is not None and self.best.cost <= enough

    def done(self) -> bool:
        """Whether the best is near the bound, or the caller's time is up."""
        return self.expired or self.near_bound

    @property
    def best_ns(self) -> int | None:
        """Cost that an allocation must beat, or None while nothing fits."""
        return None if self.best is None else self.best.cost

    @property
    def to_beat(self) -> int:
        """The longest period that makes a plan the best, whatever its stages."""
        assert self.best is not None
        return self.settings.to_pay(self.best.cost) - 1

    def bound(self, allocation: AllocationClass, replicas: bool, checkpointing: Checkpointing, period_ns: int) -> None:
        """Note a lower bound that a search has proved, at the problem's interval or at every one."""
        self.bounds.append(Bound(allocation, replicas, checkpointing, period_ns, any_interval=self.problem.policy.open))

    def lower_bound(self, allocation: Allocation) -> int | None:
        """Return a lower bound on the allocation's period, or None when it was tried or shall not be."""
        self.settings.status.candidates += 1
        if allocation.stages in self.seen or self._too_slow(allocation):
            return None
        if self.best is None and self._breaks_rules(allocation):
            return None
        floor = self._floor(self._graph(allocation))
        if floor is not None and self.best is not None and self._breaks_rules(allocation):  # few come so far
            return None
        return floor

    def _floor(self, graph: StageGraph) -> int | None:
        if self.limits is not None:
            floor = self.limits.load_ns(graph)  # which ranks better than what also counts the way there
            beaten = self.best is not None and floor >= self._to_beat(len(graph.stages))
            return None if beaten or self.limits.refuses(graph) else floor
        if not self.periodic:  # scheduled by 1F1B* alone, in the order of their loads
            return graph.period_floor_ns if graph.separate else None
        floor = self._waiting_floor(graph)
        if self.best is not None:
            worth = self._to_beat(len(graph.stages)) - 1
            if floor > worth or not may_reach(graph, worth):
                return None
        bound = group_bound(graph)
        return None if bound is None else max(bound, floor)

    def _waiting_floor(self, graph: StageGraph) -> int:
        """Return what the sums that updates surely wait for need: of stages that no memory left lets hide them."""
        return waiting_floor_ns(graph, may_sum_beside(graph, self.problem.chain.tied))

    def try_(self, allocation: Allocation) -> bool:
        """Schedule an allocation that wasn't tried before, as far as it can become the best; return whether it did."""
        best = self.best
        if best and best.allocation.claimed_period_ns is None and best.allocation.stages == allocation.stages:
            self.best = replace(best, allocation=allocation)  # with what its partitioner claims
        if allocation.stages in self.seen:
            return False
        self.settings.status.candidates += 1
        self.seen[allocation.stages] = allocation.claimed_period_ns
        if self._breaks_rules(allocation):
            return False
        graph = self._graph(allocation)
        found = self._decided(graph, allocation) if self.limits else self._patterned(graph, allocation)
        return found is not None and self.take(found)

    def take(self, found: Scheduled) -> bool:
        """Make ``found`` the best if it beats the best so far; return whether it does."""
        if self.best is not None and found.cost >= self._to_beat(len(found.allocation.stages)):
            return False
        self.best = found
        if self.settings.progress:
            bound = "" if self.floor_ns is None else f", no plan is below {self.floor_ns / 1e6:.3f} ms"
            self.settings.progress(f"best so far {found.cost / 1e6:.3f} ms{bound}")
        return True

    def try_all(self, allocations: Iterable[Allocation]) -> None:
        """Try allocations in turn until the caller's time is up."""
        for allocation in allocations:
            if self.expired:
                return
            self.try_(allocation)

    def _patterned(self, graph: StageGraph, allocation: Allocation) -> Scheduled | None:
        cutoff = self._to_beat(len(graph.stages)) if self.periodic and self.best is not None else None
        if cutoff is not None and self._waiting_floor(graph) >= cutoff:
            return None
        count = self.problem.policy.accumulate or 1
        if not self.periodic and self.best is not None and count * graph.period_floor_ns >= self.best.cost:
            return None  # a run of so many microbatches takes no less
        pattern, status = self.schedule(graph, cutoff)
        if pattern is not None:
            return Scheduled(self.cost_ns(graph, pattern), allocation, pattern, status)
        if status is None or status == "infeasible":
            self.rejected = self.rejected or allocation
        return None

    def _decided(self, graph: StageGraph, allocation: Allocation) -> Scheduled | None:
        """Simulate an allocation that could become the best."""
        assert self.limits is not None
        refused = self.limits.refuses(graph)
        if refused is not None:
            self.broken = self.broken or refused
            return None
        below = None if self.best is None else self._to_beat(len(graph.stages))
        if below is not None and self.limits.floor_ns(graph) >= below:
            return None
        choice = self.limits.choose(graph, self.problem.deadline, below)
        if choice is None and self.best is None:
            excess = self.limits.excess_bytes(graph, self.problem.deadline)
            if self.rejected is None or excess < self._excess_bytes:
                self.rejected, self._excess_bytes = allocation, excess
        if choice is None:
            return None
        return Scheduled(choice[0], allocation, None, schedule=choice[1])

    def _too_slow(self, allocation: Allocation) -> bool:
        """Whether the work of a device alone rules an allocation out; far quicker than its stage graph."""
        if self.best is None or not self.periodic:
            return False
        problem = self.problem
        return least_load_ns(problem.chain, problem.platform, allocation.stages) >= self._to_beat(
            len(allocation.stages)
        )

    def _to_beat(self, stages: int) -> int:
        """Return the cost that an allocation of so many stages must stay below."""
        assert self.best is not None
        more = stages > len(self.best.allocation.stages)
        return self.settings.to_pay(self.best.cost) if more else self.best.cost

    def _breaks_rules(self, allocation: Allocation) -> bool:
        problem = self.problem
        found = structure_violations(problem.chain, problem.platform, problem.policy, allocation.stages)
        if found and self.broken is None:
            self.broken = found[0]
        return bool(found)

    def _graph(self, allocation: Allocation) -> StageGraph:
        problem = self.problem
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        return stage_graph(problem.chain, problem.platform, problem.policy, allocation.stages, known=self._known)

    def schedule(self, graph: StageGraph, cutoff: int | None) -> tuple[Pattern | None, IlpStatus | None]:
        """Return the best pattern of a graph, and what the integer program said, which seeks periods below ``cutoff``
        alone."""
        if graph.separate:
            return best_one_f_one_b_star(graph), None
        bound = group_bound(graph)
        if bound is None:
            return None, "infeasible"
        if cutoff is not None and bound >= cutoff:
            return None, "cutoff"
        nodes = self.settings.node_limit
        most = min(MOST_SPLITS, SPLIT_WORK // len(graph.operations) ** 4)
        splits = most if nodes is None else min(most, SPLITS * nodes)
        settled = settle(graph, bound, (cutoff or one_at_a_time(graph).period_ns + 1) - 1, splits)
        if settled.proved:
            return settled.pattern, "cutoff" if settled.pattern is None else "optimal"
        if nodes is not None and len(graph.operations) ** 2 > NODE_WORK * nodes:
            self.stopped = self.stopped or "node limit"
            return settled.pattern, "node limit"
        result = schedule_ilp(
            graph,
            solver=self.settings.solver,
            limits=SolverLimits(
                self.settings.node_limit, self.settings.time_limit_s, self.problem.deadline.remaining_s()
            ),
            cutoff_period_ns=cutoff if settled.pattern is None else settled.pattern.period_ns,
            lower_bound_ns=settled.bound_ns,
        )
        if result.status in ("time limit", "unproved"):
            self.stopped = "time limit"
        elif result.status == "node limit":
            self.stopped = self.stopped or "node limit"
        elif result.status == "failed":
            self.settings.status.unsolved += 1
        if settled.pattern is not None and result.status == "cutoff":
            return settled.pattern, "optimal"
        return result.pattern or settled.pattern, result.status


Propose = Callable[[Incumbent], None]  # tries allocations of the incumbent's problem


def run_search(propose: Propose, incumbent: Incumbent, dispensable: bool = False) -> str | None:
    """Let ``propose`` feed the incumbent; return why it stopped early, or None. A ``dispensable`` one may end empty.

    Where the time limit comes before there is any plan, the simplest ones are tried, which takes :data:`GRACE_S` at
    most.
    """
    try:
        with incumbent.problem.deadline.insist():
            propose(incumbent)
    except KeyboardInterrupt:
        if incumbent.best is None and not dispensable:
            raise
        return "interrupted"
    except OutOfTime:
        incumbent.stopped, incumbent.late = "time limit", True
    wanted = incumbent.settings.simplest and not dispensable
    if incumbent.best is None and wanted and incumbent.expired:
        incumbent.exhausted = _try_simplest(incumbent)
    return incumbent.stopped


def _try_simplest(incumbent: Incumbent) -> bool:
    """Try what is found without a search, for some time behind the deadline; return whether that was enough for all."""
    limited = incumbent.problem
    incumbent.problem = replace(limited, deadline=limited.deadline.later(GRACE_S - limited.deadline.remaining_s()))
    incumbent.seen.clear()  # the last one may have been cut short
    with suppress(OutOfTime), incumbent.problem.deadline.insist():
        for allocation in simplest(limited):
            incumbent.try_(allocation)
            incumbent.problem.deadline.check()
    enough = not incumbent.problem.deadline.passed
    incumbent.problem = limited
    return enough

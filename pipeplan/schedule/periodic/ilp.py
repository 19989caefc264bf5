"""Which periodic pattern is best for any assignment of stages to devices? By integer programming (ALGORITHMS 6).

Everything is divided by the period: with the frequency f = 1/T and X_v = start_v / T, the rules of a pattern are linear
in f, X and the integer heights K, in-flight counts are linear in K, and no big constants are needed. The solver only
chooses K; ``retime`` then computes period and starts exactly, and memory is checked again on integers.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import combinations
from math import ceil, lcm
from typing import Any, Literal

from ...cost import memory_model
from ...cost.group_bound import group_bound
from ...cost.stage_graph import StageGraph
from ...plan import Pattern
from ..pattern import memory_fits, one_at_a_time, starts_of
from .retime import Order, height_bounds, retime
from .solvers import TOLERANCE, Solver, SolverFailed, SolverLimits, solved

IlpStatus = Literal["optimal", "infeasible", "cutoff", "node limit", "time limit", "unproved", "failed"]

OBJECTIVE_SCALE = 1e4  # CBC drops improvements below 1e-5, which is a lot for a frequency in (0, 1]


@dataclass(frozen=True, slots=True)
class IlpResult:
    """A pattern or None, why, and a lower bound (ns) on the period of every valid pattern of the graph.

    ``optimal``: no pattern is shorter by more than the solver's tolerance (1e-6). ``infeasible``: no pattern at any
    period. ``cutoff``: none below the cutoff. ``node limit``, ``time limit``: stopped, the first of them at the same
    place every time; the pattern, if any, is the best so far.
    ``unproved``: rounding in the solver cost the proof; the pattern, if any, is valid all the same. ``failed``: the
    solver gave no answer; the pattern, if any, is what was known without it.
    """

    pattern: Pattern | None
    status: IlpStatus
    lower_bound_ns: int


def schedule_ilp(
    graph: StageGraph,
    *,
    solver: Solver = "cbc",
    limits: SolverLimits | None = None,
    cutoff_period_ns: int | None = None,
    lower_bound_ns: int | None = None,
) -> IlpResult:
    """Return the pattern of ``graph`` with the shortest period, by CBC (bundled with PuLP) or HiGHS (``highspy``).

    Exact for any assignment of stages to devices, with replicas, recomputation, every weight policy and full-duplex
    links, among 1-periodic schedules; exponential in the operations that share a device. Only periods below
    ``cutoff_period_ns`` count; ``lower_bound_ns`` is a bound that the caller knows. Single-threaded, and deterministic
    unless a limit of ``limits`` in seconds strikes. Raises PipeplanError when ``solver`` is not installed.
    """
    low = group_bound(graph)
    if low is None:
        return IlpResult(None, "infeasible", graph.period_floor_ns)
    low = bound = max(low, lower_bound_ns or 0)
    sequential = one_at_a_time(graph)
    high = sequential.period_ns if cutoff_period_ns is None else min(sequential.period_ns, cutoff_period_ns - 1)
    best = sequential if sequential.period_ns <= high else None
    left = limits or SolverLimits()
    for margin in (0.0, TOLERANCE):
        if low > high:
            break
        model = _Model.of(graph, low, high, margin)
        try:
            answer = model.solve(solver, left)
        except SolverFailed:
            return IlpResult(best, "failed", bound)
        left = left.less(answer.seconds)
        if not margin:  # the second model is narrower: it proves nothing
            bound = max(bound, min(high + 1, answer.bound_ns))
        pattern = None if answer.order is None else retime(graph, answer.order, 1 if margin else 0)
        if pattern is not None and pattern.period_ns <= high:
            best = pattern if memory_fits(graph, starts_of(pattern), pattern.period_ns) else best
        target = high + 1 if best is None else best.period_ns
        bound = min(bound, target)
        if bound >= target * (1 - 2 * TOLERANCE):
            break
        if answer.ended is not None:
            return IlpResult(best, answer.ended, bound)
    else:
        return IlpResult(best, "unproved", bound)
    return IlpResult(best, "cutoff" if best is None else "optimal", bound)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the solver said: an order or None, which limit ended its search, and what period no pattern can beat."""

    order: Order | None
    ended: IlpStatus | None
    bound_ns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Model:
    """The program in PuLP's terms; ``f`` counts in units of 1 / ``unit_ns``, so that it lies in (0, 1]."""

    graph: StageGraph
    problem: Any
    f: Any
    x: list[Any]
    heights: dict[tuple[int, int], Any]
    unit_ns: int

    @staticmethod
    def of(graph: StageGraph, low: int, high: int, margin: float) -> _Model:
        """Return the model for periods in [low, high].

        ``margin`` lengthens every operation by that part of ``low`` and takes that part of every memory away, which
        keeps orders that only rounding allows out.
        """
        import pulp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces names of PuLP 4
            f = pulp.LpVariable("f", low / high * (1 - TOLERANCE), 1)
            x = [pulp.LpVariable(f"x{v}", 0) for v in range(len(graph.operations))]
            heights = {
                (u, v): pulp.LpVariable(f"k{u}_{v}", least, most, pulp.LpInteger)
                for (u, v), (least, most) in height_bounds(graph, low, high).items()
            }
            model = _Model(graph, pulp.LpProblem("pattern", pulp.LpMaximize), f, x, heights, low)
            model.problem.setObjective(OBJECTIVE_SCALE * f)
            model.add_path(margin)
            model.add_exclusivity(margin)
            model.add_memory(margin)
            model.add_updates()
            model.add_nesting()
            model.add_triangles()
        return model

    def height(self, u: int, v: int) -> Any:
        """Return K_uv, which is 1 - K_vu."""
        return self.heights[u, v] if u < v else 1 - self.heights[v, u]

    def duration(self, v: int, margin: float) -> Any:
        """Return d_v f: the part of a period that operation v takes."""
        return (self.graph.operations[v].duration_ns / self.unit_ns + margin) * self.f

    def add_path(self, margin: float) -> None:
        """Each operation waits for the one before it, and never for more than R periods: R more are never needed."""
        slack = lcm(*(resource.replicas for resource in self.graph.resources))
        self.problem.addConstraint(self.x[0] == 0)
        for v in range(len(self.x) - 1):
            step = self.x[v + 1] - self.x[v] - self.duration(v, margin)
            self.problem.addConstraint(step >= 0)
            self.problem.addConstraint(step <= slack)

    def add_exclusivity(self, margin: float) -> None:
        """Moved by K_uv of their resource's periods, v starts after u ends and ends before u starts again."""
        for (u, v), height in self.heights.items():
            replicas = self.graph.resources[self.graph.operations[u].resource].replicas
            gap = self.x[v] - self.x[u] + replicas * height
            self.problem.addConstraint(gap >= self.duration(u, margin))
            self.problem.addConstraint(gap <= replicas - self.duration(v, margin))

    def in_flight(self, q: int, at: int) -> Any:
        """Return how many microbatches of stage q its replica holds when operation ``at`` of its device starts."""
        forward, backward = self.graph.position["F", q], self.graph.position["B", q]
        if at in (forward, backward):
            return self.height(backward, forward)
        return self.height(backward, at) - self.height(forward, at)

    def add_memory(self, margin: float) -> None:
        """At the start of each forward, and of each backward that recomputes, a device holds at most its memory."""
        import pulp

        graph = self.graph
        for index, resource in enumerate(graph.resources):
            if resource.memory_bytes is None:
                continue
            stages = graph.stages_on(index)
            memory = max(1, resource.memory_bytes)
            fixed, versions = 0, pulp.LpAffineExpression()
            for s in stages:
                stage = graph.stages[s]
                none, one = (graph.weights_bytes(s, kept) for kept in (0, 1))
                fixed += none + stage.buffer_bytes
                if not memory_model.versions_grow(graph.policy):
                    fixed += (one - none) * memory_model.versions(graph.policy, 1)
                elif one > none:
                    versions += (one - none) / memory * self.versions(s)
                for later, size in stage.lent:
                    turning = self.height(graph.position["B", s], graph.position["B", later])
                    kept = self.updates_over(f"{s}_{later}", [(resource.replicas, turning)])
                    versions += size / memory * kept
            room = 1 - margin - fixed / memory
            for s in stages:
                transient = graph.stages[s].peak_bytes - graph.stages[s].kept_bytes
                instants = [(graph.position["F", s], 0)]
                if transient:
                    instants.append((graph.position["B", s], transient))
                for at, extra in instants:
                    kept = [(q, graph.stages[q].kept_bytes / memory) for q in stages]
                    held = pulp.lpSum(part * self.in_flight(q, at) for q, part in kept)
                    self.problem.addConstraint(held + versions <= room - extra / memory)

    def versions(self, s: int) -> Any:
        """Return the weight versions of stage s, where they follow what is in flight: :func:`memory_model.versions`."""
        graph = self.graph
        counts = [
            (graph.resources[graph.stages[q].resource].replicas, self.in_flight(q, graph.position["F", q]))
            for q in (sorted({0, s}) if graph.policy.vertical_sync else [s])
        ]
        return self.updates_over(str(s), counts) + 1

    def updates_over(self, name: str, counts: list[tuple[int, Any]]) -> Any:
        """Return the most of :func:`memory_model.updates_over` for pairs (replicas, microbatches held on each).

        Where it grows by one with each microbatch it is an expression, else a variable.
        """
        import pulp

        policy = self.graph.policy
        replicas, count = counts[0]
        if len(counts) == 1 and replicas == policy.update_interval(replicas):
            return count + memory_model.updates_over(policy, 1, replicas) - 1
        due = pulp.LpVariable(f"due{name}", lowBound=0, cat="Integer")
        for replicas, count in counts:
            self.problem.addConstraint(policy.update_interval(replicas) * due >= replicas * count - 1)
        return due

    def add_updates(self) -> None:
        """At most so many microbatches as the policy allows are in flight at the first stage, so at any."""
        most = self.graph.policy.most_lifetime
        if most is not None:
            self.problem.addConstraint(self.x[-1] + self.duration(len(self.x) - 1, 0) <= most)

    def add_nesting(self) -> None:
        """A stage holds what later ones hold (implied; not so where a later stage has fewer replicas)."""
        graph = self.graph
        for s in range(len(graph.stages) - 1):
            here, there = (graph.resources[graph.stages[q].resource].replicas for q in (s, s + 1))
            if here <= there:
                one, other = (self.in_flight(q, graph.position["F", q]) for q in (s, s + 1))
                self.problem.addConstraint(one >= other)

    def add_triangles(self) -> None:
        """Three operations of one resource follow each other in one of two cyclic orders (implied; helps the bound)."""
        for indices in self.graph.on_resource:
            for i, j, k in combinations(indices, 3):
                turn = self.height(i, j) + self.height(j, k) + self.height(k, i)
                self.problem.addConstraint(turn >= 1)
                self.problem.addConstraint(turn <= 2)

    def solve(self, solver: Solver, limits: SolverLimits) -> _Answer:
        """Return what ``solver`` finds within the limits."""
        import pulp

        seconds = solved(self.problem, solver, limits)
        if self.problem.status == pulp.LpStatusInfeasible:
            return _Answer(None, None, 2**62, seconds)
        # PuLP's status calls a search that a limit ended "Optimal"; only sol_status tells, and the seconds themselves
        status, late = self.problem.sol_status, seconds >= limits.seconds
        proved = status == pulp.LpSolutionOptimal and not late
        ended: IlpStatus = "time limit" if late or limits.nodes is None else "node limit"
        found = status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible) and self.f.value()
        order = {pair: round(k.value() or 0) for pair, k in self.heights.items()} if found else None
        frequency = 1.0
        if proved:
            frequency = self.f.value()
        elif solver == "highs":
            frequency = min(1.0, -self.problem.solverModel.getInfo().mip_dual_bound / OBJECTIVE_SCALE)
        bound = ceil(self.unit_ns / frequency * (1 - TOLERANCE))
        return _Answer(order, None if proved else ended, bound, seconds)

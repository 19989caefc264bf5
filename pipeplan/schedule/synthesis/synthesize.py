"""Which order of a drained mini-batch is best for given stages, and how good could one be?

Known schedules and repeated blocks give orders to begin with, or microbatches one by one, and an order of fewer
microbatches one of many; justification and local search better them; linear programs bound what is possible; and where
that is small, an integer program looks for an order that meets the bound.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ...cost.stage_graph import StageGraph
from ...deadline import NEVER, Deadline
from ...status import Status
from ..periodic.solvers import Solver
from ..program import Program, pipelines
from ..simulate import simulate
from ..slots import shares
from ..timeline import Timeline, flush_makespan_ns, longest_span_ns
from .bounds import NARROW, SOLVER_S, raised
from .problem import OrderProblem, Word, order_problem
from .recomputing import recomputing_apart
from .search import INTERRUPTED, Known, Search, nothing_known
from .words import program_of_words


@dataclass(frozen=True)
class Synthesis:
    """The best order that was found, run; ``bound_ns``: no order of these stages takes less, nor any of ``problem``.

    ``barrier``: it is worth its makespan, else the longest span of one device. ``moves`` were tried; ``cut`` says what
    ended the search early, a time limit or an interrupt.
    """

    problem: OrderProblem
    timeline: Timeline
    bound_ns: int
    barrier: bool
    moves: int
    cut: str | None = None

    @property
    def program(self) -> Program:
        """The program in this order."""
        return self.timeline.program

    @property
    def value_ns(self) -> int:
        """What the order is worth."""
        return worth(self.timeline, self.barrier)

    @property
    def gap(self) -> float:
        """How much longer it takes than the bound, as a share of that."""
        return self.value_ns / self.bound_ns - 1 if self.bound_ns else 0.0

    @property
    def optimal(self) -> bool:
        """Whether no order can be better."""
        return self.value_ns <= self.bound_ns


def worth(timeline: Timeline, barrier: bool) -> int:
    """Return what a drained mini-batch takes: its makespan, or without a barrier the longest span of one device."""
    return flush_makespan_ns(timeline) if barrier else longest_span_ns(timeline)


def synthesize(
    graph: StageGraph,
    microbatches: int,
    *,
    limit: int | None = None,
    barrier: bool = True,
    split: bool = True,
    weight_keeps: Fraction = Fraction(1),
    known: Known = nothing_known,
    moves: int | None = None,
    seed: int = 0,
    solver: Solver | None = "cbc",
    deadline: Deadline = NEVER,
    endless: bool = False,
    status: Status | None = None,
) -> Synthesis:
    """Return the best order that is found of ``microbatches`` on the stages of ``graph``, with a lower bound.

    Any placement of stages on devices within whose memory it stays, and of at most ``limit`` activations on each, as
    :func:`.problem.order_problem` counts them. With ``split`` backwards weight parts are passes of their own; so are
    recomputations where that is better. Equal
    pipelines run the same order. It ends after so many ``moves``, or some seconds, and the same ``seed`` finds
    the same order, unless the ``deadline`` comes before; an ``endless`` search goes on until then. Without a ``solver``
    the bound is a plain one. ``status`` says what is going on. A KeyboardInterrupt ends it with the best order so
    far, if there is one. BadInput where replicas differ, or no order fits the memory.
    """
    alone, side_by_side = graph.first_replicas(), pipelines(graph, "a synthesised order")
    share = max(shares(microbatches, side_by_side))
    stated: dict[str, Any] = {"barrier": barrier, "split": split, "weight_keeps": weight_keeps, "limit": limit}
    problem = order_problem(alone, share, **stated)
    apart = recomputing_apart(alone, share, **stated)
    search = first = Search(
        alone,
        problem,
        known,
        seed,
        *((solver, deadline) if apart is None else (None, deadline.part(2))),
        status=status,
    )
    first.run(moves, endless)
    found = [(frozenset[int](), words) for _, words in first.best()]
    if apart is not None:
        search = Search(alone, apart.problem, known, seed, solver, deadline, apart.held, apart.bounding, first, status)
        if first.cut != INTERRUPTED and first.found[0][0] > search.bound:
            search.run(moves, endless)
            found += [(apart.stages, words) for _, words in search.best()]
        else:
            search.cut = first.cut

    def run(stages: Set[int], words: Sequence[Word]) -> Timeline:
        return simulate(program_of_words(graph, microbatches, words, split, weight_keeps, stages))

    best = min((run(*one) for one in found), key=lambda timeline: worth(timeline, barrier))
    moved = first.tried + search.tried * (apart is not None)
    return Synthesis(search.bounding, best, search.bound, barrier, moved, search.cut)


def proved(
    found: Synthesis, solver: Solver = "cbc", deadline: Deadline = NEVER, window: int = NARROW, each_s: float = SOLVER_S
) -> Synthesis:
    """Return what was found with a bound that linear programs have raised, as far as time allows.

    Each may take ``each_s``.
    """
    if found.optimal:
        return found
    low, value = found.bound_ns, found.value_ns
    return replace(found, bound_ns=raised(found.problem, low, value, solver, deadline, window, each_s))

"""Which order of a drained mini-batch is best for given stages, and how good could one be?

Known schedules give orders to begin with, or microbatches one by one. Of few passes an exact search finds the best of
all; else justification and local search better them, and linear programs bound what is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from typing import Any

from ...cost.stage_graph import StageGraph
from ...deadline import NEVER, Deadline, OutOfTime
from ...integers import ceil_div
from ...status import Status
from ..periodic.solvers import Solver
from ..program import Program, pipelines
from ..programs.slots import shares
from ..simulate import simulate
from ..timeline import Timeline, worth
from .bounds import NARROW, SOLVER_S, WIDE, bearable, floor, raised
from .exact import best_words
from .justify import Orders, justified, shake
from .problem import OrderProblem, Word, order_problem, program_of_words, words_of
from .recomputing import recomputing_apart

EFFORT = 4 * 10**7  # operations that moves may time anew, unless more or less is asked for
SHAKE = 48  # moves of passes that take as long as one round of shaking
ROUNDS = ((0.06, 0), (0.03, -1), (0.06, 1), (0.015, -1))  # heat over a microbatch's mean work, start: -1 is the best
JUSTIFIED, MOST_JUSTIFIED = 2 * 10**5, 40  # operations, and orders, that are justified at the beginning
EXACT, MOVES_A_STEP = 120_000, 8  # steps of the exact search, 3 seconds; without a solver as few as moves let be
FEW_PASSES = 120  # of which that is mostly over in so many
INTERRUPTED = "interrupted"

Known = Callable[[StageGraph, int], Iterable[Program]]  # programs of drained mini-batches of one pipeline


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


def synthesize(
    graph: StageGraph,
    microbatches: int,
    *,
    limit: int | None = None,
    barrier: bool = True,
    split: bool = True,
    weight_keeps: Fraction = Fraction(1),
    known: Known = lambda graph, microbatches: (),
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
        alone, problem, known, seed, *((solver, deadline) if apart is None else (None, deadline.part(2))), status=status
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


def least_ns(graph: StageGraph, microbatches: int) -> int:
    """Return what no order of ``microbatches`` on stages of one replica each takes less than; NoRoom where none fits.

    By work, ways and memory alone: less than :func:`synthesize` proves, in a hundredth of the time.
    """
    plain, apart = order_problem(graph, microbatches), recomputing_apart(graph, microbatches)
    return floor(plain if apart is None else apart.bounding)


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


class Search:
    """Orders of one pipeline, best first, and what none can beat.

    Where recomputations are passes of their own, orders begin as some of a ``plain`` problem, in which they are part of
    backwards and hold as much, and as those that a search ``before`` has found without. The bound is that of a
    ``bounding`` problem.
    """

    def __init__(
        self,
        graph: StageGraph,
        problem: OrderProblem,
        known: Known,
        seed: int,
        solver: Solver | None,
        deadline: Deadline,
        plain: OrderProblem | None = None,
        bounding: OrderProblem | None = None,
        before: Search | None = None,
        status: Status | None = None,
    ) -> None:
        self.graph, self.problem, self.known = graph, problem, known
        self.seed, self.solver, self.deadline = seed, solver, deadline
        self.plain, self.bounding, self.before = plain or problem, bounding or problem, before
        self.status = status or Status()
        self.bound = floor(self.bounding)
        self.found: list[tuple[int, list[Word]]] = []
        self.tried = 0
        self.cut: str | None = None

    def run(self, moves: int | None, endless: bool) -> None:
        """Search until the moves are made, or with ``endless`` until the deadline; or an order meets the bound."""
        try:
            self._begin()
            operations = len(self.problem.durations) * self.problem.microbatches
            budget = EFFORT // max(1, operations) if moves is None else moves
            self._exact(min(EXACT, budget // MOVES_A_STEP) if self.solver is None else EXACT)
            self._rounds(budget, endless)
        except KeyboardInterrupt:
            if not self.found:
                raise
            self.cut = INTERRUPTED
        if self.cut is None and self.deadline.passed:
            self.cut = "time limit"

    def _rounds(self, budget: int, endless: bool) -> None:
        heat = sum(self.problem.durations) / len(self.problem.devices)
        starts = [words for _, words in self.found]
        for number in count():
            if number == 1:
                self._raise(NARROW)
            solver, least = self.solver, self.found[0][0]
            if number == len(ROUNDS) and solver and (endless or bearable(self.bounding, least, solver)):
                self._raise(WIDE)
            if self._over() or (number >= len(ROUNDS) and not endless):
                break
            self._say(f"moves in orders of {self.problem.microbatches} microbatches")
            warm, start = ROUNDS[number % len(ROUNDS)]
            words = self.found[0][1] if start < 0 else starts[start % len(starts)]
            steps = max(endless, ceil_div(budget, len(ROUNDS) * SHAKE)) << (number // len(ROUNDS))
            seed = self.seed + number
            tried, value, words = shake(self.problem, words, steps, warm * heat, seed, self.deadline, self.bound)
            self.tried += tried * SHAKE
            self._add(value, words)

    def best(self) -> list[tuple[int, list[Word]]]:
        """Return the best few orders."""
        return self.found[:3] if len(self.problem.on) > len(self.problem.devices) else self.found[:1]

    def _say(self, what: str) -> None:
        above = self.found[0][0] / self.bound - 1 if self.bound else 0
        self.status.say(f"{what}, {self.tried} moves so far, the best order is {above:.2%} above the bound")

    def _over(self) -> bool:
        return self.deadline.passed or self.found[0][0] <= self.bound

    def _begin(self) -> None:
        self.status.say(f"orders of {self.problem.microbatches} microbatches")
        for _, words in self.before.found[:MOST_JUSTIFIED] if self.before else ():
            self._begin_with(words)
        with suppress(OutOfTime):  # what follows takes less
            for words in self._known():
                self._begin_with(words)
        machines = range(len(self.plain.on))
        self._begin_with([self.plain.one_by_one(machine) * self.plain.microbatches for machine in machines])
        operations = len(self.problem.durations) * self.problem.microbatches
        for _, words in self.found[: min(MOST_JUSTIFIED, max(1, JUSTIFIED // operations))]:
            if not self._over():
                self._add(*justified(self.problem, words))

    def _known(self) -> Iterable[list[Word]]:
        """Yield the words of known programs that fit."""
        problem = self.plain
        for program in self.known(self.graph, problem.microbatches):
            if program.batch == 1 and (len(problem.durations) > problem.path or not program.split):
                yield words_of(program, problem, self.deadline)

    def _begin_with(self, words: Sequence[Word]) -> None:
        """Try an order of the plain problem, with recomputations right before their backwards."""
        self._try([self.problem.with_again(word) for word in words])

    def _try(self, words: Sequence[Word]) -> None:
        problem = self.problem
        links = [i for i in range(len(problem.on)) if i not in problem.devices]
        words = list(words)
        for link in links:
            words[link] = words[link] or problem.one_by_one(link) * problem.microbatches
        if not problem.complete(words) or not all(problem.holds(device, words[device]) for device in problem.devices):
            return
        orders = Orders(problem, words)
        if orders.settle():
            self._add(orders.value, orders.words())

    def _add(self, value: int, words: list[Word]) -> None:
        if all(words != other for _, other in self.found):
            self.found.append((value, words))
            self.found.sort(key=lambda pair: pair[0])

    def _raise(self, window: int) -> None:
        if self.solver is not None and not self._over():
            until = self.deadline.part(2)  # the rest is for moves
            self._say("linear programs")
            self.bound = raised(self.bounding, self.bound, self.found[0][0], self.solver, until, window)

    def _exact(self, steps: int) -> None:
        """Look for the best order of all where passes are few, by so many steps; with it nothing is left to prove."""
        for problem in dict.fromkeys((self.bounding, self.problem)):
            if self._over() or len(problem.durations) * problem.microbatches > FEW_PASSES:
                return
            least = self.found[0][0]
            done, words = best_words(problem, least, steps, self.deadline)
            if words is not None:
                orders = Orders(problem, words)
                least = orders.value if orders.settle() else least
                self._try(words)  # which may hold more than the problem itself allows
            if done and problem is self.bounding and problem.measured:
                self.bound = max(self.bound, least)

"""Which orders are good, and what can none beat? One search, from known orders over moves to integer programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from ...cost.stage_graph import StageGraph
from ...deadline import Deadline, OutOfTime
from ...integers import ceil_div
from ...status import Status
from ..periodic.solvers import Solver, SolverLimits
from ..program import Program
from .bounds import NARROW, WIDE, bearable, floor, raised, slots_of
from .justify import justified, shake
from .patterns import lengthened, repeated
from .problem import OrderProblem, Word
from .time_indexed import ask
from .timing import Orders
from .words import words_of

EFFORT = 4 * 10**7  # operations that moves may time anew, unless more or less is asked for
SHAKE = 48  # moves of passes that take as long as one round of shaking
ROUNDS = ((0.06, 0), (0.03, -1), (0.06, 1), (0.015, -1))  # heat over a microbatch's mean work, start: -1 is the best
JUSTIFIED, MOST_JUSTIFIED = 2 * 10**5, 40  # operations, and orders, that are justified at the beginning
FEW = 2  # microbatches per device that are enough to show a steady middle
WHOLE_COUNTS = 1_500  # of an integer program
ALL = 10**6  # times the way of a microbatch
WHOLE_NODES = 2_000
WHOLE_S = 20.0
INTERRUPTED = "interrupted"

Known = Callable[[StageGraph, int], Iterable[Program]]  # programs of drained mini-batches of one pipeline


def nothing_known(graph: StageGraph, microbatches: int) -> Iterable[Program]:
    """Yield no programs."""
    return ()


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
        self.fewer: Search | None = None

    def run(self, moves: int | None, endless: bool) -> None:
        """Search until the moves are made, or with ``endless`` until the deadline; or an order meets the bound."""
        try:
            self._begin()
            operations = len(self.problem.durations) * self.problem.microbatches
            budget = EFFORT // max(1, operations) if moves is None else moves
            self._from_fewer(budget // 2, endless)
            self._rounds(budget, endless)
            self._whole()
        except KeyboardInterrupt:
            if not self.found:
                raise
            self.cut = INTERRUPTED
        if self.cut is None and self._late():
            self.cut = "time limit"

    def _rounds(self, budget: int, endless: bool) -> None:
        heat = sum(self.problem.durations) / len(self.problem.devices)
        starts = [words for _, words in self.found]
        for number in count():
            if number == 1:
                self._raise(NARROW)
            if number == len(ROUNDS) and (endless or self._bearable()):
                self._raise(WIDE)
            if self._over() or (number >= len(ROUNDS) and not endless):
                break
            self._say(f"moves in orders of {self.problem.microbatches} microbatches")
            warm, start = ROUNDS[number % len(ROUNDS)]
            words = self.found[0][1] if start < 0 else starts[start % len(starts)]
            steps = max(endless, ceil_div(budget, len(ROUNDS) * SHAKE)) << (number // len(ROUNDS))
            seed = self.seed + number
            tried, value, words = shake(self.problem, words, steps, warm * heat, seed, self._late, self.bound)
            self.tried += tried * SHAKE
            self._add(value, words)

    def _from_fewer(self, budget: int, endless: bool) -> None:
        """Search with as few microbatches as have a steady middle, and repeat that."""
        few = FEW * len(self.problem.devices)
        if self.problem.microbatches <= few or not budget or self._over():
            return
        problem, plain = (replace(x, microbatches=few) for x in (self.problem, self.plain))
        before = self.before and self.before.fewer
        until = self.deadline.part(4)
        self.fewer = search = Search(
            self.graph, problem, self.known, self.seed, None, until, plain, None, before, self.status
        )
        search._begin()
        search._rounds(budget, endless)
        self.tried += search.tried
        for _, words in search.found[:3]:
            for longer in lengthened(problem, words, self.problem.microbatches):
                self._try(longer)
        self._justify(3)

    def best(self) -> list[tuple[int, list[Word]]]:
        """Return the best few orders."""
        return self.found[:3] if len(self.problem.on) > len(self.problem.devices) else self.found[:1]

    def _say(self, what: str) -> None:
        above = self.found[0][0] / self.bound - 1 if self.bound else 0
        self.status.say(f"{what}, {self.tried} moves so far, the best order is {above:.2%} above the bound")

    def _late(self) -> bool:
        return self.deadline.passed

    def _over(self) -> bool:
        return self._late() or self.found[0][0] <= self.bound

    def _begin(self) -> None:
        self.status.say(f"orders of {self.problem.microbatches} microbatches")
        for _, words in self.before.found[:MOST_JUSTIFIED] if self.before else ():
            self._begin_with(words)
        with suppress(OutOfTime):  # what follows takes less
            for words in self._known():
                self._begin_with(words)
        for words in repeated(self.graph, self.plain):
            self._begin_with(words)
            if self.found and self._over():
                return
        machines = range(len(self.plain.on))
        self._begin_with([self.plain.one_by_one(machine) * self.plain.microbatches for machine in machines])
        operations = len(self.problem.durations) * self.problem.microbatches
        self._justify(min(MOST_JUSTIFIED, max(1, JUSTIFIED // operations)))

    def _justify(self, most: int) -> None:
        for _, words in self.found[:most]:
            if self._over():
                return
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

    def _bearable(self) -> bool:
        return self.solver is not None and bearable(self.bounding, self.found[0][0], self.solver)

    def _raise(self, window: int) -> None:
        if self.solver is not None and not self._over():
            until = self.deadline.part(2)  # the rest is for moves
            self._say("linear programs")
            self.bound = raised(self.bounding, self.bound, self.found[0][0], self.solver, until, window)

    def _whole(self) -> None:
        """Ask for an order that meets the bound, where there are few passes and slots; if there is none, raise it."""
        while self.solver is not None and self.bounding.measured and not self._over():
            slots = slots_of(self.bounding, self.bound, ALL, 2 * WHOLE_COUNTS)
            if not slots.exact or len(self.bounding.durations) * slots.number > WHOLE_COUNTS:
                return
            limits = SolverLimits(WHOLE_NODES, WHOLE_S, self.deadline.remaining_s())
            answer = ask(slots, self.solver, limits, whole=True)
            if answer.words is not None:
                self._try(answer.words)  # which may hold more than the problem itself allows
                return
            if not answer.impossible:
                return
            self.bound = (self.bound // self.bounding.grain + 1) * self.bounding.grain

"""Which order of a drained mini-batch is best for given stages, and how good could one be?

Known schedules, repeated blocks and greedy rules give orders to begin with, and an order of fewer microbatches one of
many; justification and local search better them; linear programs bound what is possible; and where that is small, an
integer program looks for an order that meets the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count

from ...cost.stage_graph import StageGraph
from ...deadline import NEVER, Deadline, OutOfTime
from ...errors import PipeplanError
from ...integers import ceil_div
from ..periodic.solvers import Solver, SolverLimits
from ..program import Program, pipelines
from ..simulate import simulate
from ..slots import Pass, explicit, shares
from ..timeline import Timeline, flush_makespan_ns, longest_span_ns
from .bounds import NARROW, SOLVER_S, WIDE, bearable, floor, raised, slots_of
from .greedy import greedy, rules
from .justify import justified, shake
from .lengthen import lengthened
from .local_search import anneal
from .patterns import repeated
from .problem import OrderProblem, Word, order_problem
from .time_indexed import ask
from .timing import Orders

EFFORT = 4 * 10**7  # operations that moves may time anew, unless more or less is asked for
SHAKE = 48  # moves that take as long as one round of shaking
ROUNDS = (  # how to search, heat over the mean work of a microbatch, and the start: -1 is the best so far
    (shake, SHAKE, 0.06, 0),
    (anneal, 1, 0.015, -1),
    (shake, SHAKE, 0.06, 1),
    (anneal, 1, 0.03, -1),
)
JUSTIFIED, MOST_JUSTIFIED = 2 * 10**5, 40  # operations, and orders, that are justified at the beginning
FEW = 2  # microbatches per device that are enough to show a steady middle
WHOLE_COUNTS = 1_500  # of an integer program
ALL = 10**6  # times the way of a microbatch
WHOLE_NODES = 2_000
WHOLE_S = 20.0
INTERRUPTED = "interrupted"

Known = Callable[[StageGraph, int], Iterable[Program]]  # programs of drained mini-batches of one pipeline


@dataclass(frozen=True)
class Synthesis:
    """The best order that was found for a ``problem``, run; ``bound_ns``: no order of these stages takes less.

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
    known: Known = lambda graph, microbatches: (),
    moves: int | None = None,
    seed: int = 0,
    solver: Solver | None = "cbc",
    deadline: Deadline = NEVER,
    endless: bool = False,
) -> Synthesis:
    """Return the best order that is found of ``microbatches`` on the stages of ``graph``, with a lower bound.

    Any placement of stages on devices within whose memory it stays, and of at most ``limit`` activations on each, as
    :func:`.problem.order_problem` counts them. With ``split`` backwards weight parts are passes of their own. Equal
    pipelines run the same order. It ends after so many ``moves``, in the mean some seconds, and the same ``seed`` finds
    the same order, unless the ``deadline`` comes before; an ``endless`` search goes on until then. Without a ``solver``
    the bound is a plain one. A KeyboardInterrupt ends the search with the best order so far, if there is one. BadInput
    where replicas differ, or no order fits the memory.
    """
    side_by_side = pipelines(graph, "a synthesised order")
    alone = graph.first_replicas()
    share = max(shares(microbatches, side_by_side))
    problem = order_problem(alone, share, barrier=barrier, split=split, weight_keeps=weight_keeps, limit=limit)
    search = _Search(alone, problem, known, seed, solver, deadline)
    search.run(moves, endless)

    def run(words: Sequence[Word]) -> Timeline:
        return simulate(_program(graph, microbatches, side_by_side, words, split, weight_keeps))

    best = min((run(words) for _, words in search.best()), key=lambda timeline: worth(timeline, barrier))
    return Synthesis(problem, best, search.bound, barrier, search.tried, search.cut)


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


def _program(
    graph: StageGraph,
    microbatches: int,
    side_by_side: int,
    words: Sequence[Word],
    split: bool,
    weight_keeps: Fraction,
) -> Program:
    path = len(graph.operations)

    def passes(most: int) -> dict[int, list[Pass]]:
        found = {}
        for machine in dict.fromkeys(stage.resource for stage in graph.stages):
            seen = dict.fromkeys(words[machine], 0)
            order: list[Pass] = []
            for kind in words[machine]:
                name, stage = ("W", kind - path) if kind >= path else _named(graph, kind)
                if seen[kind] < most:  # a pipeline with fewer microbatches leaves the last out
                    order.append((name, stage, seen[kind]))
                seen[kind] += 1
            found[machine] = order
        return found

    return explicit(graph, microbatches, passes, side_by_side, split, weight_keeps if split else Fraction(1))


def _named(graph: StageGraph, kind: int) -> tuple[str, int]:
    operation = graph.operations[kind]
    return operation.kind, operation.stage


class _Search:
    """Orders of one pipeline, best first, and what none can beat."""

    def __init__(
        self,
        graph: StageGraph,
        problem: OrderProblem,
        known: Known,
        seed: int,
        solver: Solver | None,
        deadline: Deadline,
    ) -> None:
        self.graph, self.problem, self.known = graph, problem, known
        self.seed, self.solver, self.deadline = seed, solver, deadline
        self.bound = floor(problem)
        self.found: list[tuple[int, list[Word]]] = []
        self.tried = 0
        self.cut: str | None = None

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
            search, each, warm, start = ROUNDS[number % len(ROUNDS)]
            words = self.found[0][1] if start < 0 else starts[start % len(starts)]
            steps = max(endless, ceil_div(budget, len(ROUNDS) * each)) << (number // len(ROUNDS))
            seed = self.seed + number
            tried, value, words = search(self.problem, words, steps, warm * heat, seed, self._late, self.bound)
            self.tried += tried * each
            self._add(value, words)

    def _from_fewer(self, budget: int, endless: bool) -> None:
        """Search with as few microbatches as have a steady middle, and repeat that."""
        few = FEW * len(self.problem.devices)
        if self.problem.microbatches <= few or not budget or self._over():
            return
        problem = replace(self.problem, microbatches=few)
        search = _Search(self.graph, problem, self.known, self.seed, None, self.deadline.part(4))
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

    def _late(self) -> bool:
        return self.deadline.passed

    def _over(self) -> bool:
        return self._late() or self.found[0][0] <= self.bound

    def _begin(self) -> None:
        with suppress(OutOfTime):  # what follows takes less
            for words in self._known():
                self._try(words)
        for words in repeated(self.graph, self.problem):
            self._try(words)
            if self.found and self._over():
                return
        for rule in rules(self.problem):
            if self.found and self._over():
                return
            self._try(greedy(self.problem, rule))
        if not self.found:
            raise PipeplanError("no order was found that stays within memory and ends")
        operations = len(self.problem.durations) * self.problem.microbatches
        self._justify(min(MOST_JUSTIFIED, max(1, JUSTIFIED // operations)))

    def _justify(self, most: int) -> None:
        for _, words in self.found[:most]:
            if self._over():
                return
            self._add(*justified(self.problem, words))

    def _known(self) -> Iterable[list[Word]]:
        """Yield the words of known programs that fit."""
        path, problem = len(self.graph.operations), self.problem
        split = len(problem.durations) > path
        for program in self.known(self.graph, problem.microbatches):
            if program.batch > 1 or (program.split and not split):
                continue
            words: list[Word] = [()] * len(problem.on)
            for lane in simulate(program, deadline=self.deadline).program.lanes:
                word: list[int] = []
                for step in lane.steps:
                    word.append(step.position)
                    work = program.operations[step.position]
                    if split and not program.split and work.kind == "B":
                        word.append(path + work.stage)
                if word:
                    words[problem.machines[word[0]]] = tuple(word)
            yield words

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
        return self.solver is not None and bearable(self.problem, self.found[0][0], self.solver)

    def _raise(self, window: int) -> None:
        if self.solver is not None and not self._over():
            until = self.deadline.part(2)  # the rest is for moves
            self.bound = raised(self.problem, self.bound, self.found[0][0], self.solver, until, window)

    def _whole(self) -> None:
        """Ask for an order that meets the bound, where there are few passes and slots; if there is none, raise it."""
        while self.solver is not None and self.problem.measured and not self._over():
            slots = slots_of(self.problem, self.bound, ALL, 2 * WHOLE_COUNTS)
            if not slots.exact or len(self.problem.durations) * slots.number > WHOLE_COUNTS:
                return
            limits = SolverLimits(WHOLE_NODES, WHOLE_S, self.deadline.remaining_s())
            answer = ask(slots, self.solver, limits, whole=True)
            if answer.words is not None:
                self._try(answer.words)
                return
            if not answer.impossible:
                return
            self.bound = (self.bound // self.problem.grain + 1) * self.problem.grain

"""How does an order of words become a program that runs, and a program such an order?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from fractions import Fraction

from ...cost.stage_graph import StageGraph
from ...deadline import NEVER, Deadline
from ..program import Program, operations_of, unequal
from ..simulate import simulate
from ..slots import Pass, homes, listed
from .problem import OrderProblem, Word


def program_of_words(
    graph: StageGraph,
    microbatches: int,
    words: Sequence[Word],
    split: bool,
    weight_keeps: Fraction = Fraction(1),
    apart: Set[int] = frozenset(),
) -> Program:
    """Return the program in which each of the equal pipelines of ``graph`` runs ``words``; a pipeline with fewer
    microbatches leaves the last out."""
    works = operations_of(graph, 1, split, apart)

    def order(d: int, most: int) -> list[Pass]:
        seen: Counter[int] = Counter()
        found: list[Pass] = []
        for kind in words[homes(graph)[d]]:
            if seen[kind] < most:
                found.append((works[kind].kind, works[kind].stage, seen[kind]))
            seen[kind] += 1
        return found

    refused = unequal(graph, "a synthesised order")
    return listed(graph, microbatches, refused, order, split, weight_keeps if split else Fraction(1), apart)


def words_of(program: Program, problem: OrderProblem, deadline: Deadline = NEVER) -> list[Word]:
    """Return the words of a simulated run of one pipeline, in which backwards recompute themselves.

    Where the problem splits backwards and the program doesn't, weight parts come right behind.
    """
    path = problem.path
    splits = any(map(problem.is_weight, range(path, len(problem.durations))))
    words: list[Word] = [()] * len(problem.on)
    for lane in simulate(program, deadline=deadline).program.lanes:
        word: list[int] = []
        for step in lane.steps:
            word.append(step.position)
            work = program.operations[step.position]
            if splits and not program.split and work.kind == "B":
                word.append(path + work.stage)
        if word:
            words[problem.machines[word[0]]] = tuple(word)
    return words

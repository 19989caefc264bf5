"""Which stages can recompute in passes of their own, and which problem bounds orders with such passes and without?

And what is a known order worth with them?
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...cost.stage_graph import StageGraph
from ..program import Program
from .justify import Orders, justified
from .problem import NoRoom, OrderProblem, Word, order_problem, program_of_words, words_of


@dataclass(frozen=True, slots=True)
class RecomputingApart:
    """Orders in which the recomputations of ``stages`` are passes of their own: their ``problem``.

    ``held`` is that problem with recomputation within backwards, which hold as much as if it were apart. ``bounding``
    allows every order of ``problem``, and every one in which backwards recompute.
    """

    stages: frozenset[int]
    problem: OrderProblem
    held: OrderProblem
    bounding: OrderProblem


def recomputing_apart(
    graph: StageGraph, microbatches: int, *, split: bool = True, **options: Any
) -> RecomputingApart | None:
    """Return the orders in which stages recompute in passes of their own, those for which their devices have room; None
    where none do. ``options`` are those of :func:`.problem.order_problem`.

    A pass apart recomputes all of a stage's segments before the backward frees any of them, so it may hold more than a
    backward that recomputes them. With no more than that, right before the backward, it takes the same time or, as it
    doesn't wait for the gradient, less: so no order without is better than all of those with it.
    """
    options = {"split": split, **options}
    stages = frozenset(s for s in graph.recomputing if _has_room(graph, s, options))
    if not stages:
        return None
    inside = [x.saved_bytes if split else x.peak_bytes for x in graph.stages]
    pairs = zip(graph.stages, inside, strict=True)
    lean = replace(graph, stages=tuple(replace(x, recomputed_bytes=size) for x, size in pairs))
    return RecomputingApart(
        stages,
        order_problem(graph, microbatches, apart=stages, **options),
        order_problem(_holding(graph, stages), microbatches, **options),
        order_problem(lean, microbatches, apart=graph.recomputing, **options),
    )


def _has_room(graph: StageGraph, stage: int, options: dict[str, Any]) -> bool:
    """Whether a stage's device can run microbatches one by one, all that it recomputes apart."""
    home = graph.stages[stage].resource
    together: Set[int] = graph.recomputing & set(graph.stages_on(home))
    try:
        order_problem(graph, 1, apart=together, **options)
    except NoRoom:
        return False
    return True


def _holding(graph: StageGraph, apart: Set[int]) -> StageGraph:
    """Return a graph whose backwards hold what they would if they had recomputed apart."""
    full = (replace(x, saved_bytes=x.recomputed_bytes, peak_bytes=x.recomputed_bytes) for x in graph.stages)
    pairs = enumerate(zip(graph.stages, full, strict=True))
    return replace(graph, stages=tuple(held if s in apart else x for s, (x, held) in pairs))


def recomputed_early(graph: StageGraph, program: Program, microbatches: int) -> Program | None:
    """Return a known order with recomputations in passes of their own as early as they can be, all within memory; None
    where no device has room for any.

    ``program`` is that of the first of the equal pipelines of ``graph``, which run ``microbatches`` together.
    """
    alone, stages = graph.first_replicas(), frozenset[int]()
    for s in sorted(graph.recomputing):
        if _right_before(alone, program, stages | {s}) is not None:
            stages |= {s}
    orders = _right_before(alone, program, stages) if stages else None
    if orders is None:
        return None
    _, words = justified(orders.problem, orders.words())
    return program_of_words(graph, microbatches, words, program.split, program.weight_keeps, stages)


def _right_before(graph: StageGraph, program: Program, apart: Set[int]) -> Orders | None:
    """Return the order in which stages ``apart`` recompute right before their backwards; None without room."""
    with suppress(NoRoom):
        split, keeps = program.split, program.weight_keeps
        problem = order_problem(graph, program.microbatches, split=split, weight_keeps=keeps, apart=apart)
        words: Sequence[Word] = [problem.with_again(word) for word in words_of(program, problem)]
        fit = all(problem.holds(device, words[device]) for device in problem.devices)
        orders = Orders(problem, words)
        return orders if fit and orders.settle() else None
    return None

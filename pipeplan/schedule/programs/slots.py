"""In which order do devices run their passes, if unit-time slots say it for every stage, or a list for every device?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from fractions import Fraction
from typing import Literal

from ...cost.stage_graph import StageGraph
from ..program import Program, Step, StepKind, make_program, operations_of, refuse, side_by_side

Pass = tuple[str, int, int]  # (kind, stage, microbatch)
Slot = Callable[[Literal["F", "B"], int, int], int]  # (kind, stage, microbatch) -> unit time


def staircase(graph: StageGraph, microbatches: int, slot: Slot) -> Program:
    """Return the program in which every device runs its passes in the order of their slots; links carry what comes.

    Slots that respect the path of every microbatch never deadlock, however stages share devices.
    """
    orders: dict[tuple[int, int], list[Step]] = {}
    for index in homes(graph):
        passes = [(position, graph.operations[position]) for position in graph.on_resource[index]]
        for replica in range(count := graph.resources[index].replicas):
            keyed = [
                (slot(op.kind, op.stage, m), Step(m, position))  # type: ignore[arg-type]  # devices run no transfers
                for m in range(replica, microbatches, count)
                for position, op in passes
            ]
            orders[index, replica] = [step for _, step in sorted(keyed)]
    return make_program(graph, microbatches, orders)


def listed(
    graph: StageGraph,
    microbatches: int,
    refused: str | None,
    order: Callable[[int, int], list[Pass]],
    split: bool = False,
    weight_keeps: Fraction = Fraction(1),
    apart: Set[int] = frozenset(),
) -> Program:
    """Return the program of equal pipelines in which devices run their passes in a given order; BadInput where the
    stages are ``refused``.

    ``order(d, count)`` says what the d-th device group of :func:`homes` does in a pipeline that runs ``count``
    microbatches, numbered from 0 in each; of several pipelines number j has microbatches j, j + pipelines, .. of all,
    on device j of every group. The lists of a program that ``split`` s the backward have weight parts, of kind ``W``,
    and those of stages that recompute ``apart`` that, of kind ``R``.
    """
    refuse(refused)
    position = {(work.kind, work.stage): at for at, work in enumerate(operations_of(graph, 1, split, apart))}
    pipelines, orders = side_by_side(graph), {}
    for pipeline, count in enumerate(shares(microbatches, pipelines)):
        for d, home in enumerate(homes(graph)):
            orders[home, pipeline] = [step_of(position, one, pipelines, pipeline) for one in order(d, count)]
    return make_program(graph, microbatches, orders, split=split, weight_keeps=weight_keeps, apart=apart)


def homes(graph: StageGraph) -> list[int]:
    """Return the resources of stages in the order of their first ones."""
    return list(dict.fromkeys(stage.resource for stage in graph.stages))


def step_of(position: Mapping[tuple[StepKind, int], int], one: Pass, pipelines: int, pipeline: int) -> Step:
    """Return the step of a pass in one of several pipelines, which take microbatches in turn; ``position`` is that of
    each (kind, stage)."""
    kind, stage, m = one
    return Step(m * pipelines + pipeline, position[kind, stage])  # type: ignore[index]  # the kind of a pass


def shares(microbatches: int, pipelines: int) -> list[int]:
    """Return how many of ``microbatches`` each of equal pipelines runs, which take them in turn."""
    return [len(range(j, microbatches, pipelines)) for j in range(pipelines)]

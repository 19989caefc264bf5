"""When does each pass of a microbatch run, if a staircase of unit-time slots says it for every stage?"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from ..cost.stage_graph import StageGraph
from ..errors import BadInput
from .program import Program, Step, make_program, not_one_each

Slot = Callable[[Literal["F", "B"], int, int], int]  # (kind, stage, microbatch) -> unit time


def staircase(graph: StageGraph, microbatches: int, slot: Slot) -> Program:
    """Return the program in which every device runs its passes in the order of their slots; links carry what comes.

    Slots that respect the path of every microbatch never deadlock, however stages share devices.
    """
    orders: dict[tuple[int, int], list[Step]] = {}
    for index, resource in enumerate(graph.resources):
        if resource.is_link:
            continue
        passes = [(position, graph.operations[position]) for position in graph.on_resource[index]]
        for replica in range(resource.replicas):
            keyed = [
                (slot(op.kind, op.stage, m), Step(m, position))  # type: ignore[arg-type]  # devices run no transfers
                for m in range(replica, microbatches, resource.replicas)
                for position, op in passes
            ]
            orders[index, replica] = [step for _, step in sorted(keyed)]
    return make_program(graph, microbatches, orders)


def explicit(
    graph: StageGraph,
    microbatches: int,
    passes: dict[int, list[tuple[str, int, int]]],
    weight_keeps: Fraction = Fraction(1),
) -> Program:
    """Return the program of one list of (kind, stage, microbatch) for each device group, which is one device.

    Weight parts (kind ``W``) in the lists make it a program that splits the backward.
    """
    split = any(kind == "W" for order in passes.values() for kind, _, _ in order)
    count, position = len(graph.operations), graph.position
    orders = {
        (resource, 0): [
            Step(m, count + stage if kind == "W" else position[kind, stage])  # type: ignore[index]  # F or B
            for kind, stage, m in order
        ]
        for resource, order in passes.items()
    }
    return make_program(graph, microbatches, orders, split=split, weight_keeps=weight_keeps)


def one_stage_each(graph: StageGraph, schedule: str) -> None:
    """Raise BadInput unless every stage has one device for itself, which ``schedule`` is defined for."""
    found = not_one_each(graph, schedule)
    if found is not None:
        raise BadInput(found)

"""How do stages run an order that somebody wrote, or that a search has found? As a program, or a sentence why not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ...names import shown
from ..program import Action, Program, Step, refuse, side_by_side, unequal
from ..slots import Pass, listed
from .actions import Written, deadlock, incomplete

ACTION = re.compile(r"([0-9]{1,6})(SEND_F|RECV_F|SEND_B|RECV_B|F|R|B|I|W)([0-9]{1,6})")
Order = tuple[str, ...]  # of each rank its passes, ``0F0,0R0,0I0,0W0``: torch's compute-only CSV, and recomputation


def action_of(text: str) -> Action | None:
    """Return the action that ``text`` names, such as ``0F0``; None where it names none."""
    found = ACTION.fullmatch(text)
    return found and Action(int(found[1]), found[2], int(found[3]))  # type: ignore[arg-type]  # as matched


def order_of(written: Written) -> Order:
    """Return the passes of each rank as text."""
    return tuple(",".join(str(action) for action in row if action.computes) for row in written.rows)


def order_of_program(program: Program) -> Order:
    """Return the order of a program: a row for each device of the first pipeline that has passes, in the order of
    these."""
    graph = program.graph
    pipelines = side_by_side(graph)
    first = {resource.devices[0] for resource in graph.resources if not resource.is_link}
    rows: dict[int, str] = {}
    for lane in program.lanes:
        if lane.device is not None and lane.device in first and lane.steps:
            own = (Step(step.microbatch // pipelines, step.position) for step in lane.steps)
            rows[lane.device] = ",".join(map(program.name, own))
    return tuple(rows[device] for device in sorted(rows))


@lru_cache(maxsize=16)
def written_of(order: Order) -> Written:
    """Return the schedule that ``order`` says; BadInput where it is none."""
    rows = []
    for rank, text in enumerate(order):
        row = []
        for word in text.split(","):
            action = action_of(word)
            if action is None or not action.computes:
                raise BadInput(f"schedule.order[{rank}]: '{shown(word)}' isn't a pass such as 0F0")
            row.append(action)
        rows.append(tuple(row))
    return Written(tuple(rows))


@lru_cache(maxsize=16)
def flawed(order: Order) -> str | None:
    """Return what is wrong with an order, whatever the stages; None if nothing is."""
    try:
        written = written_of(order)
    except BadInput as error:
        return str(error)
    found = incomplete(written) or deadlock(written)
    return f"schedule.order: {found[0]}" if found else None


def unfit(graph: StageGraph, order: Order, microbatches: int) -> str | None:
    """Return why the stages of ``graph`` cannot run ``microbatches`` microbatches in an order, or None.

    Its ranks are the stages' groups of GPUs, in the order of these. Of equal pipelines each runs it.
    """
    found = flawed(order)
    if found is not None:
        return found
    written, homes = written_of(order), ranks_of(graph)
    if [written.homes.get(s) for s in range(written.stages)] != homes:
        said = [written.homes[s] for s in range(written.stages)]
        return f"the order's stages are on ranks {said}, those of the plan on {homes}"
    stored = sorted(written.apart - graph.recomputing)
    if stored:
        return f"the order recomputes stage {stored[0]}, which recomputes nothing here"
    uneven = unequal(graph, "a written order")
    if uneven is None and written.microbatches * side_by_side(graph) != microbatches:
        count = side_by_side(graph)
        each = f" in each of {count} pipelines" if count > 1 else ""
        return f"the order is of {written.microbatches} microbatches{each}, the mini-batch of {microbatches}"
    return uneven


def ranks_of(graph: StageGraph) -> list[int]:
    """Return which group of GPUs each stage is on; groups are numbered in the order of their GPUs."""
    groups = sorted({graph.resources[stage.resource].devices for stage in graph.stages})
    return [groups.index(graph.resources[stage.resource].devices) for stage in graph.stages]


def written_program(graph: StageGraph, microbatches: int, order: Order) -> Program:
    """Return the program in which every GPU runs its passes in the ``order``; BadInput says why it cannot."""
    refuse(unfit(graph, order, microbatches))
    written, ranks = written_of(order), dict.fromkeys(ranks_of(graph))  # in the order of their first stages
    rows = [_passes(written.rows[rank], written.split) for rank in ranks]
    return listed(graph, microbatches, None, lambda d, _: rows[d], split=written.split, apart=written.apart)


def _passes(row: Sequence[Action], split: bool) -> list[Pass]:
    """Return the passes of a rank. A stage of which only the weights' part is written has the other right before."""
    known = {(x.stage, x.microbatch) for x in row if x.kind in ("B", "I")}
    passes: list[Pass] = []
    for x in row:
        if x.kind == "W" and (x.stage, x.microbatch) not in known:
            passes.append(("B", x.stage, x.microbatch))
        passes.append(("B" if x.kind == "I" else x.kind, x.stage, x.microbatch))
        if split and x.kind == "B":
            passes.append(("W", x.stage, x.microbatch))
    return passes

"""What of schedules that somebody wrote down: are they whole, do they come through, how do stages run them?

A list of actions for each rank; and as a program, or a sentence why not.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Literal

from ..cost.stage_graph import StageGraph
from ..errors import BadInput
from ..names import shown
from .deadlock import Action, ActionKind, Alone, Meet, Ranks, Semantics, message, partner, stands
from .program import Program, Step, refuse, side_by_side, unequal
from .programs.slots import Pass, listed

Rows = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Written:
    """A schedule: a row of actions for each rank."""

    rows: Rows

    @cached_property
    def homes(self) -> dict[int, int]:
        """The rank of each stage."""
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row if action.computes}

    @cached_property
    def stages(self) -> int:
        """Number of stages."""
        return max(self.homes, default=-1) + 1

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return max((action.microbatch for row in self.rows for action in row), default=-1) + 1

    @cached_property
    def has_transfers(self) -> bool:
        """Whether sends and receives are among the actions."""
        return any(not action.computes for row in self.rows for action in row)

    @cached_property
    def split(self) -> bool:
        """Whether backwards come in two parts, or some do."""
        return any(action.kind in ("I", "W") for row in self.rows for action in row)

    @cached_property
    def apart(self) -> frozenset[int]:
        """The stages whose recomputation comes apart from backwards."""
        return frozenset(action.stage for row in self.rows for action in row if action.kind == "R")

    @cached_property
    def parted(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of the backwards whose part for inputs comes apart."""
        return frozenset((action.stage, action.microbatch) for row in self.rows for action in row if action.kind == "I")


MOST_SAID = 10
MOST_FOUND = 1000  # of what is missing: a number may be mistyped


def incomplete(written: Written) -> list[str]:
    """Return what is missing, there twice, on several ranks, or before what it needs on its own rank; the first few."""
    found = []
    where: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(written.rows):
        for at, action in enumerate(row):
            if action in where:
                found.append(f"{action} is there twice: on ranks {where[action][0]} and {rank}")
            elif action.computes and written.homes[action.stage] != rank:
                found.append(
                    f"{action} is on rank {rank}; stage {action.stage} is on rank {written.homes[action.stage]}"
                )
            where[action] = rank, at
    found += islice(_missing(written, where), MOST_FOUND)
    if not found:
        found = [*_out_of_order(written, where), *(_unmatched(written, where) if written.has_transfers else [])]
    more = f"and {'at least ' if len(found) >= MOST_FOUND else ''}{len(found) - MOST_SAID} more"
    return found[:MOST_SAID] + ([more] if len(found) > MOST_SAID else [])


def _missing(written: Written, where: Container[Action]) -> Iterator[str]:
    for stage in range(written.stages):
        for m in range(written.microbatches):
            if Action(stage, "F", m) not in where:
                yield f"{stage}F{m} is missing"
            if stage in written.apart and Action(stage, "R", m) not in where:
                yield f"{stage}R{m} is missing"
            parts = "".join(kind for kind in ("B", "I", "W") if Action(stage, kind, m) in where)
            if parts not in ("B", "IW") and not (parts == "W" and stage == 0):
                said = f"has {' and '.join(parts)}" if parts else "is missing"
                yield f"the backward of stage {stage}, microbatch {m} {said}"


def _out_of_order(written: Written, where: dict[Action, tuple[int, int]]) -> list[str]:
    found = []
    for action, (rank, at) in where.items():
        for needed in _needs(written, action):
            if needed in where and where[needed][0] == rank and where[needed][1] > at:
                found.append(f"rank {rank} runs {action} before {needed}, which it needs")
    return found


def _unmatched(written: Written, where: dict[Action, tuple[int, int]]) -> list[str]:
    found = []
    for action in where:
        if not action.computes and partner(action) not in where:
            found.append(f"{action} on rank {where[action][0]} has no {partner(action)}")
    for stage in range(written.stages):
        for m in range(written.microbatches):
            for kind, other in (("F", stage - 1), ("B", stage + 1)):
                needed = Action(stage, f"RECV_{kind}", m)  # type: ignore[arg-type]  # one of the kinds
                apart = 0 <= other < written.stages and written.homes[other] != written.homes[stage]
                if apart and needed not in where:
                    found.append(f"{needed} is missing on rank {written.homes[stage]}")
    return found


def _needs(written: Written, action: Action) -> list[Action]:
    """Return what must be over before an action, as far as the schedule says."""
    s, m = action.stage, action.microbatch

    def back(stage: int) -> ActionKind:
        return "I" if (stage, m) in written.parted else "B"

    def arriving(kind: Literal["F", "B"], neighbour: int) -> list[Action]:
        if not 0 <= neighbour < written.stages:
            return []
        if written.has_transfers and written.homes[neighbour] != written.homes[s]:
            return [Action(s, f"RECV_{kind}", m)]  # type: ignore[arg-type]  # one of the kinds
        return [Action(neighbour, "F" if kind == "F" else back(neighbour), m)]

    again = [Action(s, "R", m)] if s in written.apart else []
    match action.kind:
        case "F":
            return arriving("F", s - 1)
        case "R" | "SEND_F":
            return [Action(s, "F", m)]
        case "B" | "I":
            return [Action(s, "F", m), *again, *arriving("B", s + 1)]
        case "W":
            return [Action(s, "F", m), *again, *([Action(s, "I", m)] if s else arriving("B", s + 1))]
        case "SEND_B":
            return [Action(s, back(s), m)]
    return []


def deadlock(written: Written, semantics: Semantics = "free") -> list[str]:
    """Return where ranks of a complete schedule wait for each other for good, a sentence for each; empty if none does.

    Ranks run their actions in order. Without transfers among them a pass waits for those of other ranks that it needs.
    """
    homes = written.homes

    def known(action: Action, rank: int) -> Action | Meet:
        return action if action.computes else message(rank, action, homes[partner(action).stage])

    def listed(rank: int, action: Action) -> Alone | Meet:
        what = known(action, rank)
        return what if isinstance(what, Meet) else Alone(what, tuple(known(x, rank) for x in _needs(written, action)))

    ranks = Ranks({rank: [listed(rank, x) for x in row] for rank, row in enumerate(written.rows)}, semantics)
    found = []
    for rank, at in ranks.stuck().items():
        action = written.rows[rank][at]
        lacking = next((x for x in _needs(written, action) if known(x, rank) not in ranks.over), None)
        if not action.computes:
            found.append(stands(rank, action, homes[partner(action).stage]))
        else:
            found.append(f"rank {rank} stands at {action}, which waits for {lacking}")
    return found


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
        found = incomplete(written_of(order)) or deadlock(written_of(order))
    except BadInput as error:
        return str(error)
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
    uneven, count = unequal(graph, "a written order"), side_by_side(graph)
    if uneven is None and written.microbatches * count != microbatches:
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

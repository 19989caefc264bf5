"""Is a schedule that somebody wrote complete, in order, and free of deadlock? A list of actions for each rank."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal

from ..program import Action, ActionKind
from ..standstill import Meet, Pass, Ranks, Semantics, message, partner, stands

Rows = Sequence[Sequence[Action]]
Parted = Set[tuple[int, int]]


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
    found, parted = [], written.parted
    for action, (rank, at) in where.items():
        for needed in _needs(written, parted, action):
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


def _needs(written: Written, parted: Parted, action: Action) -> list[Action]:
    """Return what must be over before an action, as far as the schedule, whose :attr:`Written.parted` it is, says."""
    s, m = action.stage, action.microbatch

    def back(stage: int) -> ActionKind:
        return "I" if (stage, m) in parted else "B"

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
        case "R":
            return [Action(s, "F", m)]
        case "B" | "I":
            return [Action(s, "F", m), *again, *arriving("B", s + 1)]
        case "W":
            return [Action(s, "F", m), *again, *([Action(s, "I", m)] if s else arriving("B", s + 1))]
        case "SEND_F":
            return [Action(s, "F", m)]
        case "SEND_B":
            return [Action(s, back(s), m)]
    return []


def deadlock(written: Written, semantics: Semantics = "free") -> list[str]:
    """Return where ranks of a complete schedule wait for each other for good, a sentence for each; empty if none does.

    Ranks run their actions in order. Without transfers among them a pass waits for those of other ranks that it needs.
    """
    parted, homes = written.parted, written.homes

    def known(action: Action, rank: int) -> Action | Meet:
        return action if action.computes else message(rank, action, homes[partner(action).stage])

    def needs(action: Action, rank: int) -> tuple[Action | Meet, ...]:
        return tuple(known(x, rank) for x in _needs(written, parted, action))

    def listed(rank: int, action: Action) -> Pass | Meet:
        what = known(action, rank)
        return what if isinstance(what, Meet) else Pass(what, needs(action, rank))

    ranks = Ranks({rank: [listed(rank, x) for x in row] for rank, row in enumerate(written.rows)}, semantics)
    found = []
    for rank, at in ranks.stuck().items():
        action = written.rows[rank][at]
        lacking = next((x for x in _needs(written, parted, action) if known(x, rank) not in ranks.over), None)
        if not action.computes:
            found.append(stands(rank, action, homes[partner(action).stage]))
        else:
            found.append(f"rank {rank} stands at {action}, which waits for {lacking}")
    return found

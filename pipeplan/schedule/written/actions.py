"""Is a schedule that somebody wrote complete, in order, and free of deadlock? A list of actions for each rank.

Named semantics say what waits for what where sends and receives are among the actions. What comes through under
``blocking`` does so under all others but ``together``, and what comes through under any does so under ``free``.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from typing import Literal

Kind = Literal["F", "R", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
Semantics = Literal["blocking", "together", "batched", "rank", "lazy", "pair", "free"]
SEMANTICS: dict[Semantics, str] = {
    "blocking": "a send or receive keeps its rank until the other rank has come to it",
    "together": "sends and receives in a row happen when the other ranks have come to all of them, and keep their rank "
    "until then, as while connections are made",
    "batched": "sends and receives in a row are posted together and keep their rank until all are over",
    "rank": "each rank has one stream: its transfers happen in its order, whoever they are with",
    "lazy": "two ranks have one stream, whose first transfer keeps both of them: the communicator is made then",
    "pair": "two ranks have one stream: the transfers between them happen in the order of both",
    "free": "a transfer happens as soon as both ranks have come to it",
}


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """What a rank does: compute ``stage`` on ``microbatch``, or exchange with the rank of a neighbouring stage.

    ``I`` and ``W`` are the parts of a backward for inputs and for weights; ``R`` runs again what the stage recomputes,
    which otherwise the backward does. The stage of a SEND is the sender's, that of
    a RECV the receiver's.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def computes(self) -> bool:
        """Whether this is no transfer."""
        return self.kind in ("F", "R", "B", "I", "W")


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
        if not action.computes and _partner(action) not in where:
            found.append(f"{action} on rank {where[action][0]} has no {_partner(action)}")
    for stage in range(written.stages):
        for m in range(written.microbatches):
            for kind, other in (("F", stage - 1), ("B", stage + 1)):
                needed = Action(stage, f"RECV_{kind}", m)  # type: ignore[arg-type]  # one of the kinds
                apart = 0 <= other < written.stages and written.homes[other] != written.homes[stage]
                if apart and needed not in where:
                    found.append(f"{needed} is missing on rank {written.homes[stage]}")
    return found


def _partner(action: Action) -> Action:
    """Return the other end of a transfer."""
    step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
    kinds: dict[Kind, Kind] = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}
    return Action(action.stage + step, kinds[action.kind], action.microbatch)


def _needs(written: Written, parted: Parted, action: Action) -> list[Action]:
    """Return what must be over before an action, as far as the schedule, whose :attr:`Written.parted` it is, says."""
    s, m = action.stage, action.microbatch

    def back(stage: int) -> Kind:
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
    ranks = _Ranks(written, semantics)
    moving = True
    while moving:
        moving = False
        for rank in range(len(written.rows)):
            while ranks.step(rank):
                moving = True
        while ranks.transfer():
            moving = True
    return [sentence for rank in range(len(written.rows)) for sentence in ranks.stuck(rank)]


class _Ranks:
    """How far ranks have come: which transfers are posted, where they queue, and which of them keep their rank."""

    def __init__(self, written: Written, semantics: Semantics) -> None:
        self.written, self.semantics = written, semantics
        self.place = [0] * len(written.rows)
        self.done: set[Action] = set()
        self.posted: dict[Action, int] = {}  # with the rank
        self.queues: dict[Hashable, list[Action]] = {}
        self.waiting: list[list[Action]] = [[] for _ in written.rows]  # transfers that keep a rank
        self.fellows: dict[Action, list[Action]] = {}  # those that were posted with one, where they happen together
        self.met: set[frozenset[int]] = set()

    def step(self, rank: int) -> bool:
        """Let a rank come to its next action, or its next transfers in a row; return whether it did."""
        row, place, semantics = self.written.rows[rank], self.place[rank], self.semantics
        if place == len(row) or any(action not in self.done for action in self.waiting[rank]):
            return False
        self.waiting[rank] = []
        action, group = row[place], [row[place]]
        if action.computes:
            if any(needed not in self.done for needed in _needs(self.written, self.written.parted, action)):
                return False
            self.done.add(action)
        else:
            if semantics in ("batched", "together"):
                group = list(takewhile(lambda x: not x.computes, row[place:]))
            for one in group:
                self.posted[one] = rank
                if stream := self._stream(rank, one):
                    self.queues.setdefault(stream, []).append(one)
            if semantics == "together":
                self.fellows.update(dict.fromkeys(group, group))
            alone = semantics == "lazy" and self._ends(action) not in self.met
            if alone or semantics in ("blocking", "batched", "together"):
                self.waiting[rank] = group
        self.place[rank] += len(group)
        return True

    def transfer(self) -> bool:
        """Let every transfer happen that both ends can now; return whether any did."""
        moved = False
        for action in list(self.posted):
            other = _partner(action)
            if action in self.done or not (self._ready(action) and self._ready(other)):
                continue
            self.done.update((action, other))
            self.met.add(self._ends(action))
            for end in (action, other):
                if stream := self._stream(self.posted[end], end):
                    self.queues[stream].pop(0)
            moved = True
        for action in self.done & self.posted.keys():
            del self.posted[action]
        return moved

    def _ready(self, action: Action) -> bool:
        """Whether a transfer was posted, is the next of its stream, and what happens with it is posted elsewhere."""
        if action not in self.posted:
            return False
        stream = self._stream(self.posted[action], action)
        known = (_partner(fellow) for fellow in self.fellows.get(action, ()))
        return (stream is None or self.queues[stream][0] == action) and all(
            x in self.posted or x in self.done for x in known
        )

    def _ends(self, action: Action) -> frozenset[int]:
        homes = self.written.homes
        return frozenset((homes[action.stage], homes[_partner(action).stage]))

    def _stream(self, rank: int, action: Action) -> Hashable | None:
        if self.semantics == "rank":
            return (rank,)
        return (rank, self._ends(action)) if self.semantics in ("pair", "lazy") else None

    def stuck(self, rank: int) -> Iterator[str]:
        """Say where a rank stands, if it isn't through."""
        row, at, written = self.written.rows[rank], self.place[rank], self.written
        kept = next((action for action in self.waiting[rank] if action not in self.done), None)
        if kept is not None:
            other = written.homes[_partner(kept).stage]
            yield f"rank {rank} stands at {kept}, until rank {other} comes to {_partner(kept)}"
        elif at < len(row):
            lacking = next((x for x in _needs(written, written.parted, row[at]) if x not in self.done), None)
            yield f"rank {rank} stands at {row[at]}" + (f", which waits for {lacking}" if lacking else "")

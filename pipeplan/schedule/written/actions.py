"""Is a schedule that somebody wrote complete, in order, and free of deadlock? A list of actions for each rank.

Named semantics say what waits for what where sends and receives are among the actions. What comes through under
``blocking`` does so under all others but ``together``, and what comes through under any does so under ``free``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
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
    rows, place = written.rows, [0] * len(written.rows)
    done: set[Action] = set()
    posted: dict[Action, tuple[int, int]] = {}
    queues: dict[Hashable, list[Action]] = {}
    waiting: list[list[Action]] = [[] for _ in rows]  # transfers that keep a rank
    fellows: dict[Action, list[Action]] = {}  # those that were posted with one, where they happen together
    met: set[frozenset[int]] = set()
    homes, parted = written.homes, written.parted

    def ends(action: Action) -> frozenset[int]:
        return frozenset((homes[action.stage], homes[_partner(action).stage]))

    def streams(rank: int, action: Action) -> Hashable | None:
        return {"rank": rank, "pair": (rank, ends(action)), "lazy": (rank, ends(action))}.get(semantics)

    def first(rank: int, action: Action) -> bool:
        queue = queues.get(streams(rank, action))
        return queue is None or queue[0] == action

    def known(action: Action) -> bool:
        return all(_partner(fellow) in posted or _partner(fellow) in done for fellow in fellows.get(action, ()))

    def post(rank: int, action: Action) -> None:
        posted[action] = rank, place[rank]
        stream = streams(rank, action)
        if stream is not None:
            queues.setdefault(stream, []).append(action)

    def transfer() -> bool:
        moved = False
        for action in list(posted):
            other = _partner(action)
            if action in done or other not in posted:
                continue
            ranks = posted[action][0], posted[other][0]
            if first(ranks[0], action) and first(ranks[1], other) and known(action) and known(other):
                done.update((action, other))
                met.add(ends(action))
                for rank, end in zip(ranks, (action, other), strict=True):
                    stream = streams(rank, end)
                    if stream is not None:
                        queues[stream].pop(0)
                moved = True
        for action in [action for action in posted if action in done]:
            del posted[action]
        return moved

    def step(rank: int) -> bool:
        if any(action not in done for action in waiting[rank]):
            return False
        waiting[rank] = []
        if place[rank] == len(rows[rank]):
            return False
        action = rows[rank][place[rank]]
        if action.computes:
            if any(needed not in done for needed in _needs(written, parted, action)):
                return False
            done.add(action)
            place[rank] += 1
            return True
        group = [action]
        if semantics in ("batched", "together"):
            rest = rows[rank][place[rank] :]
            group = list(rest[: next((i for i, x in enumerate(rest) if x.computes), len(rest))])
        for one in group:
            post(rank, one)
            place[rank] += 1
        if semantics == "together":
            fellows.update(dict.fromkeys(group, group))
        if semantics in ("blocking", "batched", "together") or (semantics == "lazy" and ends(action) not in met):
            waiting[rank] = group
        return True

    moving = True
    while moving:
        moving = False
        for rank in range(len(rows)):
            while step(rank):
                moving = True
        while transfer():
            moving = True
    return _stuck(written, place, waiting, lambda action: action in done)


def _stuck(
    written: Written, place: Sequence[int], waiting: Sequence[Sequence[Action]], over: Callable[[Action], bool]
) -> list[str]:
    found, parted = [], written.parted
    for rank, row in enumerate(written.rows):
        kept = [action for action in waiting[rank] if not over(action)]
        if kept:
            other = written.homes[_partner(kept[0]).stage]
            found.append(f"rank {rank} stands at {kept[0]}, until rank {other} comes to {_partner(kept[0])}")
        elif place[rank] < len(row):
            action = row[place[rank]]
            lacking = next((x for x in _needs(written, parted, action) if not over(x)), None)
            found.append(f"rank {rank} stands at {action}" + (f", which waits for {lacking}" if lacking else ""))
    return found

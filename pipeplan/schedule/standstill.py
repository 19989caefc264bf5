"""Where do ranks wait for each other for good? Follows what each does, under rules of what sends and receives wait for.

What comes through under ``blocking`` does so under all others but ``together``, and what comes through under any does
so under ``free``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

from .program import Action

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


class Meet(NamedTuple):
    """What ``ranks`` do together, none before all have come to it: a message, or a sum."""

    ranks: frozenset[int]
    what: Hashable


class Alone(NamedTuple):
    """What a rank does alone, once the passes and meetings that it ``needs`` are over."""

    what: Hashable
    needs: tuple[Hashable, ...]


class Ranks:
    """How far ranks come with their lists; None is what waits for nothing.

    What happens doesn't depend on which rank goes first, so following it once is a proof. Linear in the operations.
    """

    def __init__(self, lists: Mapping[int, Sequence[Meet | Alone | None]], semantics: Semantics = "blocking") -> None:
        self.lists, self.semantics = lists, semantics
        self.over: set[Hashable] = set()
        self._place = dict.fromkeys(lists, 0)
        self._kept: dict[int, Sequence[Meet]] = dict.fromkeys(lists, ())  # meetings that keep a rank
        self._come: dict[Meet, set[int]] = {}  # who has come to those that are not over
        self._queues: dict[Hashable, deque[Meet]] = defaultdict(deque)
        self._fellows: dict[tuple[int, Meet], Sequence[Meet]] = {}  # posted with one, where they happen together
        self._met: set[frozenset[int]] = set()
        self._asking: dict[Hashable, list[int]] = defaultdict(list)
        self._awake = list(lists)
        while self._awake:
            rank = self._awake.pop()
            while self._step(rank):
                pass

    def _step(self, rank: int) -> bool:
        """Let a rank come to its next operation, or its next meetings in a row; return whether it did."""
        own, at = self.lists[rank], self._place[rank]
        if self._kept[rank] and next(self._waits(rank), None) is not None:
            return False
        while at < len(own) and own[at] is None:
            at += 1
        self._place[rank], self._kept[rank] = at, ()
        item = own[at] if at < len(own) else None
        if isinstance(item, Meet):
            grouped = self.semantics in ("batched", "together")
            group = takewhile(lambda x: isinstance(x, Meet), own[at:]) if grouped else (item,)
            self._post(rank, [x for x in group if isinstance(x, Meet)])
        elif item is not None:
            lacking = next((x for x in item.needs if x not in self.over), None)
            if lacking is not None:
                self._asking[lacking].append(rank)
                return False
            self._place[rank] += 1
            self._end(item.what)
        return item is not None

    def _waits(self, rank: int) -> Iterator[int]:
        """Places among the meetings that keep a rank of those that are not over."""
        return (i for i, meet in enumerate(self._kept[rank]) if rank in self._come.get(meet, ()))

    def _post(self, rank: int, group: Sequence[Meet]) -> None:
        """Have a rank come to meetings; those take place that now can."""
        first = self.semantics == "lazy" and group[0].ranks not in self._met
        if first or self.semantics in ("blocking", "batched", "together"):
            self._kept[rank] = group
        self._place[rank] += len(group)
        candidates = list(group)
        for meet in group:
            self._come.setdefault(meet, set()).add(rank)
            if stream := self._stream(rank, meet):
                self._queues[stream].append(meet)
            if self.semantics == "together":
                self._fellows[rank, meet] = group
                candidates += (x for other in meet.ranks for x in self._fellows.get((other, meet), ()))
        while candidates:
            meet = candidates.pop()
            if meet in self._come and self._ready(meet):
                candidates += self._happens(meet)

    def _ready(self, meet: Meet) -> bool:
        """Whether all have come to a meeting, it is the next of its streams, and all come to what happens with it."""
        if len(self._come[meet]) < len(meet.ranks):
            return False
        if self.semantics in ("blocking", "batched", "free"):
            return True
        fellows = (x for rank in meet.ranks for x in self._fellows.get((rank, meet), ()))
        streams = filter(None, (self._stream(rank, meet) for rank in meet.ranks))
        return all(x not in self._come or len(self._come[x]) == len(x.ranks) for x in fellows) and all(
            self._queues[stream][0] == meet for stream in streams
        )

    def _happens(self, meet: Meet) -> list[Meet]:
        """End a meeting; return those that are next in its streams."""
        del self._come[meet]
        self._met.add(meet.ranks)
        self._end(meet)
        self._awake += meet.ranks
        if not self._queues:
            return []
        queues = [self._queues[stream] for rank in meet.ranks if (stream := self._stream(rank, meet))]
        for queue in queues:
            queue.popleft()
        return [queue[0] for queue in queues if queue]

    def _end(self, what: Hashable) -> None:
        self.over.add(what)
        self._awake += self._asking.pop(what, ())

    def _stream(self, rank: int, meet: Meet) -> Hashable | None:
        if self.semantics == "rank":
            return (rank,)
        return (rank, meet.ranks) if self.semantics in ("pair", "lazy") else None

    def stuck(self) -> dict[int, int]:
        """Return where each rank stands for good: rank to place in its list; nobody if all come through."""
        found = {}
        for rank, own in self.lists.items():
            kept = next(self._waits(rank), None)
            at = self._place[rank] - (0 if kept is None else len(self._kept[rank]) - kept)
            if at < len(own):
                found[rank] = at
        return found

    def circle(self) -> list[int]:
        """Return the ranks that wait for each other where everything blocks, or else those in a row that wait for one
        that is through."""
        awaited = {rank: self._awaited(self.lists[rank][at]) for rank, at in self.stuck().items()}
        if not awaited:
            return []
        import networkx as nx  # only where something is wrong

        waits = nx.DiGraph(awaited.items())
        try:
            return [rank for rank, _ in nx.find_cycle(waits, min(awaited))]
        except nx.NetworkXNoCycle:
            return [rank for rank in nx.dfs_preorder_nodes(waits, min(awaited)) if rank in awaited]

    def _awaited(self, item: Meet | Alone | None) -> int:
        assert isinstance(item, Meet), "a rank only waits for others"
        return min(item.ranks - self._come[item])


def partner(action: Action) -> Action:
    """Return the other end of a transfer."""
    call, kind = action.kind.split("_")
    step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
    other = f"{'RECV' if call == 'SEND' else 'SEND'}_{kind}"
    return Action(action.stage + step, other, action.microbatch)  # type: ignore[arg-type]  # one of the kinds


def message(rank: int, action: Action, peer: int) -> Meet:
    """Return the meeting of ``rank`` with ``peer`` that a transfer is."""
    call, kind = action.kind.split("_")
    source, sender = (rank, action.stage) if call == "SEND" else (peer, action.stage + (1 if kind == "B" else -1))
    return Meet(frozenset((rank, peer)), (kind, source, sender, action.microbatch, action.covers))


def stands(rank: int, action: Action, peer: int | None = None) -> str:
    """Say that ``rank`` stands at a transfer for good; ``peer`` where the transfer doesn't tell it."""
    other = action.peer if peer is None else peer
    return f"rank {rank} stands at {action}, until rank {other} comes to {partner(action)}"

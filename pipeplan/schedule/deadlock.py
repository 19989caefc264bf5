"""Can ranks wait for each other for ever? How far each comes with its list, and a proof that a plan's come through.

Ranks send, receive and sum, and compute in between. What a transfer keeps from going on is a matter of whose runtime it
is; :data:`SEMANTICS` says what each waits for. What comes through under ``blocking`` does so under all others but
``together``, and what comes through under any does so under ``free``. Of a plan every process is given its own list;
when a send waits for its receive and each process does one thing after the other, two lists in unfortunate orders stop
for good.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import lcm
from typing import Literal, NamedTuple

from ..plan import Plan
from .kinds import graph_of, kind_of, plan_timeline
from .pattern import most_in_flight, starts_of
from .program import Program, device_of, unroll
from .simulate import simulate
from .timeline import Timeline

ActionKind = Literal["F", "R", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does: compute ``stage`` on ``microbatch``, or exchange with ``peer`` (a platform device), which is
    None where the rank of the neighbouring stage is meant.

    ``I`` and ``W`` are the parts of a backward for inputs and for weights; ``R`` runs again what the stage recomputes,
    which otherwise the backward does. The stage of a SEND is the sender's, that of a RECV the receiver's. What
    ``covers`` several microbatches names the last of them.
    """

    stage: int
    kind: ActionKind
    microbatch: int
    peer: int | None = None
    covers: int = 1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def computes(self) -> bool:
        """Whether this is no transfer."""
        return self.kind in ("F", "R", "B", "I", "W")


def lower(program: Program, start_ns: Sequence[Sequence[int]]) -> dict[int, list[Action]]:
    """Return each device's operations with its sends and receives, in one total order of the whole program.

    ``start_ns[microbatch][position]`` (a simulated timeline) gives the order. A send and its receive enter two lists
    at the same moment, so under rendezvous semantics the earliest unfinished exchange can always proceed and nothing
    deadlocks. Neighbours on different devices exchange even when their cut has no bytes.
    """
    graph, works = program.graph, program.operations
    order = sorted(
        (start_ns[m := step.microbatch][at := step.position], works[at].duration_ns, m, at)
        for lane in program.lanes
        for step in lane.steps
    )
    ranks: dict[int, list[Action]] = {lane.device: [] for lane in program.lanes if lane.device is not None}

    def exchange(kind: Literal["F", "B"], sender: int, m: int) -> None:
        receiver = sender + 1 if kind == "F" else sender - 1
        covers = program.batch if kind == "B" else 1
        here, there = device_of(graph, sender, m), device_of(graph, receiver, m)
        ranks[here].append(Action(sender, "SEND_F" if kind == "F" else "SEND_B", m, there, covers))
        ranks[there].append(Action(receiver, "RECV_F" if kind == "F" else "RECV_B", m, here, covers))

    last = len(graph.stages) - 1
    for _, _, m, position in order:
        work = works[position]
        if work.kind == "SEND_F" or work.kind == "SEND_B":
            exchange("F" if work.kind == "SEND_F" else "B", work.stage, m)
            continue
        ranks[device_of(graph, work.stage, m)].append(Action(work.stage, work.kind, m, None, work.covers))
        if work.kind == "F" or work.kind == "B":
            neighbour = work.stage + (1 if work.kind == "F" else -1)
            silent = 0 <= neighbour <= last and ("SEND_" + work.kind, work.stage) not in graph.position
            if silent and graph.stages[neighbour].resource != graph.stages[work.stage].resource:
                exchange(work.kind, work.stage, m)
    return ranks


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


MOST_MICROBATCHES = 2000  # that a plan's proof unrolls, where replica counts have a large common multiple
MOST_STEPS = 500_000  # operations of those, which take some seconds


def deadlock(ranks: Mapping[int, Sequence[Action]]) -> list[str]:
    """Return how ``ranks`` (device to its operations in order) deadlock, one sentence per rank involved; [] if never.

    Every send and receive blocks its rank until the peer stands at the matching call. What runs under this rule runs
    under every weaker one.
    """
    found = Ranks(
        {rank: [None if x.peer is None else message(rank, x, x.peer) for x in own] for rank, own in ranks.items()}
    )
    at = found.stuck()
    return [stands(rank, ranks[rank][at[rank]]) for rank in found.circle()]


def program_deadlock(program: Program, timeline: Timeline | None = None) -> list[str]:
    """Return how a program deadlocks when it is lowered in the order of its simulated run; [] if it doesn't."""
    timeline = timeline or simulate(program)
    return deadlock(lower(timeline.program, timeline.start_ns))


def shortened(plan: Plan, operations: int) -> Plan:
    """Return a plan that drains with shorter mini-batches where one has more than :data:`MOST_STEPS` operations, of
    which each microbatch has so many; in whole rounds of the replicas. One whose order is written stays as it is."""
    kind, schedule = kind_of(plan), plan.schedule
    round_ = lcm(*(stage.replicas for stage in plan.allocation.stages))
    fewer = max(1, MOST_STEPS // (operations * round_)) * round_
    if not kind.drains or kind.written or fewer >= schedule.mini_batch:
        return plan
    policy = replace(plan.policy, accumulate=fewer)
    return replace(plan, schedule=replace(schedule, microbatches=fewer), policy=policy)


def plan_deadlock(plan: Plan) -> list[str]:
    """Return how a valid plan's own order deadlocks once lowered; [] if it doesn't.

    Unrolls the fill, two rounds of a pattern's steady state and the drain; later rounds repeat them. With very many
    stages, as much of that as :data:`MOST_STEPS` are. Of the other kinds of schedules it is the order of the simulated
    run, of mini-batches that are :func:`shortened`.
    """
    graph = graph_of(plan)
    if plan.pattern is None:
        timeline = plan_timeline(shortened(plan, len(graph.operations)))
        return program_deadlock(timeline.program, timeline)
    rounds = lcm(*(resource.replicas for resource in graph.resources))
    fill = most_in_flight(graph, starts_of(plan.pattern), plan.pattern.period_ns)
    most = min(MOST_MICROBATCHES, max(2, MOST_STEPS // len(graph.operations)))
    return program_deadlock(unroll(graph, plan.pattern, min(fill + 2 * rounds, most)))

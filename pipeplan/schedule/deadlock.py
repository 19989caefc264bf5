"""Can the processes of a plan wait for each other for ever? A proof that they cannot, or the cycle of those that do.

Every process is given its own list of passes, sends and receives. When a send waits for its receive and each process
does one thing after the other, two lists in unfortunate orders stop for good.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import NamedTuple

from ..plan import Plan
from .kinds import graph_of, kind_of, plan_timeline
from .pattern import most_in_flight, starts_of
from .program import Program, RankOp, lower, unroll
from .simulate import simulate
from .timeline import Timeline

MOST_MICROBATCHES = 2000  # that a plan's proof unrolls, where replica counts have a large common multiple
MOST_STEPS = 500_000  # operations of those, which take some seconds


class Meet(NamedTuple):
    """What ``ranks`` do together, none before all have come to it: a message, or a sum."""

    ranks: frozenset[int]
    what: Hashable


def standstill(lists: Mapping[int, Sequence[Meet | None]]) -> tuple[dict[int, int], list[int]]:
    """Return where each rank stands for good (rank to index in its list), and which of them wait for each other.

    Nothing and nobody if all come through. Everything blocks: every operation is a rank's only one until it is over,
    and a meeting takes place when all its ranks have come to it. What runs under these rules runs under every weaker
    one. With them the run is determined, so following it once is a proof. Linear in the operations.
    """
    place, work = dict.fromkeys(lists, 0), list(lists)
    come: dict[Meet, int] = {}  # how many ranks wait at each
    while work:
        rank = work.pop()
        own, at = lists[rank], place[rank]
        while at < len(own):
            meet = own[at]
            if meet is not None:
                come[meet] = come.get(meet, 0) + 1
                if come[meet] < len(meet.ranks):
                    break
                del come[meet]
                for other in meet.ranks:
                    if other != rank:
                        place[other] += 1
                        work.append(other)
            at += 1
        place[rank] = at

    def next_of(rank: int) -> Meet | None:
        return lists[rank][place[rank]] if place.get(rank, 0) < len(lists.get(rank, ())) else None

    stuck = {rank: at for rank, at in place.items() if at < len(lists[rank])}
    return stuck, _circle({rank: _awaited(rank, next_of) for rank in stuck}) if stuck else []


def _awaited(rank: int, next_of: Callable[[int], Meet | None]) -> int:
    """Return the first of the ranks that one waits for."""
    meet = next_of(rank)
    assert meet is not None, "a rank only waits for others"
    return min(other for other in meet.ranks - {rank} if next_of(other) != meet)


def _circle(awaited: Mapping[int, int]) -> list[int]:
    """Return the ranks that wait for each other, or else those in a row that wait for one that is through."""
    import networkx as nx  # only where something is wrong

    waits = nx.DiGraph(awaited.items())
    try:
        return [rank for rank, _ in nx.find_cycle(waits, min(awaited))]
    except nx.NetworkXNoCycle:
        return [rank for rank in nx.dfs_preorder_nodes(waits, min(awaited)) if rank in awaited]


def deadlock(ranks: Mapping[int, Sequence[RankOp]]) -> list[str]:
    """Return how ``ranks`` (device to its operations in order) deadlock, one sentence per rank involved; [] if never.

    Every send and receive blocks its rank until the peer stands at the matching call (:func:`standstill`).
    """
    lists = {rank: [_meet(rank, op) for op in operations] for rank, operations in ranks.items()}
    place, chain = standstill(lists)
    stuck = {rank: ranks[rank][at] for rank, at in place.items()}
    return [_sentence(rank, stuck, ranks, place) for rank in chain]


def _meet(rank: int, op: RankOp) -> Meet | None:
    if op.peer is None:
        return None
    call, kind = op.kind.split("_")
    step = 1 if kind == "F" else -1
    sender = op.stage if call == "SEND" else op.stage - step
    source = rank if call == "SEND" else op.peer
    return Meet(frozenset((rank, op.peer)), (kind, source, sender, op.microbatch, op.covers))


def _sentence(
    rank: int, stuck: Mapping[int, RankOp], ranks: Mapping[int, Sequence[RankOp]], place: Mapping[int, int]
) -> str:
    op = stuck[rank]
    assert op.peer is not None, "a rank only waits in an exchange"
    waits = f"rank {rank}, operation {place[rank] + 1} of {len(ranks[rank])}, {_what(op)}"
    if op.peer in stuck:
        return f"{waits}; rank {op.peer} is at operation {place[op.peer] + 1}, {_what(stuck[op.peer])}"
    return f"{waits}; rank {op.peer} has run all of its operations"


def _what(op: RankOp) -> str:
    if op.peer is None:
        return f"computes {op.kind} of microbatch {op.microbatch} on stage {op.stage}"
    call, kind = op.kind.split("_")
    what = "activation" if kind == "F" else "gradient"
    verb, way = ("sends", "to") if call == "SEND" else ("receives", "from")
    side = "of" if call == "SEND" else "for"
    return f"{verb} the {what} {side} stage {op.stage}, microbatch {op.microbatch}, {way} rank {op.peer}"


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

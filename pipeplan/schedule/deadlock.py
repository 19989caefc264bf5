"""Can the processes of a plan wait for each other for ever? A proof that they cannot, or the cycle of those that do.

Every process is given its own list of passes, sends and receives. When a send waits for its receive and each process
does one thing after the other, two lists in unfortunate orders stop for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

from ..plan import Plan
from .kinds import graph_of, plan_timeline
from .pattern import most_in_flight, starts_of
from .program import Program, RankOp, lower, unroll
from .simulate import simulate
from .timeline import Timeline

MOST_MICROBATCHES = 2000  # that a plan's proof unrolls, where replica counts have a large common multiple


def deadlock(ranks: Mapping[int, Sequence[RankOp]]) -> list[str]:
    """Return how ``ranks`` (device to its operations in order) deadlock, one sentence per rank involved; [] if never.

    Every send and receive blocks its rank until the peer stands at the matching call (rendezvous, no buffers, one
    operation at a time): what runs under these rules runs under every weaker one. With them the run is determined, so
    following it once is a proof. Linear in the operations.
    """
    place = dict.fromkeys(ranks, 0)
    work = list(ranks)
    while work:
        rank = work.pop()
        operations = ranks[rank]
        while place[rank] < len(operations):
            op = operations[place[rank]]
            if op.peer is not None:
                if not _meets(rank, op, ranks, place):
                    break
                place[op.peer] += 1
                work.append(op.peer)
            place[rank] += 1
    stuck = {rank: ranks[rank][at] for rank, at in place.items() if at < len(ranks[rank])}
    if not stuck:
        return []
    chain = [min(stuck)]
    while (peer := stuck[chain[-1]].peer) in stuck and peer not in chain:
        assert peer is not None, "a rank only waits in an exchange"
        chain.append(peer)
    if peer in chain:
        chain = chain[chain.index(peer) :]
    return [_sentence(rank, stuck, ranks, place) for rank in chain]


def _meets(rank: int, op: RankOp, ranks: Mapping[int, Sequence[RankOp]], place: Mapping[int, int]) -> bool:
    assert op.peer is not None, "an exchange has a peer"
    others = ranks.get(op.peer, ())
    at = place.get(op.peer, 0)
    if at >= len(others):
        return False
    return _matching(op, rank) == others[at]


def _matching(op: RankOp, rank: int) -> RankOp:
    """Return the peer's side of an exchange."""
    call, kind = op.kind.split("_")
    step = 1 if kind == "F" else -1
    other = ("RECV_" if call == "SEND" else "SEND_") + kind
    stage = op.stage + step if call == "SEND" else op.stage - step
    return RankOp(other, stage, op.microbatch, rank, op.covers)  # type: ignore[arg-type]  # one of the four


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


def plan_deadlock(plan: Plan) -> list[str]:
    """Return how a valid plan's own order deadlocks once lowered; [] if it doesn't.

    Unrolls the fill, two rounds of a pattern's steady state and the drain; later rounds repeat them. Of the other kinds
    of schedules it is the order of the simulated run.
    """
    if plan.pattern is None:
        timeline = plan_timeline(plan)
        return program_deadlock(timeline.program, timeline)
    graph = graph_of(plan)
    rounds = lcm(*(resource.replicas for resource in graph.resources))
    fill = most_in_flight(graph, starts_of(plan.pattern), plan.pattern.period_ns)
    return program_deadlock(unroll(graph, plan.pattern, min(fill + 2 * rounds, MOST_MICROBATCHES)))

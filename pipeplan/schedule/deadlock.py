"""Can the processes of a plan wait for each other for ever? A proof that they cannot, or the cycle of those that do.

Every process is given its own list of passes, sends and receives. When a send waits for its receive and each process
does one thing after the other, two lists in unfortunate orders stop for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

from ..plan import Plan
from .kinds import graph_of, kind_of, plan_timeline
from .pattern import most_in_flight, starts_of
from .program import Action, Program, lower, unroll
from .simulate import simulate
from .standstill import Ranks, message, stands
from .timeline import Timeline

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

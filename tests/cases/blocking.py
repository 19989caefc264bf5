"""Would the instructions of a run come through if everything that ranks do together blocked them? A proof.

Sums and updates of replicas included. A transport never blocks so much by itself, but debuggers and
``CUDA_LAUNCH_BLOCKING=1`` make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from pipeplan.errors import PipeplanError
from pipeplan.integers import ceil_div
from pipeplan.plan import Plan
from pipeplan.runtime.lowering.instructions import (
    Agree,
    Instruction,
    Norm,
    Receive,
    Reduce,
    ReduceTied,
    Save,
    Send,
    Update,
    edge_into,
    sentence,
)
from pipeplan.runtime.lowering.lowered_run import LoweredRun, lower_run
from pipeplan.schedule.deadlock import MOST_MICROBATCHES, MOST_STEPS, Meet, Ranks, shortened
from pipeplan.schedule.kinds import graph_of, kind_of
from pipeplan.schedule.pattern import most_in_flight, starts_of

ROUNDS = 3  # of the repeated part that a proof follows


def run_deadlock(plan: Plan) -> list[str]:
    """Return how a run of ``plan`` deadlocks when everything blocks, one sentence per rank involved; [] if it doesn't.

    [] as well where devices decide on the way what they do next, for a plan that cannot be run, and where following it
    for one update would take more than :data:`MOST_STEPS`. Where updates are too rare for that they are followed as if
    they came whenever the pipeline is full again; drained mini-batches are :func:`shortened`.
    """
    if kind_of(plan).by_arrival:
        return []
    graph = graph_of(plan)
    plan = shortened(plan, len(graph.operations))
    if plan.pattern is not None and not plan.policy.drains and len(graph.operations) * plan.interval > MOST_STEPS:
        round_ = lcm(*(resource.replicas for resource in graph.resources))
        held = most_in_flight(graph, starts_of(plan.pattern), plan.pattern.period_ns)
        sooner = ceil_div(held + 1, round_) * round_
        if sooner >= plan.interval or len(graph.operations) * sooner > MOST_STEPS:
            return []
        plan = replace(plan, policy=replace(plan.policy, accumulate=sooner))
    try:
        lowered = lower_run(plan, 1)
        steps = len(lowered.graph.operations) * lowered.interval
        followed = MOST_STEPS if plan.policy.drains else 4 * MOST_STEPS  # a pattern needs several to come round
        most = max(1, min(MOST_MICROBATCHES // lowered.interval, followed // steps))
        if most > 1:
            rounds = ROUNDS * ceil_div(max(lowered.filled, 1), lowered.interval) + ROUNDS
            lowered = lower_run(plan, min(most, rounds))
    except PipeplanError:
        return []
    return deadlock(lowered)


def deadlock(lowered: LoweredRun) -> list[str]:
    """Return how a run deadlocks when everything blocks, one sentence per rank involved; [] if it doesn't."""
    lists = {rank: [_meet(lowered, rank, x) for x in own] for rank, own in enumerate(lowered.instructions)}
    ranks = Ranks(lists)
    place, chain = ranks.stuck(), ranks.circle()
    words = []
    for rank, other in zip(chain, [*chain[1:], *chain[:1]], strict=True):
        own: Sequence[Instruction] = lowered.instructions[rank]
        there = lowered.instructions[other][place[other]]
        words.append(
            f"rank {rank}, operation {place[rank] + 1} of {len(own)}, waits in {sentence(own[place[rank]])}; "
            f"rank {other} is in {sentence(there)}"
        )
    return words


def _meet(lowered: LoweredRun, rank: int, instruction: Instruction) -> Meet | None:
    """Return whom ``rank`` meets in ``instruction``, None if nobody."""
    match instruction:
        case Send(kind, stage, microbatch, peer, covers):
            return Meet(frozenset((rank, peer)), ((kind, stage), rank, microbatch, covers))
        case Receive(kind, stage, microbatch, peer, covers):
            return Meet(frozenset((rank, peer)), (edge_into(kind, stage), peer, microbatch, covers))
        case Reduce(stage, _) | Update(stage, _):
            return _together(lowered, (stage,), instruction)
        case ReduceTied(stages, _):
            return _together(lowered, stages, instruction)
        case Agree() | Norm() | Save():
            return Meet(frozenset(range(len(lowered.devices))), instruction)
        case _:
            return None


def _together(lowered: LoweredRun, stages: Sequence[int], instruction: Instruction) -> Meet | None:
    ranks = frozenset(rank for s in stages for rank in lowered.ranks_of(s))
    return Meet(ranks, instruction) if len(ranks) > 1 else None

"""How long should a run have taken with its own times? What the simulation leaves to explain is the model's error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from ...cost.time_model import update_share_ns
from ...schedule.program import PASSES, Program, make_program
from ..lowering.instructions import Edge, Pass, edge_into
from ..lowering.lowered_run import LoweredRun
from .times import Activity, RankMeasurement, covers, median, settled, typical


def calibrated(
    lowered: LoweredRun,
    occupied: Mapping[tuple[Activity, int], int],
    handed: Mapping[Edge, HandOver],
    waits_ns: Sequence[int],
) -> Program:
    """Return the run's program, its devices in the same order (or under the same rules), as long as measured.

    ``occupied`` is what each stage's passes and updates take of their process, sends included; updates are charged as
    costs charge them: to backwards by shares, or to the end of a drained batch. A message is
    there so long after its send as it was ``handed`` over, at once where nobody waited for any; as that was measured
    beside everything else that travels, transfers don't wait for each other. ``waits_ns`` are each stage's waits at
    updates: a drained mini-batch ends with them, otherwise backwards are charged their share.
    """
    program, decides = lowered.program, lowered.by_arrival
    graph = program.graph
    policy = replace(graph.policy, accumulate=lowered.interval)
    stages = []
    for s, cost in enumerate(graph.stages):
        replicas = graph.resources[cost.resource].replicas
        step = occupied["UPDATE", s]
        share = update_share_ns(policy, step + (0 if lowered.drains else waits_ns[s]), replicas)
        stages.append(
            replace(
                cost,
                forward_ns=occupied["F", s],
                backward_ns=occupied["R", s] + occupied["B", s] + occupied["W", s] + int(share),
                recompute_ns=occupied["R", s],
                backward_weight_ns=occupied["W", s] + int(share),
                sync_period_ns=0,
                update_ns=waits_ns[s] if lowered.drains else 0,
                step_ns=step if lowered.drains else 0,
                update_share_ns=int(share),
            )
        )
    operations = []
    resources = list(graph.resources[: 1 + max(cost.resource for cost in graph.stages)])
    for op in graph.operations:
        match op.kind:
            case "F":
                operations.append(replace(op, duration_ns=stages[op.stage].forward_ns))
            case "B":
                operations.append(replace(op, duration_ns=stages[op.stage].backward_ns))
            case "SEND_F" | "SEND_B":
                took = handed.get(("F" if op.kind == "SEND_F" else "B", op.stage))
                latency_ns = 0 if took is None else took.after_send_ns
                operations.append(replace(op, duration_ns=latency_ns, resource=len(resources)))
                resources.append(graph.resources[op.resource])
    measured = replace(  # stages that share weights wait for each other in what was measured
        graph, stages=tuple(stages), operations=tuple(operations), resources=tuple(resources), tied=(), norm_ns=0
    )
    made = make_program(
        measured, program.microbatches, {}, batch=program.batch, split=program.split, apart=program.apart
    )
    own = [lane if decides else replace(lane, rule=None) for lane in program.lanes if lane.device is not None]
    lanes = (*own, *(lane for lane in made.lanes if lane.device is None))
    return replace(made, lanes=lanes, limit=program.limit if decides else None)


@dataclass(frozen=True, slots=True)
class HandOver:
    """Medians over ``count`` hand-overs to a receiver that waited: from the start and from the end of the send."""

    whole_ns: int
    after_send_ns: int
    count: int


def handed_over(lowered: LoweredRun, measurements: Sequence[RankMeasurement]) -> dict[Edge, HandOver]:
    """Return how long hand-overs took on each edge where a receiver waited before the send began."""
    sends = {
        (t.activity, t.stage, t.microbatch): t
        for x in measurements
        for t in x.times
        if t.activity in ("SEND_F", "SEND_B")
    }
    found: dict[Edge, list[tuple[int, int]]] = {}
    first = settled(lowered)
    for x in measurements:
        for t in x.times:
            if t.activity not in ("WAIT_F", "WAIT_B") or t.microbatch < first:
                continue
            kind: Pass = "F" if t.activity == "WAIT_F" else "B"
            edge = edge_into(kind, t.stage)
            send = sends.get(("SEND_F" if kind == "F" else "SEND_B", edge[1], t.microbatch))
            if send is not None and t.start_ns <= send.start_ns <= t.end_ns:  # clocks of two hosts may differ
                found.setdefault(edge, []).append((t.end_ns - send.start_ns, max(0, t.end_ns - send.end_ns)))
    return {
        edge: HandOver(
            median(whole for whole, _ in pairs) // covers(lowered, edge[0]),
            median(after for _, after in pairs) // covers(lowered, edge[0]),
            len(pairs),
        )
        for edge, pairs in found.items()
    }


def occupied(lowered: LoweredRun, measurements: Sequence[RankMeasurement]) -> dict[tuple[Activity, int], int]:
    """Return how long a microbatch's passes and updates occupy each stage's process in the settled part.

    That is all of its time but waits, sums over replicas and checkpoints: a pass with the making of its data, the
    sending of its result and what lies between; an update with the telling of it.
    """
    ranks: list[dict[tuple[Activity, int, int], int]] = []
    for x in measurements:
        spent: dict[tuple[Activity, int, int], int] = {}
        ranks.append(spent)
        before = 0  # the next pass
        for t, following in zip_longest(x.times, x.times[1:]):
            until = t.end_ns if following is None else max(t.end_ns, following.start_ns)  # a sum may have begun before
            match t.activity:
                case "WAIT_F" | "WAIT_B" | "WAIT_DATA":
                    before += until - t.end_ns
                case "DATA":
                    before += until - t.start_ns
                case "F" | "R" | "B" | "W":
                    spent[t.activity, t.stage, t.microbatch] = before + until - t.start_ns
                    before = 0
                case "ROOM_F" | "ROOM_B" | "SEND_F" | "SEND_B":
                    kind: Activity = "F" if t.activity.endswith("F") else "B"
                    place = kind, t.stage, t.microbatch
                    if place in spent:  # otherwise its pass is the last that a long run has forgotten
                        spent[place] += until - (t.end_ns if t.activity.startswith("ROOM") else t.start_ns)
                case "UPDATE":
                    key: tuple[Activity, int, int] = "UPDATE", t.stage, t.microbatch
                    spent[key] = spent.get(key, 0) + until - t.start_ns
    return typical(lowered, (*PASSES, "UPDATE"), ranks)


def sums_ns(lowered: LoweredRun, measurements: Sequence[RankMeasurement]) -> list[int]:
    """Return how long the sum of an update takes over each stage's replicas, 0 without any (medians in ns).

    That is while any of its exchanges goes on, on the replica that came last, and so waited for nobody.
    """
    took: dict[tuple[int, int], list[int]] = {}
    for x in measurements:
        spent: Counter[tuple[int, int]] = Counter()
        over: dict[tuple[int, int], int] = {}
        for t in sorted((t for t in x.times if t.activity == "REDUCE"), key=lambda t: t.start_ns):
            key = t.stage, t.microbatch
            begin = max(t.start_ns, over.get(key, t.start_ns))
            spent[key] += max(0, t.end_ns - begin)
            over[key] = max(begin, t.end_ns)
        for key, ns in spent.items():
            took.setdefault(key, []).append(ns)
    return [
        median(min(found) for (stage, _), found in took.items() if stage == s) for s in range(len(lowered.graph.stages))
    ]


def waits_at_updates(lowered: LoweredRun, measurements: Sequence[RankMeasurement]) -> list[int]:
    """Return how long an update keeps each stage's processes waiting, beside the optimizer's work (medians in ns).

    That is for sums of gradients, as long as nothing else is done meanwhile, for their norm, and for the agreement of
    all ranks. Of each update it is the wait of the rank that came last, and so waited for nobody's work. What a device
    waits for an agreement or a norm counts for its first stage.
    """
    sums: dict[tuple[int, int], list[int]] = {}  # of each stage and version, on each of its ranks
    agreements: dict[int, Counter[int]] = {}  # of all ranks together, by version and rank
    for x in measurements:
        waited: dict[tuple[int, int], int] = {}
        begun = until = 0  # of the sum at hand; of what came before it
        summing = False
        for t in x.times:
            key = t.stage, t.microbatch
            if t.activity == "REDUCE":  # of tied weights, and then over replicas
                begun = begun if summing else t.start_ns
                summing = True
                waited.setdefault(key, 0)
                continue
            if t.activity == "UPDATE" and key in waited:
                waited[key] += max(0, t.start_ns - max(begun, until))
            elif t.activity in ("AGREE", "NORM"):
                agreements.setdefault(t.microbatch, Counter())[x.rank] += t.duration_ns
            until, summing = t.end_ns, False
        for key, ns in waited.items():
            sums.setdefault(key, []).append(ns)
    agreement = median(min(found.values()) for found in agreements.values())
    firsts = {lowered.stages_of(rank)[0] for rank in range(len(lowered.devices))}
    return [
        median(min(found) for (stage, _), found in sums.items() if stage == s) + (agreement if s in firsts else 0)
        for s in range(len(lowered.graph.stages))
    ]

"""How does a plan run under a schedule that it wasn't made for?

A schedule may need other stages than the plan has (several chunks per GPU, or equal pipelines): then the model is cut
again into balanced stages on the plan's GPUs. It also says how weights are kept, which decides memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from ...check.evaluate import summed_beside
from ...choices import BEST, DRAINED
from ...cost.stage_graph import StageGraph, stage_graph
from ...errors import BadInput
from ...partition.balance import balance
from ...plan import Plan, Schedule, Stage
from ...problem import WEIGHTS, Platform, Policy, Problem
from ...schedule.kinds import endless, graph_of, kind_of, loop, named, shown_microbatches, too_long
from ...schedule.program import Program, pipelines, unroll
from ...schedule.registered import DEFAULT_BATCH
from ...schedule.update_sums import shown_with_sums, with_sums
from ...schedule.written import Written, deadlock, incomplete, order_of, unfit, written_program


def drains(plan: Plan, schedule: str) -> bool:
    """Whether ``schedule`` empties the pipeline before every update."""
    if schedule == BEST:
        return True
    weights = named(schedule).own_weights
    return WEIGHTS[weights or plan.policy.weights].drains


def own_schedule(plan: Plan) -> str:
    """Return the name of the schedule that a plan was made for: its pattern, or the kind that needs none."""
    return "pattern" if kind_of(plan).build is None else plan.schedule.kind


def program_of(plan: Plan, schedule: str, microbatches: int, options: Mapping[str, Any] | None = None) -> Program:
    """Return the program that runs ``microbatches`` microbatches of ``plan`` under ``schedule``.

    ``options`` that the schedule doesn't take are left out; those of the plan's own schedule are the plan's unless they
    are given. BadInput says why a plan cannot run so.
    """
    entry = named(schedule)
    given = {name: value for name, value in (options or {}).items() if name in entry.options and value is not None}
    if entry.build is None:
        if plan.pattern is None:
            own = own_schedule(plan)
            raise BadInput(
                "the plan has no pattern; name a schedule" + (f" such as {own}, its own" if own != "pattern" else "")
            )
        graph = graph_of(plan)
        _refuse_endless(graph, microbatches)
        program = unroll(graph, plan.pattern, microbatches)
        return program if kind_of(plan).drains else with_sums(program, plan.pattern, summed_beside(plan, graph))
    if schedule == own_schedule(plan):
        plans = {"limit": plan.schedule.limit, "order": plan.schedule.order}
        given = {option: value for option, value in plans.items() if option in entry.options} | given
    if "batch" in entry.options:
        given["batch"] = mini_batch(plan, schedule, options)
    chunks = given.pop("chunks", None)
    graph = schedule_graph(plan, schedule, microbatches, chunks, given.get("batch", 1))
    limited = None
    if entry.steady is not None:  # which is found in a run that the limit makes longer
        limited = Schedule(schedule, given["batch"], given.get("limit"))  # type: ignore[arg-type]  # such are kinds
    _refuse_endless(graph, microbatches, limited)
    return entry.build(graph, microbatches, **given)


def program_of_written(plan: Plan, written: Written, name: str) -> Program:
    """Return the program of a schedule that somebody wrote for the stages of ``plan``, drained; of equal pipelines each
    runs it. BadInput says where the two don't fit. Sends and receives are left to what the plan's links do."""
    stages = plan.allocation.stages
    found = incomplete(written) or deadlock(written)
    if found:
        raise BadInput(f"{name}: {found[0]}")
    alone = stage_graph(plan.chain, plan.platform, replace(plan.policy, weights=DRAINED, accumulate=1), stages)
    count = written.microbatches * pipelines(alone, name)
    policy = plan.policy.drained(count)
    graph, order = stage_graph(plan.chain, plan.platform, policy, stages), order_of(written)
    refused = unfit(graph, order, count)
    if refused is not None:
        raise BadInput(f"{name}: {refused}")
    _refuse_endless(graph, count)
    return written_program(graph, count, order)


def _refuse_endless(graph: StageGraph, microbatches: int, limited: Schedule | None = None) -> None:
    """Raise BadInput where a run takes too many steps, or one that a ``limited`` schedule is judged by."""
    what = f"{microbatches} microbatches on {len(graph.stages)} stages"
    reason = endless(microbatches * len(graph.operations), what)
    if reason is None and limited is not None:
        reason = too_long(len(graph.operations), limited)
    if reason is not None:
        raise BadInput(reason)


def mini_batch(plan: Plan, schedule: str, options: Mapping[str, Any] | None = None) -> int:
    """Return how many microbatches one backward covers: 1, or of a schedule with a choice the given, its own or 4."""
    if schedule == BEST or "batch" not in named(schedule).options:
        return 1
    own = plan.schedule.microbatches if schedule == own_schedule(plan) else None
    return int((options or {}).get("batch") or own or DEFAULT_BATCH)


def schedule_graph(
    plan: Plan, schedule: str, microbatches: int, chunks: int | None = None, batch: int = 1
) -> StageGraph:
    """Return the stages that ``schedule`` runs: the plan's own where it can, balanced ones on its GPUs elsewhere."""
    entry = named(schedule)
    weights = entry.own_weights or plan.policy.weights
    drained = WEIGHTS[weights].drains
    accumulate = microbatches if drained else batch
    synced = plan.policy.vertical_sync and schedule == own_schedule(plan)
    engine = plan.policy.engine if drained else None
    policy = replace(plan.policy, weights=weights, accumulate=accumulate, vertical_sync=synced, engine=engine)
    return stage_graph(plan.chain, plan.platform, policy, schedule_stages(plan, schedule, chunks))


def schedule_stages(plan: Plan, schedule: str, chunks: int | None = None) -> tuple[Stage, ...]:
    """Return the stages that ``schedule`` runs: the plan's own where it can, and elsewhere others on its GPUs.

    Of a schedule with a choice of ``chunks`` its own are those of as many, if these are said. Others are cut anew, into
    as many equal pipelines as the plan's replicas can be shared by (their greatest common divisor), with the plan's
    recomputation.
    """
    entry, own = named(schedule), plan.allocation.stages
    if entry.homes is None and not entry.refuses(graph_of(plan)):
        return own
    if schedule == own_schedule(plan) and chunks in (None, len(own) // len({x.devices for x in own})):
        return own
    groups = _even_groups(own) if entry.replicas else [(d,) for d in sorted({d for x in own for d in x.devices})]
    homes = (entry.homes or loop)(len(groups), (chunks or 2) if entry.homes else 1)
    return balanced_stages(plan, [groups[i] for i in homes], schedule)


def _even_groups(stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    """Return the devices of ``stages`` in groups of equal size, one device for each of as many equal pipelines.

    Stages that have equally many keep theirs.
    """
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    count = gcd(*map(len, groups))
    if all(len(group) == count for group in groups):
        return groups if count > 1 else sorted(groups)
    devices = sorted(device for group in groups for device in group)
    return [tuple(devices[i : i + count]) for i in range(0, len(devices), count)]


def balanced_stages(plan: Plan, homes: Sequence[tuple[int, ...]], schedule: str) -> tuple[Stage, ...]:
    """Return stages of the plan's model, stage i on the devices ``homes[i]``, the longest as short as can be."""
    if len(homes) > len(plan.chain):
        raise BadInput(f"{schedule} cuts the model into {len(homes)} stages; it has {len(plan.chain)} layers")
    platform = Platform(tuple(map(plan.platform.slowest, homes)), plan.platform.levels)
    problem = Problem(plan.chain, platform, Policy(), replicas=False, checkpointing="none")
    allocation = next(iter(balance(problem)))
    recomputed = [segment for stage in plan.allocation.stages for segment in stage.checkpoint]
    return tuple(
        Stage(part.start, part.stop, home).recomputing(recomputed)
        for part, home in zip(allocation.stages, homes, strict=True)
    )


def default_microbatches(plan: Plan, schedule: str, options: Mapping[str, Any] | None = None) -> int:
    """Return how many microbatches to simulate: as many as show the plan's own schedule, in whole mini-batches.

    Of a schedule that drains, those of the mini-batch that the options name, if they do.
    """
    named = (options or {}).get("batch")
    if named and drains(plan, schedule):
        return int(named)
    if schedule == own_schedule(plan) and plan.pattern is not None and not kind_of(plan).drains:
        summed = shown_with_sums(graph_of(plan), plan.pattern)
        if summed is not None:
            return summed
    batch = mini_batch(plan, schedule, options)
    return -(-shown_microbatches(plan) // batch) * batch

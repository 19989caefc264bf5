"""How good is a plan? Period, makespan and memory per device, recomputed from its stages and starts alone.

And which stages' replicas sum gradients while passes go on?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..cost.memory_model import gradient_bytes
from ..cost.stage_graph import StageGraph
from ..deadline import NEVER, Deadline
from ..integers import ceil_div
from ..plan import Bound, Pattern, Plan, Schedule
from ..problem import Platform, Policy
from ..registry import Late
from ..schedule.kinds import KINDS, graph_of, kind_of, simulated_run
from ..schedule.pattern import DeviceUse, Group, device_uses, groups, most_in_flight, starts_of
from ..schedule.program import unroll
from ..schedule.simulate import STEP_S, simulate
from ..schedule.timeline import flush_makespan_ns, run_uses

admitted_uses = Late("schedule.programs.deciding:admitted_uses")
summed_period_ns = Late("schedule.update_sums:summed_period_ns")

COARSENING = 2  # buckets that are summed at once: the least at which Myelin's figure 8 has few enough exchanges


def under_way_bytes(policy: Policy, gradient: int, parameters: int) -> int:
    """Return the most bytes beside a ``gradient`` that its exchange takes: those of two chunks, with ``zero`` of three,
    or as much again."""
    chunk = (policy.coarsening or COARSENING) * policy.bucket_parameters * ceil_div(gradient, max(1, parameters))
    return min(gradient, (3 if policy.zero else 2) * chunk)


def may_sum_beside(graph: StageGraph, tied: object) -> list[int]:
    """Return the stages with replicas that may sum gradients while passes go on, if their devices have the memory."""
    if tied or not graph.policy.updates_together:
        return []
    return [s for s, stage in enumerate(graph.stages) if graph.resources[stage.resource].replicas > 1]


def sums_beside(graph: StageGraph, tied: object, uses: Sequence[DeviceUse]) -> dict[int, int]:
    """Return the stages whose replicas sum gradients while passes go on, with the bytes of the second gradient that
    each takes of what its devices, by their ``uses``, have free.

    Under 2bw an update has a whole round to be made in: there it is those whose GPUs have room for a second gradient,
    which clipping has anyway, and for what is under way. Where a batch drains it is those that other stages, or the
    agreement of all ranks, come behind; they need none. Stages of models with shared weights, whose ``tied`` isn't
    empty, are left alone.
    """
    policy, on = graph.policy, [stage.resource for stage in graph.stages]
    replicated = may_sum_beside(graph, tied)
    if not replicated:
        return {}
    if policy.drains:
        several = [s for s in replicated if policy.precision != "fp32" or on.count(on[s]) > 1]
        return {} if policy.clip else dict.fromkeys(several, 0)
    if policy.waits_for_norm:
        return dict.fromkeys(replicated, 0)
    free = [use.memory_bytes - use.peak_bytes for use in uses]
    chosen: dict[int, int] = {}
    for s in replicated:
        cost, devices = graph.stages[s], graph.resources[on[s]].devices
        size = int(gradient_bytes(policy, cost.weight_bytes, cost.parameters))
        needed = size + under_way_bytes(policy, size, int(cost.parameters))
        if all(free[d] >= needed for d in devices):
            chosen[s] = size
            for d in devices:
                free[d] -= needed
    return chosen


def waiting_period_ns(graph: StageGraph, tied: object, pattern: Pattern, platform: Platform) -> int:
    """Return the time per microbatch (ns) of a ``pattern`` that never drains, with what its updates wait for."""
    if not graph.summing:
        return pattern.period_ns
    uses = device_uses(graph, starts_of(pattern), pattern.period_ns, platform) if graph.policy.updates_together else []
    period: int = summed_period_ns(graph, pattern, sums_beside(graph, tied, uses))
    return period


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of one plan; times in ns, ``period_ns`` per microbatch.

    ``makespan_ns`` is the time of one drained mini-batch with its weight synchronisation, None for a plan that never
    drains. ``most_in_flight`` is d of ALGORITHMS section 3, ``groups`` are those of the plan's pattern, if it has one.
    """

    graph: StageGraph
    period_ns: int
    makespan_ns: int | None
    devices: tuple[DeviceUse, ...]
    most_in_flight: int
    groups: tuple[Group, ...] = ()


def evaluate(plan: Plan, graph: StageGraph | None = None) -> Evaluation:
    """Return the figures of ``plan``, whose structure and operations must be in order; ``graph`` is of its stages."""
    graph = graph or graph_of(plan)
    kind = kind_of(plan)
    if kind.build is not None:
        return evaluate_simulated(graph, plan.schedule, plan.platform, NEVER)
    assert plan.pattern is not None
    starts, period = starts_of(plan.pattern), plan.pattern.period_ns
    makespan, uses = None, tuple(device_uses(graph, starts, period, plan.platform))
    if kind.drains:
        assert plan.schedule.microbatches is not None
        makespan = flush_makespan_ns(simulate(unroll(graph, plan.pattern, plan.schedule.microbatches)))
    return Evaluation(
        graph=graph,
        period_ns=(
            waiting_period_ns(graph, plan.chain.tied, plan.pattern, plan.platform)
            if makespan is None
            else ceil_div(makespan, plan.schedule.mini_batch)
        ),
        makespan_ns=makespan,
        devices=uses,
        most_in_flight=most_in_flight(graph, starts, period),
        groups=tuple(groups(graph, plan.pattern)),
    )


def summed_beside(plan: Plan, graph: StageGraph) -> dict[int, int]:
    """Return the stages of ``plan`` whose replicas sum gradients while passes go on: see :func:`sums_beside`.

    ``graph`` is what its stages are built into.
    """
    uses: list[DeviceUse] = []
    if plan.pattern is not None and not plan.policy.drains:
        uses = device_uses(graph, starts_of(plan.pattern), plan.pattern.period_ns, plan.platform)
    return sums_beside(graph, plan.chain.tied, uses)


@lru_cache(maxsize=16)
def evaluate_simulated(graph: StageGraph, schedule: Schedule, platform: Platform, deadline: Deadline) -> Evaluation:
    """Return the figures of stages under nF1B or message-driven, from their simulated timeline.

    Of nF1B they are those of the steady state and of all that comes before it. Where the simulated run is too short to
    show one, every stage but the last is charged what the limit admits, and its period is the mean of the run's second
    half. Message-driven is one drained mini-batch; its peaks are those of the planned times, and what they cannot
    exceed in whatever order messages really arrive is ``limit`` microbatches per stage and pipeline. OutOfTime at the
    ``deadline``.
    """
    makespan = None
    find_steady = KINDS[schedule.kind].steady
    if find_steady is not None:
        steady = find_steady(graph, schedule.mini_batch, schedule.limit or len(graph.stages), deadline)
        timeline, period = steady.timeline, steady.period_ns
        uses = run_uses(timeline, platform) if steady.repeats else admitted_uses(steady, platform)
    else:
        count = schedule.mini_batch
        deadline.check(count * len(graph.operations) * STEP_S)
        timeline = simulated_run(graph, schedule, None, count, deadline)
        makespan = flush_makespan_ns(timeline)
        period = ceil_div(makespan, count)
        uses = run_uses(timeline, platform)
    together = [0] * len(graph.stages)
    for index, resource in enumerate(graph.resources):
        for place, s in enumerate(graph.stages_on(index)):
            together[s] = sum(uses[d].in_flight[place] for d in resource.devices)
    return Evaluation(graph, period, makespan, tuple(uses), max(together))


def fits(evaluation: Evaluation) -> bool:
    """Whether every device stays within its memory."""
    return all(use.over_bytes <= 0 for use in evaluation.devices)


def gap(period_ns: int, bound: Bound) -> float:
    """Return how far ``period_ns`` is above ``bound``: period / bound - 1."""
    return period_ns / bound.period_ns - 1

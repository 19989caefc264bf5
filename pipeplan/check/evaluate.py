"""How good is a plan? Period, makespan and memory per device, recomputed from its stages and starts alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..cost import memory_model
from ..cost.stage_graph import StageGraph
from ..deadline import NEVER, Deadline
from ..integers import ceil_div
from ..plan import Bound, Plan, Schedule
from ..problem import Platform
from ..schedule.kinds import KINDS, graph_of, kind_of, simulated_run
from ..schedule.memory import run_uses
from ..schedule.pattern import DeviceUse, Group, device_uses, groups, most_in_flight, starts_of, unused
from ..schedule.program import unroll
from ..schedule.registered import SteadyRun
from ..schedule.simulate import STEP_S, simulate
from ..schedule.timeline import flush_makespan_ns
from ..schedule.update_sums import summed_period_ns
from .replica_sums import sums_beside


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
    if kind.simulated is not None:
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
            summed_period_ns(graph, plan.pattern, sums_beside(graph, plan.chain.tied, uses))
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
        uses = run_uses(timeline, platform) if steady.repeats else _admitted_uses(steady, platform)
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
    return all(use.peak_bytes <= use.memory_bytes for use in evaluation.devices)


def _admitted_uses(steady: SteadyRun, platform: Platform) -> list[DeviceUse]:
    """Return what each device of an nF1B run holds at most however far it goes: all that the limit admits.

    The last stage has its gradient at once and holds one mini-batch, but under vertical sync it keeps the weights with
    which each one inside has entered, as all stages do.
    """
    program = steady.timeline.program
    graph, limit = program.graph, program.limit or 1
    uses = unused(platform)
    for s, stage in enumerate(graph.stages):
        admitted = limit if s < len(graph.stages) - 1 else 1
        count = admitted * program.batch
        kept = limit + 1 if graph.policy.vertical_sync else 1
        device = graph.resources[stage.resource].devices[0]
        uses[device] = DeviceUse(
            platform.devices[device].memory_bytes,
            graph.weights_bytes(s, kept),
            int(memory_model.held_bytes(stage.kept_bytes, stage.peak_bytes, count)),
            program.buffer_bytes(s),
            (count,),
        )
    return uses


def gap(period_ns: int, bound: Bound) -> float:
    """Return how far ``period_ns`` is above ``bound``: period / bound - 1."""
    return period_ns / bound.period_ns - 1

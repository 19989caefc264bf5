"""What a plan achieves, recomputed from its stages and starts alone: period, makespan, memory per device, gaps."""

from __future__ import annotations

from dataclasses import dataclass

from .groups import ceil_div
from .plan import Bound, Plan
from .program import Step, unroll
from .simulate import Timeline, simulate
from .stages import DeviceUse, StageGraph, device_uses, most_in_flight, stage_graph, starts_of


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of one plan; times in ns, ``period_ns`` per microbatch.

    ``makespan_ns`` is the time of one drained mini-batch with its weight synchronisation, None for a plan that never
    drains. ``most_in_flight`` is d of ALGORITHMS section 3.
    """

    graph: StageGraph
    period_ns: int
    makespan_ns: int | None
    devices: tuple[DeviceUse, ...]
    most_in_flight: int


def evaluate(plan: Plan) -> Evaluation:
    """Return the figures of ``plan``, whose structure and operations must be in order."""
    assert plan.pattern is not None
    graph = stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)
    starts, period = starts_of(plan.pattern), plan.pattern.period_ns
    makespan = None
    if plan.schedule.kind == "flush":
        assert plan.schedule.microbatches is not None
        makespan = flush_makespan_ns(simulate(unroll(graph, plan.pattern, plan.schedule.microbatches)))
    return Evaluation(
        graph=graph,
        period_ns=period if makespan is None else ceil_div(makespan, plan.schedule.microbatches or 1),
        makespan_ns=makespan,
        devices=tuple(device_uses(graph, starts, period, plan.platform)),
        most_in_flight=most_in_flight(graph, starts, period),
    )


def flush_makespan_ns(timeline: Timeline) -> int:
    """Return the time of a drained mini-batch: every stage's last backward, then its all-reduce, then the next one."""
    program = timeline.program
    graph, last = program.graph, program.microbatches
    ready = []
    for s, stage in enumerate(graph.stages):
        replicas = graph.resources[stage.resource].replicas
        done = max(timeline.end_ns(Step(m, program.release[s])) for m in range(max(0, last - replicas), last))
        ready.append((done, s))
    ends = [0] * len(graph.resources)
    for done, s in sorted(ready):  # all-reduces of stages that share devices follow each other
        stage = graph.stages[s]
        ends[stage.resource] = max(ends[stage.resource], done) + stage.sync_period_ns * stage.update_interval
    return max(ends)


def gap(period_ns: int, bound: Bound) -> float:
    """Return how far ``period_ns`` is above ``bound``: period / bound - 1."""
    return period_ns / bound.period_ns - 1

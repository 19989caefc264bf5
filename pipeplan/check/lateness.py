"""How late are a plan's gradients, by the updates that its stages' forwards miss?"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from ..cost.stage_cost import summed_stages
from ..cost.stage_graph import StageGraph
from ..plan import Plan
from ..schedule.kinds import kind_of, program_of_kind
from ..schedule.pattern import most_in_flight, starts_of
from ..schedule.simulate import simulate
from ..schedule.update_sums import MOST_STEPS
from ..schedule.weight_versions import PROMPT, Delay, Waits, delays, pattern_delays, used
from .evaluate import summed_beside


def waits_of(plan: Plan, graph: StageGraph, beside: Iterable[int]) -> Waits:
    """Return what updates of ``plan`` wait for while passes go on, ``beside`` which these stages sum gradients; nothing
    where it drains."""
    if plan.policy.drains:
        return PROMPT
    sums = {s: graph.stages[s].sync_period_ns * plan.interval for s in beside}
    every = [range(len(graph.stages))] if plan.policy.waits_for_norm else []
    together = plan.policy.updates_together
    return Waits(sums, every or (summed_stages(plan.chain, plan.allocation.stages) if together else ()))


def plan_delays(plan: Plan, graph: StageGraph) -> list[Delay]:
    """Return how many updates the gradients of each stage miss in the steady state of ``plan``; none where it drains.

    They are those of the run as it is lowered. Where replicas or waiting updates make its order another than the
    pattern's, and simulating it takes long, they are those in the pattern's own time.
    """
    if plan.policy.drains:
        return [Delay(0.0, 0) for _ in graph.stages]
    policy, interval, kind = plan.policy.rules, plan.interval, kind_of(plan)
    if plan.pattern is None:
        assert kind.steady is not None, "what never drains has a pattern or a steady state"
        timeline = kind.steady(graph, interval, plan.schedule.limit or len(graph.stages)).timeline
        first = timeline.program.microbatches // interval // 2 * interval
        window = range(first, timeline.program.microbatches - interval)
        return delays(used(timeline, policy, interval), timeline, interval, window)
    waits = waits_of(plan, graph, summed_beside(plan, graph))
    held = most_in_flight(graph, starts_of(plan.pattern), plan.pattern.period_ns)
    again = lcm(interval, *(resource.replicas for resource in graph.resources))
    count = 4 * held + again
    count += again - count % again
    steps = (count + again + held) * len(graph.operations)
    if steps > MOST_STEPS or (waits == PROMPT and all(x.replicas == 1 or x.is_link for x in graph.resources)):
        return pattern_delays(graph, plan.pattern, plan.policy, interval, waits)
    program = program_of_kind(graph, plan.schedule, plan.pattern, count + again + held).first_come()
    timeline = simulate(program)
    found = used(timeline, policy, interval, waits=waits)
    return delays(found, timeline, interval, range(count, count + again))

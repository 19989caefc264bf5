"""Which stages' replicas sum gradients while passes go on?"""

from __future__ import annotations

from collections.abc import Sequence

from ..cost.memory_model import gradient_bytes
from ..cost.stage_graph import StageGraph
from ..integers import ceil_div
from ..plan import Pattern
from ..problem import Platform, Policy
from ..schedule.pattern import DeviceUse, device_uses, starts_of
from ..schedule.update_sums import summed_period_ns, summing

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
    if not summing(graph):
        return pattern.period_ns
    uses = device_uses(graph, starts_of(pattern), pattern.period_ns, platform) if graph.policy.updates_together else []
    return summed_period_ns(graph, pattern, sums_beside(graph, tied, uses))

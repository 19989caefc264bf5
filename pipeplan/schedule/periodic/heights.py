"""How many periods can lie between two operations of a device or link? What every search for a pattern may assume."""

from __future__ import annotations

from itertools import combinations
from math import ceil, lcm

from ...cost.group_bound import device_bytes, group_counts
from ...cost.stage_graph import StageGraph
from ...integers import ceil_div


def height_bounds(graph: StageGraph, low: int, high: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the least and most value of each height K_uv that a shortest pattern with a period in [low, high] needs.

    While a microbatch stays at a stage that memory limits to N in flight, less than N periods of the stage pass.
    """
    slack = lcm(*(resource.replicas for resource in graph.resources))
    last = len(graph.operations) - 1
    fewest, _ = group_counts(graph, high)
    whole = ceil(graph.path_ns / low) + last * slack + 1
    whole = min(whole, graph.policy.most_lifetime or whole)
    stays = [(0, last, whole)]  # (first operation, last operation, periods T)
    for s, stage in enumerate(graph.stages):
        replicas = graph.resources[stage.resource].replicas
        most = _most_in_flight(graph, s, fewest, ceil_div(whole, replicas))
        stays.append((graph.position["F", s], graph.position["B", s], replicas * most))
    bounds = {}
    for resource, indices in zip(graph.resources, graph.on_resource, strict=True):
        for u, v in combinations(indices, 2):
            between = sum(op.duration_ns for op in graph.operations[u + 1 : v])
            periods = ceil(between / low) + (v - u) * slack + 1
            periods = min(periods, *(most for first, final, most in stays if first <= u and v <= final))
            bounds[u, v] = 1 - ceil_div(periods, resource.replicas), 0
    for s in range(len(graph.stages)):
        pair = graph.position["F", s], graph.position["B", s]
        bounds[pair] = bounds[pair][0], 1 - fewest[s]
    return bounds


def _most_in_flight(graph: StageGraph, stage: int, fewest: list[int], limit: int) -> int:
    """Return how many microbatches of ``stage``, up to ``limit``, fit its device with the others at their fewest."""
    resource = graph.stages[stage].resource
    memory = graph.resources[resource].memory_bytes
    assert memory is not None, "stages are on devices"
    counts = [*fewest]
    while counts[stage] < limit and device_bytes(graph, resource, counts) <= memory:
        counts[stage] += 1
    return counts[stage] if device_bytes(graph, resource, counts) <= memory else max(counts[stage] - 1, fewest[stage])

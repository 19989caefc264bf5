"""What is the smallest integer period, with its starts, of operations in a given order? The exact finish of a schedule.

An order says, for each pair u < v of operations (in path order) of one resource, by how many of the resource's periods
v is moved to come right after u: the height K_uv <= 0 of ALGORITHMS section 6, with K_vu = 1 - K_uv. Once it is fixed,
the smallest period is a maximum cycle ratio, and the starts are longest paths. All arithmetic is on integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, lcm

from ...cost.group_bound import device_bytes, group_counts
from ...cost.stage_graph import StageGraph
from ...integers import ceil_div, smallest
from ...plan import Pattern
from ..pattern import make_pattern

Order = Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Precedence:
    """``start[after] - start[before] >= gap_ns - height * period``."""

    before: int
    after: int
    gap_ns: int
    height: int


def retime(graph: StageGraph, order: Order, separation_ns: int = 0) -> Pattern | None:
    """Return the pattern with ``order`` of the smallest period, every operation as early as that period allows.

    None when no period allows the order. The pattern obeys path, exclusivity, synchronisation and the policy's
    ``accumulate``; memory depends on the order alone and is not looked at. (Where an operation takes no time, starts
    may coincide and the order be lost; ``separation_ns`` 1 keeps them apart.) Exact: the period is the maximum cycle
    ratio, rounded up; see :func:`smallest_period_of`.
    """
    rules = precedences(graph, order, separation_ns)
    found = smallest_period_of(len(graph.operations), rules, max(1, graph.period_floor_ns))
    return None if found is None else make_pattern(graph, found[1], found[0])


def order_of(
    graph: StageGraph, starts: Sequence[int], period: int, length: int | None = None
) -> dict[tuple[int, int], int]:
    """Return the order of a valid pattern: the heights of all pairs of operations that share a resource, each of the
    same ``length`` if one is given."""
    order = {}
    for resource, indices in zip(graph.resources, graph.on_resource, strict=True):
        for u, v in combinations(indices, 2):
            own = graph.operations[u].duration_ns if length is None else length
            order[u, v] = -((starts[v] - starts[u] - own) // (resource.replicas * period))
    return order


def precedences(graph: StageGraph, order: Order, separation_ns: int = 0) -> list[Precedence]:
    """Return the rules of a valid pattern with ``order``, memory aside."""
    duration = [op.duration_ns for op in graph.operations]
    rules = [Precedence(v, v + 1, duration[v], 0) for v in range(len(duration) - 1)]
    for (u, v), height in order.items():
        replicas = graph.resources[graph.operations[u].resource].replicas
        rules.append(Precedence(u, v, max(duration[u], separation_ns), replicas * height))
        rules.append(Precedence(v, u, max(duration[v], separation_ns), replicas * (1 - height)))
    if graph.policy.most_lifetime is not None:  # the first stage holds a microbatch longest
        rules.append(Precedence(len(duration) - 1, 0, duration[-1], graph.policy.most_lifetime))
    return rules


def smallest_period_of(count: int, rules: Iterable[Precedence], lowest_ns: int) -> tuple[int, list[int]] | None:
    """Return the smallest integer period at least ``lowest_ns`` that satisfies ``rules``, and the earliest starts.

    Operation 0 starts at 0 and every other must be bound to it by a path of rules. None when no period will do.
    Newton's method on the cycle ratio (sum of gaps over sum of heights): as long as a cycle of positive length remains
    at the period, its ratio, rounded up, is the next period. Exact; each round costs O(count * rules).
    """
    rules = list(rules)
    period = lowest_ns
    while True:
        weighted = [(r.before, r.after, r.gap_ns - r.height * period, i) for i, r in enumerate(rules)]
        starts, cycle = _longest_paths(count, weighted)
        if not cycle:
            return period, starts
        gap = sum(rules[i].gap_ns for i in cycle)
        height = sum(rules[i].height for i in cycle)
        if height <= 0:
            return None  # longer periods don't shorten this cycle
        period = -(-gap // height)


def _longest_paths(count: int, edges: list[tuple[int, int, int, int]]) -> tuple[list[int], list[int]]:
    """Return (longest path from node 0 to each node, []), or (anything, the labels of a cycle of positive length).

    Edges are (from, to, length, label). Bellman-Ford.
    """
    unreached = -(10**30)
    longest = [0] + [unreached] * (count - 1)
    entered: list[tuple[int, int]] = [(-1, -1)] * count  # (previous node, label of the edge taken)
    changed = 0
    for _ in range(count + 1):
        changed = -1
        for u, v, length, label in edges:
            if longest[u] > unreached and longest[u] + length > longest[v]:
                longest[v] = longest[u] + length
                entered[v] = (u, label)
                changed = v
        if changed < 0:
            return longest, []
    node = changed
    for _ in range(count):  # walk back far enough to be on the cycle
        node = entered[node][0]
    cycle = []
    at = node
    while True:
        at, label = entered[at]
        cycle.append(label)
        if at == node:
            return longest, cycle


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
    low, most = fewest[stage], max(limit, fewest[stage])

    def too_many(count: int) -> bool | None:
        return device_bytes(graph, resource, [*fewest[:stage], count, *fewest[stage + 1 :]]) > memory or None

    found = smallest(too_many, low, most, low)
    return most if found is None else max(found[0] - 1, low)

"""How short can the period of given stages be, and how much must they hold then? 1F1B*'s counts as a lower bound.

A microbatch that reaches a stage's backward later is held longer, so a stage holds as many microbatches as periods pass
until then. 1F1B* (MadPipe section 4.1) lets the least pass: it packs the stages from the last to the first into
*groups*, each as much work as fits into one period, and a stage in the g-th group from the end holds g microbatches.
That is the truth for stages that each have their devices for themselves, and a bound for all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..integers import ceil_div, extend, smallest
from . import memory_model
from .stage_cost import StageCost
from .stage_graph import StageGraph


def lifetimes(graph: StageGraph, period: int) -> list[int]:
    """Return for each operation on the way to the loss the least time (ns) from its start to the end of its partner.

    One entry for each of ``graph.round_trips``. Every stage and cut is taken as its own resource, which only
    relaxes the rules, and then the walk of 1F1B* from the loss back to the first layer is optimal for all at once
    (MadPipe section 4.1, Proposition 1; ALGORITHMS section 4 for replicas). ``period`` must not be below
    ``graph.period_floor_ns``. Linear in the operations.
    """
    least, delay = list[int](), 0
    for there, back in reversed(graph.round_trips):
        work = there.duration_ns + back.duration_ns
        if there.resource == back.resource:
            delay = extend(delay, work, period * graph.resources[there.resource].replicas)
        else:  # the two directions of a full-duplex link don't exclude each other
            delay += work
        least.append(delay)
    return least[::-1]


def group_counts(graph: StageGraph, period: int) -> tuple[list[int], int]:
    """Return (counts, lifetime): per stage the fewest microbatches that one replica holds at its peak at ``period``,
    and the least time (ns) from a microbatch's first operation to its last; both by :func:`lifetimes`."""
    least = lifetimes(graph, period)
    counts = [1] * len(graph.stages)
    for (operation, _), life in zip(graph.round_trips, least, strict=True):
        if operation.kind == "F":
            counts[operation.stage] = max(1, ceil_div(life, period * graph.resources[operation.resource].replicas))
    return counts, least[0]


def group_bound(graph: StageGraph) -> int | None:
    """Return a lower bound (ns) on the period of every valid pattern, or None when there is no valid pattern at all.

    The smallest period at which the group counts fit into memory and ``accumulate``. Exact for contiguous graphs, and
    exact about feasibility for all: when the counts are all 1, one microbatch at a time is a valid pattern.
    """
    low, known = graph.period_floor_ns, dict[tuple[int, ...], bool]()
    found = smallest(lambda period: _counts_fit(graph, period, known) or None, low, max(low, graph.path_ns))
    return None if found is None else found[0]


def may_reach(graph: StageGraph, period: int) -> bool:
    """Whether the group counts allow a valid pattern of ``period`` ns: :func:`group_bound` is at most that."""
    return period >= graph.period_floor_ns and _counts_fit(graph, period, {})


def _counts_fit(graph: StageGraph, period: int, known: dict[tuple[int, ...], bool]) -> bool:
    counts, lifetime = group_counts(graph, period)
    most = graph.policy.most_lifetime
    if most is not None and lifetime > most * period:
        return False
    key = tuple(counts)
    if key not in known:
        known[key] = all(
            device_bytes(graph, index, counts) <= resource.memory_bytes
            for index, resource in enumerate(graph.resources)
            if resource.memory_bytes is not None
        )
    return known[key]


def device_bytes(graph: StageGraph, resource: int, counts: list[int]) -> int:
    """Return the least that a device group holds at its peak if stage s holds ``counts[s]`` microbatches at its own."""
    stages = graph.stages_on(resource)
    weights = sum(graph.weights_bytes(s, graph.versions(s, counts[s], counts[0])) for s in stages)
    lent = sum(graph.lent_bytes(s, lambda _: 1) for s in stages)
    return weights + lent + held_together(stages, graph.stages, counts)


def held_together(
    stages: Sequence[int], costs: Sequence[StageCost] | Mapping[int, StageCost], counts: Sequence[int]
) -> int:
    """Return the least that stages on one device hold at its peak, beside weights.

    At the start of an operation of s, earlier stages hold what s holds, and every stage at least its peak less one.
    """
    most = 0
    for s in stages:
        held: int = memory_model.held_bytes(costs[s].kept_bytes, costs[s].peak_bytes, counts[s])
        for q in stages:
            if q != s:
                held += (max(counts[s], counts[q] - 1) if q < s else counts[q] - 1) * costs[q].kept_bytes
        most = max(most, held)
    return most + sum(costs[s].buffer_bytes for s in stages)

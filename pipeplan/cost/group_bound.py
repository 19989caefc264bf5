"""What every pattern of a stage graph must hold, whatever shares a device: 1F1B*'s counts as a lower bound."""

from __future__ import annotations

from ..integers import ceil_div, extend, smallest
from . import memory_model
from .stage_graph import StageGraph


def group_counts(graph: StageGraph, period: int) -> tuple[list[int], int]:
    """Return (counts, lifetime): per stage the fewest microbatches that one replica holds at its peak at ``period``,
    and the least time (ns) from a microbatch's first operation to its last.

    Every stage and cut is taken as its own resource, which only relaxes the rules, and then 1F1B* is optimal for all
    stages at once (MadPipe Proposition 1). ``period`` must not be below ``graph.period_floor_ns``.
    """
    counts = [1] * len(graph.stages)
    half = len(graph.operations) // 2
    delay = 0
    for i in reversed(range(half)):
        there, back = graph.operations[i], graph.operations[-1 - i]
        work = there.duration_ns + back.duration_ns
        step = period * graph.resources[there.resource].replicas
        if there.resource == back.resource:
            delay = extend(delay, work, step)
        else:  # the two directions of a full-duplex link don't exclude each other
            delay += work
        if there.kind == "F":
            counts[there.stage] = max(1, ceil_div(delay, step))
    return counts, delay


def group_bound(graph: StageGraph) -> int | None:
    """Return a lower bound (ns) on the period of every valid pattern, or None when there is no valid pattern at all.

    The smallest period at which the group counts fit into memory and ``accumulate``. Exact for contiguous graphs, and
    exact about feasibility for all: when the counts are all 1, one microbatch at a time is a valid pattern.
    """
    low = graph.period_floor_ns
    found = smallest(lambda period: _counts_fit(graph, period) or None, low, max(low, graph.path_ns))
    return None if found is None else found[0]


def may_reach(graph: StageGraph, period: int) -> bool:
    """Whether the group counts allow a valid pattern of ``period`` ns: :func:`group_bound` is at most that."""
    return period >= graph.period_floor_ns and _counts_fit(graph, period)


def _counts_fit(graph: StageGraph, period: int) -> bool:
    counts, lifetime = group_counts(graph, period)
    policy = graph.policy
    if policy.weights == "2bw" and policy.accumulate is not None and lifetime > policy.accumulate * period:
        return False
    return all(
        device_bytes(graph, index, counts) <= resource.memory_bytes
        for index, resource in enumerate(graph.resources)
        if resource.memory_bytes is not None
    )


def device_bytes(graph: StageGraph, resource: int, counts: list[int]) -> int:
    """Return the least that a device group holds at its peak when stage s holds ``counts[s]`` microbatches at its own.

    At the start of an operation of s, earlier stages hold what s holds, and every stage at least its peak less one.
    """
    stages = graph.stages_on(resource)
    fixed = most = 0
    for s in stages:
        stage = graph.stages[s]
        fixed += stage.buffer_bytes
        kept = graph.versions(s, counts[s], counts[0])
        fixed += memory_model.versioned_bytes(graph.policy, stage.weight_bytes, stage.parameters, kept)
        held: int = memory_model.held_bytes(stage.kept_bytes, stage.peak_bytes, counts[s])
        for q in stages:
            if q != s:
                least = max(counts[s], counts[q] - 1) if q < s else counts[q] - 1
                held += least * graph.stages[q].kept_bytes
        most = max(most, held)
    return fixed + most

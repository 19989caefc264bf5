"""1F1B*: the pattern with the fewest microbatches in flight for stages that each have their devices for themselves."""

from __future__ import annotations

from ...cost.stage_graph import StageGraph
from ...integers import extend, smallest
from ...plan import Pattern
from ..pattern import make_pattern, memory_fits, most_in_flight


def one_f_one_b_star(graph: StageGraph, period: int) -> Pattern | None:
    """Return the 1F1B* pattern at ``period`` (ns), or None when loads, synchronisation, memory or updates forbid it.

    No valid pattern of that period holds fewer microbatches at any stage (MadPipe section 4.1, Proposition 1), so None
    means that no pattern exists. Transfers count as stages of their own; a stage with r replicas sees the period
    ``r * period``. Linear in the number of stages, plus the memory check.
    """
    if not graph.contiguous:
        raise ValueError("1F1B* needs stages that share no device")
    if period < graph.period_floor_ns:
        return None
    count = len(graph.operations)
    half = count // 2  # the path is a palindrome: operation i's partner is count - 1 - i
    starts = [0] * count
    for i in range(1, half):
        starts[i] = starts[i - 1] + graph.operations[i - 1].duration_ns
    delay = 0
    for i in reversed(range(half)):
        there, back = graph.operations[i], graph.operations[count - 1 - i]
        work = there.duration_ns + back.duration_ns
        if there.resource == back.resource:
            delay = extend(delay, work, period * graph.resources[there.resource].replicas)
        else:  # the two directions of a full-duplex link don't exclude each other
            delay += work
        starts[count - 1 - i] = starts[i] + there.duration_ns + delay - work
    if not memory_fits(graph, starts, period):
        return None
    policy = graph.policy
    limit = policy.accumulate if policy.weights == "2bw" else None
    if limit is not None and most_in_flight(graph, starts, period) > limit:
        return None
    return make_pattern(graph, starts, period)


def best_one_f_one_b_star(graph: StageGraph) -> Pattern | None:
    """Return the valid pattern of the exactly smallest integer period, or None when memory forbids every period.

    Feasibility is monotone in the period, and at the sum of all operations one microbatch runs at a time; so
    bisection on integers is exact.
    """
    low = graph.period_floor_ns
    high = max(low, graph.path_ns)
    found = smallest(lambda period: one_f_one_b_star(graph, period), low, high)
    return None if found is None else found[1]

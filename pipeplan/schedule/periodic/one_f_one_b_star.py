"""Which pattern holds the fewest microbatches where stages have their devices for themselves? 1F1B*."""

from __future__ import annotations

from itertools import accumulate

from ...cost.group_bound import lifetimes
from ...cost.stage_graph import StageGraph
from ...integers import smallest
from ...plan import Pattern
from ..pattern import make_pattern, memory_fits, most_in_flight, starts_of


def one_f_one_b_star(graph: StageGraph, period: int) -> Pattern | None:
    """Return the 1F1B* pattern at ``period`` (ns), or None when loads, synchronisation, memory or updates forbid it.

    No valid pattern of that period holds fewer microbatches at any stage (MadPipe section 4.1, Proposition 1), so None
    means that no pattern exists. Transfers count as stages of their own; a stage with r replicas sees the period
    ``r * period``. Linear in the number of stages, plus the memory check.
    """
    if not graph.separate:
        raise ValueError("1F1B* needs stages that share no device, and cuts that share no link")
    if period < graph.period_floor_ns:
        return None
    starts = [0, *accumulate(op.duration_ns for op in graph.operations[:-1])]
    for i, (life, (_, back)) in enumerate(zip(lifetimes(graph, period), graph.round_trips, strict=True)):
        starts[-1 - i] = starts[i] + life - back.duration_ns
    if not memory_fits(graph, starts, period):
        return None
    limit = graph.policy.most_lifetime
    if limit is not None and most_in_flight(graph, starts, period) > limit:
        return None
    return make_pattern(graph, starts, period)


def best_one_f_one_b_star(graph: StageGraph) -> Pattern | None:
    """Return the valid pattern of the exactly smallest integer period, or None when memory forbids every period.

    Feasibility is monotone in the period, and at the sum of all operations one microbatch runs at a time; so
    bisection on integers is exact.
    """
    low = graph.period_floor_ns
    found = smallest(lambda period: one_f_one_b_star(graph, period), low, max(low, graph.path_ns))
    return None if found is None else found[1]


def emptiest_one_f_one_b_star(graph: StageGraph, high: int) -> Pattern | None:
    """Return the pattern that holds the fewest microbatches at every stage of those with a period (ns) of at most
    ``high``, and of these the shortest one; None where there is none.

    What 1F1B* lets pass between a stage's forward and its backward, in periods, doesn't grow with the period.
    """
    best = one_f_one_b_star(graph, high)
    if best is None:
        return None
    least = _inside(graph, best)

    def as_few(period: int) -> Pattern | None:
        found = one_f_one_b_star(graph, period)
        return found if found is not None and _inside(graph, found) <= least else None

    found = smallest(as_few, graph.period_floor_ns, high, high)
    return best if found is None else found[1]


def _inside(graph: StageGraph, pattern: Pattern) -> int:
    starts = starts_of(pattern)
    stages = range(len(graph.stages))
    return sum((starts[graph.position["B", s]] - starts[graph.position["F", s]]) // pattern.period_ns for s in stages)

"""Periods settled by propagation: the same as by the integer program, which is exact, and quickly."""

from collections import Counter

from test_ilp import DEALT, varied_graph

from pipeplan.check.validate import pattern_violations
from pipeplan.cost.group_bound import group_bound
from pipeplan.schedule.pattern import one_at_a_time
from pipeplan.schedule.periodic.ilp import schedule_ilp
from pipeplan.schedule.periodic.turns import settle
from scripts.bench.ilp import instance


def test_settles_what_the_integer_program_says():
    seen = Counter()
    for seed in range(50):
        graph = varied_graph(seed, contiguous=False, roomy=(1, 1.2))
        low, exact = group_bound(graph), schedule_ilp(graph, solver="highs")
        if low is None:
            continue
        settled = settle(graph, low, one_at_a_time(graph).period_ns, 1000)
        if not settled.proved:
            seen["not settled"] += 1
            continue
        assert settled.pattern is not None
        assert settled.pattern.period_ns == settled.bound_ns == exact.lower_bound_ns, seed
        if graph.policy.weights != "2bw" or graph.policy.accumulate is not None:
            assert pattern_violations(graph, settled.pattern) == []
        below = settle(graph, low, settled.pattern.period_ns - 1, 1000)
        assert (below.pattern, below.proved) == (None, True), seed
        seen["above the bound"] += settled.pattern.period_ns > low
        seen["settled"] += 1
    assert seen["settled"] >= 15
    assert seen["above the bound"] >= 1
    assert seen["not settled"] <= 5


def test_a_budget_ends_the_search_at_the_same_place_every_time():
    graph = instance(DEALT, 1.3, 0)
    low, high = group_bound(graph), graph.path_ns
    found = [settle(graph, low, high, 10) for _ in range(2)]
    assert found[0] == found[1]
    assert not found[0].proved
    assert found[0].bound_ns == low

"""Periods settled by propagation: the same as by the integer program, which is exact, and quickly."""

import random
from collections import Counter
from dataclasses import replace

from cases.chains import random_chain
from oracles.schedules import all_patterns
from test_ilp import DEALT, varied_graph

from pipeplan.check.validate import pattern_violations
from pipeplan.cost.group_bound import group_bound
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.pattern import memory_fits, one_at_a_time, starts_of
from pipeplan.schedule.periodic.ilp import schedule_ilp
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star, emptiest_one_f_one_b_star
from pipeplan.schedule.periodic.turns import emptiest, settle
from scripts.bench.ilp import instance


def test_settles_what_the_integer_program_says():
    seen = Counter()
    for seed in range(25, 50):
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
    assert seen["settled"] >= 7
    assert seen["above the bound"] >= 1
    assert seen["not settled"] <= 3


def test_a_budget_ends_the_search_at_the_same_place_every_time():
    graph = instance(DEALT, 1.3, 0)
    low, high = group_bound(graph), graph.path_ns
    found = [settle(graph, low, high, 10) for _ in range(2)]
    assert found[0] == found[1]
    assert not found[0].proved
    assert found[0].bound_ns == low


def inside(graph, starts, period):
    """The microbatches that start between a stage's forward and its backward, over all stages."""
    return sum(
        (starts[graph.position["B", s]] - starts[graph.position["F", s]]) // period for s, _ in enumerate(graph.stages)
    )


def test_sums_that_no_machine_number_holds_are_left_to_other_searches():
    """So much later than another a pass begins at most: the least common multiple of replicas' numbers, in periods."""
    layers = tuple(Layer(f"l{i}", 10**17, 2 * 10**17, 8, 4) for i in range(2))
    stages = (Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3, 4)))
    graph = stage_graph(Chain("years", layers, 4), Platform.flat(5, 10**12, 10**9), Policy("2bw"), stages)
    assert not settle(graph, graph.period_floor_ns, graph.path_ns, 10).proved


def test_the_emptiest_pattern_is_that_of_one_f_one_b_star():
    fewer = 0
    for seed in range(20):
        rng = random.Random(seed)
        layers = [Layer(f"{i}", rng.randint(9, 11), rng.randint(19, 21), 0, 1, 1) for i in range(rng.randint(3, 5))]
        stages = [Stage(i, i + 1, (i,)) for i in range(len(layers))]
        platform = Platform.flat(len(layers), rng.randint(8, 14), 10**9)
        graph = stage_graph(Chain("straight", tuple(layers), 0), platform, Policy("stash", 8), stages)
        best = best_one_f_one_b_star(graph)
        high = best.period_ns + rng.randint(0, 4)
        found, exact = emptiest(graph, best, high, 1000), emptiest_one_f_one_b_star(graph, high)
        one, other = ((inside(graph, starts_of(x), x.period_ns), x.period_ns) for x in (found, exact))
        assert one == other or (found is best and one[0] == other[0]), seed
        fewer += found is not best
    assert fewer >= 5


def test_no_pattern_of_stages_that_share_a_device_is_emptier():
    """By force: three stages, the first and the last on one device."""
    fewer = 0
    for seed in range(20):
        rng = random.Random(seed)
        chain = random_chain(rng, 3, largest=2)
        chain = replace(chain, layers=tuple(replace(x, output_bytes=0, saved_bytes=2) for x in chain.layers))
        stages = [Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (0,))]
        graph = stage_graph(chain, Platform.flat(2, 10**6), Policy("stash", rng.randint(1, 4)), stages)
        best = settle(graph, graph.period_floor_ns, graph.path_ns, 1000).pattern
        if best is None or best.period_ns > 9:
            continue
        high = best.period_ns + rng.randint(0, 1)
        found = emptiest(graph, best, high, 1000)
        assert pattern_violations(graph, found) == []
        every = [
            (inside(graph, list(map(int, starts)), period), period)
            for period in range(best.period_ns, high + 1)
            for starts in all_patterns(graph, period)
            if memory_fits(graph, list(map(int, starts)), period)
        ]
        mine = inside(graph, starts_of(found), found.period_ns)
        assert mine == min(every)[0]
        assert found is best or found.period_ns == min(every)[1]
        fewer += found is not best
    assert fewer

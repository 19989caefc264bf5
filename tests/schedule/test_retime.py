from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases.chains import random_problem

from pipeplan.check.validate import pattern_violations
from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.schedule.pattern import most_in_flight, starts_of
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.periodic.retime import Precedence, order_of, precedences, retime, smallest_period_of


def chain_of(*times: tuple[int, int]) -> Chain:
    """Return a chain without bytes whose layers take (forward, backward) ns."""
    return Chain("t", tuple(Layer(f"layer{i}", f, b, 0, 0) for i, (f, b) in enumerate(times)), 0)


def shared_device(*, accumulate: int | None = None) -> StageGraph:
    """Stages 0 and 2 on device 0, stage 1 on device 1: F0 F1 F2 B2 B1 B0 take 2 3 1 2 4 3 ns."""
    stages = [Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (0,))]
    policy = Policy(accumulate=accumulate)
    return stage_graph(chain_of((2, 3), (3, 4), (1, 2)), Platform.flat(2, 10**6), policy, stages)


def test_a_cycle_of_height_two_gives_half_its_length_rounded_up():
    # 0 -> 1 takes 4, 1 -> 0 takes 3, and the turn spans two periods: T = ceil(7 / 2)
    rules = [Precedence(0, 1, 4, 0), Precedence(1, 0, 3, 2)]
    assert smallest_period_of(2, rules, 1) == (4, [0, 4])


def test_no_period_helps_a_cycle_of_no_height():
    assert smallest_period_of(2, [Precedence(0, 1, 4, 1), Precedence(1, 0, 3, -1)], 1) is None


def test_the_period_is_at_least_the_lowest_asked_for():
    assert smallest_period_of(2, [Precedence(0, 1, 4, 0), Precedence(1, 0, 3, 2)], 9) == (9, [0, 4])


def feasible(count: int, rules: list[Precedence], period: int) -> bool:
    """Floyd-Warshall: whether no cycle is longer than 0 at ``period``."""
    far = [[-(10**9)] * count for _ in range(count)]
    for r in rules:
        far[r.before][r.after] = max(far[r.before][r.after], r.gap_ns - r.height * period)
    for k in range(count):
        for i in range(count):
            for j in range(count):
                far[i][j] = max(far[i][j], far[i][k] + far[k][j])
    return all(far[i][i] <= 0 for i in range(count))


@pytest.mark.parametrize("seed", range(60))
def test_smallest_period_equals_a_scan(seed):
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    rules = [Precedence(v, v + 1, rng.randint(0, 9), 0) for v in range(count - 1)]
    for _ in range(rng.randint(1, 8)):
        u, v = rng.sample(range(count), 2)
        rules.append(Precedence(u, v, rng.randint(0, 9), rng.randint(-1, 3)))
    found = smallest_period_of(count, rules, 1)
    periods = [period for period in range(1, 200) if feasible(count, rules, period)]
    if found is None:
        assert not periods
    else:
        period, starts = found
        assert period == periods[0]
        assert all(starts[r.after] - starts[r.before] >= r.gap_ns - r.height * period for r in rules)
        for v in range(1, count):  # nothing could start earlier
            assert any(starts[v] == starts[r.before] + r.gap_ns - r.height * period for r in rules if r.after == v)


def test_retime_by_hand():
    # device 0 runs F0 F2 B2 B0 of one microbatch in a row, and waits for F1 and B1 in between
    graph = shared_device()
    position = graph.position
    f0, f2, b2, b0 = (position[key] for key in (("F", 0), ("F", 2), ("B", 2), ("B", 0)))
    f1, b1 = position["F", 1], position["B", 1]
    order = {(f0, f2): 0, (f0, b2): 0, (f0, b0): 0, (f2, b2): 0, (f2, b0): 0, (b2, b0): 0, (f1, b1): 0}
    pattern = retime(graph, order)
    assert pattern is not None
    assert (pattern.period_ns, starts_of(pattern)) == (15, [0, 2, 5, 6, 8, 12])
    # B0 after F0 of the next microbatch, while stage 1 works on that one: device 1's round F1 F2 B2 B1 binds
    pattern = retime(graph, order | {(f0, b0): -1})
    assert pattern is not None
    assert (pattern.period_ns, starts_of(pattern)) == (10, [0, 2, 5, 6, 8, 12])
    assert order_of(graph, starts_of(pattern), 10) == order | {(f0, b0): -1}
    # B0 even after F2 and B2 of the next microbatch: device 0's round F0 F1 F2 B2 B0 binds
    pattern = retime(graph, order | {(f0, b0): -1, (f2, b0): -1, (b2, b0): -1})
    assert pattern is not None
    assert (pattern.period_ns, starts_of(pattern)) == (11, [0, 2, 5, 6, 8, 19])
    assert not pattern_violations(replace(graph, policy=Policy(accumulate=2)), pattern)


def test_accumulate_limits_how_long_a_microbatch_stays():
    graph = shared_device()
    overlapping = sequential_order(graph) | {(graph.position["F", 0], graph.position["B", 0]): -1}
    assert retime(shared_device(accumulate=1), overlapping) is None  # F0 before B0 of the microbatch before: two
    two = retime(shared_device(accumulate=2), overlapping)
    assert two is not None
    assert two.period_ns == 10


def sequential_order(graph: StageGraph) -> dict[tuple[int, int], int]:
    starts = [0]
    for op in graph.operations[:-1]:
        starts.append(starts[-1] + op.duration_ns)
    return order_of(graph, starts, graph.path_ns)


def test_separation_keeps_operations_of_no_duration_apart():
    graph = stage_graph(
        chain_of((0, 2), (1, 1)), Platform.flat(1, 100), Policy(), [Stage(0, 1, (0,)), Stage(1, 2, (0,))]
    )
    order = sequential_order(graph)
    loose, tight = retime(graph, order), retime(graph, order, separation_ns=1)
    assert loose is not None
    assert tight is not None
    assert (loose.period_ns, tight.period_ns) == (4, 5)
    assert all(rule.gap_ns >= 1 for rule in precedences(graph, order, 1)[3:])


def contiguous_graph(seed: int) -> StageGraph:
    rng = random.Random(seed)
    layers, devices = rng.randint(2, 6), rng.randint(2, 6)
    problem: Problem = random_problem(
        rng, layers, devices, weights=("2bw", "stash", "flush", "latest"), levels=True, duplex=True, latency=True
    )
    count = rng.randint(2, min(layers, devices))
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    borders = [0, *sorted(rng.sample(range(1, devices), count - 1)), devices]
    stages = [Stage(cuts[s], cuts[s + 1], tuple(range(borders[s], borders[s + 1]))) for s in range(count)]
    return stage_graph(problem.chain, problem.platform, problem.policy, stages)


def test_the_order_of_the_best_contiguous_pattern_allows_exactly_its_period():
    checked = 0
    for seed in range(120):
        graph = contiguous_graph(seed)
        best = best_one_f_one_b_star(graph)
        if best is None:
            continue
        again = retime(graph, order_of(graph, starts_of(best), best.period_ns))
        assert again is not None
        assert again.period_ns == best.period_ns
        depth = most_in_flight(graph, starts_of(again), again.period_ns)
        decided = replace(graph, policy=replace(graph.policy, accumulate=depth))
        assert not pattern_violations(decided, again)
        checked += 1
    assert checked >= 40

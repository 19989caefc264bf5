"""What a microbatch takes where updates wait for replicas' sums, by figures worked out by hand and as simulated."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases.lowering import chain_of, plan_of
from cases.plans import random_plan

from pipeplan.check.bounds import any_bound
from pipeplan.check.evaluate import evaluate, summed_beside
from pipeplan.plan import Stage
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Device, Policy, Problem
from pipeplan.schedule.kinds import graph_of
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.update_sums import waiting_floor_ns

STAGES = (Stage(0, 1, (0, 1)), Stage(1, 2, (2,)))


def replicated(weights, interval, weight_bytes, **policy):
    """Two stages, the first on two devices; a byte takes 1 ns, so a sum takes as many as there are of weights."""
    chain = chain_of([(2 * 10**9, 4 * 10**9), (10**9, 2 * 10**9)])
    layers = (replace(chain.layers[0], weight_bytes=weight_bytes), *chain.layers[1:])
    plan = plan_of(replace(chain, layers=layers), STAGES, Policy(weights, accumulate=interval, **policy))
    levels = tuple(replace(level, bandwidth=10**9) for level in plan.platform.levels)
    plan = replace(plan, platform=replace(plan.platform, levels=levels))
    return replace(plan, pattern=best_one_f_one_b_star(graph_of(plan)))


def test_an_update_waits_for_a_sum_and_the_simulation_shows_the_period_that_the_plan_says():
    """A microbatch takes 6 s on one of two devices and 3 s on a third: an update of k takes 3 k s and its sum."""
    for weights, interval, size in (
        ("stash", 2, 3 * 10**9),
        ("stash", 4, 30 * 10**9),
        ("stash", 3, 7 * 10**9),
        ("latest", 8, 20 * 10**9),
        ("2bw", 2, 20 * 10**9),
        ("2bw", 4, 30 * 10**9),
    ):
        plan = replicated(weights, interval, size)
        found, graph = evaluate(plan), graph_of(plan)
        floor = waiting_floor_ns(graph, summed_beside(plan, graph))
        assert found.period_ns >= max(floor, plan.pattern.period_ns)
        if weights != "2bw":
            assert floor == 3 * 10**9 + -(-size // interval)
        figures = simulate_plan(plan).figures()
        assert found.period_ns - 1 < figures["period_ns"] <= found.period_ns
        slower = replicated(weights, interval, size + 10**9)
        assert evaluate(slower).period_ns >= found.period_ns


def test_a_second_gradient_needs_room_for_what_is_exchanged_too():
    """All of it at once, or two chunks of two buckets."""
    plan = replicated("2bw", 8, 3 * 10**9)
    most = max(x.peak_bytes for x in evaluate(plan).devices)
    for size, added in ((10**9, 3 * 10**9), (10**6, 4 * 10**6 * 3 * 10**9 // int(plan.chain.sums.parameters[1]))):
        for left, chosen in ((-1, {}), (0, {0: 3 * 10**9})):
            room = most + 3 * 10**9 + added + left
            devices = tuple(Device(room) for _ in range(3))
            policy = replace(plan.policy, bucket_parameters=size)
            tight = replace(plan, platform=replace(plan.platform, devices=devices), policy=policy)
            assert summed_beside(tight, graph_of(tight)) == chosen


def test_the_figures_by_hand_of_data_parallelism():
    """Four replicas of 8 s each, an update of 16 microbatches and a sum: 4 x 8 s and that for 16."""
    chain = chain_of([(10**9, 7 * 10**9)])
    chain = replace(chain, layers=(replace(chain.layers[0], weight_bytes=6 * 10**9),))
    plan = plan_of(chain, (Stage(0, 1, (0, 1, 2, 3)),), Policy("stash", accumulate=16))
    levels = tuple(replace(level, bandwidth=10**9, latency_ns=0) for level in plan.platform.levels)
    plan = replace(plan, platform=replace(plan.platform, levels=levels))
    plan = replace(plan, pattern=best_one_f_one_b_star(graph_of(plan)))
    sum_ns = graph_of(plan).stages[0].sync_period_ns * 16
    assert plan.pattern.period_ns == 2 * 10**9
    assert evaluate(plan).period_ns == -(-(32 * 10**9 + sum_ns) // 16)


def test_sums_go_on_beside_passes_where_a_second_gradient_has_room():
    plan = replicated("2bw", 8, 3 * 10**9)
    assert summed_beside(plan, graph_of(plan)) == {0: 3 * 10**9}
    assert evaluate(plan).period_ns == plan.pattern.period_ns
    most = max(x.peak_bytes for x in evaluate(plan).devices)
    full = replace(plan, platform=replace(plan.platform, devices=tuple(Device(most) for _ in range(3))))
    other = replicated("stash", 8, 3 * 10**9)
    assert summed_beside(full, graph_of(full)) == summed_beside(other, graph_of(other)) == {}
    assert evaluate(full).period_ns > plan.pattern.period_ns


@pytest.mark.parametrize("seed", range(0, 400, 8))
def test_no_period_is_below_what_stages_need_and_no_bound_is_above_it(seed):
    rng = random.Random(seed)
    plan = random_plan(rng)
    if plan.pattern is None or plan.policy.drains:
        return
    period = evaluate(plan).period_ns
    graph = graph_of(plan)
    assert period >= max(plan.pattern.period_ns, waiting_floor_ns(graph, summed_beside(plan, graph)))
    assert any_bound(Problem(plan.chain, plan.platform, plan.policy)).period_ns <= period

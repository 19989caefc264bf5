"""1F1B and GPipe: staircase, closed form, NOAM, depth, replicas, memory."""

from __future__ import annotations

import random

import pytest
from cases.plans import random_plan
from cases.schedules import balanced, held, looped, picture, staircase

from pipeplan.check.validate import pattern_violations
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.periodic.one_f_one_b import one_f_one_b_pattern
from pipeplan.schedule.program import unroll
from pipeplan.schedule.programs.one_f_one_b import ahead_of, gpipe, one_f_one_b
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import in_flight


def replicated(*counts):
    """Stages with these replica counts whose replicas together keep up: r times as long with r replicas."""
    layers = tuple(Layer(f"l{i}", 10 * r, 20 * r, 0, 0, saved_bytes=1) for i, r in enumerate(counts))
    stages, first = [], 0
    for i, r in enumerate(counts):
        stages.append(Stage(i, i + 1, tuple(range(first, first + r))))
        first += r
    return stage_graph(Chain("replicated", layers, 0), Platform.flat(first, 10**9), Policy(weights="stash"), stages)


def test_staircase():
    assert picture(simulate(one_f_one_b(balanced(3, 1, 1), 4))) == staircase("""
        F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
        .  .  F0 B0 F1 B1 F2 B2 F3 B3
    """)


def test_published_value_with_unit_times():
    assert simulate(one_f_one_b(balanced(8, 1, 2), 24)).makespan_ns == 93


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("devices", [1, 2, 5, 8])
def test_closed_form(devices, microbatches):
    timeline = simulate(one_f_one_b(balanced(devices, 3, 5), microbatches))
    assert timeline.makespan_ns == (microbatches + devices - 1) * 8
    assert held(timeline) == [min(microbatches, devices - s) for s in range(devices)]


@pytest.mark.parametrize(("stages", "microbatches", "bubble"), [(4, 8, 28.63), (8, 24, 24.31), (8, 64, 11.87)])
def test_published_bubbles(stages, microbatches, bubble):
    timeline = simulate(one_f_one_b(balanced(stages, 18522, 18086 + 9337, 601), microbatches))
    assert round(100 * timeline.longest_stage_bubble(), 2) <= bubble


@pytest.mark.parametrize(("counts", "active"), [((1, 1, 1, 1), 4), ((2, 1), 2), ((15, 1), 2), ((2, 1, 1), 2)])
def test_noam(counts, active):
    graph = replicated(*counts)
    assert ahead_of(graph)[0] == active
    timeline = simulate(one_f_one_b(graph, 16 * sum(counts)))
    assert [in_flight(timeline, i)[0] for i in range(counts[0])] == [active] * counts[0]


@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (2, 1, 1), (3, 2), (15, 1), (5, 3, 4)])
def test_round_robin_keeps_balanced_replicas_busy(counts):
    graph = replicated(*counts)
    assert program_deadlock(one_f_one_b(graph, 60)) == []
    timeline = simulate(one_f_one_b(graph, 120 * max(counts)))
    assert timeline.steady_period_ns() == 30
    sizes = [sum(counts[s:]) for s in range(len(counts))]
    assert in_flight(timeline, len(timeline.program.lanes) - 1) == {len(counts) - 1: 1}
    assert in_flight(timeline, 0) == {0: -(-sizes[0] // counts[0])}


def test_noam_is_too_few_where_a_middle_stage_has_the_most_replicas():
    graph = replicated(1, 3, 1)
    assert ahead_of(graph)[0] == 5
    assert simulate(one_f_one_b(graph, 120)).steady_period_ns() == 60
    assert simulate(one_f_one_b(graph, 120, 7)).steady_period_ns() == 30


def test_depth_trades_memory_for_throughput():
    graph = balanced(4, 10, 20)
    runs = {depth: simulate(one_f_one_b(graph, 64, depth)) for depth in (1, 2, 3, 4, 6)}
    assert [held(runs[d]) for d in runs] == [[1, 1, 1, 1], [2, 2, 2, 1], [3, 3, 2, 1], [4, 3, 2, 1], [6, 4, 2, 1]]
    periods = [runs[depth].steady_period_ns() for depth in runs]
    assert periods == pytest.approx([120, 60, 40, 30, 30], rel=0.01)


def test_more_depth_hides_transfers():
    graph = balanced(4, 10, 20, 10)
    periods = [simulate(one_f_one_b(graph, 64, depth)).steady_period_ns() for depth in (4, 7)]
    assert periods[1] == 30 < periods[0]


def test_runs_stages_that_share_devices_at_any_depth():
    for depth in range(1, 9):
        for homes in ([0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 2, 1], looped(3, 2)):
            graph = balanced(len(homes), 2, 3, 1, homes=homes)
            assert program_deadlock(one_f_one_b(graph, 12, depth)) == []


def test_runs_random_plans_or_says_why_not():
    rng = random.Random(2)
    ran = 0
    for _ in range(120):
        plan = random_plan(rng)
        graph = stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)
        shared = not graph.contiguous and any(stage.replicas > 1 for stage in plan.allocation.stages)
        try:
            program = one_f_one_b(graph, rng.randint(1, 15), rng.choice((None, 1, 2, 5)))
        except BadInput:
            assert shared
            continue
        ran += 1
        assert not shared
        assert program_deadlock(program) == []
    assert ran > 60


def test_replicated_stages_that_share_gpus_are_refused():
    layers = tuple(Layer(f"l{i}", 10, 20, 0, 1) for i in range(3))
    stages = [Stage(0, 1, (0, 1)), Stage(1, 2, (2,)), Stage(2, 3, (0, 1))]
    graph = stage_graph(Chain("shared", layers, 0), Platform.flat(3, 10**9), Policy(weights="stash"), stages)
    with pytest.raises(BadInput, match="some replicated stages share GPUs"):
        one_f_one_b(graph, 8)


def test_depth_is_positive():
    with pytest.raises(BadInput, match="depth: 0 is not positive"):
        one_f_one_b(balanced(2, 1, 1), 4, 0)


@pytest.mark.parametrize("seed", range(25))
def test_as_a_pattern_every_device_runs_the_same_order(seed):
    rng = random.Random(seed)
    replicas = [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]
    layers = tuple(Layer(f"l{i}", rng.randint(1, 30), rng.randint(1, 30), 10, 5 * rng.randint(0, 2)) for i in replicas)
    first = [sum(replicas[:s]) for s in range(len(replicas))]
    stages = [Stage(s, s + 1, tuple(range(d, d + r))) for s, (d, r) in enumerate(zip(first, replicas, strict=True))]
    platform = Platform.flat(sum(replicas), 10**9, 10**9, latency_ns=rng.randint(0, 3))
    graph = stage_graph(Chain("c", layers, 7), platform, Policy("stash", accumulate=max(replicas)), stages)
    depth = rng.choice([None, ahead_of(graph)[0] + rng.randint(0, 3)])
    pattern, count = one_f_one_b_pattern(graph, depth), 4 * sum(replicas) + 8
    assert pattern_violations(graph, pattern) == []
    assert unroll(graph, pattern, count).text() == one_f_one_b(graph, count, depth).text()
    if ahead_of(graph)[0] > 1:
        with pytest.raises(BadInput, match="fewer than NOAM's"):
            one_f_one_b_pattern(graph, ahead_of(graph)[0] - 1)


def test_gpipe_staircase():
    assert picture(simulate(gpipe(balanced(3, 1, 1), 3))) == staircase("""
        F0 F1 F2 .  .  .  .  B0 B1 B2
        .  F0 F1 F2 .  .  B0 B1 B2
        .  .  F0 F1 F2 B0 B1 B2
    """)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("devices", [1, 2, 5, 8])
def test_gpipe_closed_form(devices, microbatches):
    timeline = simulate(gpipe(balanced(devices, 3, 5), microbatches))
    assert timeline.makespan_ns == (microbatches + devices - 1) * 8
    assert held(timeline) == [microbatches] * devices


def test_gpipe_runs_any_stages_on_any_devices():
    rng = random.Random(1)
    for _ in range(60):
        plan = random_plan(rng)
        graph = stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)
        assert program_deadlock(gpipe(graph, rng.randint(1, 12))) == []

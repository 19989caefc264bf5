"""Plans that are judged through their simulated timeline: nF1B's steady state, memory, and the sentences about them."""

from __future__ import annotations

import random
from dataclasses import replace
from math import gcd

import pytest
from cases.plans import random_plan, random_simulated_plan
from cases.schedules import balanced, held

from pipeplan.check.evaluate import evaluate, evaluate_simulated
from pipeplan.check.validate import violations
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.deadline import NEVER
from pipeplan.errors import BadInput
from pipeplan.integers import ceil_div
from pipeplan.plan import Schedule, Stage
from pipeplan.problem import Chain, Device, Layer, Platform, Policy
from pipeplan.schedule.kinds import MOST_STEPS, graph_of, plan_program, plan_timeline, shown_microbatches, too_long
from pipeplan.schedule.programs.deciding import nf1b, steady_nf1b
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import flush_makespan_ns, in_flight, lane_use

UNLIMITED = 100


@pytest.mark.parametrize(("workers", "batch"), [(2, 2), (3, 1), (4, 2), (4, 4), (6, 2), (8, 3)])
@pytest.mark.parametrize("realistic", [False, True])
def test_equal_stages_hold_what_the_formula_says_at_the_period_of_one_stage(workers, batch, realistic):
    """N + (W - s)(b + 1) microbatches, one after the other without a gap (ALGORITHMS section 8)."""
    backward = 2 * batch if realistic else 1
    graph = balanced(workers, batch, backward)  # a time point is N ns, the backward of a mini-batch b of them
    steady = steady_nf1b(graph, batch, UNLIMITED)
    assert steady.repeats
    assert steady.cycle_ns == steady.cycle * batch * (batch + backward)
    result = evaluate_simulated(graph, Schedule("nf1b", batch, UNLIMITED), Platform.flat(workers, 10**9), NEVER)
    expected = [batch + (workers - s) * (backward + 1) for s in range(1, workers + 1)]
    assert [use.activation_bytes for use in result.devices] == expected
    assert [use.in_flight for use in result.devices] == [(count,) for count in expected]
    assert result.period_ns == batch + backward
    assert result.most_in_flight == expected[0]


@pytest.mark.parametrize("seed", range(40))
def test_a_settled_run_goes_on_as_it_did(seed):
    """Three times as long a run leaves at the same period and holds no more."""
    rng = random.Random(seed)
    plan = random_simulated_plan(rng, "nf1b")
    graph, schedule = graph_of(plan), plan.schedule
    steady = steady_nf1b(graph, schedule.microbatches, schedule.limit)
    assert steady.repeats
    batch, count = schedule.microbatches, steady.timeline.program.microbatches
    longer = simulate(nf1b(graph, 3 * count, batch, schedule.limit))
    entries = [row[0] for row in longer.start_ns[::batch]]
    for k in range(count // batch - 1, len(entries) - steady.cycle):
        assert entries[k + steady.cycle] - entries[k] == steady.cycle_ns
    for lane, work in enumerate(longer.program.lanes):
        if work.device is not None:
            assert in_flight(longer, lane) == in_flight(steady.timeline, lane)
            assert lane_use(longer, lane).peak_bytes == lane_use(steady.timeline, lane).peak_bytes


def nearly_equal():
    """Stages that differ by a thousandth in time, with transfers that share links both ways: no steady state shows."""
    rng = random.Random(7)
    layers = tuple(
        Layer(f"l{s}", 10**7 + rng.randrange(10**5), 2 * 10**7 + rng.randrange(2 * 10**5), 1, 2 * 10**6, saved_bytes=1)
        for s in range(8)
    )
    stages = [Stage(s, s + 1, (s,)) for s in range(8)]
    platform = Platform.flat(8, 10**9, 10**9)
    return stage_graph(Chain("nearly equal", layers, 0), platform, Policy("latest", 7), stages), platform


def test_an_unsettled_run_is_charged_all_that_the_limit_admits():
    graph, platform = nearly_equal()
    steady = steady_nf1b(graph, 7, 8)
    assert not steady.repeats
    result = evaluate_simulated(graph, Schedule("nf1b", 7, 8), platform, NEVER)
    assert [use.in_flight for use in result.devices] == [(56,)] * 7 + [(7,)]
    seen = held(steady.timeline)
    assert all(use.activation_bytes >= count for use, count in zip(result.devices, seen, strict=True))
    assert result.period_ns >= graph.period_floor_ns


@pytest.mark.parametrize("seed", range(30))
def test_random_plans_are_valid_and_need_all_their_memory(seed):
    rng = random.Random(seed)
    plan = random_simulated_plan(rng)
    assert violations(plan) == []
    result = evaluate(plan)
    assert result.period_ns >= plan.lower_bounds[0].period_ns
    for d, use in enumerate(result.devices):
        if use.peak_bytes:
            smaller = list(plan.platform.devices)
            smaller[d] = Device(use.peak_bytes - 1, smaller[d].speed)
            found = violations(replace(plan, platform=replace(plan.platform, devices=tuple(smaller))))
            assert any(f"({use.peak_bytes} bytes" in sentence and "in flight" in sentence for sentence in found)
            assert any(f"({use.peak_bytes - 1} bytes)" in sentence for sentence in found)


@pytest.mark.parametrize("seed", range(20))
def test_message_driven_figures_are_those_of_its_run(seed):
    plan = random_simulated_plan(random.Random(seed), "message-driven")
    result, timeline = evaluate(plan), plan_timeline(plan)
    assert result.makespan_ns == flush_makespan_ns(timeline)
    assert result.period_ns == ceil_div(result.makespan_ns, plan.schedule.microbatches)
    pipelines = plan.allocation.stages[0].replicas
    for lane, work in enumerate(timeline.program.lanes):
        if work.device is not None:
            assert result.devices[work.device].peak_bytes == lane_use(timeline, lane).peak_bytes
            for s, count in in_flight(timeline, lane).items():
                served = pipelines // gcd(pipelines, plan.allocation.stages[s].replicas)
                assert count <= plan.schedule.limit * served


def test_each_broken_rule_has_its_sentence():
    plan = random_simulated_plan(random.Random(3), "nf1b")
    count, schedule = plan.policy.accumulate, plan.schedule

    def said(**changes):
        return violations(replace(plan, **changes))

    assert said(schedule=replace(schedule, limit=None)) == [
        "schedule.limit is missing; nf1b needs the mini-batches that it admits, at least 1"
    ]
    assert "needs the mini-batches that it admits, at least 1" in said(schedule=replace(schedule, limit=0))[0]
    assert "schedule.microbatches is missing" in said(schedule=replace(schedule, microbatches=None))[0]
    (sentence,) = said(schedule=replace(schedule, limit=10**9))
    assert sentence.endswith(f"steps; up to {MOST_STEPS} are simulated")
    (sentence,) = said(schedule=replace(schedule, microbatches=10**12), policy=replace(plan.policy, accumulate=10**12))
    assert f"mini-batches of {10**12} microbatches, {schedule.limit} admitted at once" in sentence
    assert said(schedule=replace(schedule, microbatches=count + 1)) == [
        f"the schedule runs mini-batches of {count + 1} microbatches, but the policy updates weights every {count}"
    ]
    assert said(policy=replace(plan.policy, weights="stash")) == [
        "nf1b takes the newest weights, which is for weights latest; the policy is stash"
    ]
    assert said(schedule=Schedule("message-driven", count, 2)) == [
        "the schedule drains every mini-batch, which is for weights flush; the policy is latest"
    ]
    pattern = random_plan(random.Random(1)).pattern
    assert said(pattern=pattern) == ["the schedule is nf1b, which has no pattern, but the plan has one"]


@pytest.mark.parametrize("kind", ["flush", "message-driven"])
def test_a_drained_mini_batch_too_long_to_simulate_is_refused(kind):
    operations = 14
    most = MOST_STEPS // operations
    assert too_long(operations, Schedule(kind, most, 3)) is None
    assert too_long(operations, Schedule(kind, most + 1, 3)) == (
        f"a mini-batch of {most + 1} microbatches would take {(most + 1) * operations} steps; "
        f"up to {MOST_STEPS} are simulated"
    )
    assert too_long(operations, Schedule("pattern")) is None


def test_nf1b_gives_each_stage_one_gpu_and_each_gpu_one_stage():
    layers = tuple(Layer(f"l{i}", 1, 2, 0, 1, saved_bytes=1) for i in range(3))
    plan = random_simulated_plan(random.Random(3), "nf1b")
    plan = replace(plan, chain=Chain("three", layers, 0), platform=Platform.flat(3, 10**6), lower_bounds=())
    replicated = (Stage(0, 2, (0, 1)), Stage(2, 3, (2,)))
    shared = (Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (0,)))
    for stages, sentence in (
        (replicated, "nf1b gives each stage one GPU; stage 0 of this plan has 2"),
        (shared, "nf1b gives each GPU one stage; device 0 has stages [0, 2] in this plan"),
    ):
        assert violations(replace(plan, allocation=replace(plan.allocation, stages=stages))) == [sentence]


@pytest.mark.parametrize(("batch", "limit", "mini_batches"), [(1, 2, 64), (4, 1, 16), (5, 1, 13), (4, 3, 24)])
def test_a_run_to_be_shown_has_64_microbatches_and_eight_times_what_the_limit_admits(batch, limit, mini_batches):
    plan = random_simulated_plan(random.Random(3), "nf1b")
    assert shown_microbatches(replace(plan, schedule=Schedule("nf1b", batch, limit))) == batch * mini_batches


def test_every_kind_has_a_timeline():
    for seed in range(8):
        plan = random_plan(random.Random(seed))
        assert plan_timeline(plan).program == plan_program(plan, plan_timeline(plan).program.microbatches)
        plan = random_simulated_plan(random.Random(seed))
        assert plan_timeline(plan).program.microbatches % plan.schedule.microbatches == 0
    with pytest.raises(BadInput, match="no pattern"):
        plan_timeline(replace(random_plan(random.Random(0)), pattern=None))

"""Every algorithm on every case under one judge; what the planner decides beyond them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases.chains import published, random_chain, random_platform

import pipeplan as pp
from pipeplan.check.evaluate import evaluate, gap
from pipeplan.check.validate import violations
from pipeplan.errors import Infeasible
from pipeplan.files.profiles import read_profile
from pipeplan.partition import ALGORITHMS
from pipeplan.partition.granularity import merge_articulation
from pipeplan.plan import Bound
from pipeplan.planner import plan as planning
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.plan import make_plan
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, Problem

GB = 10**9


def problems(count: int, seed: int) -> list[Problem]:
    rng = random.Random(seed)
    made = []
    for index in range(count):
        chain = random_chain(
            rng, rng.randint(1, 9), edges=rng.random() < 0.4, saved=rng.random() < 0.4, optimizer=rng.random() < 0.5
        )
        if index % 3 == 0 and len(chain) > 1:
            chain = replace(chain, tied=((0, len(chain) - 1),))
        policy = Policy(
            weights=rng.choice(["2bw", "2bw", "stash", "flush"]),
            optimizer=rng.choice(["sgd", "momentum", "adam"]),
            precision=rng.choice(["fp32", "mixed"]),
        )
        made.append(
            Problem(
                chain,
                random_platform(rng, rng.randint(1, 5)),
                policy,
                rng.random() < 0.7,
                rng.choice(["none", "stages"]),
            )
        )
    return made


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_plan_is_valid_and_its_simulation_keeps_its_promise(algorithm: str) -> None:
    planned = 0
    for problem in problems(10, seed=len(algorithm)):
        try:
            plan = make_plan(problem, algorithm).plan
        except Infeasible:
            continue
        planned += 1
        assert violations(plan) == []
        result = evaluate(plan)
        assert all(bound.period_ns <= result.period_ns for bound in plan.lower_bounds)
        assert [bound.allocation for bound in plan.lower_bounds][-1] == "any"
        assert plan.pattern is not None
        waits = bool(result.graph.summing)
        simulation = simulate_plan(plan, None if waits else max(64, 12 * result.most_in_flight))
        figures = simulation.figures()
        reached = figures["beat_ns" if simulation.drained else "period_ns"]
        promised = result.period_ns if waits else plan.pattern.period_ns
        assert promised - 1 < reached <= promised
        assert all(row["peak_bytes"] == row["predicted_peak_bytes"] for row in figures["devices"])
    assert planned >= 2


def test_contiguous_claims_exactly_what_is_scheduled_and_no_algorithm_beats_it() -> None:
    compared = 0
    for problem in problems(8, seed=7):
        if problem.policy.weights == "flush":
            continue
        problem = problem.with_policy(replace(problem.policy, accumulate=64))
        try:
            best = make_plan(problem, "contiguous").plan
        except Infeasible:
            continue
        assert best.pattern is not None
        assert best.provenance.claimed_period_ns == best.pattern.period_ns
        assert best.lower_bounds[0].allocation == "contiguous"
        for algorithm in ALGORITHMS:
            try:
                other = make_plan(problem, algorithm).plan
            except Infeasible:
                continue
            assert other.pattern is not None
            if other.allocation.contiguous:
                assert other.pattern.period_ns >= best.pattern.period_ns
                compared += 1
    assert compared > 6


def test_a_given_accumulate_limits_what_is_in_flight() -> None:
    chain = Chain("even", tuple(Layer(f"l{i}", 10, 10, 0, 1) for i in range(8)), 1)
    problem = Problem(chain, Platform.flat(4, GB), replicas=False, checkpointing="none")
    free = make_plan(problem).plan
    assert evaluate(free).most_in_flight == 7  # with transfers of 1 ns, 1F1B* holds 2P - 1
    tight = make_plan(problem.with_policy(Policy(accumulate=4))).plan
    assert evaluate(tight).most_in_flight <= 4
    assert tight.pattern is not None
    assert free.pattern is not None
    assert tight.pattern.period_ns > free.pattern.period_ns


def test_flush_plans_for_the_drained_mini_batch() -> None:
    chain = Chain("even", tuple(Layer(f"l{i}", 100, 200, 0, 1) for i in range(8)), 1)
    problem = Problem(chain, Platform.flat(4, GB), Policy("flush"), replicas=False, checkpointing="none")
    plan = make_plan(problem, schedule="flush").plan
    assert plan.schedule.kind == "flush"
    assert plan.schedule.microbatches == plan.policy.accumulate == 16
    result = evaluate(plan)
    assert result.makespan_ns is not None
    # four equal stages: (m + p - 1) stage times, and the few ns of transfers
    assert 19 * 600 <= result.makespan_ns <= 19 * 600 + 40
    grid = evaluate(make_plan(problem).plan)  # two stages on each GPU fill and drain in half the time
    assert grid.makespan_ns is not None
    assert 16 * 600 + 3 * 300 <= grid.makespan_ns <= 16 * 600 + 3 * 300 + 100
    one = make_plan(problem.with_policy(Policy("flush", accumulate=1))).plan
    assert evaluate(one).makespan_ns == 2400  # a single microbatch gains nothing from cuts


@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gnmt"])
def test_published_profiles_plan_optimally_on_eight_gpus(name: str) -> None:
    chain = published(name)
    plan = make_plan(Problem(chain, Platform.flat(8, 16 * GB)), "contiguous").plan
    result = evaluate(plan)
    assert result.period_ns < int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1]) / 3
    assert gap(result.period_ns, plan.lower_bounds[0]) == 0
    merged = make_plan(Problem(merge_articulation(chain), Platform.flat(8, 16 * GB)), "contiguous").plan
    assert evaluate(merged).period_ns >= result.period_ns  # fewer places to cut


def test_vertical_sync_finds_splits_that_leave_room_for_versions() -> None:
    """Heavy weights at the end, activations at the start: what the first stage holds decides what the last keeps."""
    layers = tuple(Layer(f"l{i}", 10, 20, 10 * (i + 1) ** 2, 1, saved_bytes=400 // (i + 1)) for i in range(8))
    chain, policy = Chain("narrowing", layers, 1), Policy("stash", 1, vertical_sync=True)
    for memory in (3600, 3900, 4200, 4800):
        platform = Platform.flat(3, memory, 10**9)
        problem = Problem(chain, platform, policy, replicas=False, checkpointing="none")
        plan = make_plan(problem, effort="quick").plan
        assert violations(plan) == []
        assert evaluate(plan).period_ns <= 122  # of layers [4, 7, 8], which fit from 3600 bytes


@pytest.mark.parametrize(("replicas", "most", "alone"), [(True, 2_880_000, 3_000_000), (False, 6_860_000, 24_000_000)])
def test_a_gpt_whose_head_is_its_embedding_becomes_a_pipeline(replicas: bool, most: int, alone: int) -> None:
    """With replicas within a fortieth of U / P; one stage alone holds all weights, and recomputes for it. The sum is
    hidden."""
    chain = read_profile("profiles/gpt2-small-b4-a100.json")
    problem = Problem(chain, Platform.flat(8, 2 * GB), replicas=replicas, checkpointing="segments")
    found = make_plan(problem, "contiguous")
    assert found.evaluation.period_ns < most
    assert gap(found.evaluation.period_ns, found.plan.lower_bounds[-1]) < 0.025
    assert found.plan.lower_bounds[0].allocation == "contiguous"
    assert gap(found.evaluation.period_ns, found.plan.lower_bounds[0]) <= 0.001, "proved at any interval"
    graph = found.evaluation.graph
    (holders,) = graph.tied
    assert holders == (0, len(graph.stages) - 1)
    assert all(graph.sync_periods_ns[graph.stages[s].resource] for s in holders)
    together = make_plan(replace(problem, tied="together"), "contiguous").evaluation.period_ns
    assert together > alone


def test_a_sum_over_stages_that_binds_is_the_period_and_the_simulated_one() -> None:
    layers = tuple(Layer(f"l{i}", 10, 20, 1000 if i % 3 == 0 else 8, 1) for i in range(4))
    chain = Chain("made", layers, 1, tied=((0, 3),))
    platform = Platform.flat(2, 10**6, 10**9)
    problem = Problem(chain, platform, Policy(accumulate=5), replicas=False)
    found = make_plan(replace(problem, platform=Platform.flat(2, 5000, 10**9)))
    assert found.evaluation.period_ns == 200  # 1000 ns for every 5 microbatches; the stages take 60
    assert found.plan.lower_bounds[0].period_ns == 200
    simulation = simulate_plan(found.plan, microbatches=100)
    assert simulation.timeline.steady_period_ns() == 200
    pattern = found.plan.pattern
    assert pattern is not None
    shorter = replace(found.plan, pattern=replace(pattern, period_ns=199), lower_bounds=())
    assert [x for x in violations(shorter) if "of gradient all-reduce per microbatch" in x]
    roomy = make_plan(problem).evaluation.period_ns
    assert roomy == 60, "the first and the last stage are on one GPU and sum nothing"


def test_a_bound_that_a_plan_refutes_costs_the_bound_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(random_chain(random.Random(1), 4), Platform.flat(2, 10**6))
    expected = make_plan(problem)
    wrong = Bound("any", True, "stages", expected.evaluation.period_ns + 1, any_interval=True)
    monkeypatch.setattr(planning, "any_bound", lambda *_: wrong)
    settings = Settings()
    found = make_plan(problem, settings=settings)
    assert found.evaluation == expected.evaluation
    assert wrong not in found.plan.lower_bounds
    assert violations(found.plan) == []
    (note,) = settings.status.notes
    assert note.startswith(f"a lower bound of {wrong.period_ns} ns for class any is wrong and left out")


def test_a_schedule_of_one_policy_says_the_weights() -> None:
    assert pp.plan("example:gpt-tiny", gpus=2, mem="16GB", schedule="nf1b").plan.policy.weights == "latest"


@pytest.mark.filterwarnings("error")
def test_a_gpu_without_memory_has_no_stage():
    chain = random_chain(random.Random(3), 5, saved=True, largest=30)
    platform = Platform((Device(0), Device(10**6)), (Level(2, 10**9),))
    plan = make_plan(Problem(chain, platform)).plan
    assert {d for stage in plan.allocation.stages for d in stage.devices} == {1}

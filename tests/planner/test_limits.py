"""Planning for schedules that decide as they go: nF1B and message-driven, with limits chosen or given."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from cases.chains import random_chain
from cases.drained import drained_instance
from cases.schedules import balanced

from pipeplan.check.bounds import any_bound
from pipeplan.check.evaluate import evaluate
from pipeplan.check.validate import violations
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput, Infeasible
from pipeplan.files.plans import plan_text
from pipeplan.plan import Schedule, Stage
from pipeplan.planner.drained.run import any_run
from pipeplan.planner.grids.pipelines import Pipelines
from pipeplan.planner.grids.space import GridConfig
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.periodic.limits import LimitSearch, cost_and_excess, drained_floor_ns
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.schedule.kinds import KINDS
from pipeplan.schedule.programs.deciding import message_driven, steady_nf1b
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import flush_makespan_ns, in_flight


def even(layers=8, gpus=4, memory=10**6, weights="latest", accumulate=None, output=1, **allowed):
    """Equal layers of F 10 and B 20 that save 100 bytes each."""
    chain = Chain("even", tuple(Layer(f"l{i}", 10, 20, 5, output, saved_bytes=100) for i in range(layers)), 1)
    return Problem(chain, Platform.flat(gpus, memory, 10**9), Policy(weights, accumulate), **allowed)


def test_latest_plans_for_nf1b_at_the_period_of_an_even_split():
    plan = make_plan(even(accumulate=2, output=0)).plan
    assert plan.schedule == Schedule("nf1b", 2, 4)
    assert plan.pattern is None
    assert evaluate(plan).period_ns == 60 == plan.lower_bounds[0].period_ns
    assert not plan.lower_bounds[0].replicas
    assert [(stage.start, stage.stop) for stage in plan.allocation.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_the_mini_batch_is_the_largest_of_those_with_the_shortest_period():
    plan = make_plan(even(output=0)).plan
    assert plan.policy.accumulate == plan.schedule.microbatches == 3  # W - 1
    held = max(use.in_flight[0] for use in evaluate(plan).devices)
    tight = make_plan(even(output=0, memory=200 * held // 3 + 100, checkpointing="none")).plan
    assert tight.policy.accumulate in (1, 2, 3)
    assert all(use.peak_bytes <= use.memory_bytes for use in evaluate(tight).devices)


@pytest.mark.parametrize("seed", range(2))
def test_less_memory_admits_less_and_never_runs_faster(seed):
    rng = random.Random(seed)
    chain = random_chain(rng, 5, saved=True)
    last = None
    for memory in (10**6, 250, 100, 60):
        problem = Problem(chain, Platform.flat(3, memory, 10**9), Policy("latest", 3))
        try:
            plan = make_plan(problem).plan
        except Infeasible:
            break
        assert violations(plan) == []
        assert plan.lower_bounds == (any_bound(replace(problem, replicas=False)),)
        period = evaluate(plan).period_ns
        assert last is None or period >= last - last // 500
        last = period


def test_a_given_limit_is_kept_and_what_does_not_fit_is_explained():
    for limit in (1, 2, 5):
        assert make_plan(even(accumulate=2), limit=limit).plan.schedule.limit == limit
    with pytest.raises(Infeasible) as error:
        make_plan(even(accumulate=4, memory=1300, checkpointing="none"), limit=4)
    sentence = str(error.value)
    assert "with 4 mini-batches of 4 admitted" in sentence
    assert "feasible with --limit 1" in sentence or "with --accumulate" in sentence
    with pytest.raises(Infeasible, match=r"even with 1 mini-batch of 50 admitted.*--accumulate"):
        make_plan(even(accumulate=50, memory=2000, checkpointing="none"))


def test_vertical_sync_needs_memory_for_its_versions():
    """Versions are those that the simulated run has at once, and the plan pays for them."""
    problem = even(accumulate=2, output=0)
    without = make_plan(problem).plan
    synced = make_plan(problem.with_policy(replace(problem.policy, vertical_sync=True))).plan
    assert [use.weights_bytes for use in evaluate(without).devices] == [2 * 10] * 4
    versions = [use.weights_bytes // 10 - 1 for use in evaluate(synced).devices]
    assert versions[0] >= 1
    assert versions == sorted(versions)  # the last stage updates first and waits longest for the others
    assert versions[-1] > 1


def test_message_driven_plans_for_the_simulated_makespan():
    plan = make_plan(even(weights="flush", accumulate=16, replicas=False, output=0), schedule="message-driven").plan
    result, schedule = evaluate(plan), plan.schedule
    assert (schedule.kind, schedule.microbatches) == ("message-driven", 16)
    assert result.makespan_ns <= (16 + 3) * 60  # of one stage per GPU; stages that share GPUs may drain faster
    graph = stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)
    assert result.makespan_ns == flush_makespan_ns(simulate(message_driven(graph, 16, schedule.limit)))
    cost, excess = cost_and_excess(graph, plan.schedule, plan.platform)
    assert (cost, excess <= 0) == (result.makespan_ns, True)


@pytest.mark.parametrize("seed", range(3))
def test_a_message_driven_plan_is_as_good_as_the_best_split_of_any_grid(seed):
    rng = random.Random(seed)
    chain, platform = random_chain(rng, 6, saved=True, optimizer=seed % 2 == 0), Platform.flat(4, 10**6, 10**9)
    problem = Problem(chain, platform, Policy("flush", 12))
    plan = make_plan(problem, schedule="message-driven").plan
    for stages, pipelines in ((4, 1), (3, 1), (2, 2), (1, 4), (1, 2)):
        grid = Pipelines(problem, GridConfig(stages, pipelines, 1).groups(), 12 // pipelines)
        best = max(grid.try_(grid.probe()), key=lambda split: -split.result.batch_ns, default=None)
        assert best is not None
        graph = stage_graph(chain, platform, problem.policy, best.stages)
        cost, _ = LimitSearch(Schedule("message-driven", 12), platform).choose(graph)
        assert evaluate(plan).makespan_ns <= cost * 1.001


@pytest.mark.parametrize(
    ("gpus", "memory", "said"), [(1, 10**9, "at least 2 stages on each of 2 GPUs"), (4, 60, "no pipelines were found")]
)
def test_it_is_said_why_nothing_runs_with_several_stages_on_a_gpu(gpus, memory, said):
    problem = replace(even(weights="flush", accumulate=8), platform=Platform.flat(gpus, memory))
    with pytest.raises(Infeasible, match=said):
        make_plan(problem, schedule="zbv")


def test_flush_is_a_pattern_where_nothing_drains_sooner():
    assert make_plan(even(weights="flush", accumulate=8), schedule="flush").plan.schedule == Schedule("flush", 8)
    found = make_plan(even(weights="flush", accumulate=8))  # sums of gradients are hidden behind other stages
    assert (found.plan.schedule, found.evaluation.makespan_ns) == (Schedule("breadth-first", 8), 488)
    alone = replace(even(weights="flush", accumulate=8), platform=Platform.flat(1, 10**9))
    assert make_plan(alone).plan.schedule == Schedule("flush", 8)
    assert make_plan(even(accumulate=1), schedule="pattern").plan.schedule == Schedule()


def test_with_replicas_the_limit_counts_for_each_pipeline():
    layers = tuple(Layer(f"l{i}", 1, 2, 0, 0, saved_bytes=1) for i in range(2))
    stages = [Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3))]
    platform = Platform.flat(4, 10**6, 10**9)
    graph = stage_graph(Chain("two", layers, 0), platform, Policy("flush", 12), stages)
    alone = simulate(message_driven(balanced(2, 1, 2), 6, 3))
    both = simulate(message_driven(graph, 12, 3))
    assert both.makespan_ns == alone.makespan_ns
    assert [max(in_flight(both, i).values()) for i in range(4)] == [
        max(in_flight(alone, i // 2).values()) for i in range(4)
    ]


def test_the_largest_limit_that_fits_is_chosen_below_the_usual_one():
    graph = balanced(4, 2, 4)  # one byte for each microbatch
    for memory in (2, 4, 6, 8, 10, 16):
        platform = Platform.flat(4, memory, 10**9)
        cost, chosen = LimitSearch(Schedule("nf1b", 2), platform).choose(graph)
        limit = chosen.limit
        assert cost == steady_nf1b(graph, 2, limit).period_ns
        assert cost_and_excess(graph, chosen, platform)[1] <= 0
        if limit < 4:
            assert cost_and_excess(graph, replace(chosen, limit=limit + 1), platform)[1] > 0
    assert LimitSearch(Schedule("nf1b", 2), Platform.flat(4, 1, 10**9)).choose(graph) is None


def test_equal_input_gives_equal_bytes():
    problem = even(layers=6, gpus=3, memory=2500)
    assert plan_text(make_plan(problem).plan) == plan_text(make_plan(problem).plan)


@pytest.mark.parametrize(
    ("weights", "schedule", "limit", "sentence"),
    [
        ("2bw", "nf1b", None, "nf1b doesn't go with weights 2bw; only pattern"),
        ("flush", "pattern", None, "pattern doesn't go with weights flush; only flush and message-driven"),
        ("latest", "nf1b", 0, "limit: 0 is not positive"),
        ("stash", None, 3, "limit: a pattern schedule has a fixed order"),
        ("flush", None, 3, "limit: a flush schedule"),
    ],
)
def test_contradictions(weights, schedule, limit, sentence):
    with pytest.raises(BadInput, match=sentence):
        make_plan(even(weights=weights, accumulate=2), schedule=schedule, limit=limit)


def test_what_needs_replicas_cannot_run_as_nf1b():
    with pytest.raises(Infeasible, match="contiguous may find one that can"):
        make_plan(even(accumulate=2), "data-parallel")


def memory_bound(memory):
    """Eight layers that save much and pass on little: holding more than a few microbatches needs recomputation."""
    layers = tuple(Layer(f"l{i}", 10, 20, 0, 1, saved_bytes=100) for i in range(8))
    chain = Chain("dear", layers, 1)
    return Problem(chain, Platform.flat(4, memory, 10**9), Policy("latest", 1), replicas=False)


@pytest.mark.parametrize(("weights", "schedule"), [("latest", "nf1b"), ("flush", "message-driven")])
def test_stages_recompute_parts_of_themselves_to_hold_what_the_limit_admits(weights, schedule):
    problem = memory_bound(800)
    problem = problem.with_policy(Policy(weights, 1 if schedule == "nf1b" else 16))
    parts = make_plan(replace(problem, checkpointing="segments"), schedule=schedule).plan
    whole = make_plan(replace(problem, checkpointing="stages"), schedule=schedule).plan
    assert evaluate(parts).period_ns < evaluate(whole).period_ns
    recomputed = [sum(stop - start for start, stop in stage.checkpoint) for stage in parts.allocation.stages]
    assert any(0 < r < stage.stop - stage.start for r, stage in zip(recomputed, parts.allocation.stages, strict=True))


def test_what_does_not_fit_is_told_of_the_split_that_lacks_least():
    """The first splits that are tried store everything and lack the most; they are not what a user can do best."""
    problem = memory_bound(60).with_policy(Policy("latest", None))
    with pytest.raises(Infeasible, match=r"fits \(proved: .*\): even with one microbatch in flight") as error:
        make_plan(problem)
    assert "nf1b" not in str(error.value)
    problem = memory_bound(250).with_policy(Policy("flush", 400))
    with pytest.raises(Infeasible, match="message-driven: with 200 microbatches per pipeline admitted") as error:
        make_plan(problem, schedule="message-driven", limit=200)
    assert "or from 0.01 MB per GPU" in str(error.value)  # stored layers would take 0.04 MB
    fewer = int(re.search(r"feasible with --limit (\d+)", str(error.value))[1])
    assert make_plan(problem, schedule="message-driven", limit=fewer).plan.schedule.limit == fewer


def test_a_stage_alone_admits_one_microbatch_whatever_the_limit():
    layers = (Layer("a", 10, 20, 0, 0, saved_bytes=100),)
    problem = Problem(Chain("one", layers, 1), Platform.flat(2, 150, 10**9), Policy("flush", 8))
    plan = make_plan(problem, schedule="message-driven", limit=9).plan
    assert plan.schedule.limit == 1
    assert evaluate(plan).devices[0].in_flight == (1,)


def test_stages_between_which_no_mini_batch_fits_become_one():
    """A cut takes 10 bytes for activations and 40 for the gradients of a mini-batch, more than a pattern would."""
    layers = tuple(Layer(f"l{i}", 10, 20, 0, 10 - 10 * i, saved_bytes=1) for i in range(2))
    problem = Problem(Chain("wide", layers, 0), Platform.flat(2, 30, 10**9), Policy("latest", 4), replicas=False)
    plan = make_plan(problem).plan
    assert [stage.devices for stage in plan.allocation.stages] == [(0,)]
    assert evaluate(plan).period_ns == 60
    split = make_plan(replace(problem, platform=Platform.flat(2, 62, 10**9))).plan
    assert evaluate(split).devices[0].buffer_bytes == 50


def test_an_interrupt_ends_the_choice_of_mini_batches():
    told: list[str] = []

    def interrupt(line: str) -> None:
        told.append(line)
        if len(told) == 1:
            raise KeyboardInterrupt

    plan = make_plan(even(), settings=Settings(progress=interrupt)).plan
    assert plan.provenance.solver_status == "interrupted"
    assert (plan.policy.accumulate, len(told)) == (3, 1)


@pytest.mark.parametrize("seed", range(20))
def test_no_mini_batch_is_over_before_its_floor(seed: int) -> None:
    """Under any kind that drains without an order of its own, and no run that may be soon enough is left out."""
    problem, rng = drained_instance(seed, more=2), random.Random(seed)
    homes = rng.choice([(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2), (1, 0, 2, 0), (0, 1, 2, 1, 0)])
    cuts = sorted(rng.sample(range(1, len(problem.chain)), len(homes) - 1))
    parts = pairwise((0, *cuts, len(problem.chain)))
    stages = tuple(Stage(*part, (home,)) for part, home in zip(parts, homes, strict=True))
    for kind in (name for name, row in KINDS.items() if row.drains and not row.written):
        run = any_run(problem, stages, kind)
        if run is not None:
            floor = drained_floor_ns(run.graph, kind, run.timeline.program.microbatches)
            assert floor <= run.makespan_ns
            assert any_run(problem, stages, kind, run.makespan_ns + 1) is not None

"""Stages that drain soonest: timed like the simulator, and as good as all that there are."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product

import pytest
from cases.chains import uneven_chain
from cases.drained import open_and_named, open_instance, soonest_in_any_order

import pipeplan as pp
from pipeplan.plan import ScheduleKind, Stage
from pipeplan.planner.drained.run import any_run, drained_run, fitting_run
from pipeplan.planner.drained.search import search_stages
from pipeplan.planner.periodic.incumbent import Incumbent, Settings
from pipeplan.planner.plan import make_plan
from pipeplan.planner.simulated.simulation import compare_schedules
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.schedule.kinds import kinds_for


def _chain(rng: random.Random, layers: int, sizes: int = 40) -> Chain:
    return Chain(
        "random",
        tuple(
            Layer(
                f"l{i}",
                rng.randint(1, 30),
                rng.randint(1, 60),
                rng.randint(0, 50),
                rng.randint(1, sizes),
                optimizer_ns=7,
            )
            for i in range(layers)
        ),
        input_bytes=4,
    )


@pytest.mark.parametrize(("memory", "weight_ns"), [(400, 0), (400, 20), (230, 20)])
def test_a_drained_plan_is_no_worse_than_any_schedule_that_it_is_simulated_under(memory: int, weight_ns: int) -> None:
    rng = random.Random(memory)
    layers = tuple(
        Layer(f"l{i}", rng.randint(10, 30), rng.randint(30, 60), 2, rng.randint(2, 9), backward_weight_ns=weight_ns)
        for i in range(9)
    )
    policy = Policy(weights="flush", accumulate=8)
    problem = Problem(Chain("even", layers, 5), Platform.flat(4, memory, 10**9), policy, checkpointing="segments")
    found = make_plan(problem, effort="quick")
    runs, _ = compare_schedules(found.plan, kinds_for("flush")[1:])
    assert runs
    assert found.evaluation.period_ns <= min(run.per_microbatch_ns for run in runs if run.fits) + 1


@pytest.mark.parametrize("seed", [1, 3, 209])
def test_the_open_question_is_never_worse_than_a_named_schedule_or_algorithm(seed: int) -> None:
    """But for schedules that search for their order, under which the best stages alone are tried."""
    found = open_and_named(open_instance(seed))
    assert not found or found["{}"] == min(found.values()), found


@pytest.mark.parametrize("seed", [6, 19])
def test_few_passes_are_ordered_as_no_schedule_orders_them(seed: int) -> None:
    problem = open_instance(seed, layers=3, replicas=False)
    planned = make_plan(problem)
    assert planned.evaluation.makespan_ns == soonest_in_any_order(problem)
    assert planned.plan.schedule.kind == "written"


def test_recomputation_is_as_little_as_lets_a_run_fit() -> None:
    """Beside all 81 choices."""
    layers = tuple(Layer(f"l{i}", 20, 40, 2, 9, backward_weight_ns=20, saved_bytes=9 + i) for i in range(8))
    chain, policy = Chain("even", layers, 5), Policy(weights="flush", accumulate=6)
    cases: list[tuple[ScheduleKind, int]] = [("interleaved", 130), ("interleaved", 150), ("zbv", 115)]
    for kind, memory in cases:
        homes = (0, 1, 0, 1) if kind == "interleaved" else (0, 1, 1, 0)
        problem = Problem(chain, Platform.flat(2, memory, 10**9), policy, checkpointing="segments")
        made = tuple(Stage(2 * s, 2 * s + 2, (home,)) for s, home in enumerate(homes))
        again = [((), ((x.start, x.start + 1),), ((x.start, x.stop),)) for x in made]
        every = (tuple(replace(x, checkpoint=y) for x, y in zip(made, ys, strict=True)) for ys in product(*again))
        runs = (drained_run(problem, stages, kind) for stages in every)
        best = min((run.makespan_ns for run in runs if run is not None), default=None)
        bare = any_run(problem, made, kind)
        assert bare is not None
        found = fitting_run(problem, bare, again, partial(any_run, problem, kind=kind))
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert found.fits
            assert best <= found.makespan_ns <= best * 21 // 20


def test_a_bound_that_follows_from_that_of_more_plans_is_left_out() -> None:
    """Weights that no GPU has room for twice: the plan is on one, and its bound for class any is its period; that of
    drained contiguous plans is found to a part of 4096."""
    chain = Chain("heavy", tuple(Layer(f"{i}", 10**9, 2 * 10**9, 2 * 10**14, 2 * 10**14) for i in range(4)), 10**14)
    problem = Problem(chain, Platform.flat(3, 9 * 10**15, 12 * 10**9), Policy("flush", accumulate=3))
    planned = make_plan(problem)
    (bound,) = planned.plan.lower_bounds
    assert (bound.allocation, bound.period_ns) == ("any", planned.evaluation.period_ns)


def test_a_schedule_that_is_asked_for_gets_the_stages_that_drain_soonest_under_it() -> None:
    chain = _chain(random.Random(1), 5, 20)
    policy = Policy(weights="flush", accumulate=6)
    problem = Problem(chain, Platform.flat(4, 420, 10**9), policy, checkpointing="none")
    search = Incumbent(problem, Settings())
    search_stages(search, ("1f1b",), "normal")
    found = make_plan(problem, schedule="1f1b").evaluation
    assert search.best is not None
    assert found.makespan_ns is not None
    assert found.makespan_ns <= search.best.cost


@pytest.mark.parametrize("seed", range(4))
def test_the_search_comes_near_what_trying_all_finds(seed: int) -> None:
    rng = random.Random(seed)
    chain = _chain(rng, 5, 20)
    problem = Problem(chain, Platform.flat(4, 420, 10**9), Policy(weights="flush", accumulate=6), checkpointing="none")
    best = None
    for used in range(1, 5):
        for count in range(1, used + 1):
            for ends in combinations(range(1, used), count - 1):
                for cuts in combinations(range(1, 5), count - 1):
                    devices, layers = list(pairwise((0, *ends, used))), list(pairwise((0, *cuts, 5)))
                    stages = tuple(
                        Stage(*part, tuple(range(*group))) for part, group in zip(layers, devices, strict=True)
                    )
                    for kind in ("flush", "1f1b"):
                        run = drained_run(problem, stages, kind)
                        if run is not None and (best is None or run.makespan_ns < best):
                            best = run.makespan_ns
    search = Incumbent(problem, Settings())
    search_stages(search, ("flush", "1f1b"), "normal")
    assert best is not None
    assert search.best is not None
    assert best <= search.best.cost <= 1.02 * best


@pytest.mark.parametrize("seed", [20, 22, 39])
def test_an_order_of_its_own_names_the_gpus_that_the_plan_has(seed):
    """The best of these has its first stage on the second of two equal GPUs, which a plan numbers by first use."""
    rng = random.Random(seed)
    chain = uneven_chain(rng, rng.randint(3, 5))
    policy = Policy("flush", rng.randint(2, 6))
    plan = make_plan(Problem(chain, Platform.flat(2, 10**6, 10**9, 1), policy, False), effort="quick").plan
    assert plan.schedule.kind == "written"
    assert plan.allocation.stages[0].devices == (0,)


def test_where_memory_is_scarce_several_stages_on_one_gpu_are_tried():
    asked = {"gpus": 4, "mem": "8GB", "weights": "flush", "no_replicas": True, "checkpointing": "none"}
    named, found = (pp.plan("example:resnet50-1000-b8-v100", algorithm=x, **asked) for x in ("madpipe", "auto"))
    assert found.period_ns <= named.period_ns
    assert not found.plan.allocation.contiguous

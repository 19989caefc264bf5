from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cases.chains import random_problem

from pipeplan.check.evaluate import evaluate
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput, Infeasible
from pipeplan.partition.granularity import merge_articulation
from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.carry import carried, matching_chain
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star


def chain(times: list[int], names: str = "", size: int = 100, **fields: int) -> Chain:
    layers = tuple(
        Layer(names[i] if names else f"l{i}", time, 2 * time, 1000, size, **fields) for i, time in enumerate(times)
    )
    return Chain("made", layers, size)


def planned(of: Chain, gpus: int = 2, memory: int = 10**6, **options: object) -> Problem:
    return Problem(of, Platform.flat(gpus, memory, 10**9), Policy(), replicas=False, checkpointing="none")


def test_a_plan_carried_to_its_own_profile_is_as_good() -> None:
    rng = random.Random(3)
    carries = 0
    for _ in range(10):
        problem = random_problem(rng, rng.randint(2, 7), rng.randint(1, 4), edges=rng.random() < 0.5, saved=True)
        problem = problem.with_policy(replace(problem.policy, accumulate=16))
        try:
            plan = make_plan(problem, "contiguous").plan
        except Infeasible:
            continue
        assert plan.pattern is not None
        result = carried(plan, problem.chain)
        assert result.violations == ()
        assert result.period_ns is not None
        assert result.period_ns <= evaluate(plan).period_ns
        carries += 1
    assert carries > 3


def test_a_plan_scaled_with_its_profile_scales() -> None:
    slow, fast = chain([100, 100, 100, 100]), chain([50, 50, 50, 50], size=50)
    result = carried(make_plan(planned(slow), "contiguous").plan, fast)
    assert result.period_ns == 300
    assert make_plan(planned(slow), "contiguous").plan.pattern.period_ns == 600  # type: ignore[union-attr]
    assert result.plan.lower_bounds[0].period_ns <= 300


def test_another_balance_shows_in_the_period() -> None:
    plan = make_plan(planned(chain([100, 100, 100, 100])), "contiguous").plan
    result = carried(plan, chain([100, 100, 100, 300]))
    assert result.violations == ()
    assert result.period_ns == 1200
    assert make_plan(planned(chain([100, 100, 100, 300])), "contiguous").plan.pattern.period_ns == 900  # type: ignore[union-attr]


def test_more_memory_than_there_is_names_the_device_and_another_order() -> None:
    before, after = chain([100] * 4, saved_bytes=1000), chain([100] * 4, saved_bytes=10_000)
    plan = make_plan(planned(before, memory=30_000), "contiguous").plan
    result = carried(plan, after)
    assert result.period_ns is None
    assert len(result.violations) == 1
    assert "device 0 needs" in result.violations[0]
    graph = stage_graph(after, plan.platform, plan.policy, plan.allocation.stages)
    best = best_one_f_one_b_star(graph)
    assert result.other_order_ns == (None if best is None else best.period_ns)
    assert result.other_order_ns is not None


def test_transfers_that_vanish_give_another_order() -> None:
    plan = make_plan(planned(chain([100] * 4)), "contiguous").plan
    assert carried(plan, chain([100] * 4, size=0)).period_ns == 600


def test_stages_that_do_not_cover_the_other_profile() -> None:
    result = carried(make_plan(planned(chain([100] * 4)), "contiguous").plan, chain([100] * 5))
    assert result.violations == ("the last stage ends at layer 4; the chain has 5 layers",)


def test_the_plan_says_at_which_granularity_the_other_profile_is_read() -> None:
    dag = replace(chain([100] * 4), edges=((0, 1), (0, 2), (1, 2), (2, 3)))
    other = replace(dag, layers=tuple(replace(x, forward_ns=50) for x in dag.layers))
    plan = make_plan(planned(merge_articulation(dag)), "contiguous").plan
    assert matching_chain(plan, dag, other) == merge_articulation(other)
    assert matching_chain(make_plan(planned(dag), "contiguous").plan, dag, other) == other
    with pytest.raises(BadInput, match="the plan was made from another profile than made"):
        matching_chain(plan, other, dag)


def test_a_profile_that_merging_leaves_as_it_is_is_compared_without_merging() -> None:
    one = chain([3, 4, 5, 6])
    other = replace(one, edges=((0, 1), (0, 2), (1, 2), (2, 3)))
    assert len(merge_articulation(other)) < len(other)
    assert matching_chain(make_plan(planned(one), "contiguous").plan, one, other) is other

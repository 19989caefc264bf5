from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from cases.chains import random_chain, random_platform, random_problem

from pipeplan.cost.stage_cost import StageCost
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.balance import balance, data_parallel, simplest
from pipeplan.plan import Allocation, Stage
from pipeplan.problem import Chain, Layer, Platform, Problem


def costs_of(problem: Problem, stages: tuple[Stage, ...]) -> tuple[StageCost, ...]:
    return stage_graph(problem.chain, problem.platform, problem.policy, stages).stages


def every_division(problem: Problem, recompute: bool) -> list[tuple[Stage, ...]]:
    """All ways to cut the chain into one stage per device; with fewer layers, one layer per chosen device."""
    count, devices = len(problem.chain), len(problem.platform)
    used = min(count, devices)
    return [
        tuple(
            Stage(start, stop, (device,), ((start, stop),) if recompute else ())
            for device, start, stop in zip(chosen, (0, *cuts), (*cuts, count), strict=True)
        )
        for chosen in combinations(range(devices), used)
        for cuts in combinations(range(1, count), used - 1)
    ]


@pytest.mark.parametrize("seed", range(30))
def test_balance_has_the_shortest_longest_stage(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(
        rng, rng.randint(1, 7), rng.randint(1, 5), optimizer=True, speeds=True, edges=seed % 3 == 0
    )
    plain, recomputing = balance(problem)
    for allocation, recompute in ((plain, False), (recomputing, True)):
        work = [[x.total_ns for x in costs_of(problem, stages)] for stages in every_division(problem, recompute)]
        ours = [x.total_ns for x in costs_of(problem, allocation.stages)]
        assert allocation.contiguous
        assert allocation.claimed_period_ns == max(ours) == min(max(x) for x in work)
        assert sum(x**2 for x in ours) == min(sum(x**2 for x in one) for one in work if max(one) == max(ours))
        assert len(ours) == min(len(problem.chain), len(problem.platform))
        assert [bool(stage.checkpoint) for stage in allocation.stages] == [recompute] * len(ours)


def chain_of(*times: int) -> Chain:
    return Chain("times", tuple(Layer(f"l{i}", t, 0, 0, 1) for i, t in enumerate(times)), 1)


def cuts_of(allocation: Allocation) -> list[tuple[int, int]]:
    return [(stage.start, stage.stop) for stage in allocation.stages]


def test_the_simplest_plans_count_the_forward_twice_where_it_is_recomputed() -> None:
    layers = tuple(Layer(f"l{i}", f, b, 0, 1) for i, (f, b) in enumerate(((4, 0), (0, 4), (0, 4))))
    problem = Problem(Chain("uneven", layers, 1), Platform.flat(2, 10**6), checkpointing="stages")
    plain, recomputed = [x for x in simplest(problem) if len(x.stages) == 2]
    assert cuts_of(plain) == [(0, 2), (2, 3)]
    assert cuts_of(recomputed) == [(0, 1), (1, 3)]


def test_balance_spreads_what_the_longest_stage_leaves_open() -> None:
    problem = Problem(chain_of(9, 3, 3, 3, 3), Platform.flat(3, 10**6), checkpointing="none")
    (allocation,) = balance(problem)
    assert cuts_of(allocation) == [(0, 1), (1, 3), (3, 5)]


def test_balance_gives_the_slow_device_less() -> None:
    platform = Platform.flat(2, 10**6)
    slow = replace(platform.devices[0], speed=platform.devices[0].speed / 3)
    problem = Problem(chain_of(1, 1, 1, 1), replace(platform, devices=(slow, platform.devices[1])))
    assert cuts_of(next(balance(problem))) == [(0, 1), (1, 4)]


def test_balance_takes_hundreds_of_layers_on_many_devices() -> None:
    chain = random_chain(random.Random(3), 1000, largest=10**6)
    (allocation,) = balance(Problem(chain, Platform.flat(64, 10**9), checkpointing="none"))
    total = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
    assert len(allocation.stages) == 64
    assert allocation.claimed_period_ns is not None
    assert total / 64 <= allocation.claimed_period_ns <= total / 64 + 2 * 10**6


@pytest.mark.parametrize("seed", range(30))
def test_data_parallel_claims_what_its_stage_graph_says(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(
        rng, rng.randint(1, 5), rng.randint(1, 6), levels=True, speeds=True, optimizer=True, checkpointing="segments"
    )
    plans = list(data_parallel(problem))
    everything, count = tuple(range(len(problem.platform))), len(problem.chain)
    ways = (), ((0, count),), tuple((i, i + 1) for i in range(count))
    assert [x.stages for x in plans] == [(Stage(0, count, everything, way),) for way in ways]
    for allocation in plans:
        graph = stage_graph(problem.chain, problem.platform, problem.policy, allocation.stages)
        assert allocation.claimed_period_ns == graph.period_floor_ns


def test_data_parallel_honours_what_is_allowed() -> None:
    rng = random.Random(5)
    problem = Problem(random_chain(rng, 3), random_platform(rng, 4), checkpointing="none")
    assert len(list(data_parallel(problem))) == 1
    assert list(data_parallel(replace(problem, replicas=False))) == []
    alone = replace(problem, platform=Platform.flat(1, 10**6), replicas=False)
    assert [x.stages[0].devices for x in data_parallel(alone)] == [(0,)]

import random
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from cases.bounds import instance
from cases.chains import published
from oracles.any_class import allocations, optimum

from pipeplan.check.bounds import all_contiguous, derived_up_to, proof
from pipeplan.check.bounds.covers import CELLS, Master, Sets, View
from pipeplan.check.bounds.strong import Refutations
from pipeplan.cost.group_bound import group_bound
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.granularity import merge_articulation
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem


def test_a_plan_is_proved_the_best_by_the_stages_that_fit_on_one_gpu():
    """ResNet-50 without replicas and recomputation on 6 GPUs of 6 GB, where the best plan known takes 129.922 ms;
    what doesn't take long says less."""
    chain = merge_articulation(published("resnet50"), saved="input")
    problem = Problem(chain, Platform.flat(6, 6 * 10**9, 12 * 10**9), replicas=False, checkpointing="none")
    assert derived_up_to(problem, 129_900_000) == 129_900_000
    assert proof(problem, up_to=129_900_000).part == "covers"
    other = Problem(chain, problem.platform, Policy(accumulate=64), replicas=False, checkpointing="none")
    assert proof(other).period_ns < 105 * 10**6


def test_a_microbatch_is_inside_all_layers_of_a_gpu_at_once():
    """Four layers keep 60 bytes or more each: no GPU of 100 has two, though each runs in a fraction of a period."""
    layers = tuple(Layer(f"{i}", 10 + i, 10, 0, 1, 60 + i) for i in range(4))
    problem = Problem(Chain("c", layers, 0), Platform.flat(3, 100, 10**12), replicas=False, checkpointing="none")
    assert proof(problem).infeasible
    assert proof(problem).part == "covers"
    assert optimum(problem) is None


@pytest.mark.parametrize("seed", range(8))
def test_the_set_worth_most_is_found(seed):
    """All sets of runs of five layers whose shares are whole cells, by enumeration."""
    rng = np.random.default_rng(seed)
    count = 5
    work, held = (rng.integers(0, CELLS // 2, (count + 1, count + 1)) / CELLS for _ in range(2))
    top = held + rng.integers(0, CELLS // 2, held.shape) / CELLS
    possible = np.triu(rng.random(held.shape) < 0.8, 1)
    possible[:, count] = False
    worth = rng.integers(1, 100, held.shape).astype(float)
    sets = Sets(possible, work, View(held[None], top[None]), 0)
    best, found = sets.dearest(worth)
    runs = [(a, b) for a in range(count) for b in range(a + 1, count) if possible[a, b]]
    most = 0.0
    for size in (1, 2, 3):
        for some in combinations(sorted(runs, reverse=True), size):
            apart = all(one[0] > other[1] for one, other in pairwise(some))
            behind = [sum(held[r] for r in some[:i]) for i in range(size)]
            fits = all(x + top[r] <= 1 for x, r in zip(behind, some, strict=True)) and sum(work[r] for r in some) <= 1
            if apart and fits:
                most = max(most, sum(worth[r] for r in some))
    assert best == most == sum(worth[r] for r in found)


def test_prices_are_the_optimum_of_their_linear_program():
    """Sets {0, 1}, {1, 2}, {0, 2} and single layers, at one GPU each: half a GPU a layer; a pair on two GPUs says
    nothing more."""
    master = Master([1, 1, 1])
    rng = random.Random(0)
    pairs = [[(0, 2)], [(1, 3)], [(0, 1), (2, 3)]]
    rng.shuffle(pairs)
    for pair in pairs:
        master.add(pair, 1)
    master.add([(0, 2)], 2)
    assert np.allclose(master.prices(), [0.5, 0.5, 0.5])


def test_an_expanded_tensor_counts_with_its_storage():
    """The middle layer saves an input of 9 bytes that lies in 8, and 5 of its own: recomputed alone it leaves 28 bytes
    in all to the GPU of 28, for its forward of 1 ns."""
    layers = (
        Layer("expanded", 1, 1, 0, 9, 0, saves=(), storage_bytes=8),
        Layer("between", 1, 1, 0, 1, 14, saves=(0,)),
        Layer("loss", 2, 1, 0, 0, 20, saves=()),
    )
    platform = Platform.flat(1, 28, 10**9)
    problem = Problem(Chain("c", layers, 0), platform, replicas=False, checkpointing="segments")
    assert optimum(problem) == 8
    conditions = Refutations(problem)
    assert conditions.refuted(8) is conditions.cover_refuted(8) is conditions.pool_refuted(8) is None


def test_where_no_gpu_has_room_for_two_layers_every_plan_is_contiguous():
    """Of all allocations that may fit; the bound is then that of contiguous plans, and what states it derives it."""
    said = tighter = 0
    for seed in range(30):
        problem, rng = instance(seed, 3), random.Random(seed)
        layers = tuple(replace(x, weight_bytes=x.weight_bytes + 60) for x in problem.chain.layers)
        devices = tuple(replace(x, memory_bytes=rng.randint(240, 440)) for x in problem.platform.devices)
        chain, platform = replace(problem.chain, layers=layers), replace(problem.platform, devices=devices)
        problem = replace(problem, chain=chain, platform=platform)
        if not all_contiguous(problem):
            continue
        graphs = [stage_graph(chain, platform, problem.policy, stages) for stages in allocations(problem)]
        assert all(graph.contiguous for graph in graphs if group_bound(graph) is not None)
        best = optimum(problem)
        if best is not None:
            bound = derived_up_to(problem, best)
            assert bound <= best
            assert derived_up_to(problem, bound) == bound
            said += 1
            tighter += bound > proof(problem).period_ns
    assert said > 5
    assert tighter

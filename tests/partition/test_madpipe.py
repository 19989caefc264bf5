from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from cases.chains import published, random_platform, random_problem
from oracles.patterns import one_special_claim, special_stages

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.granularity import merge_articulation
from pipeplan.partition.madpipe.exact import Charge, decide, madpipe, one_special_bound, smallest_period
from pipeplan.plan import Allocation, Stage
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, Problem, SharedWeights
from pipeplan.schedule.periodic.ilp import schedule_ilp

CHARGES: tuple[Charge, ...] = ("paper", "tight", "full")


def equal_devices(seed: int, largest: int = 6) -> Problem:
    """Return a small instance on equal devices; memory, policy, links and saved bytes as the seed says."""
    rng = random.Random(seed)
    layers, devices = rng.randint(2, largest), rng.randint(1, 4)
    problem = random_problem(
        rng,
        layers,
        devices,
        weights=("2bw", "2bw", "stash", "flush", "latest"),
        checkpointing="none",
        replicas=False,
        edges=rng.random() < 0.3,
        saved=rng.random() < 0.5,
        optimizer=rng.random() < 0.3,
        latency=True,
        duplex=True,
    )
    device = Device(int(problem.platform.devices[0].memory_bytes * rng.choice((1, 1.3, 2, 3))))
    policy = problem.policy
    if rng.random() < 0.3:
        policy = replace(policy, accumulate=rng.randint(1, 4))
    return replace(problem, platform=replace(problem.platform, devices=(device,) * devices), policy=policy)


def claim(problem: Problem, charge: Charge, split: bool = False) -> int | None:
    found = smallest_period(problem, charge, split)
    return None if found is None else found.claimed_period_ns


@pytest.mark.parametrize("charge", CHARGES)
@pytest.mark.parametrize("split", [False, True])
def test_equals_enumeration(charge, split):
    seen = Counter()
    for seed in range(25):
        problem = equal_devices(seed)
        expected = one_special_claim(problem, charge, split)
        assert claim(problem, charge, split) == expected, seed
        seen["feasible"] += expected is not None
        seen["infeasible"] += expected is None
    assert seen["feasible"] >= 12
    assert seen["infeasible"] >= 1


@pytest.mark.parametrize("charge", CHARGES)
def test_once_a_period_is_met_every_longer_one_is(charge):
    for seed in range(5):
        problem = equal_devices(seed, largest=5)
        for split in (False, True):
            found = smallest_period(problem, charge, split)
            met = [decide(problem, period, charge, split) is not None for period in range(1, 120)]
            assert met == sorted(met)
            if found is not None:
                assert met.index(True) + 1 == found.claimed_period_ns


def test_what_is_yielded_is_one_special_allocation():
    seen = Counter()
    for seed in range(200):
        problem = equal_devices(seed)
        for split in (False, True):
            for found in madpipe(problem, "full", split):
                check_structure(found, problem, split)
                seen["split" if any(a.devices == b.devices for a, b in pairwise(found.stages)) else "apart"] += 1
                seen["several on one"] += len({s.devices for s in found.stages}) < len(found.stages)
    assert seen["split"] >= 5
    assert seen["apart"] >= 100
    assert seen["several on one"] >= 20


def check_structure(found: Allocation, problem: Problem, split: bool) -> None:
    stages = found.stages
    assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
    assert stages[-1].stop == len(problem.chain)
    assert all(stage.replicas == 1 and not stage.checkpoint for stage in stages)
    held = Counter(stage.devices[0] for stage in stages)
    assert sum(count > 1 for count in held.values()) <= 1
    assert list(dict.fromkeys(stage.devices[0] for stage in stages)) == list(range(len(held)))
    assert len(held) <= len(problem.platform)
    if not split:
        assert all(one.devices != other.devices for one, other in pairwise(stages))


def test_charges_and_splits_are_ordered():
    infinite = 10**9
    for seed in range(40):
        problem = equal_devices(seed)
        for split in (False, True):
            paper, tight, full = (claim(problem, charge, split) or infinite for charge in CHARGES)
            assert paper <= tight <= full
        for charge in CHARGES:
            assert (claim(problem, charge, True) or infinite) <= (claim(problem, charge) or infinite)


@pytest.mark.parametrize("charge", CHARGES)
def test_nonincreasing_in_memory_and_bandwidth(charge):
    chain = merge_articulation(published("resnet50"))
    infinite = 10**12

    def claims(platforms: list[Platform]) -> list[int]:
        return [claim(Problem(chain, x, Policy(), False, "none"), charge) or infinite for x in platforms]

    by_memory = claims([Platform.flat(4, size * 10**9) for size in (3, 7, 12, 32)])
    assert by_memory == sorted(by_memory, reverse=True)
    assert len(set(by_memory)) >= 3
    by_bandwidth = claims([Platform.flat(4, 12 * 10**9, speed * 10**8) for speed in (5, 20, 240)])
    assert by_bandwidth == sorted(by_bandwidth, reverse=True)
    assert len(set(by_bandwidth)) == 3


def test_the_bound_is_below_every_plan_of_its_class():
    tight = 0
    for seed in range(24):
        problem = equal_devices(seed, largest=4)
        count = len(problem.chain)
        if seed % 2 and problem.policy.updates_together:  # the special device has what its stages share once
            least = min(problem.chain.layers[i].weight_bytes for i in (0, count - 1))
            shared = (SharedWeights((0, count - 1), least),)
            problem = replace(problem, chain=replace(problem.chain, tied=((0, count - 1),), shared=shared))
        for split in (False, True):
            bound = one_special_bound(problem) if split else one_special_bound(problem, split=False)
            best: int | None = None
            for stages in special_stages(len(problem.chain), len(problem.platform), split):
                period = scheduled(problem, stages, best)
                best = period if period is not None else best
            if bound is None:
                assert best is None
            elif best is not None:
                assert bound <= best, seed
                tight += bound == best
    assert tight >= 20


@pytest.mark.parametrize("memory", [420, 480, 560])
def test_the_update_of_weights_that_a_device_shares_is_made_in_its_first_stage(memory):
    """No backward on the way there waits for it: with it in the last stage the bound would be 210."""
    end, middle = Layer("end", 10, 20, 100, 5, 50, optimizer_ns=400), Layer("middle", 10, 20, 150, 5, 50)
    chain = Chain("tied", (end, middle, middle, end), 5, tied=((0, 3),), shared=(SharedWeights((0, 3), 100),))
    problem = Problem(chain, Platform.flat(3, memory, 10**9), Policy("stash", 4), False, "none")
    found = scheduled(problem, ((0, 1, True), (1, 2, False), (2, 3, False), (3, 4, True)), None)
    bound = one_special_bound(problem)
    assert found == 205
    assert bound is not None
    assert bound <= found


def test_the_bound_is_of_the_whole_class_with_neighbours_on_the_special_device():
    lower = 0
    for seed in range(80, 140):
        problem = equal_devices(seed)
        whole, apart = (one_special_claim(problem, "tight", split) for split in (True, False))
        assert one_special_bound(problem) == whole, seed
        near = (whole or 9) + seed % 3 - 1  # below, at or above it
        assert one_special_bound(problem, known_ns=near) == whole, seed
        lower += whole != apart
    assert lower >= 2


def scheduled(problem: Problem, stages: tuple[tuple[int, int, bool], ...], cutoff: int | None) -> int | None:
    """Return the period of the best pattern of ``stages`` below ``cutoff``, special ones on device 0."""
    alone = 0
    made = []
    for start, stop, special in stages:
        alone += not special
        made.append(Stage(start, stop, (0 if special else alone,)))
    if alone >= len(problem.platform):
        return None
    graph = stage_graph(problem.chain, problem.platform, problem.policy, made)
    result = schedule_ilp(graph, solver="highs", cutoff_period_ns=cutoff)
    assert result.status in ("optimal", "infeasible", "cutoff")
    return None if result.pattern is None else result.pattern.period_ns


def test_unequal_devices_are_taken_at_their_worst_and_bounded_at_their_best():
    for seed in range(30):
        rng = random.Random(seed)
        problem = equal_devices(seed)
        platform = random_platform(rng, 4, memory=(30, 90), levels=True, latency=True, speeds=True)
        memories, speeds = [x.memory_bytes for x in platform.devices], [x.speed for x in platform.devices]
        (slow, late), (fast, early) = platform.paths[-1], platform.paths[0]
        worst = Platform((Device(min(memories), min(speeds)),) * 4, (Level(4, slow, late),))
        best = Platform((Device(max(memories), max(speeds)),) * 4, (Level(4, fast, early),))
        uneven = replace(problem, platform=platform)
        assert claim(uneven, "full") == claim(replace(problem, platform=worst), "full")
        assert one_special_bound(uneven) == one_special_bound(replace(problem, platform=best))


def test_speed_scales_the_claim():
    problem = replace(equal_devices(3), platform=Platform.flat(3, 1000, 10**15))
    double = replace(problem.platform, devices=(Device(1000, Fraction(1, 2)),) * 3)
    one = claim(problem, "full")
    assert one is not None
    assert claim(replace(problem, platform=double), "full") == 2 * one


def test_tied_layers_stay_on_one_device():
    apart = 0
    for seed in range(40):
        problem = replace(equal_devices(seed), policy=Policy("stash"))
        layers = len(problem.chain)
        i = random.Random(seed).randrange(layers - 1)
        problem = replace(problem, chain=replace(problem.chain, tied=((i, layers - 1),)))
        for found in madpipe(problem, "paper"):
            holder = next(stage for stage in found.stages if stage.start <= i < stage.stop)
            assert holder.devices == found.stages[-1].devices
            apart += holder != found.stages[-1]
    assert apart


def test_published_profile():
    chain = merge_articulation(published("resnet50"))
    problem = Problem(chain, Platform.flat(8, 12 * 10**9), Policy(), False, "none")
    found = smallest_period(problem, "full")
    assert found is not None
    graph = stage_graph(chain, problem.platform, problem.policy, found.stages)
    result = schedule_ilp(graph)
    assert result.status == "optimal"
    assert result.pattern is not None
    assert result.pattern.period_ns == found.claimed_period_ns  # a claim that can be scheduled
    bound = one_special_bound(problem, split=False)
    assert bound is not None
    assert bound <= result.pattern.period_ns

"""Unequal devices: which orders there are, what the best of them gives, and profiles of devices' own."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from math import prod

import pytest
from cases.chains import random_chain, random_platform, random_problem
from cases.contiguous import assert_attains
from oracles.partition import contiguous_optimum, device_orders

from pipeplan.check.bounds import any_bound
from pipeplan.cost.stage_cost import least_load_ns
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.files.profiles import read_profile
from pipeplan.partition.contiguous.contiguous import feasible, smallest_period
from pipeplan.partition.devices.orders import Orders
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Device, LayerTimes, Level, Platform, Policy, Problem
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star


def kinds_along(platform: Platform, order: tuple[int, ...]) -> tuple[Device, ...]:
    return tuple(platform.devices[d] for d in order)


def test_orders_are_those_that_keep_units_together() -> None:
    most = 0
    for seed in range(60):
        rng = random.Random(seed)
        platform = random_platform(rng, rng.choice((2, 3, 4, 6)), memory=(1, 2), levels=True, speeds=True)
        orders = Orders(platform, most=24)
        truth = {kinds_along(platform, order) for order in device_orders(platform)}
        assert orders.count == len(truth)
        for order in orders.first():
            assert sorted(order) == list(range(len(platform)))
            assert orders.along(order) == order
            assert {kinds_along(platform, x) for x in (order, *orders.near(order))} <= truth
        every = [kinds_along(platform, order) for order in replace(orders, most=10**6).first()]
        assert set(every) == truth
        assert len(every) <= len(truth) + 8  # the first ones twice
        most = max(most, len(truth))
    assert most > 100


def of_few_kinds(seed: int) -> Problem:
    """Return an instance on 4 to 8 devices of two or three kinds, on one to three levels."""
    rng = random.Random(seed)
    counts = ((5,), (2, 2), (2, 3), (2, 2, 2), (3, 2))[seed % 5]
    weights, ways = ("flush", "2bw", "stash", "latest"), ("none", "stages")
    problem = random_problem(
        rng, rng.randint(2, 5), prod(counts), weights=weights, checkpointing=rng.choice(ways), replicas=seed % 2 > 0
    )
    memory = 3 * problem.platform.devices[0].memory_bytes
    kinds = [
        Device(int(memory * rng.choice((0.6, 0.8, 1, 1.3))), rng.choice((Fraction(1, 2), Fraction(1), Fraction(2))))
        for _ in range(rng.choice((2, 2, 3)))
    ]
    levels = tuple(
        Level(n, rng.choice((5, 10, 30)) * 10**8 // (i + 1), rng.choice((0, 1))) for i, n in enumerate(counts)
    )
    return replace(problem, platform=Platform(tuple(rng.choice(kinds) for _ in range(prod(counts))), levels))


def best_of_listed(problem: Problem) -> int | None:
    """Return the best period of searches along one order each, over all of them."""
    best: int | None = None
    for order in device_orders(problem.platform):
        platform = replace(problem.platform, devices=kinds_along(problem.platform, order))
        found = smallest_period(replace(problem, platform=platform), best, as_listed=True)
        best = best if found is None else found.claimed_period_ns
    return best


def test_one_search_finds_the_best_of_all_orders() -> None:
    compared = {1: 0, 2: 0, 3: 0}
    for seed in (*range(5), 81):  # 81: a stage passes through a server and takes devices of one kind there
        problem = of_few_kinds(seed)
        found, truth = smallest_period(problem), best_of_listed(problem)
        assert (found is None) == (truth is None), seed
        if found is not None and truth is not None:
            assert found.claimed_period_ns == found.lower_bound_ns == truth, seed
            assert_attains(problem, found)
            again = feasible(problem, truth)
            assert again is not None, seed
            assert again.claimed_period_ns == truth, seed
            assert feasible(problem, truth - 1) is None, seed
            compared[len(problem.platform.levels)] += 1
    assert min(compared.values())


def vgg16(devices: list[tuple[int, str]], replicas: bool) -> Problem:
    chain = read_profile("profiles/vgg16-224-b32-v100.json")
    some = tuple(Device(gigabytes * 10**9, Fraction(speed)) for gigabytes, speed in devices)
    return Problem(chain, Platform(some, (Level(len(some), 12 * 10**9),)), replicas=replicas)


def test_the_best_order_of_four_unequal_devices() -> None:
    problem = vgg16([(8, "1"), (16, "1"), (8, "2"), (4, "1/2")], replicas=False)
    listed, best = smallest_period(problem, as_listed=True), smallest_period(problem)
    assert listed is not None
    assert best is not None
    assert (listed.claimed_period_ns, best.claimed_period_ns, best.lower_bound_ns) == (86396412, 78255756, 78255756)
    assert Orders.of(problem).sentence() == "best of all 24 orders of 4 kinds of devices"
    assert best_of_listed(problem) == best.claimed_period_ns


def test_four_and_four_devices_have_the_best_of_seventy_orders() -> None:
    problem = vgg16([(16, "1")] * 4 + [(8, "2")] * 4, replicas=True)
    problem = replace(problem, chain=replace(problem.chain, layers=problem.chain.layers[:5]))
    assert Orders.of(problem).sentence() == "best of all 70 orders of 2 kinds of devices"
    found = smallest_period(problem)
    assert found is not None
    assert found.claimed_period_ns == found.lower_bound_ns == best_of_listed(problem)
    used = {d for stage in found.stages for d in stage.devices}
    for kind in (range(4), range(4, 8)):
        assert used & set(kind) == set(kind[: len(used & set(kind))])  # the first ones of each kind


def test_of_many_kinds_some_orders_are_searched_and_less_is_proved() -> None:
    problem = vgg16([(3 + i, f"{24 - i}/8") for i in range(16)], replicas=False)
    problem = replace(problem, chain=replace(problem.chain, layers=problem.chain.layers[:7]))
    orders = Orders.of(problem)
    assert not orders.exact
    assert orders.sentence() == "best of some of about 10^13 orders of 16 kinds of devices, 100 at most"
    listed, best = smallest_period(problem, as_listed=True), smallest_period(problem)
    assert listed is not None
    assert best is not None
    assert (best.claimed_period_ns or 0) < (listed.claimed_period_ns or 0)
    assert (best.lower_bound_ns or 0) <= (best.claimed_period_ns or 0)


def with_own_profiles(rng: random.Random, problem: Problem) -> Problem:
    """Return the problem with devices of two profiles, one quick where the other is slow."""
    other = random_chain(rng, len(problem.chain), optimizer=True)
    owns = [LayerTimes.of(problem.chain.layers, "main"), LayerTimes.of(other.layers, "other")]
    devices = tuple(replace(x, times=rng.choice(owns)) for x in problem.platform.devices)
    return replace(problem, platform=replace(problem.platform, devices=devices))


@pytest.mark.parametrize("checkpointing", ["none", "stages", "segments"])
def test_profiles_of_devices_own_are_planned_exactly(checkpointing: str) -> None:
    compared = 0
    for seed in range(10):
        rng = random.Random(seed)
        problem = random_problem(
            rng,
            rng.randint(1, 4),
            rng.randint(1, 3),
            checkpointing=checkpointing,
            replicas=rng.random() < 0.6,
            saved=rng.random() < 0.5,
            speeds=rng.random() < 0.5,
            levels=rng.random() < 0.3,
        )
        problem = with_own_profiles(rng, problem)
        found, truth = smallest_period(problem), contiguous_optimum(problem)
        assert (found is None) == (truth is None), seed
        if found is None or truth is None:
            continue
        compared += 1
        assert found.claimed_period_ns == found.lower_bound_ns == truth[0], seed
        assert_attains(problem, found)
        assert any_bound(problem).period_ns <= truth[0], seed
        graph = stage_graph(problem.chain, problem.platform, problem.policy, found.stages)
        pattern = best_one_f_one_b_star(graph)
        assert pattern is not None
        assert least_load_ns(problem.chain, problem.platform, found.stages) <= pattern.period_ns
    assert compared > 3


def test_a_stage_takes_what_its_devices_profiles_say() -> None:
    chain = Chain("two", tuple(read_profile("profiles/vgg16-224-b32-v100.json").layers[:2]), 4)
    first = LayerTimes("a", (10, 100), (20, 200), (0, 0), (0, 0))
    second = LayerTimes("b", (30, 40), (60, 80), (0, 0), (0, 0))
    platform = Platform((Device(2**50, Fraction(1), first), Device(2**50, Fraction(2), second)), (Level(2, 10**9),))

    def times(*devices: int) -> tuple[int, int]:
        (cost,) = stage_graph(chain, platform, Policy(accumulate=4), (Stage(0, 2, devices),)).stages
        return cost.forward_ns, cost.backward_ns

    assert times(0) == (110, 220)
    assert times(1) == (35, 70)  # twice as fast as its own profile
    assert times(0, 1) == (15 + 100, 30 + 200)  # each layer what it takes on the slower one
    assert platform.best_device.times is not None
    assert platform.best_device.times.forward_ns == (10, 20)

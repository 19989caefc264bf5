"""Unequal devices: which orders there are, what the best of them gives, and profiles of devices' own."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest
from cases.chains import random_chain, random_platform, random_problem
from cases.contiguous import assert_attains
from oracles.partition import contiguous_optimum, device_orders

from pipeplan.check.bounds import any_bound
from pipeplan.cost.stage_graph import least_load_ns, stage_graph
from pipeplan.files.profiles import read_profile
from pipeplan.partition.contiguous.contiguous import smallest_period
from pipeplan.partition.contiguous.orders import Orders
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Device, LayerTimes, Level, Platform, Policy, Problem
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star

FLAT = (Level(4, 12 * 10**9),)


def kinds_along(platform: Platform, order: tuple[int, ...]) -> tuple[Device, ...]:
    return tuple(platform.devices[d] for d in order)


def test_orders_are_all_that_keep_units_together_and_each_once() -> None:
    most = 0
    for seed in range(60):
        rng = random.Random(seed)
        platform = random_platform(rng, rng.choice((2, 3, 4, 6)), memory=(1, 2), levels=True, speeds=True)
        orders = Orders.of(platform, 5)
        assert orders.count <= 720
        if not orders.all:
            continue
        found = list(orders.first())
        assert all(sorted(order) == list(range(len(platform))) for order in found)
        truth = {kinds_along(platform, order) for order in device_orders(platform)}
        assert {kinds_along(platform, order) for order in found} == truth
        assert orders.count == len(truth)
        for order in found:
            stages = orders.placed([Stage(d, d + 1, (d,)) for d in range(len(platform))], order)
            assert [d for stage in stages for d in stage.devices] == list(order)
            assert orders.along(order) == order
            assert {kinds_along(platform, near) for near in orders.near(order)} <= truth
        most = max(most, len(truth))
    assert most > 100


def vgg16(devices: list[tuple[int, str]], replicas: bool) -> Problem:
    chain = read_profile("profiles/vgg16-224-b32-v100.json")
    some = tuple(Device(gigabytes * 10**9, Fraction(speed)) for gigabytes, speed in devices)
    return Problem(chain, Platform(some, (Level(len(some), 12 * 10**9),)), replicas=replicas)


def test_the_best_order_of_four_unequal_devices() -> None:
    problem = vgg16([(8, "1"), (16, "1"), (8, "2"), (4, "1/2")], replicas=False)
    listed, best = smallest_period(problem, as_listed=True), smallest_period(problem)
    assert listed is not None
    assert best is not None
    assert best.claimed_period_ns == best.lower_bound_ns
    assert (listed.claimed_period_ns or 0) > 1.1 * (best.claimed_period_ns or 0)
    assert Orders.of(problem.platform, 23).sentence() == "best of 24 orders of 4 kinds of devices"
    periods = []
    for order in permutations(range(4)):
        platform = replace(problem.platform, devices=kinds_along(problem.platform, order))
        found = smallest_period(replace(problem, platform=platform), as_listed=True)
        assert found is not None
        periods.append(found.claimed_period_ns)
    assert min(periods) == best.claimed_period_ns  # type: ignore[type-var]  # all are there


def test_more_orders_than_are_searched_still_beat_the_listed_one_and_prove_less() -> None:
    rng = random.Random(2)
    devices = [(rng.choice((6, 8, 12, 16)), rng.choice(("1/2", "1", "2"))) for _ in range(10)]
    problem = vgg16(devices, replicas=False)
    orders = Orders.of(problem.platform, 23)
    assert not orders.all
    assert (orders.sentence() or "").startswith(f"best of some of {orders.count} orders")
    problem = replace(problem, chain=replace(problem.chain, layers=problem.chain.layers[:8]))
    listed, best = smallest_period(problem, as_listed=True), smallest_period(problem)
    assert listed is not None
    assert best is not None
    assert (best.claimed_period_ns or 0) <= (listed.claimed_period_ns or 0)
    assert (best.lower_bound_ns or 0) <= (best.claimed_period_ns or 0)


def with_own_profiles(rng: random.Random, problem: Problem) -> Problem:
    """Return the problem with devices of two profiles, one quick where the other is slow."""
    other = random_chain(rng, len(problem.chain), optimizer=True)
    owns = [LayerTimes.of(problem.chain, "main"), LayerTimes.of(other, "other")]
    devices = tuple(replace(x, times=rng.choice(owns)) for x in problem.platform.devices)
    return replace(problem, platform=replace(problem.platform, devices=devices))


@pytest.mark.parametrize("checkpointing", ["none", "stages", "segments"])
def test_profiles_of_devices_own_are_planned_exactly(checkpointing: str) -> None:
    compared = 0
    for seed in range(40):
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
    assert compared > 15


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

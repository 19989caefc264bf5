"""Groups of devices in the place of very many, and few cuts in the place of very many."""

import random
from dataclasses import replace

import pytest
from cases.chains import random_chain

from pipeplan.integers import ceil_div
from pipeplan.partition.contiguous import claims, contiguous
from pipeplan.partition.contiguous.claims import claimed
from pipeplan.partition.contiguous.contiguous import feasible, smallest_period
from pipeplan.partition.cuts import counts_standing, memory_counts, near_cuts
from pipeplan.partition.tables import stages as tables
from pipeplan.plan import Stage
from pipeplan.problem import Device, Level, Platform, Policy, Problem


def problem_of(seed, layers=6, devices=8, checkpointing="none"):
    rng = random.Random(seed)
    platform = Platform.flat(devices, rng.randint(60, 200), 10**9)
    return Problem(random_chain(rng, layers), platform, Policy(), checkpointing=checkpointing)


@pytest.fixture
def few_places(monkeypatch):
    """Eight devices and seven cuts are too many."""
    monkeypatch.setattr(claims, "MOST_PLACES", 4 * 4 * 7)
    monkeypatch.setattr(claims, "_FEWEST", 2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_groups_take_all_their_devices_take_in_that_part_of_the_time(size):
    found = 0
    for seed in range(8):
        problem = problem_of(seed, devices=4 * size)
        groups = claims.grouped(problem, size)
        best = smallest_period(groups.problem)
        if best is None:
            continue
        whole = claimed(problem, groups.stages(best.stages))
        assert whole.claimed_period_ns == ceil_div(best.claimed_period_ns, size)
        assert all(stage.replicas % size == 0 for stage in whole.stages)
        found += 1
    assert found > 2


def test_a_search_among_groups_is_valid_never_below_the_optimum_and_bounded_by_work(few_places, monkeypatch):
    found = 0
    for seed in range(8):
        problem = problem_of(seed)
        assert claims.group_sizes(problem)
        some = smallest_period(problem)
        met = None if some is None else feasible(problem, some.claimed_period_ns)
        with monkeypatch.context() as patch:
            patch.setattr(claims, "MOST_PLACES", 10**6)
            exact = smallest_period(problem)
        if some is None:
            continue
        assert some.claimed_period_ns >= exact.claimed_period_ns
        assert some.lower_bound_ns <= exact.claimed_period_ns
        assert claimed(problem, some.stages).claimed_period_ns == some.claimed_period_ns
        assert met is not None
        assert met.claimed_period_ns <= some.claimed_period_ns
        found += 1
    assert found > 2


def test_smaller_groups_find_what_large_ones_miss(monkeypatch):
    monkeypatch.setattr(contiguous, "group_sizes", lambda x: [8] * (x.replicas and len(x.platform) == 24))
    better = 0
    for seed in range(16):
        problem = problem_of(seed, 12, 24, checkpointing="segments" if seed % 2 else "stages")
        fine = smallest_period(problem)
        with monkeypatch.context() as patch:
            patch.setattr(contiguous, "_TURNS", 0)
            coarse = smallest_period(problem)
        if coarse is not None:
            assert fine.claimed_period_ns <= coarse.claimed_period_ns
            better += fine.claimed_period_ns < coarse.claimed_period_ns
    assert better > 2


@pytest.mark.parametrize("devices", [40, 300])
def test_the_bytes_of_more_replicas_stand_for_those_of_fewer_between_groups_alone(devices):
    problem = replace(problem_of(0, devices=devices), policy=Policy("stash", 4 * devices))
    assert counts_standing(problem) == list(memory_counts(problem))
    groups = claims.grouped(problem, 4).problem
    counts, standing = memory_counts(groups), counts_standing(groups)
    assert all(x <= y < 1 + 4 * x / 3 for x, y in zip(counts, standing, strict=True))
    assert len(set(standing)) < len(counts)


def test_groups_keep_to_units_and_are_as_good_as_their_least_device():
    levels = (Level(8, 10**10), Level(4, 10**9, 5))
    platform = Platform(tuple(Device(100 + d // 16) for d in range(32)), levels)
    problem = Problem(problem_of(0).chain, platform, Policy(accumulate=33))
    fours, servers = (claims.grouped(problem, size).problem for size in (4, 16))
    assert [level.count for level in fours.platform.levels] == [2, 4]
    assert [device.memory_bytes for device in fours.platform.devices] == [100] * 4 + [101] * 4
    assert fours.policy.accumulate == 9
    assert servers.platform.levels == (Level(2, 10**9, 5),)
    assert [claims._size(platform, most) for most in (31, 16, 8, 7, 3, 1)] == [2, 2, 4, 8, 16, 32]
    assert claims._size(Platform.flat(1021, 1), 200) == 6


def test_what_is_left_out_is_told():
    assert claims.coarseness(problem_of(0)) is None
    many = replace(problem_of(0, layers=3000), platform=Platform.flat(1024, 1, 1))
    words = "GPUs in groups of 16 or 8; about 1000 of 2999 cuts, then those near the best; bounds are of all"
    assert claims.coarseness(many).startswith(words)


def test_few_devices_and_single_ones_stay_themselves(few_places):
    assert claims.group_sizes(problem_of(0, devices=4)) == []
    assert claims.group_sizes(replace(problem_of(0), replicas=False)) == []


def test_where_tables_have_some_cuts_alone_the_others_are_found_by_moving(monkeypatch):
    monkeypatch.setattr(tables, "_MOST_ENTRIES", 30**2 * 13)
    monkeypatch.setattr(tables, "SPREAD", 20)
    better = 0
    for seed in range(4):
        problem = problem_of(seed, layers=90, devices=3)
        problem = replace(problem, platform=Platform.flat(3, 10**6, 10**9), replicas=False)
        assert not tables.stage_tables(problem).complete
        found = smallest_period(problem)
        monkeypatch.setattr(contiguous, "_REFINED", 0)
        rough = smallest_period(problem)
        monkeypatch.undo()
        exact = smallest_period(problem)
        monkeypatch.setattr(tables, "_MOST_ENTRIES", 30**2 * 13)
        monkeypatch.setattr(tables, "SPREAD", 20)
        assert exact.claimed_period_ns <= found.claimed_period_ns <= rough.claimed_period_ns
        assert found.lower_bound_ns <= exact.claimed_period_ns
        better += found.claimed_period_ns < rough.claimed_period_ns
    assert better


def test_cuts_near_stages_are_theirs_and_some_on_each_side():
    import numpy as np

    stages = (Stage(0, 40, (0,)), Stage(40, 90, (1,)), Stage(90, 100, (2,)))
    near = near_cuts(np.arange(101), stages, 2)
    assert near.tolist() == [0, 1, 2, 38, 39, 40, 41, 42, 88, 89, 90, 91, 92, 98, 99, 100]
    assert near_cuts(np.arange(0, 101, 10), stages, 5) is None

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from cases.chains import published, random_chain, random_problem, uneven_chain
from cases.contiguous import WEIGHTS, assert_attains, assert_brute_force_agrees, assert_schedules, varied_problem
from oracles.partition import contiguous_decision, contiguous_optimum

from pipeplan.check.validate import pattern_violations
from pipeplan.cost import memory_model
from pipeplan.cost.group_bound import group_bound
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.integers import NEVER
from pipeplan.partition.contiguous.claims import longest_period_ns, on_lowest_devices
from pipeplan.partition.contiguous.contiguous import contiguous, feasible, smallest_period
from pipeplan.partition.cuts import UNLIMITED, in_flight_limit
from pipeplan.partition.granularity import merge_articulation
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Checkpointing, Layer, Level, Platform, Policy, Problem, SharedWeights
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star


def test_equals_brute_force() -> None:
    """On more instances: scripts/checks/contiguous.py."""
    for seed in range(20):
        assert_brute_force_agrees(seed)


def test_stages_that_share_weights_equal_brute_force() -> None:
    """Sums over stages are no part of the decision, yet the plan is the best and nearly always proved to be."""
    apart = proved = 0
    for seed in range(18):
        rng = random.Random(seed)
        problem = varied_problem(seed)
        count = len(problem.chain)
        if count < 2:
            continue
        first = rng.randrange(count - 1)
        policy = replace(problem.policy, weights="2bw", vertical_sync=False, accumulate=rng.choice((None, 2, 4, 8)))
        pair = (first, rng.randrange(first + 1, count))
        chain = replace(problem.chain, tied=(pair,))
        if seed % 2:  # the profile says what they share, which one stage or device holds once
            least = min((chain.layers[i] for i in pair), key=lambda layer: layer.weight_bytes)
            size = min(rng.randint(0, least.weight_bytes), *(4 * chain.layers[i].parameter_count for i in pair))
            chain = replace(chain, shared=(SharedWeights(pair, size, size // 4),))
        problem, as_listed = replace(problem, chain=chain, policy=policy), seed % 5 > 0
        truth, found = contiguous_optimum(problem, as_listed), smallest_period(problem, as_listed=as_listed)
        assert (found is None) == (truth is None), seed
        if found is None or truth is None:
            continue
        assert found.claimed_period_ns == truth[0], seed
        assert found.lower_bound_ns is not None
        assert found.lower_bound_ns <= truth[0], seed
        proved += found.lower_bound_ns == truth[0]
        if not problem.replicas and len(problem.platform.levels) == 1:
            assert found.lower_bound_ns == truth[0], seed
        assert_attains(problem, found)
        assert smallest_period(problem, upper=truth[0] - 1, as_listed=as_listed) is None, seed
        if not as_listed or len(set(problem.platform.devices)) == 1:
            assert feasible(problem, found.lower_bound_ns - 1) is None, seed
            again = feasible(problem, truth[0])
            assert again is not None, seed
            assert again.claimed_period_ns == truth[0], seed
        apart += len({sum(s.stop <= i for s in truth[1]) for i in chain.tied[0]}) > 1
    assert apart > 2
    assert proved > 5


@pytest.mark.parametrize("seed", range(3))
def test_long_chains_equal_the_plain_recursion(seed: int) -> None:
    rng = random.Random(seed)
    layers, devices = rng.randint(45, 60), rng.choice((2, 3, 4))
    problem = random_problem(
        rng,
        layers,
        devices,
        checkpointing=rng.choice(("none", "stages")),
        replicas=rng.random() < 0.6,
        edges=rng.random() < 0.3,
        saved=rng.random() < 0.5,
    )
    problem = replace(problem, platform=alike(problem.platform))
    found = smallest_period(problem)
    if found is None:
        assert not contiguous_decision(problem, 10**9)
    else:
        assert found.claimed_period_ns is not None
        assert contiguous_decision(problem, found.claimed_period_ns)
        assert not contiguous_decision(problem, found.claimed_period_ns - 1)


@pytest.mark.parametrize("seed", [79, 127, 180, 286, 352, 497, 503, 593])
def test_equal_devices_equal_the_plain_recursion_where_the_fewest_behind_a_cut_are_not_best(seed: int) -> None:
    """Among equal devices only their number counts, and more of them behind a cut are tried where that helps."""
    rng = random.Random(seed)
    chain = uneven_chain(rng, rng.choice((6, 9, 14)))
    platform = Platform.flat(rng.randint(3, 8), rng.choice((40, 60, 90, 130)), rng.choice((10**9, 3 * 10**8)))
    checkpointing: Checkpointing = "none" if rng.choice((True, False)) else "stages"
    problem = Problem(chain, platform, checkpointing=checkpointing, replicas=rng.random() < 0.7)
    found = smallest_period(problem)
    assert found is not None
    assert found.claimed_period_ns is not None
    assert contiguous_decision(problem, found.claimed_period_ns)
    assert not contiguous_decision(problem, found.claimed_period_ns - 1)


def alike(platform: Platform) -> Platform:
    return replace(platform, devices=(platform.devices[0],) * len(platform))


@pytest.mark.parametrize("seed", range(0, 400, 40))
def test_the_scheduler_and_the_validator_agree(seed: int) -> None:
    problem = varied_problem(seed)
    problem = problem.with_policy(replace(problem.policy, accumulate=problem.policy.accumulate or 4))
    found = smallest_period(problem)
    if found is not None:
        assert_schedules(problem, found)


def test_platforms_of_servers_and_unequal_devices_stay_exact_on_longer_chains() -> None:
    for seed in range(3):
        rng = random.Random(seed)
        problem = random_problem(rng, 20, 5, levels=True, speeds=True, latency=True, saved=True)
        found = smallest_period(problem)
        if found is not None:
            assert_attains(problem, found)
            assert found.claimed_period_ns is not None
            assert feasible(problem, found.claimed_period_ns - 1) is None


def period_of(problem: Problem) -> float:
    found = smallest_period(problem)
    return float("inf") if found is None or found.claimed_period_ns is None else found.claimed_period_ns


@pytest.mark.parametrize("seed", range(8))
def test_more_of_anything_never_lengthens_the_period(seed: int) -> None:
    rng = random.Random(seed)
    layers, devices = rng.randint(3, 14), rng.randint(2, 5)
    problem = random_problem(rng, layers, devices, weights=WEIGHTS, checkpointing="none", replicas=False, saved=True)
    platform = problem.platform
    period = period_of(problem)
    roomier = replace(platform, devices=tuple(replace(x, memory_bytes=x.memory_bytes + 7) for x in platform.devices))
    assert period_of(replace(problem, platform=roomier)) <= period
    wider = replace(platform, levels=tuple(replace(x, bandwidth=x.bandwidth * 2) for x in platform.levels))
    assert period_of(replace(problem, platform=wider)) <= period
    assert period_of(replace(problem, platform=replace(platform, full_duplex=True))) <= period
    faster = replace(platform, devices=tuple(replace(x, speed=x.speed * 2) for x in platform.devices))
    assert period_of(replace(problem, platform=faster)) <= period
    more = replace(problem, replicas=True)
    assert period_of(more) <= period
    assert period_of(replace(more, checkpointing="stages")) <= period_of(more)
    extra = replace(platform.levels[0], count=devices + 1)
    longer = replace(platform, devices=(*platform.devices, platform.devices[0]), levels=(extra,))
    assert period_of(replace(problem, platform=longer)) <= period


@pytest.mark.parametrize("seed", range(8))
def test_scaling_all_times_scales_the_period(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(2, 12), rng.randint(1, 4), edges=seed % 2 == 0, latency=True)
    (level,) = problem.platform.levels
    problem = replace(problem, platform=replace(problem.platform, levels=(replace(level, bandwidth=10**9),)))
    slower = tuple(replace(x, forward_ns=2 * x.forward_ns, backward_ns=2 * x.backward_ns) for x in problem.chain.layers)
    links = (replace(level, bandwidth=5 * 10**8, latency_ns=2 * level.latency_ns),)
    scaled = replace(
        problem, chain=replace(problem.chain, layers=slower), platform=replace(problem.platform, levels=links)
    )
    period = period_of(problem)
    assert period_of(scaled) in (2 * period, 2 * period - 1)  # the ceiling of twice a rational optimum


def unit_chain(layers: int, **changes: int) -> Chain:
    one = Layer("unit", forward_ns=1, backward_ns=2, weight_bytes=1, output_bytes=0)
    return Chain("units", (replace(one, **changes),) * layers, input_bytes=1)


def test_one_layer_is_one_stage() -> None:
    problem = Problem(unit_chain(1), Platform.flat(1, 100))
    (found,) = contiguous(problem)
    assert [(s.start, s.stop, s.devices) for s in found.stages] == [(0, 1, (0,))]
    assert found.claimed_period_ns == 3


def test_more_devices_than_layers_leaves_some_unused_or_replicates() -> None:
    (straight,) = contiguous(Problem(unit_chain(2), Platform.flat(5, 100), replicas=False))
    assert straight.claimed_period_ns == 3
    assert sum(stage.replicas for stage in straight.stages) == 2
    (replicated,) = contiguous(Problem(unit_chain(2, weight_bytes=0), Platform.flat(6, 100)))
    assert replicated.claimed_period_ns == 1
    assert sum(stage.replicas for stage in replicated.stages) == 6


def test_no_plan_fits_too_little_memory() -> None:
    problem = Problem(unit_chain(3), Platform.flat(4, 2))
    assert list(contiguous(problem)) == []
    assert feasible(problem, 10**9) is None
    assert smallest_period(problem) is None


def period_of_its_own(problem: Problem, stages: tuple[Stage, ...]) -> int | None:
    return group_bound(stage_graph(problem.chain, problem.platform, problem.policy, stages))


def test_limits_on_the_period() -> None:
    problem = Problem(unit_chain(4), Platform.flat(2, 100), replicas=False)
    best = smallest_period(problem)
    assert best is not None
    assert best.claimed_period_ns == 6
    assert smallest_period(problem, upper=5) is None
    assert smallest_period(problem, upper=6, lower=6) == best
    assert period_of_its_own(problem, best.stages) == 6


def test_what_is_exact_proves_its_period() -> None:
    for checkpointing in ("none", "stages"):
        found = smallest_period(Problem(unit_chain(4), Platform.flat(2, 100), checkpointing=checkpointing))
        assert found is not None
        assert found.lower_bound_ns == found.claimed_period_ns


def test_steps_too_long_to_cost_nothing_at_the_limit_are_charged_to_every_number_of_replicas() -> None:
    layers = tuple(Layer(f"layer{i}", 10, 20, 40, 8, optimizer_ns=i * 650 * 10**12) for i in range(2))
    problem = Problem(Chain("steps", layers, 8), Platform.flat(2, 10**6), Policy())
    found = smallest_period(problem)
    assert found is not None
    truth = contiguous_optimum(problem)
    assert truth is not None
    assert (
        found.claimed_period_ns == truth[0] == 31
    )  # on two replicas 60 and two nanoseconds of the step, every second microbatch


def test_unused_devices_are_the_last_ones_where_all_are_alike() -> None:
    (found,) = contiguous(Problem(unit_chain(3), Platform.flat(5, 100), replicas=False))
    assert [stage.devices for stage in found.stages] == [(0,), (1,), (2,)]
    platform = replace(Platform.flat(8, 100), levels=(Level(4, 10**9), Level(2, 10**6)))
    stages = (Stage(0, 1, (1, 3)), Stage(1, 2, (5,)), Stage(2, 3, (7,)))
    problem = Problem(unit_chain(3), platform)
    moved = on_lowest_devices(platform, stages)
    assert [stage.devices for stage in moved] == [(0, 1), (4,), (5,)]
    assert period_of_its_own(problem, moved) == period_of_its_own(problem, stages)
    mixed = replace(platform, devices=(*platform.devices[:7], replace(platform.devices[7], speed=Fraction(2))))
    assert on_lowest_devices(mixed, stages) == stages


def test_a_thousand_layers_on_many_devices() -> None:
    rng = random.Random(3)
    layers = tuple(
        Layer(f"layer{i}", rng.randint(10, 300), rng.randint(20, 600), rng.randint(1, 20), rng.randint(1, 50), 200)
        for i in range(1000)
    )
    problem = Problem(Chain("large", layers, 10), Platform.flat(64, 9000, 10**9))
    found = smallest_period(problem)
    assert found is not None
    assert found.claimed_period_ns is not None
    assert any(stage.checkpoint for stage in found.stages)
    assert any(stage.replicas > 1 for stage in found.stages)
    assert_attains(problem, found)
    assert feasible(problem, found.claimed_period_ns - 1) is None


def test_without_any_time_there_is_no_stage() -> None:
    assert list(contiguous(Problem(unit_chain(2, forward_ns=0, backward_ns=0), Platform.flat(2, 100)))) == []


def test_a_slow_device_in_the_middle_stays_unused() -> None:
    chain = unit_chain(2, weight_bytes=0)
    fast, slow = Platform.flat(1, 100).devices[0], replace(Platform.flat(1, 100).devices[0], speed=Fraction(1, 9))
    platform = replace(Platform.flat(3, 100), devices=(fast, slow, fast))
    (found,) = contiguous(Problem(chain, platform, replicas=False))
    assert [stage.devices for stage in found.stages] == [(0,), (2,)]
    (replicated,) = contiguous(Problem(replace(chain, layers=chain.layers[:1]), platform))
    assert [stage.devices for stage in replicated.stages] == [(0, 2)]


def test_stages_keep_to_a_server_when_the_links_between_servers_are_slow() -> None:
    sizes = (0, 30, 30)  # nothing crosses the first cut, so that one may lie between servers
    chain = Chain("servers", tuple(Layer(f"layer{i}", 10, 10, 0, x) for i, x in enumerate(sizes)), 1)
    platform = replace(Platform.flat(4, 10**6), levels=(Level(2, 3 * 10**9), Level(2, 10**9)))
    problem = Problem(chain, platform, replicas=False)
    (found,) = contiguous(problem)
    assert found.claimed_period_ns == 20
    assert [stage.devices for stage in found.stages[1:]] == [(2,), (3,)]
    (flat,) = contiguous(replace(problem, platform=Platform.flat(4, 10**6, 10**9)))
    assert flat.claimed_period_ns == 40


@pytest.mark.parametrize(("name", "ratio"), [("vgg16", 1.33), ("resnet50", 1.21), ("densenet121", 1.07)])
def test_published_profiles_reach_the_known_periods(name: str, ratio: float) -> None:
    chain = merge_articulation(published(name), saved="input")
    work = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
    ratios = []
    for devices in (2, 4, 6, 8):
        for memory in (3, 4, 6, 8, 12):
            problem = Problem(chain, Platform.flat(devices, memory * 10**9))
            found = smallest_period(problem)
            if found is not None:
                assert found.claimed_period_ns is not None
                ratios.append(found.claimed_period_ns * devices / work)
                assert feasible(problem, found.claimed_period_ns - 1) is None
    assert len(ratios) >= 7
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= ratio


def test_periods_of_months_stay_within_the_integers() -> None:
    chain = unit_chain(2, forward_ns=2**58, backward_ns=2**58)
    assert longest_period_ns(Problem(chain, Platform.flat(4, 100))) == NEVER // 8
    assert longest_period_ns(Problem(unit_chain(2), Platform.flat(4, 100))) == 2 * 3 + 2 + 3 * 2  # recomputed, rounded


def test_weights_that_nothing_binds_have_no_limit() -> None:
    free = Problem(unit_chain(3, weight_bytes=0, saved_bytes=0), Platform.flat(1, 1), Policy("stash", accumulate=4))
    for replicas in (1, 4):
        assert in_flight_limit(free, 0, 2, 0, 0, 1, replicas) == UNLIMITED


def test_replicas_make_room_for_the_versions_between_their_updates() -> None:
    chain = unit_chain(1, weight_bytes=10, saved_bytes=1)
    gradient, version, activation = 10, 10, 1
    for memory, devices in ((gradient + version + activation, 1), (gradient + 2 * version + activation, 3)):
        found = smallest_period(Problem(chain, Platform.flat(3, memory, 10**12), Policy("stash")))
        assert found is not None
        assert [stage.replicas for stage in found.stages] == [devices]


@pytest.mark.parametrize("seed", range(10))
def test_equals_brute_force_where_replicas_stash_versions(seed: int) -> None:
    problem = varied_problem(seed)
    policy = replace(problem.policy, weights="stash", vertical_sync=False, accumulate=(None, 1, 2, 3, 5)[seed % 5])
    problem = replace(problem, policy=policy, replicas=True)
    found, truth = smallest_period(problem, as_listed=True), contiguous_optimum(problem, as_listed=True)
    assert (found is None) == (truth is None)
    if found is not None and truth is not None:
        assert found.claimed_period_ns == truth[0]
        assert_attains(problem, found)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize(("replicas", "accumulate"), [(1, None), (2, None), (1, 3), (2, 3), (5, 3)])
def test_the_in_flight_limit_inverts_the_memory_model(
    weights: str, precision: str, replicas: int, accumulate: int | None
) -> None:
    rng = random.Random(1)
    chain = random_chain(rng, 4, saved=True)
    policy = Policy(weights, accumulate, "adam", precision, vertical_sync=True)  # type: ignore[arg-type]
    for memory in range(0, 400, 7):
        problem = Problem(chain, Platform.flat(1, memory), policy)
        limit = int(in_flight_limit(problem, 1, 3, 5, 8, memory, replicas))
        size, count = sum(x.weight_bytes for x in chain.layers[1:3]), sum(x.parameter_count for x in chain.layers[1:3])

        def held(g: int, size: int = size, count: int = count) -> int:
            cuts = 2 * (chain.cut_bytes[1] + chain.cut_bytes[3])
            return (
                memory_model.weights_bytes(policy, size, count, g, replicas) + memory_model.held_bytes(5, 8, g) + cuts
            )

        assert limit == 0 or held(limit) <= memory
        assert held(limit + 1) > memory


def test_where_servers_share_links_it_is_exact_as_if_they_did_not() -> None:
    for seed in range(25):
        problem = varied_problem(seed)
        levels = list(problem.platform.levels)
        levels[seed % len(levels)] = replace(levels[seed % len(levels)], links=1 + seed % 2)
        problem, as_listed = replace(problem, platform=replace(problem.platform, levels=tuple(levels))), seed % 5 > 0
        truth, found = contiguous_optimum(problem, as_listed), smallest_period(problem, as_listed=as_listed)
        assert (found is None) == (truth is None), seed
        if found is not None and truth is not None:
            assert found.claimed_period_ns == truth[0], seed
            shared = group_bound(stage_graph(problem.chain, problem.platform, problem.policy, found.stages))
            assert shared is None or shared >= truth[0]


@pytest.mark.parametrize("checkpointing", ["none", "stages", "segments"])
def test_transfers_that_block_and_messages_overhead_are_work_of_both_their_ends(checkpointing: Checkpointing) -> None:
    slower = 0
    for seed in range(10):
        problem = replace(varied_problem(seed), checkpointing=checkpointing)
        if checkpointing == "segments" and len(problem.chain) > 4:
            continue
        as_listed = seed % 5 > 0
        plain = smallest_period(problem, as_listed=as_listed)
        blocking, overhead = seed % 2 == 0, 0 if seed % 4 == 0 else 5
        problem = replace(problem, platform=replace(problem.platform, blocking=blocking, overhead_ns=overhead))
        truth, found = contiguous_optimum(problem, as_listed), smallest_period(problem, as_listed=as_listed)
        assert (found is None) == (truth is None) == (plain is None), seed
        if found is None or truth is None or plain is None:
            continue
        assert found.claimed_period_ns == truth[0], seed
        slower += truth[0] > (plain.claimed_period_ns or 0)
        if len(problem.platform.levels) == 1 and not problem.policy.vertical_sync and problem.policy.accumulate:
            graph = stage_graph(problem.chain, problem.platform, problem.policy, found.stages)
            pattern = best_one_f_one_b_star(graph)
            assert pattern is not None
            assert pattern.period_ns == truth[0]
            assert pattern_violations(graph, pattern) == []
    assert slower


def test_replicas_that_share_bytes_per_parameter_equal_brute_force() -> None:
    """What another engine holds of a parameter may depend on the replicas, whatever the optimizer keeps."""
    replicated = 0
    for seed in range(25):
        problem = varied_problem(seed)
        own, shared = random.Random(seed).choice(((1, 2), (2, 1), (1, 0), (2, 4)))
        policy = replace(
            problem.policy,
            optimizer=("sgd", "momentum")[seed % 2],
            offload=False,
            zero=1,
            bytes_per_parameter=own + shared,
            shared_bytes_per_parameter=shared,
        )
        problem = replace(problem, policy=policy, replicas=True)
        truth, found = contiguous_optimum(problem, as_listed=True), smallest_period(problem, as_listed=True)
        assert (found and found.claimed_period_ns) == (truth and truth[0]), seed
        replicated += truth is not None and any(stage.replicas > 1 for stage in truth[1])
    assert replicated > 3

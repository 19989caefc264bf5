from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from cases.chains import random_chain, random_problem
from oracles.patterns import pattern_starts

from pipeplan.check.validate import pattern_violations
from pipeplan.cost.group_bound import group_bound
from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.errors import PipeplanError
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy, SharedWeights
from pipeplan.schedule.pattern import most_in_flight, starts_of
from pipeplan.schedule.periodic import ilp
from pipeplan.schedule.periodic.ilp import IlpResult, schedule_ilp
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.periodic.solvers import Solver, SolverLimits, solved
from scripts.bench.ilp import INSTANCES, instance

SOLVERS: tuple[Solver, ...] = ("cbc", "highs")
WEIGHTS = ("2bw", "stash", "flush", "latest")


def judged(graph: StageGraph, result: IlpResult) -> int | None:
    """Return the period of the pattern, which the judge must find valid, or None when there is none."""
    if result.pattern is None:
        return None
    if graph.policy.weights == "2bw" and graph.policy.accumulate is None:
        depth = most_in_flight(graph, starts_of(result.pattern), result.pattern.period_ns)
        graph = replace(graph, policy=replace(graph.policy, accumulate=depth))
    assert pattern_violations(graph, result.pattern) == []
    assert result.lower_bound_ns <= result.pattern.period_ns
    return result.pattern.period_ns


def varied_graph(seed: int, contiguous: bool, roomy: tuple[float, ...]) -> StageGraph:
    """Return a small stage graph with replicas, recomputation, levels, duplex, speeds, policies as the seed says."""
    rng = random.Random(seed)
    layers, devices = rng.randint(3, 7), rng.randint(2, 6)
    problem = random_problem(
        rng, layers, devices, weights=WEIGHTS, edges=rng.random() < 0.3, saved=True, optimizer=rng.random() < 0.3,
        levels=True, latency=True, speeds=True, duplex=True,
    )  # fmt: skip
    factor = rng.choice(roomy)
    platform = replace(
        problem.platform,
        devices=tuple(replace(d, memory_bytes=int(d.memory_bytes * factor)) for d in problem.platform.devices),
    )
    policy = problem.policy
    if policy.weights == "2bw" and rng.random() < 0.4:
        policy = replace(policy, accumulate=rng.randint(1, 5))
    return stage_graph(problem.chain, platform, policy, random_stages(rng, layers, devices, contiguous))


def random_stages(rng: random.Random, layers: int, devices: int, contiguous: bool) -> list[Stage]:
    borders = [0]
    while borders[-1] < devices:
        borders.append(min(devices, borders[-1] + rng.choice((1, 1, 2, 3))))
    groups = [tuple(range(a, b)) for a, b in pairwise(borders)]
    most = min(layers, len(groups) if contiguous else 5)
    count = rng.randint(min(2, most), most)
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    owners = sorted(rng.sample(range(len(groups)), count)) if contiguous else rng.choices(range(len(groups)), k=count)
    return [
        Stage(cuts[s], cuts[s + 1], groups[owner], ((cuts[s], cuts[s + 1]),) if rng.random() < 0.4 else ())
        for s, owner in enumerate(owners)
    ]


@pytest.mark.parametrize("solver", SOLVERS)
def test_equals_1f1b_star_on_contiguous_stages(solver):
    seen = Counter()
    for seed in range(40):
        graph = varied_graph(seed, contiguous=True, roomy=(1, 1.5, 2, 3))
        best = best_one_f_one_b_star(graph)
        result = schedule_ilp(graph, solver=solver)
        assert judged(graph, result) == (best and best.period_ns), seed
        assert result.status == ("infeasible" if best is None else "optimal")
        if best is not None:
            seen["solved"] += 1
            seen["replicated"] += any(r.replicas > 1 for r in graph.resources)
            seen["above the floor"] += best.period_ns > graph.period_floor_ns
    assert seen["solved"] >= 20
    assert seen["replicated"] >= 8
    assert seen["above the floor"] >= 2


def test_the_solvers_agree_on_shared_devices():
    statuses = Counter()
    for seed in range(25, 40):
        graph = varied_graph(seed, contiguous=False, roomy=(1, 1.2))
        results = [schedule_ilp(graph, solver=solver) for solver in SOLVERS]
        assert judged(graph, results[0]) == judged(graph, results[1]), seed
        assert results[0].status == results[1].status
        statuses[results[0].status] += 1
        statuses["bound not tight"] += results[0].pattern is not None and judged(graph, results[0]) != group_bound(
            graph
        )
    assert statuses["optimal"] >= 5
    assert statuses["optimal"] + statuses["infeasible"] == 15
    assert statuses["bound not tight"] >= 1


def shared_device_graph(seed: int) -> StageGraph:
    """Return three or four stages, two on one device, which often share weights, with memory just above the least that
    any pattern needs."""
    rng = random.Random(seed)
    shape = rng.choice([(0, 1, 0), (0, 1, 0), (0, 0, 1), (0, 1, 0, 1), (0, 1, 2, 0)])
    chain = random_chain(rng, len(shape), largest=2 if len(shape) == 3 else 3)
    transfers = len(shape) == 3
    layers = [
        replace(
            x, output_bytes=x.output_bytes if transfers and rng.random() < 0.6 else 0, saved_bytes=rng.randint(1, 6)
        )
        for x in chain.layers
    ]
    chain = replace(chain, layers=tuple(layers))
    pair = next((i, j) for j in range(len(shape)) for i in range(j) if shape[i] == shape[j])
    if seed % 2:
        known = SharedWeights(pair, min(chain.layers[i].weight_bytes for i in pair))
        chain = replace(chain, tied=(pair,), shared=(known,))
    replicas = shape == (0, 1, 0) and rng.random() < 0.3
    groups = [(0, 1), (2,)] if replicas else [(d,) for d in range(max(shape) + 1)]
    policy = Policy(weights=rng.choice(WEIGHTS))
    if policy.weights == "2bw" and rng.random() < 0.4:
        policy = replace(policy, accumulate=rng.randint(1, 3))
    stages = [Stage(i, i + 1, groups[d], ((i, i + 1),) if rng.random() < 0.3 else ()) for i, d in enumerate(shape)]

    def with_memory(size: int) -> StageGraph:
        return stage_graph(chain, Platform.flat(sum(map(len, groups)), size, 10**9), policy, stages)

    least = next(size for size in range(1, 10**4) if group_bound(with_memory(size)) is not None)
    return with_memory(least + rng.randint(-1, 6))


def test_equals_exhaustive_search_on_shared_devices():
    seen = Counter()
    for seed in range(45):
        graph = shared_device_graph(seed)
        if graph.path_ns > 14:
            continue  # exhaustive search takes too long
        result = schedule_ilp(graph)
        period = judged(graph, result)
        if period is None:
            assert result.status == "infeasible"
            assert pattern_starts(graph, max(graph.path_ns, graph.period_floor_ns)) is None, seed
            continue
        assert (result.status, result.lower_bound_ns) == ("optimal", period)
        assert pattern_starts(graph, period) is not None
        assert pattern_starts(graph, period - 1) is None, seed
        seen["solved"] += 1
        seen["bound not tight"] += period > (group_bound(graph) or 0)
        seen["replicated"] += any(r.replicas > 1 for r in graph.resources)
        seen["lent"] += any(lent for stage in graph.stages for lent in stage.lent if lent[1])
    assert seen["lent"] >= 1
    assert seen["solved"] >= 10
    assert seen["bound not tight"] >= 1
    assert seen["replicated"] >= 1


@pytest.mark.parametrize("seed", [98, 169, 331])
@pytest.mark.parametrize(("vertical_sync", "accumulate"), [(False, None), (False, 2), (True, None), (True, 2)])
def test_equals_exhaustive_search_where_versions_take_memory(seed, vertical_sync, accumulate):
    policy = Policy("stash", accumulate, vertical_sync=vertical_sync)
    graph = replace(shared_device_graph(seed), policy=policy)

    def with_memory(size: int) -> StageGraph:
        resources = (x if x.is_link else replace(x, memory_bytes=size) for x in graph.resources)
        return replace(graph, resources=tuple(resources))

    least = next(size for size in range(1, 10**3) if group_bound(with_memory(size)) is not None)
    for size in (least + 3, least + 8):
        roomy = with_memory(size)
        result = schedule_ilp(roomy, solver="highs")
        period = judged(roomy, result)
        assert (result.status, result.lower_bound_ns) == ("optimal", period)
        assert pattern_starts(roomy, period - 1) is None


# --- larger ones, of sizes as in networks ---------------------------------------------------------------------------


ONE_SPECIAL, DEALT = INSTANCES.values()


@pytest.mark.parametrize(("owner", "solver", "roomy"), [(ONE_SPECIAL, "cbc", 1.15), (DEALT, "highs", 1.02)])
def test_large_instances_are_proved_optimal(owner, solver, roomy):
    graph = instance(owner, roomy, 0)
    result = schedule_ilp(graph, solver=solver, limits=SolverLimits(own_s=600))
    assert result.status == "optimal"
    assert result.lower_bound_ns * (1 + 3e-6) >= judged(graph, result)


def test_the_solvers_agree_on_ten_stages():
    for seed in range(1):
        graph = instance([0, 1, 0, 2, 0, 1, 0, 2, 3, 1], 1.05, seed)
        periods = [judged(graph, schedule_ilp(graph, solver=solver)) for solver in SOLVERS]
        assert periods[0] == pytest.approx(periods[1], rel=3e-6)


def test_a_time_limit_is_told_and_what_was_found_is_valid():
    graph = instance(DEALT, 1.3, 0)
    for solver in SOLVERS:
        for limits in (SolverLimits(own_s=0.2), SolverLimits(clock_s=0.2)):
            result = schedule_ilp(graph, solver=solver, limits=limits)
            assert result.status == "time limit"
            assert judged(graph, result) > result.lower_bound_ns >= group_bound(graph)
        short, cutoff = SolverLimits(own_s=0.1), graph.path_ns // 2
        assert schedule_ilp(graph, solver=solver, limits=short, cutoff_period_ns=cutoff).status in (
            "time limit",
            "cutoff",
        )


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_limit_of_nodes_ends_a_search_at_the_same_place_every_time(solver):
    graph = instance(ONE_SPECIAL, 1.3, 0)
    found = [schedule_ilp(graph, solver=solver, limits=SolverLimits(nodes=2, own_s=600)) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].status == "node limit"
    assert judged(graph, found[0]) > found[0].lower_bound_ns >= group_bound(graph)


# --- the ends of a search -------------------------------------------------------------------------------------------


def small_graph(memory: int = 30, policy: Policy | None = None, scale: int = 1) -> StageGraph:
    """Return stages on devices 0, 1, 0: forwards 2 3 1, backwards 2 4 3, 3 bytes saved each, no transfers."""
    times = [(2, 2), (3, 4), (1, 3)]
    chain = Chain("s", tuple(Layer(f"l{i}", f * scale, b * scale, 0, 0, 3) for i, (f, b) in enumerate(times)), 0)
    stages = [Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (0,))]
    return stage_graph(chain, Platform.flat(2, memory), policy or Policy(), stages)


@pytest.mark.parametrize("solver", SOLVERS)
def test_cutoff(solver):
    graph = small_graph(memory=9)
    best = schedule_ilp(graph, solver=solver)
    period = judged(graph, best)
    assert (best.status, best.lower_bound_ns) == ("optimal", period)
    below = schedule_ilp(graph, solver=solver, cutoff_period_ns=period)
    assert (below.status, below.pattern, below.lower_bound_ns) == ("cutoff", None, period)
    above = schedule_ilp(graph, solver=solver, cutoff_period_ns=period + 1)
    assert (above.status, judged(graph, above)) == ("optimal", period)


def test_a_cutoff_at_the_bound_needs_no_solver(monkeypatch):
    graph, asked = small_graph(), list[str]()
    monkeypatch.setattr(ilp, "solved", lambda *how: (asked.append(how[1]), solved(*how))[1])
    result = schedule_ilp(graph, cutoff_period_ns=graph.period_floor_ns)
    assert (result.status, result.pattern, result.lower_bound_ns, asked) == ("cutoff", None, graph.period_floor_ns, [])
    schedule_ilp(graph)
    assert asked == ["cbc"]


def test_a_known_bound_is_used_and_returned():
    graph = small_graph(memory=9)
    period = judged(graph, schedule_ilp(graph))
    result = schedule_ilp(graph, lower_bound_ns=period)
    assert (result.status, judged(graph, result), result.lower_bound_ns) == ("optimal", period, period)


def test_infeasible():
    result = schedule_ilp(small_graph(memory=5))  # stages 0 and 2 save 6 bytes of one microbatch
    assert (result.status, result.pattern) == ("infeasible", None)
    assert schedule_ilp(small_graph(memory=6)).status == "optimal"


def test_many_replicas_hold_fewer_each_than_the_single_stage_behind_them():
    """Four replicas of a stage have room for two microbatches each, while the stage behind holds three."""
    times = [(4, 8, 10), (1, 2, 1), (1, 2, 1), (1, 2, 1)]
    chain = Chain("wide", tuple(Layer(f"l{i}", f, b, 0, 0, saved) for i, (f, b, saved) in enumerate(times)), 0)
    stages = [Stage(0, 1, (0, 1, 2, 3)), *(Stage(i, i + 1, (3 + i,)) for i in (1, 2, 3))]
    result = schedule_ilp(stage_graph(chain, Platform.flat(7, 20), Policy("stash"), stages))
    assert (result.status, result.pattern and result.pattern.period_ns) == ("optimal", 3)


def test_accumulate_limits_what_is_in_flight():
    for accumulate, expected in ((1, 15), (2, 11), (3, 8)):
        graph = small_graph(policy=Policy(accumulate=accumulate))
        assert judged(graph, schedule_ilp(graph)) == expected
        assert pattern_starts(graph, expected - 1) is None


def test_more_memory_never_lengthens_and_scaling_scales():
    for memory, expected in ((6, 11), (9, 9), (12, 8)):
        one, thousand = small_graph(memory), small_graph(memory, scale=1000)
        assert judged(one, schedule_ilp(one)) == expected
        assert pattern_starts(one, expected - 1) is None
        assert judged(thousand, schedule_ilp(thousand)) == 1000 * expected


@pytest.mark.parametrize("solver", SOLVERS)
def test_same_input_same_pattern(solver):
    graph = instance([0, 1, 0, 2, 1, 0], 1.1, 0)
    assert schedule_ilp(graph, solver=solver) == schedule_ilp(graph, solver=solver)


def test_operations_without_duration_keep_the_pattern_valid():
    for seed in range(20):
        rng = random.Random(seed)
        chain = random_chain(rng, 4, zero_times=True, largest=4)
        layers = [replace(x, forward_ns=max(x.forward_ns, 1 - x.backward_ns), output_bytes=0) for x in chain.layers]
        chain = replace(chain, layers=tuple(layers))
        stages = [Stage(i, i + 1, (device,)) for i, device in enumerate((0, 1, 0, 1))]
        for size in (rng.randint(10, 60), 1000):
            graph = stage_graph(chain, Platform.flat(2, size), Policy(), stages)
            result = schedule_ilp(graph, solver="highs")
            assert (judged(graph, result) is None) == (result.status == "infeasible"), seed
            assert result.status in ("optimal", "unproved", "infeasible")


def test_a_missing_solver_is_a_sentence(monkeypatch):
    import pulp

    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    with pytest.raises(PipeplanError, match="HiGHS is not installed"):
        schedule_ilp(small_graph(), solver="highs")

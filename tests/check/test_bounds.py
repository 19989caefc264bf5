import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, product
from math import ceil

import pytest
from cases.bounds import instance
from cases.chains import published, random_chain, random_problem
from cases.plans import fitted, graph_of, greedy_pattern, random_plan
from oracles.any_class import optimum

from pipeplan.check.bounds import any_bound, layer_bound, load_bound, proof, quick_proof, work_ns
from pipeplan.check.bounds.blocks import Blocks
from pipeplan.check.bounds.facts import Facts
from pipeplan.check.bounds.strong import Proved, Refutations
from pipeplan.cost.memory_model import stage_activations
from pipeplan.cost.relaxations import relative
from pipeplan.cost.saved import saved_bytes
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.granularity import merge_articulation
from pipeplan.plan import Bound, Stage
from pipeplan.problem import Chain, Device, Layer, LayerTimes, Level, Platform, Policy, Problem
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star


def chain_of(*times, weights=0, size=0, saved=None):
    return Chain("c", tuple(Layer(f"{i}", f, b, weights, size, saved) for i, (f, b) in enumerate(times)), size)


def test_perfectly_shared_work():
    chain = chain_of((3, 4), (5, 6))
    assert work_ns(Problem(chain, Platform.flat(4, 100))) == 18
    assert load_bound(Problem(chain, Platform.flat(4, 100))) == 5
    mixed = Platform((Device(100), Device(100, Fraction(1, 2))), (Level(2, 1),))
    assert load_bound(Problem(chain, mixed)) == 12
    stepping = replace(chain, layers=tuple(replace(x, optimizer_ns=10) for x in chain.layers))
    assert work_ns(Problem(stepping, mixed, Policy(accumulate=8))) == 18 + Fraction(20, 8)
    assert work_ns(Problem(stepping, mixed, Policy(accumulate=1))) == 38
    assert 18 < work_ns(Problem(stepping, mixed, Policy())) < Fraction(181, 10)  # at any interval
    by_both = work_ns(Problem(stepping, mixed, Policy(accumulate=1, zero=1)))
    assert by_both == 18 + Fraction(20, 2)  # once every 2 microbatches
    assert work_ns(Problem(stepping, mixed, Policy(accumulate=1, zero=1), replicas=False)) == 38
    assert work_ns(Problem(stepping, mixed, Policy(accumulate=8, zero=1))) == 18 + Fraction(20, 8)


def test_the_largest_layer():
    chain = chain_of((3, 4), (5, 6))
    assert layer_bound(Problem(chain, Platform.flat(4, 100), replicas=False)) == 11
    assert layer_bound(Problem(chain, Platform.flat(4, 100))) == 3
    fast = Platform((Device(100), Device(100, Fraction(2))), (Level(2, 1),))
    assert layer_bound(Problem(chain, fast, replicas=False)) == 6


@pytest.mark.parametrize(
    ("replicas", "checkpointing"), [(True, "none"), (True, "stages"), (False, "segments"), (False, "none")]
)
def test_a_bound_names_its_class(replicas, checkpointing):
    problem = Problem(chain_of((3, 4)), Platform.flat(2, 100), Policy(), replicas, checkpointing)
    bound = any_bound(problem)
    period = max(load_bound(problem), layer_bound(problem))
    assert bound == Bound("any", replicas, checkpointing, period, any_interval=True)
    given = any_bound(problem.with_policy(Policy(accumulate=2)))
    assert given == Bound("any", replicas, checkpointing, period)


def class_of(plan):
    """The narrowest flags whose class contains the plan."""
    stages = plan.allocation.stages
    replicas = any(stage.replicas > 1 for stage in stages)
    if all(not stage.checkpoint for stage in stages):
        return replicas, "none"
    whole = all(stage.checkpoint in ((), ((stage.start, stage.stop),)) for stage in stages)
    return replicas, "stages" if whole else "segments"


def test_no_valid_plan_is_below_the_bound_of_its_class():
    """Contiguous plans at their best period, the others at the best of some tries, on memory that they just fit."""
    tight = binding = shared = 0
    for seed in range(60):
        rng = random.Random(seed)
        plan = random_plan(
            rng, weights=("stash", "latest", "2bw"), checkpoint=seed % 2 > 0, replicas=seed % 4 < 2, most_devices=4
        )
        graph, period = graph_of(plan), plan.pattern.period_ns
        period = best_one_f_one_b_star(graph).period_ns if graph.contiguous else min(period, *shorter(rng, plan, graph))
        replicas, checkpointing = class_of(plan)
        problem = Problem(plan.chain, plan.platform, plan.policy, replicas, checkpointing)
        proved = proof(problem)
        assert proved.period_ns <= period
        assert not proved.infeasible
        tight += proved.period_ns == period
        binding += proved.part not in ("work", "fill", "layer")
        shared += not graph.contiguous
    assert tight > 5
    assert binding > 3
    assert shared > 20


def shorter(rng, plan, graph):
    """Periods of other patterns of the same stages that fit the same memory."""
    for period in range(graph.period_floor_ns, plan.pattern.period_ns):
        pattern = greedy_pattern(rng, graph, period, slack=0)
        if pattern is None:
            continue
        other = fitted(random.Random(0), plan.chain, plan.platform, plan.policy, plan.allocation.stages, pattern)
        pairs = zip(other.platform.devices, plan.platform.devices, strict=True)
        if all(need.memory_bytes <= has.memory_bytes for need, has in pairs):
            yield period
    yield plan.pattern.period_ns


def allocations(problem):
    """Every contiguous allocation, with all replica counts and recomputed segments that the problem allows."""
    layers, devices = len(problem.chain), len(problem.platform)
    for count in range(1, min(layers, devices) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            parts = list(zip((0, *cuts), (*cuts, layers), strict=True))
            menus = [segments(start, stop, problem.checkpointing) for start, stop in parts]
            for spread in product(range(1, devices + 1 if problem.replicas else 2), repeat=count):
                if sum(spread) <= devices:
                    ends = [sum(spread[:i]) for i in range(count + 1)]
                    homes = [tuple(range(a, b)) for a, b in pairwise(ends)]
                    for choice in product(*menus):
                        yield tuple(
                            Stage(i, j, home, checkpoint)
                            for (i, j), home, checkpoint in zip(parts, homes, choice, strict=True)
                        )


def activations_bind(rng, problem):
    """The same without weights and with small cuts, on devices that hold less than one microbatch saves in all."""
    layers = tuple(
        replace(x, weight_bytes=0, saved_bytes=rng.randint(20, 60), output_bytes=rng.randint(0, 2))
        for x in problem.chain.layers
    )
    chain = replace(problem.chain, layers=layers)
    memory = max(*(x.saved_bytes for x in layers), int(saved_bytes(chain, 0, len(chain)) * rng.uniform(0.4, 1))) + 10
    devices = tuple(replace(d, memory_bytes=memory) for d in problem.platform.devices)
    return replace(problem, chain=chain, platform=replace(problem.platform, devices=devices))


def segments(start, stop, checkpointing):
    if checkpointing == "none":
        return [()]
    if checkpointing == "stages":
        return [(), ((start, stop),)]
    found = []
    for labels in product((0, 1, 2), repeat=stop - start):  # 0 stored; 1 and 2 alternate to part neighbours
        runs, previous = [], 0
        for layer, mark in enumerate(labels, start):
            if mark and mark == previous:
                runs[-1] = (runs[-1][0], layer + 1)
            elif mark:
                runs.append((layer, layer + 1))
            previous = mark
        found.append(tuple(runs))
    return sorted(set(found))


@pytest.mark.parametrize("checkpointing", ["none", "stages", "segments"])
@pytest.mark.parametrize("replicas", [False, True])
def test_the_bound_never_exceeds_the_best_contiguous_plan(replicas, checkpointing, monkeypatch):
    """All allocations of small chains, each with its exactly best pattern; the bound is often the optimum itself."""
    feasible = tight = binding = 0
    for seed in range(20):
        rng = random.Random(seed)
        problem = random_problem(
            rng,
            3 if seed % 2 else rng.randint(1, 3),
            3 if seed % 2 else rng.randint(1, 3),
            weights=("stash", "latest", "2bw"),
            checkpointing=checkpointing,
            replicas=replicas,
            edges=seed % 4 == 0,
            saved=seed % 3 == 0,
            latency=True,
            speeds=seed % 5 == 0,
            duplex=True,
        )
        if seed % 2:
            problem = activations_bind(rng, problem)
        if seed % 6 > 3:
            sharing = replace(problem.policy, optimizer="adam", accumulate=seed % 4 or None, zero=1)
            layers = tuple(replace(x, optimizer_ns=7 * (i + 1)) for i, x in enumerate(problem.chain.layers))
            problem = replace(problem, policy=sharing, chain=replace(problem.chain, layers=layers))
        patterns = (
            best_one_f_one_b_star(stage_graph(problem.chain, problem.platform, problem.policy, stages))
            for stages in allocations(problem)
        )
        best = min((pattern.period_ns for pattern in patterns if pattern is not None), default=None)
        proved = proof(problem)
        bound = proved.period_ns
        if best is None:
            continue
        assert not proved.infeasible
        assert bound <= best
        feasible += 1
        tight += bound == best
        binding += proved.part not in ("work", "fill", "layer")
    assert feasible > 6
    assert tight > 1
    assert binding


def test_more_memory_bandwidth_or_devices_never_raise_the_bound():
    for seed in range(24):
        rng = random.Random(seed)
        problem = random_problem(
            rng,
            rng.randint(1, 6),
            rng.randint(1, 5),
            checkpointing=rng.choice(("none", "stages")),
            replicas=seed % 2 > 0,
        )
        bound = any_bound(problem).period_ns
        platform = problem.platform
        roomier = replace(platform, devices=tuple(Device(2 * d.memory_bytes, d.speed) for d in platform.devices))
        quicker = replace(platform, levels=tuple(Level(x.count, 3 * x.bandwidth) for x in platform.levels))
        level = platform.levels[0]
        more = Platform((*platform.devices, platform.devices[0]), (Level(level.count + 1, level.bandwidth),))
        for other in (roomier, quicker, *([more] if len(platform.levels) == 1 else [])):
            if not proof(problem).infeasible:
                assert any_bound(replace(problem, platform=other)).period_ns <= bound


def test_no_bound_is_above_the_truth_and_most_reach_it():
    """Every allocation of tiny problems of all kinds, scheduled exactly; what no plan fits is proved to have none."""
    ratios, averages, impossible, sharp = [], [], 0, 0
    for seed in range(24):
        problem = instance(seed, most_layers=3)
        truth, proved = optimum(problem), proof(problem)
        assert proved.infeasible == (truth is None), seed
        if truth is None:
            impossible += 1
            continue
        assert proved.period_ns <= truth, seed
        conditions = Refutations(problem)
        for period in (truth, truth + 1, 2 * truth):
            assert conditions.cover_refuted(period) is None, seed
        assert conditions.refuted(truth) is None, seed
        sharp += conditions.cover_refuted(truth - 1) is not None
        assert proof(problem, up_to=2 * truth).period_ns <= truth, seed
        ratios.append(truth / proved.period_ns)
        averages.append(truth / quick_proof(problem).period_ns)
    assert sum(ratios) / len(ratios) < 1.25
    assert sum(averages) / len(averages) > 1.2
    assert impossible > 4
    assert sharp > 5


@pytest.mark.parametrize(
    ("name", "memory", "bandwidth", "least", "part"),
    [("vgg16", 12, 12.0, 235.6, "runs"), ("resnet50", 3, 0.3, 404.7, "runs"), ("vgg16", 3, 12.0, None, "runs")],
)
def test_published_profiles_are_bounded_by_what_stages_hold(name, memory, bandwidth, least, part):
    """Four GPUs, no replicas, segments; the first has a contiguous plan of 274.0 ms, the last none of any kind."""
    chain = merge_articulation(published(name), saved="input")
    platform = Platform.flat(4, memory * 10**9, int(bandwidth * 10**9))
    proved = proof(Problem(chain, platform, replicas=False, checkpointing="segments"))
    assert (proved.part, proved.infeasible) == (part, least is None)
    assert least is None or least * 10**6 < proved.period_ns < (274 if name == "vgg16" else 10**3) * 10**6


def test_whole_blocks_fill_devices_unevenly():
    """Of eleven blocks one of four devices has three, where they cannot be shared; 11 * 30 / 4 = 82.5 ns otherwise."""
    chain = chain_of(*[(10, 20)] * 11, saved=1)
    problem = Problem(chain, Platform.flat(4, 1000), replicas=False, checkpointing="none")
    assert proof(problem) == Proved(90, "blocks")
    assert quick_proof(problem) == Proved(83, "work")
    shared = replace(problem, replicas=True)
    assert proof(shared).period_ns == 83


def test_blocks_without_room_run_again_as_whole_things():
    """Three blocks of 30 ns on two devices that have room for what two keep: 45 ns if all were stored, 50 at best."""
    chain = Chain("blocks", tuple(Layer(f"l{i}", 10, 20, 0, 1, saved_bytes=40) for i in range(3)), 40)
    problem = Problem(chain, Platform.flat(2, 110, 10**12), checkpointing="segments")
    assert proof(problem).period_ns <= optimum(problem)
    assert proof(problem) == Proved(50, "blocks")
    assert proof(replace(problem, platform=Platform.flat(2, 200, 10**12))).period_ns == 45


@pytest.mark.parametrize("seed", range(6))
def test_no_bound_by_blocks_is_above_the_truth(seed):
    rng = random.Random(seed)
    forward, saved, weights = rng.randint(1, 9), rng.randint(5, 40), rng.randint(0, 6)
    layers = [Layer(f"l{i}", forward, 2 * forward, weights, 1, saved_bytes=saved) for i in range(3)]
    if seed % 3 == 0:
        layers.append(Layer("head", rng.randint(1, 9), rng.randint(1, 9), rng.randint(0, 9), 1, saved_bytes=saved))
    memory = 3 * weights * rng.randint(1, 3) + rng.randint(saved, 3 * saved) + 8
    platform = Platform.flat(2 if seed % 3 == 0 else 3, memory, 10**12)
    problem = Problem(Chain("blocks", tuple(layers), saved), platform, replicas=seed % 2 == 0, checkpointing="segments")
    truth, blocks = optimum(problem), Blocks(Facts(problem))
    assert truth is None or not any(blocks.too_many(period) for period in (truth, truth + 1, 2 * truth))


def test_a_layer_alone_runs_again_for_every_microbatch_or_for_none():
    layers = (Layer(f"l{i}", 10**6, 2 * 10**6, 10**9, 10**6, saved_bytes=10**8) for i in range(6))
    platform = Platform.flat(6, 3_250_000_000, 10**12)
    problem = Problem(Chain("blocks", tuple(layers), 10**6), platform, Policy("2bw", 64), False, "segments")
    assert proof(problem) == Proved(4 * 10**6, "runs")


def test_allowing_more_never_raises_the_bound():
    for seed in range(24):
        rng = random.Random(seed)
        problem = random_problem(rng, rng.randint(1, 6), rng.randint(1, 5))
        plain = replace(problem, replicas=False, checkpointing="none")
        if proof(plain).infeasible:
            continue
        plain = any_bound(plain).period_ns
        assert any_bound(replace(problem, replicas=True, checkpointing="none")).period_ns <= plain
        assert any_bound(replace(problem, replicas=False, checkpointing="stages")).period_ns <= plain


def test_scaling_all_times_scales_the_load_bound():
    for seed in range(30):
        chain = random_chain(random.Random(seed), 5)
        thrice = replace(
            chain,
            layers=tuple(replace(x, forward_ns=3 * x.forward_ns, backward_ns=3 * x.backward_ns) for x in chain.layers),
        )
        platform = Platform.flat(3, 10**6)
        exact = Fraction(work_ns(Problem(chain, platform)), 3)
        assert load_bound(Problem(chain, platform)) == ceil(exact)
        assert load_bound(Problem(thrice, platform)) == ceil(3 * exact)


def test_what_devices_wait_for_is_bounded_by_each_ones_own_profile():
    """Of two devices one computes nearly all of its backward for the layer before, the other hardly any."""
    times = [LayerTimes("", (10, 8), (10, 10), weight, (0, 0)) for weight in ((9, 9), (1, 2))]
    platform = Platform(tuple(Device(100, Fraction(2), one) for one in times), (Level(2, 10**9),))
    relaxed = relative(Problem(chain_of((1, 1), (1, 1)), platform))
    assert [x.backward_ns - x.weight_part_ns for x in relaxed.chain.layers] == [0, 0]
    assert [x.backward_ns for x in relaxed.chain.layers] == [5, 5]
    assert {x.speed for x in relaxed.platform.devices} == {1}


def test_sums_of_large_gradients():
    """8 GB on each of 4 devices at 10 GB/s: 1.2 s an update, of 12 microbatches."""
    problem = Problem(
        chain_of((1, 1), (1, 1), weights=4 * 10**9), Platform.flat(4, 10**12, 10**10), Policy(accumulate=12)
    )
    assert Facts(problem).sync_ns[3, 0, 2] == 10**8


def test_an_engines_buffers_hold_what_views_of_them_would_keep():
    """Layer 1 is a view of what it reads, which layer 2 keeps: in a buffer already where a stage begins at layer 1."""
    layers = (
        Layer("a", 1, 1, 4, 100, 0, ()),
        Layer("b", 1, 1, 0, 100, 0, (), view_of=0),
        Layer("c", 1, 1, 4, 10, 100, (1,)),
    )
    chain, policy = Chain("c", layers, 10), Policy("flush", 4, engine="torch")
    _, peak, _ = stage_activations(policy, chain, 1, 3, ())
    assert Facts(Problem(chain, Platform.flat(2, 10**6), policy, checkpointing="none")).least_peak[1, 3] <= peak == 0


def test_one_device_does_all_layers_of_a_run():
    """Layers 0 to 2 fit on one device alone, where two microbatches inside layer 1 and one inside layer 2 don't. So
    what follows layer 1 and comes back to it fits into a period, though layer 0 alone has room for many."""
    times = ((1, 1), (10, 10), (10, 10), (20, 20), (20, 20))
    costs = zip(times, (60, 60, 1, 1, 0), (1, 40, 40, 0, 0), strict=True)
    layers = tuple(Layer(f"{i}", f, b, 0, size, kept) for i, ((f, b), size, kept) in enumerate(costs))
    problem = Problem(Chain("c", layers, 0), Platform.flat(3, 110, 10**12), replicas=False, checkpointing="none")
    assert quick_proof(problem).period_ns < 50
    assert proof(problem) == Proved(122, "runs")
    assert optimum(problem) == 122


def test_one_microbatch_has_to_fit():
    """Of two layers that keep 60 bytes in 100 one is recomputed by every replica, though on average there is room."""
    layers = (Layer("0", 10, 10, 0, 1, 60), Layer("1", 10, 10, 0, 0, 60), Layer("2", 1, 1, 0, 0, 1))
    problem = Problem(Chain("c", layers, 0), Platform.flat(2, 100, 10**12), checkpointing="segments")
    facts = Facts(problem)
    assert facts.recomputed[0][0, 3] == facts.recomputed[1][0, 3] == 10
    assert facts.recomputed[0][0, 1] == 0
    truth = optimum(problem)
    assert truth is not None
    assert proof(problem).period_ns <= truth


@pytest.mark.parametrize("seed", [115, 533, 541])
def test_inputs_of_segments_are_kept_of_every_microbatch_that_is_inside(seed):
    assert proof(instance(seed)).period_ns == optimum(instance(seed))

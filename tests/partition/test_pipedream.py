from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from cases.chains import published, random_chain, random_platform, random_problem

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.files.graph_txt import read_graph_text
from pipeplan.files.profiles import profile_text, read_profile
from pipeplan.partition.granularity import merge_articulation
from pipeplan.partition.pipedream.paper import _strict, pipedream
from pipeplan.plan import Allocation, Stage
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, Problem
from scripts.studies.pipedream import released
from scripts.studies.pipedream.released import pipedream_released, released_period_ns

MEMORY = 16 * 10**9
GB = 10**9
HIERARCHY_4X4 = Platform((Device(MEMORY),) * 16, (Level(4, 10 * GB), Level(4, 5 * GB // 4)))
FLAT_16 = Platform.flat(16, MEMORY, 5 * GB // 4)
EACH = Policy(accumulate=1)  # as the paper: each replica updates after its own microbatch
PLATFORMS = [Platform.flat(4, MEMORY, 10 * GB), Platform.flat(8, MEMORY, 30 * GB), FLAT_16, HIERARCHY_4X4]


def shape(allocation: Allocation) -> str:
    return "-".join(str(stage.replicas) for stage in allocation.stages)


def floor_ns(problem: Problem, allocation: Allocation) -> int:
    """Return the least period by PipeDream's charges: all replicas share one link at every cut, rings never wait."""
    instant = replace(problem.platform, levels=tuple(replace(x, latency_ns=0) for x in problem.platform.levels))
    graph, other = (
        stage_graph(problem.chain, platform, problem.policy, allocation.stages)
        for platform in (problem.platform, instant)
    )
    shared = tuple(replace(x, replicas=1) if x.is_link else x for x in graph.resources)
    return replace(graph, resources=shared, stages=other.stages).period_floor_ns


# --- the paper's mode ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "replicas", "milliseconds", "first_after_the_cut"),
    [
        ("vgg16", "15-1", 44.159, "Linear-35"),
        ("alexnet", "15-1", 15.099, "Linear-18"),
        ("resnet50", "16", 27.714, None),
    ],
)
def test_table_1_on_sixteen_workers(
    name: str, replicas: str, milliseconds: float, first_after_the_cut: str | None
) -> None:
    problem = Problem(published(name), FLAT_16, EACH)
    (allocation,) = pipedream(problem)
    assert allocation.claimed_period_ns is not None
    assert shape(allocation) == replicas
    assert allocation.claimed_period_ns / 10**6 == pytest.approx(milliseconds, abs=0.0005)
    assert floor_ns(problem, allocation) == allocation.claimed_period_ns
    if first_after_the_cut:
        later = problem.chain.layers[allocation.stages[1].start :]
        assert next(x.name for x in later if x.weight_bytes) == first_after_the_cut
        assert any(x.name.startswith("Conv") for x in problem.chain.layers[: allocation.stages[1].start])


def test_a_strict_hierarchy_cannot_have_15_1_and_the_flat_solve_wins() -> None:
    flat, strict = pipedream(Problem(published("vgg16"), HIERARCHY_4X4, EACH))
    assert (shape(flat), flat.claimed_period_ns) == ("15-1", 44_159_000)
    assert sum(stage.replicas for stage in strict.stages[:1]) % 4 == 0
    assert strict.claimed_period_ns == 55_198_750


def consecutive(count: int, devices: int, straight: bool) -> Iterator[Allocation]:
    """All stages on consecutive devices from the first on."""
    for stages in range(1, min(count, devices) + 1):
        for cuts in combinations(range(1, count), stages - 1):
            for ends in combinations(range(1, devices + 1), stages):
                groups = [tuple(range(a, b)) for a, b in zip((0, *ends), ends, strict=False)]
                if not straight or all(len(group) == 1 for group in groups):
                    bounds = zip((0, *cuts), (*cuts, count), groups, strict=True)
                    yield Allocation(tuple(Stage(start, stop, group) for start, stop, group in bounds))


@pytest.mark.parametrize("seed", range(30))
def test_the_flat_claim_is_the_least_floor_of_all_partitions(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(
        rng, rng.randint(1, 5), rng.choice((1, 2, 3, 4, 4, 6)), weights=("2bw", "stash"), edges=seed % 3 == 0,
        optimizer=True, levels=True, latency=True, speeds=seed % 2 == 0, duplex=True,
    )  # fmt: skip
    problem = problem.with_policy(
        replace(problem.policy, accumulate=rng.choice((None, 1, 5)), precision=rng.choice(("fp32", "mixed")))
    )
    straight = seed % 4 == 0
    least = min(floor_ns(problem, x) for x in consecutive(len(problem.chain), len(problem.platform), straight))
    allocations = list(pipedream(problem, straight=straight))
    assert [x.claimed_period_ns for x in allocations] == sorted(x.claimed_period_ns or 0 for x in allocations)
    flat = [x for x in allocations if x.claimed_period_ns == floor_ns(problem, x) == least]
    assert flat, "one of the allocations is the best partition and claims no more and no less than it costs"
    assert all(x.contiguous and floor_ns(problem, x) >= least for x in allocations)


def paper_period(problem: Problem, straight: bool) -> int:
    """PipeDream's A^k(i -> j, m), plainly, with units allowed to stay unused."""
    chain, platform = problem.chain, problem.platform
    speed = platform.slowest(range(len(platform))).speed
    directions = 1 if platform.full_duplex else 2

    @cache
    def stage(k: int, i: int, j: int, m: int) -> Fraction:
        if k == 0:
            part = chain.layers[i:j]
            work = Fraction(
                math.ceil(sum(x.forward_ns for x in part) / speed) + math.ceil(sum(x.backward_ns for x in part) / speed)
            )
        else:
            work = best(k - 1, i, j, platform.levels[k - 1].count)
        weight_bytes = sum(x.weight_bytes for x in chain.layers[i:j])
        bandwidth, _ = platform.paths[k]
        return max(work / m, Fraction(2 * (m - 1) * weight_bytes * 10**9, m * bandwidth * m))

    @cache
    def best(k: int, i: int, j: int, m: int) -> Fraction:
        choices = [stage(k, i, j, used) for used in range(1, m + 1) if used == 1 or not straight]
        for cut in range(i + 1, j):
            crossing = Fraction(directions * platform.transfer_ns(chain.cut_bytes[cut], k))
            for last in range(1, (2 if straight else m) if m > 1 else 1):
                choices.append(max(best(k, i, cut, m - last), crossing, stage(k, cut, j, last)))
        return min(choices)

    top = len(platform.levels) - 1
    return math.ceil(best(top, 0, len(chain), platform.levels[top].count))


@pytest.mark.parametrize("seed", range(30))
def test_the_strict_claim_is_the_papers_recurrence(seed: int) -> None:
    rng = random.Random(seed)
    counts = [(2, 2), (2, 3), (3, 2), (2, 2, 2)][seed % 4]
    levels = tuple(Level(n, rng.choice((10**9, 5 * 10**8, 3 * 10**8)), rng.choice((0, 1))) for n in counts)
    platform = Platform((Device(MEMORY, Fraction(rng.choice((1, 2)), 3)),) * math.prod(counts), levels, seed % 5 == 0)
    problem = Problem(random_chain(rng, rng.randint(1, 7), edges=seed % 3 == 0), platform, EACH)
    straight = seed % 6 == 0
    period, stages = _strict(problem, straight)
    assert period == paper_period(problem, straight)
    assert [x.stop for x in stages] == [*(x.start for x in stages[1:]), len(problem.chain)]
    assert sum(x.replicas for x in stages) <= len(platform)


def test_an_equal_strict_solution_is_not_repeated() -> None:
    chain = Chain("even", (Layer("a", 8, 8, 0, 10**6), Layer("b", 8, 8, 0, 0)), 0)
    (allocation,) = pipedream(Problem(chain, Platform((Device(MEMORY),) * 4, (Level(2, GB), Level(2, GB))), EACH))
    assert (shape(allocation), allocation.claimed_period_ns) == ("4", 8)


def test_no_replicas_means_a_straight_pipeline() -> None:
    rng = random.Random(2)
    problem = Problem(random_chain(rng, 9), random_platform(rng, 4), replicas=False)
    for allocation in [*pipedream(problem), *pipedream_released(problem, straight=True)]:
        assert {stage.replicas for stage in allocation.stages} == {1}


# --- the released mode -----------------------------------------------------------------------------------------------

KNOWN = {
    "vgg16": ((170.1790624, "3-1"), (88.92920091, "7-1"), (54.79489083, "13-2-1"), (67.13399693, None)),
    "resnet50": ((111.497, "1-1-1-1"), (55.79924361, "5-1-1-1"), (43.84779004, "8-5-3"), (43.20846920, "4-4-4-4")),
    "densenet121": ((81.98392080, "2-1-1"), (41.00904132, "5-1-1-1"), (23.54944996, "5-6-3-1-1"), (24.61463200, None)),
    "gnmt": ((25.868, "1-1-1-1"), (16.61350364, "1-1-1-1-3-1"), (17.125, None), (11.081, None)),
}


@pytest.mark.parametrize("platform", range(4))
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_published_optimizers_values(name: str, platform: int) -> None:
    problem = Problem(published(name), PLATFORMS[platform])
    milliseconds, replicas = KNOWN[name][platform]
    period = released_period_ns(problem)
    assert period / 10**6 == pytest.approx(milliseconds, rel=1e-6, abs=0)
    (allocation,) = pipedream_released(problem)
    assert allocation.claimed_period_ns == math.ceil(period - 1e-3)
    assert allocation.contiguous
    assert (allocation.stages[0].start, allocation.stages[-1].stop) == (0, len(problem.chain))
    assert sum(stage.replicas for stage in allocation.stages) == len(problem.platform)
    assert replicas in (None, shape(allocation))


@pytest.mark.parametrize(("platform", "milliseconds"), [(0, 137.129), (1, 75.0459624)])
def test_the_published_optimizers_values_on_1495_antichains(platform: int, milliseconds: float) -> None:
    problem = Problem(published("gnmt_large"), PLATFORMS[platform])
    assert released_period_ns(problem) / 10**6 == pytest.approx(milliseconds, rel=1e-6, abs=0)


def test_a_graph_that_became_a_profile_keeps_its_released_value(tmp_path: Path) -> None:
    """Inputs are dropped where the graph is read; sinks that only pick a part are known by their names, kept there."""
    line = "forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
    costs = {1: (0, 0, 9, 0), 2: (3, 5, 4e6, 8e6), 3: (2, 2, 1e6, 0), 4: (0, 0, 7e6, 0), 5: (4, 6, 2e6, 9e6)}
    kinds = {1: "Input0", 2: "LSTM(4)", 3: "Add", 4: "__getitem__(1)", 5: "Linear"}
    nodes = [f"node{i} -- {kinds[i]} -- {line.format(*costs[i])}" for i in kinds]
    edges = [f"\tnode{i} -- node{j}" for i, j in ((1, 2), (2, 3), (2, 4), (2, 5), (3, 5))]
    graph = read_graph_text("\n".join([*nodes, *edges]), "toy", "toy.txt")
    assert [x.name for x in graph.layers] == ["LSTM-2", "Add-3", "__getitem__-4", "Linear-5"]
    path = tmp_path / "toy.json"
    path.write_text(profile_text(graph))
    chain = read_profile(str(path))
    assert chain == graph
    platform = Platform.flat(2, MEMORY, GB)
    values = [released_period_ns(Problem(x, platform)) for x in (graph, chain, without_layer(graph, 2))]
    assert values[0] == values[1] == values[2] == pytest.approx(12e6)


def without_layer(chain: Chain, left_out: int) -> Chain:
    """The chain without a layer that nothing reads."""
    edges = [(i - (i > left_out), j - (j > left_out)) for i, j in chain.edges or () if left_out not in (i, j)]
    return replace(chain, layers=(*chain.layers[:left_out], *chain.layers[left_out + 1 :]), edges=tuple(edges))


def released_reference(chain: Chain, platform: Platform, straight: bool) -> float:
    """The recurrence of ALGORITHMS section 5 on a plain chain, term by term."""
    count = len(chain)
    compute = [x.forward_ns + x.backward_ns for x in chain.layers]
    output = [x.output_bytes for x in chain.layers]

    def solve(k: int, i: int, j: int, m: int) -> float:
        return table[k].setdefault((i, j, m), _solve(k, i, j, m)) if (i, j, m) not in table[k] else table[k][i, j, m]

    def stage_time(k: int, i: int, j: int) -> float:
        return sum(compute[i : j + 1]) if k == 0 else solve(k - 1, i, j, platform.levels[k - 1].count)

    def _solve(k: int, i: int, j: int, m: int) -> float:
        rate = platform.levels[k].bandwidth / 10**9
        below = platform.levels[k - 1].count if k else 1

        def weights(a: int, b: int) -> int:
            return sum(x.weight_bytes for x in chain.layers[a : b + 1])

        best = (stage_time(k, i, j) + 4 * (m - 1) * weights(i, j) / (rate * m) / below) / m
        if straight and m > 1:
            best = math.inf
        for split in range(i, j):
            for q in range(1, 2 if straight and m > 1 else m):
                best = min(best, max(
                    solve(k, i, split, m - q),
                    (stage_time(k, split + 1, j) + 4 * (q - 1) * weights(split + 1, j) / (rate * q)) / q,
                    2 * output[split] / (rate * q),
                    2 * output[j] / (rate * q) if j < count - 1 else 0,
                ))  # fmt: skip
        return best

    table: list[dict[tuple[int, int, int], float]] = [{} for _ in platform.levels]
    top = len(platform.levels) - 1
    return solve(top, 0, count - 1, platform.levels[top].count)


@pytest.mark.parametrize("seed", range(30))
def test_released_is_its_recurrence_on_plain_chains(seed: int) -> None:
    rng = random.Random(seed)
    counts = [(3,), (5,), (2, 2), (2, 3), (2, 2, 2)][seed % 5]
    levels = tuple(Level(n, rng.choice((10**9, 5 * 10**8, 3 * 10**8))) for n in counts)
    platform = Platform((Device(MEMORY),) * math.prod(counts), levels)
    chain = random_chain(rng, rng.randint(1, 8))
    straight = seed % 3 == 0
    expected = released_reference(chain, platform, straight)
    assert released_period_ns(Problem(chain, platform), straight) == pytest.approx(expected, rel=1e-9)
    assert len(list(pipedream_released(Problem(chain, platform), straight))) == (expected < math.inf)


def antichain_reference(chain: Chain, workers: int, bandwidth: int) -> float:
    """The antichain DAG with sets instead of bits, and the recurrence on it for one level."""
    edges = set(chain.edges or ())
    after: dict[int, set[int]] = {v: {j for i, j in edges if i == v} for v in range(len(chain))}

    @cache
    def descendants(v: int) -> frozenset[int]:
        return frozenset(after[v].union(*(descendants(w) for w in after[v])))

    def ancestors(v: int) -> set[int]:
        return {u for u in range(len(chain)) if v in descendants(u)}

    def augment(antichain: frozenset[int]) -> frozenset[int]:
        waiting = {p for a in antichain for p in ancestors(a) if after[p] - ancestors(a) - {a}}
        return antichain | waiting

    follows: dict[frozenset[int], set[frozenset[int]]] = {}
    queue = [frozenset([0])]
    for antichain in queue:
        if antichain in follows:
            continue
        whole = augment(antichain)
        follows[antichain] = set()
        for u in whole:
            for v in after[u] - antichain:
                if not descendants(v) & whole:
                    replaced = whole - {u} | {v}
                    follows[antichain].add(frozenset(x for x in replaced if not descendants(x) & replaced))
        queue += follows[antichain]

    done = {x: x.union(*(ancestors(a) for a in x)) for x in follows}
    states = sorted(follows, key=lambda x: len(done[x]))
    earlier: dict[frozenset[int], set[frozenset[int]]] = {x: set() for x in states}
    for x in states:
        for y in follows[x]:
            earlier[y] |= earlier[x] | {x}

    def total(field: str, x: frozenset[int], without: frozenset[int] = frozenset()) -> int:
        return sum(getattr(chain.layers[v], field) for v in done[x]) - sum(
            getattr(chain.layers[v], field) for v in (done[without] if without else ())
        )

    def out(x: frozenset[int]) -> int:
        return sum(chain.layers[v].output_bytes for v in augment(x))

    rate = bandwidth / 10**9

    @cache
    def solve(x: frozenset[int], m: int) -> float:
        time_ = total("forward_ns", x) + total("backward_ns", x)
        best = (time_ + 4 * (m - 1) * total("weight_bytes", x) / (rate * m)) / m
        for y in earlier[x]:
            for q in range(1, m):
                time_ = total("forward_ns", x, y) + total("backward_ns", x, y)
                stage = (time_ + 4 * (q - 1) * total("weight_bytes", x, y) / (rate * q)) / q
                moved = max(out(y), out(x) if x != states[-1] else 0)
                best = min(best, max(solve(y, m - q), stage, 2 * moved / (rate * q)))
        return best

    return solve(states[-1], workers)


@pytest.mark.parametrize("seed", range(30))
def test_released_works_on_the_antichain_dag(seed: int) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(2, 8), edges=True)
    # one source and one sink, as the published optimizer expects
    edges = set(chain.edges or ()) | {(0, j) for j in range(1, len(chain)) if all(t != j for _, t in chain.edges or ())}
    edges |= {(i, len(chain) - 1) for i in range(len(chain) - 1) if all(s != i for s, _ in edges)}
    chain = replace(chain, edges=tuple(sorted(edges)))
    platform = Platform.flat(rng.randint(1, 4), MEMORY, rng.choice((10**9, 5 * 10**8)))
    expected = antichain_reference(chain, len(platform), platform.levels[0].bandwidth)
    problem = Problem(chain, platform)
    assert released_period_ns(problem) == pytest.approx(expected, rel=1e-9)
    (allocation,) = pipedream_released(problem)
    bounds = [(stage.start, stage.stop) for stage in allocation.stages]
    assert all(start < stop for start, stop in bounds)
    assert [b for _, b in bounds] == [a for a, _ in bounds[1:]] + [len(chain)]


def test_sinks_that_pick_an_item_are_left_out() -> None:
    chain = Chain(
        "picks",
        (Layer("LSTM-1", 5, 5, 4, 6), Layer("__getitem__-2", 9, 9, 9, 9), Layer("Linear-3", 5, 5, 4, 2)),
        0,
        edges=((0, 1), (0, 2)),
    )
    assert released_period_ns(Problem(chain, Platform.flat(1, MEMORY))) == pytest.approx(20)
    (two,) = pipedream_released(Problem(chain, Platform.flat(2, MEMORY, GB // 8)))
    assert [(stage.start, stage.stop) for stage in two.stages] == [(0, 3)], "8 ns/byte: 4 weights of 8 bytes are less"


def test_too_many_antichains_are_linearised(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = 14
    branches = [Layer(f"branch{i}", 3 + i, 2, 4, 5) for i in range(2 * wide)]
    edges = [(0, 1 + i) for i in range(wide)] + [(1 + i, 1 + wide + i) for i in range(wide)]
    edges += [(1 + wide + i, 1 + 2 * wide) for i in range(wide)]
    ends = (Layer("first", 20, 30, 4, 6), Layer("join", 40, 50, 4, 6), Layer("last", 60, 70, 4, 6))
    chain = Chain(
        "wide", (ends[0], *branches, *ends[1:]), 0, edges=(*edges, (1 + 2 * wide, 2 + 2 * wide))
    )  # 3^14 antichains
    problem = Problem(chain, Platform.flat(3, MEMORY, GB))
    linear = replace(problem, chain=merge_articulation(chain))
    assert len(released._states(chain).stop) - 1 == len(linear.chain) == 3  # the branches and the join are one
    assert released_period_ns(problem) == pytest.approx(released_period_ns(linear), rel=1e-12)
    (ours,), (theirs,) = pipedream_released(problem), pipedream_released(linear)
    assert ours.claimed_period_ns == theirs.claimed_period_ns
    small = random_chain(random.Random(4), 7, edges=True)
    monkeypatch.setattr(released, "MOST_STATES", 1)
    expected = released_period_ns(replace(problem, chain=merge_articulation(small)))
    assert released_period_ns(replace(problem, chain=small)) == pytest.approx(expected, rel=1e-12)


def test_four_hundred_layers_on_eight_servers_of_eight_take_seconds() -> None:
    chain = random_chain(random.Random(0), 400, largest=10**6)
    platform = Platform((Device(MEMORY),) * 64, (Level(8, 10 * GB), Level(8, 5 * GB // 4)))
    begin = time.process_time()  # other processes don't count
    claims = [x.claimed_period_ns for x in pipedream(Problem(chain, platform))]
    assert time.process_time() - begin < 100  # a slow machine's; a fast one needs 5
    assert all(claim is not None and claim >= sum(x.forward_ns for x in chain.layers) / 64 for claim in claims)


def test_policy_changes_what_is_synchronised() -> None:
    chain = Chain("heavy", (Layer("a", 4, 4, 64, 0),), 0)
    problem = Problem(chain, Platform.flat(2, MEMORY, GB), Policy(accumulate=1, precision="mixed"))
    assert next(pipedream(problem)).claimed_period_ns == 8, "64 bytes in fp32 and 32 in mixed every second microbatch"
    assert next(pipedream(problem.with_policy(Policy(accumulate=16)))).claimed_period_ns == 4

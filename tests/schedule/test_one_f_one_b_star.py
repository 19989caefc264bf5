import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
from cases.chains import random_chain, random_platform
from cases.plans import graph_of, random_checkpoint, random_plan
from oracles.schedules import all_patterns, held_counts, lifetime, smallest_period_by_force

from pipeplan.check.validate import pattern_violations
from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.pattern import groups, in_flight, most_in_flight, resource_use, starts_of
from pipeplan.schedule.periodic.one_f_one_b_star import (
    best_one_f_one_b_star,
    emptiest_one_f_one_b_star,
    one_f_one_b_star,
)

PLENTY = 10**6
STASH = Policy("stash")


def straight(times, transfer=0, memory=PLENTY, policy=STASH, saved=1):
    """Return the graph of one stage per (forward, backward) pair on its own device, equal transfers between them."""
    layers = tuple(
        Layer(f"{i}", f, b, 0, transfer if i + 1 < len(times) else 0, saved) for i, (f, b) in enumerate(times)
    )
    platform = Platform.flat(len(times), memory, 10**9)
    stages = [Stage(i, i + 1, (i,)) for i in range(len(times))]
    return stage_graph(Chain("straight", layers, 0), platform, policy, stages)


def counts(graph, pattern):
    starts, period = starts_of(pattern), pattern.period_ns
    return [in_flight(graph, starts, period, s, starts[graph.position["F", s]]) for s in range(len(graph.stages))]


def small_graph(rng, *, replicas=False, tight=False, weights="stash", silent=False, largest=3):
    """Return a graph of one to three stages with tiny times; ``tight`` memory is between too little and plenty."""
    while True:
        stages = rng.choice((1, 2, 2) if replicas and not silent else (1, 2, 2, 3))
        chain = random_chain(rng, stages, largest=largest)
        if silent:
            chain = replace(chain, layers=tuple(replace(x, output_bytes=0, saved_bytes=2) for x in chain.layers))
        homes, device = [], 0
        for _ in range(stages):
            r = rng.choice((1, 1, 2, 3)) if replicas else 1
            homes.append(tuple(range(device, device + r)))
            device += r
        platform = random_platform(rng, device, duplex=True)
        policy = Policy(weights, accumulate=rng.randint(1, 5))
        parts = [Stage(i, i + 1, home, random_checkpoint(rng, i, i + 1)) for i, home in enumerate(homes)]
        graph = stage_graph(chain, platform, policy, parts)
        if graph.path_ns <= (22 if replicas else 24):
            return tightened(rng, graph) if tight else graph


def tightened(rng, graph):
    """Return the graph with memory from a little less than one microbatch in flight needs to what the floor needs."""
    wide = tuple(r if r.is_link else replace(r, memory_bytes=PLENTY) for r in graph.resources)
    free = replace(graph, resources=wide, policy=replace(graph.policy, accumulate=10**6))
    fast = one_f_one_b_star(free, graph.period_floor_ns)
    alone = one_f_one_b_star(free, max(graph.path_ns, graph.period_floor_ns))
    resources = list(graph.resources)
    for r, resource in enumerate(resources):
        if not resource.is_link:
            least, most = (resource_use(graph, starts_of(p), p.period_ns, r).peak_bytes for p in (alone, fast))
            resources[r] = replace(resource, memory_bytes=rng.randint(least - (rng.random() < 0.1), most))
    return replace(graph, resources=tuple(resources))


def synced(graph):
    """All-reduce loads in ns per microbatch as exact fractions, from the graph's own numbers."""
    return [Fraction(stage.sync_period_ns) for stage in graph.stages]


@pytest.mark.parametrize(("replicas", "trials"), [(False, 30), (True, 50)])
def test_no_pattern_holds_fewer_at_any_stage(replicas, trials):
    """Proposition 1 of MadPipe against all patterns, with transfers, full duplex links and replicas."""
    kinds = set()
    for seed in range(trials):
        rng = random.Random(seed)
        graph = small_graph(rng, replicas=replicas, silent=seed % 4 == 0)
        floor = graph.period_floor_ns
        for period in {floor - 1, floor, floor + 1, rng.randint(floor, floor + 4)}:
            if period < 1 or cost_of_enumeration(graph, period) > (10**6 if replicas else 4 * 10**5):
                continue
            starts = all_patterns(graph, period)
            pattern = one_f_one_b_star(graph, period)
            if period < floor:
                assert pattern is None
                slow = max((stage.sync_period_ns for stage in graph.stages), default=0)
                assert not len(starts) or slow > period
                continue
            assert pattern is not None
            assert pattern_violations(graph, pattern) == []
            held = held_counts(graph, starts, period)
            assert counts(graph, pattern) == held.min(axis=0).tolist()
            for s in range(len(graph.stages)):  # and no microbatch stays a shorter time
                begin, end = lifetime(graph, starts, s)
                own = starts_of(pattern)
                mine = own[graph.position["B", s]] + graph.stages[s].backward_ns - own[graph.position["F", s]]
                assert mine == (end - begin).min()
            kinds.add((len(graph.stages), len(graph.resources), max(counts(graph, pattern))))
    assert len(kinds) >= 5


def inside(graph, pattern):
    """The microbatches that start between a stage's forward and its backward, over all stages."""
    starts = starts_of(pattern)
    apart = [starts[graph.position["B", s]] - starts[graph.position["F", s]] for s in range(len(graph.stages))]
    return sum(x // pattern.period_ns for x in apart)


def test_the_emptiest_is_the_best_of_all_periods():
    fewer = 0
    for seed in range(120):
        rng = random.Random(seed)
        graph = small_graph(rng, replicas=seed % 3 == 0, tight=seed % 2 == 0, weights=rng.choice(("stash", "2bw")))
        best = best_one_f_one_b_star(graph)
        if best is None:
            continue
        high = best.period_ns + rng.randint(0, 8)
        every = [x for period in range(1, high + 1) if (x := one_f_one_b_star(graph, period)) is not None]
        found = emptiest_one_f_one_b_star(graph, high)
        assert (inside(graph, found), found.period_ns) == min((inside(graph, x), x.period_ns) for x in every)
        assert emptiest_one_f_one_b_star(graph, best.period_ns - 1) is None
        fewer += inside(graph, found) < inside(graph, best)
    assert fewer >= 10


def test_transfers_that_take_next_to_nothing_need_no_group_of_their_own():
    graph = straight([(10**6, 2 * 10**6)] * 4, transfer=10)
    best = best_one_f_one_b_star(graph)
    found = emptiest_one_f_one_b_star(graph, best.period_ns * 1001 // 1000)
    assert (best.period_ns, found.period_ns) == (3 * 10**6, 3 * 10**6 + 20)
    assert (counts(graph, best), counts(graph, found)) == ([7, 5, 3, 1], [4, 3, 2, 1])


def cost_of_enumeration(graph, period):
    """Patterns to try at most, were none refused."""
    step = 1
    for resource in graph.resources:
        step = max(step, resource.replicas)
    if any(r.replicas == 2 for r in graph.resources) and any(r.replicas == 3 for r in graph.resources):
        step = 6
    return (step * period) ** (len(graph.operations) - 1) // (1 if len(graph.operations) < 8 else 16)


@pytest.mark.parametrize(
    ("weights", "silent", "largest", "most"),
    [("stash", True, 3, 10**5), ("2bw", True, 3, 10**5), ("stash", False, 2, 4 * 10**4)],
)
def test_the_smallest_period_under_memory_equals_brute_force(weights, silent, largest, most):
    none = bound = 0
    for seed in range(30, 54):
        rng = random.Random(seed)
        graph = small_graph(rng, replicas=seed % 3 == 0, tight=True, weights=weights, silent=silent, largest=largest)
        pattern = best_one_f_one_b_star(graph)
        longest = pattern.period_ns if pattern else max(graph.path_ns, graph.period_floor_ns)
        if cost_of_enumeration(graph, longest - 1) > most:
            continue
        truth = smallest_period_by_force(graph, synced(graph), longest)
        assert (pattern and pattern.period_ns) == truth
        none += pattern is None
        bound += pattern is not None and pattern.period_ns > graph.period_floor_ns
    assert none
    assert bound >= 3


def test_without_replicas_the_smallest_period_is_a_sum_of_consecutive_works():
    bound = 0
    for seed in range(200):
        rng = random.Random(seed)
        plan = random_plan(rng, shared=False, replicas=False, duplex=False, weights=("stash", "latest", "2bw"))
        graph = tightened(rng, graph_of(plan))
        pattern = best_one_f_one_b_star(graph)
        if pattern is None:
            continue
        half = len(graph.operations) // 2
        works = [graph.operations[i].duration_ns + graph.operations[-1 - i].duration_ns for i in range(half)]
        assert pattern.period_ns in {sum(works[i:j]) for i, j in combinations(range(half + 1), 2)}
        bound += pattern.period_ns > graph.period_floor_ns
    assert bound > 30


def test_more_time_or_memory_never_hurts():
    for seed in range(60):
        plan = random_plan(random.Random(seed), shared=False)
        graph = graph_of(plan)
        best = best_one_f_one_b_star(graph)
        assert best is not None  # the plan itself is valid
        assert best.period_ns <= plan.pattern.period_ns
        assert one_f_one_b_star(graph, best.period_ns - 1) is None
        previous = None
        for period in range(best.period_ns, graph.path_ns + 2):
            pattern = one_f_one_b_star(graph, period)
            assert pattern is not None
            assert pattern_violations(graph, pattern) == []
            held = [*counts(graph, pattern), most_in_flight(graph, starts_of(pattern), period)]
            assert previous is None or all(now <= before for now, before in zip(held, previous, strict=True))
            previous = held
        assert best.period_ns > graph.path_ns or max(counts(graph, pattern)) == 1


# --- examples laid out as in the papers ------------------------------------------------------------------------------


def staircase(graph, pattern):
    """Return one row per device: each time unit of the period with ``F`` or ``B`` and its index shift."""
    rows = {}
    for op in pattern.operations:
        if op.kind in ("F", "B"):
            row = rows.setdefault(op.stage, ["."] * pattern.period_ns)
            for t in range(op.start_ns, op.start_ns + op.duration_ns):
                row[t % pattern.period_ns] = f"{op.kind}{op.start_ns // pattern.period_ns}"
    return [" ".join(f"{cell:>2}" for cell in rows[s]) for s in sorted(rows)]


def test_three_groups_as_in_madpipe_figure_3():
    """Six stages of F = 1, B = 1 at period 4: groups of two stages each, numbered from the end."""
    graph = straight([(1, 1)] * 6)
    pattern = one_f_one_b_star(graph, 4)
    assert counts(graph, pattern) == [3, 3, 2, 2, 1, 1]
    assert [place.number for place in groups(graph, pattern)] == [3, 3, 2, 2, 1, 1]
    assert [place.shifts for place in groups(graph, pattern)] == [(0, 2)] * 4 + [(1, 1)] * 2
    assert staircase(graph, pattern) == [
        "F0  .  . B2", " . F0 B2  .", " . B2 F0  .", "B2  .  . F0", "F1  .  . B1", " . F1 B1  .",
    ]  # fmt: skip


def test_groups_are_filled_from_the_end_and_numbered_by_what_they_hold():
    rng = random.Random(5)
    for _ in range(100):
        works = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(1, 8))]
        graph = straight(works)
        period = rng.randint(max(f + b for f, b in works), sum(f + b for f, b in works))
        expected, number, load = [], 1, 0
        for f, b in reversed(works):
            if load + f + b > period:
                number, load = number + 1, 0
            load += f + b
            expected.append(number)
        pattern = one_f_one_b_star(graph, period)
        assert counts(graph, pattern) == expected[::-1]
        assert [place.number for place in groups(graph, pattern)] == expected[::-1]
        starts = starts_of(pattern)
        for s in range(len(works)):  # forwards in one sweep, and a backward's shift is its forward's plus g - 1
            assert starts[s] == sum(f for f, _ in works[:s])
            forward, backward = (starts[graph.position[kind, s]] // period for kind in "FB")
            assert backward - forward in (expected[::-1][s] - 1, expected[::-1][s])


def test_transfers_are_stages_of_their_own():
    """Two stages of 2 + 2 with transfers of 1 + 1 at period 6: one group holds all but the first stage."""
    graph = straight([(2, 2), (2, 2)], transfer=1)
    pattern = one_f_one_b_star(graph, 6)
    assert [(op.kind, op.stage, op.start_ns) for op in pattern.operations] == [
        ("F", 0, 0), ("SEND_F", 0, 2), ("F", 1, 3), ("B", 1, 5), ("SEND_B", 1, 7), ("B", 0, 8),
    ]  # fmt: skip
    assert counts(graph, pattern) == [2, 1]
    alone = one_f_one_b_star(graph, 4)
    assert counts(graph, alone) == [3, 1]
    assert [(x.kind, x.stage, x.number) for x in groups(graph, alone)] == [("F", 0, 3), ("SEND_F", 0, 2), ("F", 1, 1)]
    assert counts(graph, one_f_one_b_star(graph, 5)) == [3, 1]
    assert counts(graph, one_f_one_b_star(graph, 10)) == [1, 1]
    assert one_f_one_b_star(graph, 3) is None


def test_memory_buys_the_period_step_by_step():
    """Three stages of 2 + 2, a byte per microbatch: 3 bytes allow a period of 4, 2 bytes 8, 1 byte 12."""
    periods = {}
    for memory in range(4):
        pattern = best_one_f_one_b_star(straight([(2, 2)] * 3, memory=memory))
        periods[memory] = pattern and pattern.period_ns
    assert periods == {0: None, 1: 12, 2: 8, 3: 4}


def test_a_replicated_stage_holds_fewer_per_replica():
    layers = (Layer("a", 4, 8, 0, 0, 1), Layer("b", 2, 2, 0, 0, 1))
    platform = Platform.flat(4, PLENTY, 10**9)
    graph = stage_graph(Chain("c", layers, 0), platform, Policy("stash"), [Stage(0, 1, (0, 1, 2)), Stage(1, 2, (3,))])
    pattern = best_one_f_one_b_star(graph)
    assert pattern.period_ns == 4
    assert counts(graph, pattern) == [2, 1]
    assert starts_of(pattern) == [0, 4, 6, 16]  # at 8 the backward would run into the next forward, 12 to 16
    assert most_in_flight(graph, starts_of(pattern), 4) == 6
    assert [place.number for place in groups(graph, pattern)] == [6, 1]


def test_a_group_counts_what_is_between_the_way_there_and_the_way_back_on_all_replicas():
    """In any pattern, contiguous or not: every microbatch of a long run is looked at."""
    rng = random.Random(11)
    for _ in range(150):
        plan = random_plan(rng)
        graph, pattern = graph_of(plan), plan.pattern
        starts, period = starts_of(pattern), pattern.period_ns
        for i, place in enumerate(groups(graph, pattern)):
            begin, end = starts[i], starts[-1 - i] + pattern.operations[-1 - i].duration_ns
            assert (pattern.operations[i].kind, pattern.operations[i].stage) == (place.kind, place.stage)
            run = range(-10 - (end - begin) // period, 1)  # microbatch 0 begins its way
            assert sum(begin + m * period <= begin < end + m * period for m in run) == place.number
            for there, shift in zip((begin, starts[-1 - i]), place.shifts, strict=True):
                entries = [starts[0] + m * period for m in range(-1, shift + 2)]
                assert sum(entry <= there for entry in entries) - 2 == shift  # microbatches that entered since


def test_an_update_interval_that_is_too_short_lengthens_the_period():
    for accumulated, period in [(1, 12), (2, 8), (3, 4), (4, 4)]:
        graph = straight([(2, 2)] * 3, policy=Policy("2bw", accumulate=accumulated))
        assert best_one_f_one_b_star(graph).period_ns == period


def test_synchronisation_sets_a_floor():
    chain = Chain("c", (Layer("a", 2, 2, 300, 0, 1),), 0)
    graph = stage_graph(chain, Platform.flat(3, PLENTY, 10**9), Policy("flush", accumulate=4), [Stage(0, 1, (0, 1, 2))])
    assert best_one_f_one_b_star(graph).period_ns == 100  # 2*2/3 * 300 ns every 4 microbatches
    assert one_f_one_b_star(graph, 99) is None


def test_shared_devices_are_refused():
    layers = (Layer("a", 1, 1, 0, 1), Layer("b", 1, 1, 0, 1), Layer("c", 1, 1, 0, 0))
    stages = [Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (0,))]
    graph: StageGraph = stage_graph(Chain("c", layers, 1), Platform.flat(2, PLENTY), Policy(), stages)
    with pytest.raises(ValueError, match="share no device"):
        one_f_one_b_star(graph, 100)


def test_scaling_all_times_scales_the_period():
    for seed in range(40):
        rng = random.Random(seed)
        works = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(1, 6))]
        memory, transfer = rng.randint(1, 4), rng.randint(0, 3)
        one = best_one_f_one_b_star(straight(works, transfer, memory + 2 * 2 * transfer))
        thrice = straight([(3 * f, 3 * b) for f, b in works], transfer, memory + 2 * 2 * transfer)
        slow = replace(
            thrice,
            operations=tuple(
                replace(op, duration_ns=op.duration_ns * 3) if op.kind.startswith("SEND") else op
                for op in thrice.operations
            ),
        )
        other = best_one_f_one_b_star(slow)
        assert (one and 3 * one.period_ns) == (other and other.period_ns)

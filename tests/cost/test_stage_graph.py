import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from cases.plans import graph_of, greedy_pattern, random_plan
from oracles.schedules import overlaps, peak_activations, unrolled, weights_table

from pipeplan.cost import memory_model
from pipeplan.cost.stage_cost import least_load_ns
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Pattern, Stage, TimedOp
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, SharedWeights
from pipeplan.schedule.pattern import (
    DeviceUse,
    device_uses,
    in_flight,
    make_pattern,
    memory_fits,
    most_in_flight,
    resource_use,
    starts_of,
)

LAYERS = tuple(Layer(f"{i}", 10 + i, 20 + i, 100 * (i + 1), 6 * (i + 1)) for i in range(4))
CHAIN = Chain("c", LAYERS, 5)  # cuts of 5, 6, 12, 18, 0 bytes
FLAT = Platform.flat(6, 1000, 2 * 10**9)  # 2 bytes per ns


def path(graph):
    return [f"{op.kind}{op.stage}" for op in graph.operations]


def test_the_path_of_one_microbatch():
    graph = stage_graph(CHAIN, FLAT, Policy(), [Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 4, (2,))])
    assert path(graph) == ["F0", "SEND_F0", "F1", "SEND_F1", "F2", "B2", "SEND_B2", "B1", "SEND_B1", "B0"]
    assert [op.duration_ns for op in graph.operations] == [10, 3, 23, 9, 13, 23, 9, 43, 3, 20]
    assert [r.name for r in graph.resources] == ["device 0", "device 1", "device 2", "link 0 - 1", "link 1 - 2"]
    assert graph.path_ns == 156
    assert graph.period_floor_ns == 66
    assert graph.contiguous
    assert [graph.position["B", s] for s in range(3)] == [9, 7, 5]


def test_neighbours_on_one_device_and_cuts_without_bytes_need_no_transfer():
    graph = stage_graph(CHAIN, FLAT, Policy(), [Stage(0, 1, (0,)), Stage(1, 2, (0,)), Stage(2, 4, (1,))])
    assert path(graph) == ["F0", "F1", "SEND_F1", "F2", "B2", "SEND_B2", "B1", "B0"]
    assert not graph.contiguous
    assert graph.stages_on(0) == [0, 1]
    assert [stage.buffer_bytes for stage in graph.stages] == [0, 24, 24]
    silent = Chain("c", (LAYERS[0], Layer("b", 1, 1, 0, 0), LAYERS[2]), 5)
    graph = stage_graph(silent, FLAT, Policy(), [Stage(0, 2, (0,)), Stage(2, 3, (1,))])
    assert path(graph) == ["F0", "F1", "B1", "B0"]
    assert len(graph.resources) == 2
    assert [stage.buffer_bytes for stage in graph.stages] == [0, 0]


def test_pairs_of_groups_share_links_which_are_one_per_direction_in_full_duplex():
    stages = [Stage(0, 1, (0, 1)), Stage(1, 2, (2,)), Stage(2, 3, (0, 1)), Stage(3, 4, (2,))]
    graph = stage_graph(CHAIN, FLAT, Policy(), stages)
    assert [r.name for r in graph.resources] == ["devices 0,1", "device 2", "link 0,1 - 2"]
    assert [r.replicas for r in graph.resources] == [2, 1, 2]
    assert [graph.resources[2].one_name(i) for i in range(2)] == ["link 0 - 2", "link 1 - 2"]
    assert [path(graph)[i] for i in graph.on_resource[2]] == [
        "SEND_F0", "SEND_F1", "SEND_F2", "SEND_B3", "SEND_B2", "SEND_B1",
    ]  # fmt: skip
    duplex = Platform(FLAT.devices, FLAT.levels, full_duplex=True)
    graph = stage_graph(CHAIN, duplex, Policy(), stages)
    assert [r.name for r in graph.resources[2:]] == ["link 0,1 -> 2", "link 2 -> 0,1"]
    assert [graph.resources[3].one_name(i) for i in range(2)] == ["link 2 -> 0", "link 2 -> 1"]
    assert [path(graph)[i] for i in graph.on_resource[2]] == ["SEND_F0", "SEND_F2", "SEND_B2"]
    assert [path(graph)[i] for i in graph.on_resource[3]] == ["SEND_F1", "SEND_B3", "SEND_B1"]
    assert stage_graph(CHAIN, FLAT, Policy(), [Stage(0, 4, (0, 1, 2, 3))]).resources[0].name == "devices 0-3"


@pytest.mark.parametrize(("one", "other"), [(1, 1), (2, 1), (1, 3), (2, 2), (2, 3), (4, 6), (5, 4)])
def test_two_groups_have_a_link_for_every_two_gpus_that_exchange_microbatches(one, other):
    groups = tuple(range(one)), tuple(range(one, one + other))
    graph = stage_graph(CHAIN, Platform.flat(10, 10**6), Policy(), [Stage(0, 2, groups[0]), Stage(2, 4, groups[1])])
    link = graph.resources[2]
    pairs = [f"link {groups[0][m % one]} - {groups[1][m % other]}" for m in range(one * other)]
    assert len(set(pairs)) == link.replicas
    if link.replicas > 1:
        assert [link.one_name(m % link.replicas) for m in range(one * other)] == pairs


def test_blocking_transfers_are_part_of_the_passes_at_both_ends():
    platform = replace(Platform.flat(4, 1000, 10**9, 3), blocking=True)
    stages = [Stage(0, 1, (0,)), Stage(1, 3, (1, 2)), Stage(3, 4, (3,))]
    graph, plain = (stage_graph(CHAIN, x, Policy(), stages) for x in (platform, replace(platform, blocking=False)))
    assert path(graph) == ["F0", "F1", "F2", "B2", "B1", "B0"]
    assert not any(resource.is_link for resource in graph.resources)
    waits = [9, 9 + 21, 21]  # cuts of 6 and 18 bytes, 3 ns of latency
    for blocked, alone, wait in zip(graph.stages, plain.stages, waits, strict=True):
        assert (blocked.forward_ns, blocked.backward_ns) == (alone.forward_ns + wait, alone.backward_ns + wait)
        assert blocked.buffer_bytes == alone.buffer_bytes
    assert [op.duration_ns for op in graph.operations[:3]] == [stage.forward_ns for stage in graph.stages]


def test_the_overhead_of_messages_is_part_of_the_passes_that_send_and_receive_them():
    platform = replace(Platform.flat(4, 1000, 10**9, 3), overhead_ns=2)
    stages = [Stage(0, 1, (0,)), Stage(1, 2, (0,)), Stage(2, 3, (1, 2)), Stage(3, 4, (3,))]
    graph, plain = (stage_graph(CHAIN, x, Policy(), stages) for x in (platform, replace(platform, overhead_ns=0)))
    for with_it, alone, overhead in zip(graph.stages, plain.stages, [0, 2, 4, 2], strict=True):
        assert with_it == replace(
            alone, forward_ns=alone.forward_ns + overhead, backward_ns=alone.backward_ns + overhead
        )
    links = [[op for op in found.operations if op.kind.startswith("SEND")] for found in (graph, plain)]
    assert links[0] == links[1]
    blocked = stage_graph(CHAIN, replace(platform, blocking=True), Policy(), stages)
    waits = [0, 2 + 15, 2 + 15 + 2 + 21, 2 + 21]  # cuts of 12 and 18 bytes
    for with_it, alone, wait in zip(blocked.stages, plain.stages, waits, strict=True):
        assert (with_it.forward_ns, with_it.backward_ns) == (alone.forward_ns + wait, alone.backward_ns + wait)


def test_levels_set_the_pace_of_transfers_and_of_synchronisation():
    platform = Platform((Device(1000),) * 4, (Level(2, 2 * 10**9), Level(2, 10**9, 7)))
    inside = stage_graph(CHAIN, platform, Policy(accumulate=1), [Stage(0, 2, (0,)), Stage(2, 4, (1,))])
    across = stage_graph(CHAIN, platform, Policy(accumulate=1), [Stage(0, 2, (1,)), Stage(2, 4, (2,))])
    wide = stage_graph(CHAIN, platform, Policy(accumulate=1), [Stage(0, 2, (0, 1)), Stage(2, 4, (2,))])
    assert [g.operations[1].duration_ns for g in (inside, across, wide)] == [6, 19, 19]
    assert inside.stages[0].sync_period_ns == 0
    assert wide.stages[0].sync_period_ns == 75  # 2(2-1)/2 * 300 bytes at 2 bytes/ns, every second microbatch
    spread = stage_graph(CHAIN, platform, Policy(accumulate=1), [Stage(0, 4, (0, 1, 2, 3))])
    # 2*3/4 * 1000 bytes at 1 byte/ns and six steps of 7 ns, every fourth microbatch
    assert spread.stages[0].sync_period_ns == 386
    assert spread.stages[0].update_interval == 4
    assert spread.period_floor_ns == 386


def test_replicas_share_the_load_and_the_slowest_sets_the_pace():
    devices = (Device(900, Fraction(2)), Device(700), Device(1000, Fraction(1, 2)))
    platform = Platform(devices, (Level(3, 10**12),))
    graph = stage_graph(CHAIN, platform, Policy(accumulate=60), [Stage(0, 1, (0,)), Stage(1, 4, (1, 2))])
    assert [op.duration_ns for op in graph.operations if op.kind == "F"] == [5, 72]
    assert [op.duration_ns for op in graph.operations if op.kind == "B"] == [132, 10]
    assert graph.resources[1].memory_bytes == 700
    assert graph.period_floor_ns == 102  # (72 + 132) / 2


def test_recomputation_is_part_of_the_backward():
    graph = stage_graph(CHAIN, FLAT, Policy(), [Stage(0, 4, (0,), ((1, 3),))])
    stage = graph.stages[0]
    assert (stage.forward_ns, stage.backward_ns) == (46, 86 + 23)
    assert (stage.kept_bytes, stage.peak_bytes) == memory_model.activations(CHAIN, 0, 4, ((1, 3),))[:2]


def test_every_cost_of_random_stages():
    for seed in range(150):
        plan = random_plan(random.Random(seed))
        graph, chain = graph_of(plan), plan.chain
        for s, (stage, cost) in enumerate(zip(plan.allocation.stages, graph.stages, strict=True)):
            layers = chain.layers[stage.start : stage.stop]
            kept, peak, again = memory_model.activations(chain, stage.start, stage.stop, stage.checkpoint)
            assert (cost.kept_bytes, cost.peak_bytes) == (kept, peak)
            assert cost.weight_bytes == sum(x.weight_bytes for x in layers)
            assert cost.parameters == sum(x.parameter_count for x in layers)
            step = sum(x.optimizer_ns for x in layers) * (1 if plan.policy.zero else stage.replicas)
            each = 0 if plan.policy.drains else -(-step // max(stage.replicas, plan.policy.accumulate))
            work = sum(x.backward_ns for x in layers) + again + each
            speed = min(plan.platform.devices[d].speed for d in stage.devices)
            behind = -(-step // stage.replicas) if plan.policy.drains else 0
            assert cost.step_ns == -(-behind // speed)
            assert cost.backward_ns == -(-work // speed)
            assert cost.forward_ns == -(-sum(x.forward_ns for x in layers) // speed)
            assert graph.resources[cost.resource].devices == stage.devices
            buffers = 0
            for edge, other in ((stage.start, s - 1), (stage.stop, s + 1)):
                if 0 <= other < len(graph.stages) and plan.allocation.stages[other].devices != stage.devices:
                    buffers += 2 * chain.cut_bytes[edge]
            assert cost.buffer_bytes == buffers
        for early, late in pairwise(graph.operations):
            assert early.stage == late.stage or abs(early.stage - late.stage) == 1


# --- in flight and memory --------------------------------------------------------------------------------------------


def test_releases_come_before_acquisitions_at_one_instant():
    graph = stage_graph(CHAIN, FLAT, Policy(), [Stage(0, 4, (0,))])  # F 46 ns, B 86 ns
    starts = [0, 46]
    assert [in_flight(graph, starts, 132, 0, at) for at in (-1, 0, 131, 132)] == [1, 1, 1, 1]
    assert [in_flight(graph, starts, 140, 0, at) for at in (0, 131, 132, 139, 140)] == [1, 1, 0, 0, 1]
    assert [in_flight(graph, starts, 131, 0, at) for at in (130, 131, 132)] == [1, 2, 1]
    assert most_in_flight(graph, starts, 132) == 1
    assert most_in_flight(graph, starts, 131) == 2


def test_in_flight_is_a_count_of_microbatches():
    for seed in range(60):
        plan = random_plan(random.Random(seed))
        graph, starts, period = graph_of(plan), starts_of(plan.pattern), plan.pattern.period_ns
        most = 0
        for s, stage in enumerate(graph.stages):
            r = graph.resources[stage.resource].replicas
            begin, end = starts[graph.position["F", s]], starts[graph.position["B", s]] + stage.backward_ns
            reach = range(-end // period - 3 * r, 3 * r)
            for at in range(2 * period):
                held = [m for m in reach if begin + m * period <= at < end + m * period]
                assert in_flight(graph, starts, period, s, at) == sum(m % r == 0 for m in held)
                most = max(most, len(held))
        assert most_in_flight(graph, starts, period) == most


def test_memory_of_random_patterns_equals_an_unrolled_sweep():
    """Also of patterns whose operations overlap: memory is judged whether or not the order is good."""
    transients = overlapping = 0
    for seed in range(300):
        rng = random.Random(seed)
        plan = random_plan(rng)
        graph, starts, period = graph_of(plan), starts_of(plan.pattern), plan.pattern.period_ns
        if rng.random() < 0.4:
            delay, moved = 0, []
            for start in starts:
                delay += rng.choice((0, 0, 0, rng.randint(1, 2 * period)))
                moved.append(start + delay)
            starts = moved
            overlapping += bool(overlaps(graph, starts, period))
        swept = peak_activations(graph, starts, period)
        entered = in_flight(graph, starts, period, 0, starts[graph.position["F", 0]])
        first = entered, graph.resources[graph.stages[0].resource].replicas
        for index, resource in enumerate(graph.resources):
            if resource.is_link:
                continue
            use = resource_use(graph, starts, period, index)
            assert use.activation_bytes == swept[index]
            stages = graph.stages_on(index)
            counts = [in_flight(graph, starts, period, s, starts[graph.position["F", s]]) for s in stages]
            assert use.in_flight == tuple(counts)
            assert use.weights_bytes == sum(
                weights_table(
                    graph.policy, graph.stages[s].weight_bytes, graph.stages[s].parameters, n, resource.replicas, first
                )
                for s, n in zip(stages, counts, strict=True)
            )
            assert use.buffer_bytes == sum(graph.stages[s].buffer_bytes for s in stages)
            assert use.peak_bytes == use.weights_bytes + use.activation_bytes + use.buffer_bytes
            one_by_one = sum(
                memory_model.held_bytes(graph.stages[s].kept_bytes, graph.stages[s].peak_bytes, n)
                for s, n in zip(stages, counts, strict=True)
            )
            assert use.activation_bytes <= one_by_one
            if len(stages) == 1:
                assert use.activation_bytes == one_by_one
            transients += any(graph.stages[s].peak_bytes > graph.stages[s].kept_bytes for s in stages)
    assert transients > 50
    assert overlapping > 20


def test_every_device_of_the_platform_is_listed():
    platform = Platform((Device(700), Device(900), Device(800)), (Level(3, 10**9),))
    graph = stage_graph(CHAIN, platform, Policy("flush"), [Stage(0, 4, (0, 2))])
    uses = device_uses(graph, [0, 46], 200, platform)
    assert [use.memory_bytes for use in uses] == [700, 900, 800]
    assert uses[1] == DeviceUse(900, 0, 0, 0, ())
    assert uses[0].peak_bytes == uses[2].peak_bytes == 2000 + 41
    assert not memory_fits(graph, [0, 46], 200)
    roomy = Platform((Device(2041),) * 3, (Level(3, 10**9),))
    assert memory_fits(stage_graph(CHAIN, roomy, Policy("flush"), [Stage(0, 4, (0, 2))]), [0, 46], 200)


def test_make_pattern_and_starts_of_are_inverse():
    graph = stage_graph(CHAIN, FLAT, Policy(), [Stage(0, 4, (0,))])
    pattern = make_pattern(graph, [3, 50], 140)
    assert pattern == Pattern(140, (TimedOp("F", 0, 3, 46), TimedOp("B", 0, 50, 86)))
    assert starts_of(pattern) == [3, 50]
    with pytest.raises(ValueError, match="zip"):
        make_pattern(graph, [3], 140)


def test_tied_stages_are_several_that_hold_weights_of_each_other():
    def tied(*pairs):
        graph = stage_graph(replace(CHAIN, tied=pairs), FLAT, Policy("flush"), stages)
        return graph.tied

    stages = [Stage(0, 2, (0,)), Stage(2, 3, (1,)), Stage(3, 4, (2,))]
    assert tied() == ()
    assert tied((0, 1)) == (), "one stage holds both layers"
    assert tied((0, 3)) == ((0, 2),)
    assert tied((0, 1), (1, 3)) == ((0, 2),)
    assert tied((0, 2), (1, 3)) == ((0, 1, 2),), "stage 0 shares with both"
    assert tied((2, 3), (0, 1)) == ((1, 2),)


def test_weights_in_several_stages_are_summed_over_all_their_devices_once_per_group():
    def updates(tied, stages):
        graph = stage_graph(replace(CHAIN, tied=tied), FLAT, Policy("flush"), stages)
        return [stage.update_ns for stage in graph.stages]

    pair = ((0, 3),)  # 100 of 400 bytes, at 2 bytes per ns
    apart = [Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 4, (2,))]
    assert updates((), apart) == [0, 0, 0]
    assert updates(pair, apart) == [50, 0, 50]  # 2(2-1)/2 of 100 bytes
    assert updates(pair, [Stage(0, 4, (0,))]) == [0], "one stage sums nothing"
    wide = [Stage(0, 2, (0, 1)), Stage(2, 4, (2,))]
    alone = updates((), wide)
    assert alone == [150, 0]  # 300 bytes over two replicas
    assert updates(pair, wide) == [150 + 67 - 50, 67], "a ring over three devices in the place of one over two"
    shared = [Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 4, (0,))]
    assert sum(updates(pair, shared)) == 0, "one device has both copies"


def test_what_layers_share_is_held_and_stepped_once_on_a_device():
    layers = tuple(replace(x, optimizer_ns=8) for x in LAYERS)  # of 100, 200, 300, 400 bytes
    known = replace(CHAIN, layers=layers, tied=((0, 2), (2, 3)), shared=(SharedWeights((0, 2, 3), 80),))
    steps = [8 * 20 // 25, 8 * 20 // 50, 8 * 20 // 75, 8 * 20 // 100]  # a quarter of the bytes are parameters

    def found(stages, policy, *fields):
        return [tuple(getattr(x, y) for y in fields) for x in stage_graph(known, FLAT, policy, stages).stages]

    fields = ("weight_bytes", "parameters", "update_share_ns", "waiting_bytes", "lent")
    bw = Policy(accumulate=1)
    least = min(steps)
    assert found([Stage(0, 4, (0,))], bw, *fields) == [(1000 - 160, 210, 32 - 2 * least, 0, ())]
    one = [Stage(0, 1, (0,)), Stage(1, 3, (0,)), Stage(3, 4, (0,))]
    alone = [(100, 25, 8, 0, ((2, 80),)), (420, 105, 16 - least, 0, ()), (320, 80, 8 - least, 0, ())]
    for weights in ("2bw", "stash", "latest"):
        assert found(one, Policy(weights, accumulate=1), *fields) == alone
    assert found(one, Policy("flush", accumulate=1), *fields) == [(*x[:2], 0, 0, ()) for x in alone]
    assert found(one, Policy("flush", accumulate=1), "step_ns") == [(8,), (16 - least,), (8 - least,)]
    assert found(one, bw, "sync_period_ns") == [(0,)] * 3
    two = [Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 4, (0,))]  # copies on two devices, the third stage has none
    assert found(two, bw, *fields) == [(100, 25, 8, 0, ()), (500, 125, 16, 80, ()), (320, 80, 8 - least, 80, ())]
    assert found(two, bw, "sync_period_ns") == [(40,), (40,), (0,)]
    unknown = stage_graph(replace(known, shared=None), FLAT, bw, one).stages
    assert [(x.weight_bytes, x.waiting_bytes, x.lent) for x in unknown] == [
        (100, 0, ()),
        (500, 100, ()),
        (400, 100, ()),
    ]
    graph = stage_graph(known, FLAT, Policy("stash", accumulate=2), one)
    assert [graph.lent_bytes(0, lambda later, n=n: n) for n in (1, 2, 3, 4)] == [0, 80, 80, 160]


def test_the_least_load_is_that_of_the_busiest_device_for_each_of_its_replicas():
    wide = [Stage(0, 1, (0,)), Stage(1, 4, (1, 2))]
    assert least_load_ns(CHAIN, FLAT, wide) == 51  # 102 ns of layers 1 to 3 over two devices
    assert least_load_ns(CHAIN, FLAT, [Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 4, (0,))]) == 30 + 34 + 36
    mixed = Platform((Device(10**6), Device(10**6, Fraction(1, 2)), Device(10**6)), FLAT.levels)
    assert least_load_ns(CHAIN, mixed, wide) == 102


def test_stages_without_times_have_no_floor():
    chain = Chain("still", (Layer("a", 0, 0, 5, 0),) * 2, 1)
    stages = [Stage(0, 1, (0,)), Stage(1, 2, (1,))]
    assert stage_graph(chain, FLAT, Policy(), stages).period_floor_ns == least_load_ns(chain, FLAT, stages) == 0


def test_the_floor_is_reached_by_loads_alone():
    """No pattern is shorter than the floor, and a single stage's pattern reaches it."""
    for seed in range(60):
        plan = random_plan(random.Random(seed), shared=True)
        graph = graph_of(plan)
        below = graph.period_floor_ns - 1
        synced = {
            r: sum(x.sync_period_ns for x in graph.stages if x.resource == r) for r in range(len(graph.resources))
        }
        assert graph.sync_periods_ns == tuple(synced.values())
        if below >= 1 and max(synced.values()) <= below:
            assert greedy_pattern(random.Random(0), graph, below, slack=0) is None
        loads: dict[int, int] = {}
        for (resource, _), begin, end, _, m in unrolled(graph, [0] * len(graph.operations), 1):
            if m == 0:
                loads[resource] = loads.get(resource, 0) + end - begin
        floor = max(-(-load // graph.resources[r].replicas) for r, load in loads.items())
        assert graph.period_floor_ns == max(floor, *synced.values())


@pytest.mark.parametrize(("accumulate", "loads"), [(1, [50, 0, 50]), (4, [13, 0, 13]), (100, [1, 0, 1])])
def test_undrained_sums_over_stages_are_a_load_of_every_interval(accumulate, loads):
    pair = replace(CHAIN, tied=((0, 3),))
    apart = [Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 4, (2,))]
    graph = stage_graph(pair, FLAT, Policy(accumulate=accumulate), apart)
    assert [stage.sync_period_ns for stage in graph.stages] == loads  # 100 bytes in 50 ns
    assert graph.period_floor_ns == max(loads[0], stage_graph(CHAIN, FLAT, Policy(), apart).period_floor_ns)
    free = stage_graph(pair, FLAT, Policy(accumulate=accumulate), apart, free_sums=True)
    assert not any(stage.sync_period_ns for stage in free.stages)
    drained = stage_graph(pair, FLAT, Policy("flush", accumulate=accumulate), apart)
    assert not any(stage.sync_period_ns for stage in drained.stages), "they come when the pipeline is empty"


def test_sums_over_replicas_and_stages_are_one_ring_and_none_on_one_device():
    def loads(stages, accumulate=6, platform=FLAT):
        graph = stage_graph(replace(CHAIN, tied=((0, 3),)), platform, Policy(accumulate=accumulate), stages)
        return [stage.sync_period_ns for stage in graph.stages]

    wide = [Stage(0, 2, (0, 1)), Stage(2, 4, (2,))]
    assert loads(wide) == [25 + 12 - 9, 12]  # of 300 bytes over 2 / 6; 100 over 3: 133 / 2 / 6, over 2: 100 / 2 / 6
    assert loads([Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 4, (0,))]) == [0, 0, 0]
    assert loads([Stage(0, 4, (0,))]) == [0]
    servers = replace(FLAT, levels=(Level(2, 2 * 10**9), Level(2, 10**9)))
    assert loads([Stage(0, 2, (0,)), Stage(2, 4, (2,))], platform=servers) == [17, 17], "the slower level decides"


def test_gradients_of_shared_weights_wait_in_all_stages_but_the_first():
    def waiting(tied, policy, cuts=(0, 1, 3, 4)):
        chain = replace(CHAIN, tied=tied)
        return [memory_model.waiting_bytes(chain, policy, i, j) for i, j in pairwise(cuts)]

    bw = Policy(accumulate=4)
    assert waiting(((0, 3),), bw) == [0, 0, 100]
    assert waiting(((0, 3),), Policy(precision="mixed")) == [0, 0, 2 * CHAIN.layers[0].parameter_count]
    assert waiting(((0, 3),), Policy("flush", accumulate=4)) == [0, 0, 0]
    assert waiting(((0, 3),), bw, (0, 4)) == [0]
    assert waiting(((1, 2),), bw) == [0, 0, 0], "both in one stage"
    assert waiting(((0, 3), (1, 3)), bw) == [0, 100, 100]
    graph = stage_graph(replace(CHAIN, tied=((0, 3),)), FLAT, bw, [Stage(0, 2, (0,)), Stage(2, 4, (1,))])
    bare = stage_graph(CHAIN, FLAT, bw, [Stage(0, 2, (0,)), Stage(2, 4, (1,))])
    assert [stage.waiting_bytes for stage in graph.stages] == [0, 100]
    assert [graph.weights_bytes(s, 2) - bare.weights_bytes(s, 2) for s in (0, 1)] == [0, 100]


@pytest.mark.parametrize("zero", [0, 1])
def test_one_of_equal_pipelines_holds_what_each_of_all_does(zero):
    """Also of the optimizer's state that they share."""
    chain = Chain("four", tuple(Layer(f"l{i}", 1000, 2000, 800, 64, 96) for i in range(4)), 64)
    platform = Platform((Device(10**9),) * 8, (Level(8, 10**9),))
    policy = Policy("flush", accumulate=8, optimizer="adam", precision="mixed", zero=zero)
    stages = tuple(Stage(s, s + 1, tuple(range(4 * (s % 2), 4 * (s % 2) + 4))) for s in range(4))
    graph = stage_graph(chain, platform, policy, stages)
    assert graph.first_replicas().policy.pipelines == 4
    held = {s: [x.weights_bytes(s, 1) for x in (graph, graph.first_replicas())] for s in range(4)}
    assert all(one == other for one, other in held.values())
    assert held[0][0] == 200 * (4 + (4 if zero else 16))

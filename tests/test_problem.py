import random
from fractions import Fraction
from functools import partial
from math import ceil
from typing import get_args

import numpy as np
import pytest
from cases.chains import PUBLISHED, published, random_chain, random_platform
from cases.plans import reading_the_input_late
from oracles.schedules import saved_by, storages_of

from pipeplan.cost.saved import entering_bytes, first_saved, inner_bytes, saved_bytes
from pipeplan.problem import (
    ENDLESS,
    WEIGHTS,
    Chain,
    Device,
    Layer,
    Level,
    Platform,
    Policy,
    Problem,
    Weights,
    connected,
)


def random_chains(count=150, **options):
    for seed in range(count):
        rng = random.Random(seed)
        chain = random_chain(rng, rng.randint(1, 8), edges=seed % 3 > 0, saved=seed % 2 > 0, **options)
        yield reading_the_input_late(rng, chain) if chain.edges and seed % 5 < 2 else chain


def tensors_read(chain, layer):
    """Tensors that a layer reads, by the rule as it is written: 0 is the network's input, i + 1 layer i's output."""
    if chain.edges is None:
        return {layer}
    return {i + 1 for i, j in chain.edges if j == layer} or {0}


def size(chain, tensors):
    return sum(chain.input_bytes if t == 0 else chain.layers[t - 1].output_bytes for t in tensors)


def ranges(chain):
    return [(i, j) for i in range(len(chain) + 1) for j in range(i, len(chain) + 1)]


def test_cut_bytes_count_each_live_tensor_once():
    for chain in random_chains():
        count = len(chain)
        for cut in range(count + 1):
            live = {t for j in range(cut, count) for t in tensors_read(chain, j) if t <= cut}
            assert chain.cut_bytes[cut] == size(chain, live)
        assert chain.cut_bytes[count] == 0


def test_readers_follow_edges():
    for chain in random_chains(60):
        for t, readers in enumerate(chain.readers):
            assert readers == tuple(j for j in range(len(chain)) if t in tensors_read(chain, j))


def test_saved_bytes_count_each_storage_once():
    shared = 0
    for chain in random_chains():
        for start, stop in ranges(chain):
            storages = storages_of(chain, start)
            kept = {}
            for j in range(start, stop):
                kept |= saved_by(chain, j, storages)
            assert saved_bytes(chain, start, stop) == sum(kept.values())
            shared += saved_bytes(chain, start, stop) < sum(saved_bytes(chain, j, j + 1) for j in range(start, stop))
    assert shared > 300


def test_a_layer_alone_saves_what_it_says():
    for chain in random_chains():
        for j, layer in enumerate(chain.layers):
            read = size(chain, tensors_read(chain, j))
            assert saved_bytes(chain, j, j + 1) == (read if layer.saved_bytes is None else layer.saved_bytes)


def relu_between(**second):
    """A linear layer, a ReLU that keeps its output of 20 bytes, and a layer behind it."""
    return Chain(
        "c",
        (
            Layer("linear", 1, 1, 0, 20, saved_bytes=10, saves=(-1,)),
            Layer("relu", 1, 1, 0, 20, saved_bytes=20, saves=(1,)),
            Layer("behind", 1, 1, 0, 5, **second),
        ),
        10,
    )


def test_the_output_that_a_stage_ends_with_counts():
    chain = relu_between()  # the layer behind saves its input: the same tensor
    assert [saved_bytes(chain, 0, stop) for stop in (1, 2, 3)] == [10, 30, 30]
    assert (saved_bytes(chain, 1, 3), saved_bytes(chain, 2, 3)) == (20, 20)
    softmax = relu_between(saved_bytes=5, saves=(2,))  # the layer behind saves its own output alone
    assert [saved_bytes(softmax, 0, stop) for stop in (1, 2, 3)] == [10, 30, 35]
    assert (saved_bytes(softmax, 2, 3), inner_bytes(softmax, 2, 3)) == (5, 5)
    assert inner_bytes(chain, 2, 3) == 0


def test_views_lie_in_the_storage_of_what_they_show():
    flat = relu_between(saved_bytes=0, saves=(), view_of=1)
    layers = (*flat.layers, Layer("end", 1, 1, 0, 1, saved_bytes=5, saves=(2,)))
    chain = Chain("c", layers, 10)  # the last 5 bytes of the ReLU's 20 go on
    assert saved_bytes(chain, 1, 4) == 20
    assert saved_bytes(chain, 0, 3) == saved_bytes(chain, 0, 4) == 30
    assert (saved_bytes(chain, 2, 4), saved_bytes(chain, 3, 4)) == (20, 5), "what enters a stage arrives by itself"
    assert saved_bytes(chain, 2, 3) == 0
    larger = Layer("part", 1, 1, 0, 5, saved_bytes=0, saves=(), storage_bytes=50)
    whole = Chain("c", (larger, Layer("reader", 1, 1, 0, 1)), 10)
    assert [saved_bytes(whole, i, j) for i, j in ((0, 1), (0, 2), (1, 2))] == [0, 50, 5]


def test_entering_bytes_leave_out_what_only_passes_through():
    for chain in random_chains():
        for start, stop in ranges(chain):
            entering = {t for j in range(start, stop) for t in tensors_read(chain, j) if t <= start}
            if chain.edges is not None or start < stop:
                assert entering_bytes(chain, start, stop) == size(chain, entering)
            assert entering_bytes(chain, start, stop) <= chain.cut_bytes[start]


def test_first_saved_shares_out_the_whole_and_never_more_than_the_stages_of_any_division_save():
    exact = 0
    for chain in random_chains():
        total = sum(first_saved(chain))
        assert total <= saved_bytes(chain, 0, len(chain))
        parts = any(x.storage_bytes is not None or x.view_of is not None for x in chain.layers)
        if not parts:
            assert total == saved_bytes(chain, 0, len(chain))
            exact += 1
        for start, stop in ranges(chain):
            assert sum(first_saved(chain)[start:stop]) <= saved_bytes(chain, start, stop)
    assert exact > 50


def test_ranges_as_arrays_give_the_same_as_integers():
    for chain in random_chains(40):
        pairs = ranges(chain)
        start, stop = np.array([i for i, _ in pairs]), np.array([j for _, j in pairs])
        for f in (partial(saved_bytes, chain), partial(entering_bytes, chain), partial(inner_bytes, chain)):
            assert f(start, stop).tolist() == [f(i, j) for i, j in pairs]
            assert all(type(f(i, j)) is int for i, j in pairs[:3])


def test_sums_are_prefix_sums():
    for chain in random_chains(30, optimizer=True):
        sums = chain.sums
        for i in range(len(chain) + 1):
            part = chain.layers[:i]
            assert sums.forward_ns[i] == sum(x.forward_ns for x in part)
            assert sums.backward_ns[i] == sum(x.backward_ns for x in part)
            assert sums.optimizer_ns[i] == sum(x.optimizer_ns for x in part)
            assert sums.weight_bytes[i] == sum(x.weight_bytes for x in part)
            assert sums.parameters[i] == sum(x.parameter_count for x in part)


def test_largest_values_stay_exact():
    layers = tuple(Layer(f"{i}", 10**14, 10**14, 10**14, 10**14) for i in range(10))
    chain = Chain("big", layers, 10**14, edges=tuple((i, j) for j in range(10) for i in range(j)))
    assert chain.cut_bytes[9] == 9 * 10**14
    assert saved_bytes(chain, 0, 10) == 10 * 10**14  # the input and nine outputs
    assert int(chain.sums.forward_ns[-1]) == 10**15


def test_a_plain_chain_written_with_edges_costs_the_same():
    for chain in random_chains(30):
        if chain.edges is None:
            same = Chain(chain.name, chain.layers, chain.input_bytes, tuple((i, i + 1) for i in range(len(chain) - 1)))
            assert same.cut_bytes == chain.cut_bytes
            for start, stop in ranges(chain):
                assert saved_bytes(same, start, stop) == saved_bytes(chain, start, stop)
                assert inner_bytes(same, start, stop) == inner_bytes(chain, start, stop)
                if start < stop:
                    assert entering_bytes(same, start, stop) == entering_bytes(chain, start, stop)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_profiles_cross_their_cuts_with_live_tensors_only(name):
    chain = published(name)
    assert chain.edges is not None or name in ("alexnet", "vgg16")
    for cut in range(0, len(chain), 7):
        live = {t for j in range(cut, len(chain)) for t in tensors_read(chain, j) if t <= cut}
        assert chain.cut_bytes[cut] == size(chain, live)


def test_parameters_default_to_a_quarter_of_the_bytes():
    assert Layer("a", 1, 1, 40, 0).parameter_count == 10
    assert Layer("a", 1, 1, 40, 0, parameters=20).parameter_count == 20
    assert Layer("a", 1, 1, 40, 0, parameters=0).parameter_count == 0


def test_levels_join_units_of_the_level_below():
    platform = Platform((Device(1),) * 24, (Level(2, 100), Level(3, 50, 7), Level(4, 80, 3)))
    assert platform.unit_sizes == (2, 6, 24)
    assert [platform.level_of(d) for d in ([0], [0, 1], [1, 2], [0, 5], [5, 6], [6, 11], [0, 23])] == [
        0, 0, 1, 1, 2, 1, 2,
    ]  # fmt: skip
    assert platform.level_of([8, 3]) == 2  # any order
    assert platform.paths == ((100, 0), (50, 7), (50, 7))  # the slowest part of the path decides


def test_groups_are_as_near_as_their_devices_that_exchange():
    platform = Platform((Device(1),) * 8, (Level(4, 100), Level(2, 10)))
    assert platform.level_between([0, 4], [1, 5]) == 0  # two pipelines, each in its server
    assert platform.level_between([0, 4], [5, 1]) == 1  # crossed
    assert platform.level_between([0, 4], [1]) == 1  # microbatches of device 4 come from device 1
    assert platform.level_between([0, 1], [2, 3]) == 0
    for cuts in ((0, 2, 4), (0, 3, 5), (1, 4, 8), (2, 3, 7)):  # one behind the other: what joins them all
        one, other = list(range(cuts[0], cuts[1])), list(range(cuts[1], cuts[2]))
        pairs = [(one[m % len(one)], other[m % len(other)]) for m in range(60)]
        assert platform.level_between(one, other) == platform.level_of(one + other)
        assert platform.level_between(other, one) == max(platform.level_of(pair) for pair in pairs)


def test_levels_agree_with_the_definition():
    for seed in range(50):
        rng = random.Random(seed)
        platform = random_platform(rng, rng.choice((4, 6, 8)), levels=True)
        for a in range(len(platform)):
            for b in range(len(platform)):
                level = platform.level_of([a, b])
                together = [a // size == b // size for size in platform.unit_sizes]
                assert together[level]
                assert not any(together[:level])


def test_transfers_round_up_after_the_latency():
    platform = Platform((Device(1),) * 4, (Level(2, 3 * 10**9), Level(2, 10**9, 5)))
    assert platform.transfer_ns(10, 0) == 4
    assert platform.transfer_ns(10, 1) == 15
    assert platform.transfer_ns(0, 1) == 0
    assert platform.transfer_ns(1, 0) == 1
    rng = random.Random(0)
    for _ in range(200):
        size, bandwidth, latency = rng.randint(1, 10**15), rng.randint(1, 10**12), rng.randint(0, 10**6)
        flat = Platform.flat(2, 1, bandwidth, latency)
        assert flat.transfer_ns(size, 0) == ceil(latency + Fraction(size * 10**9, bandwidth))


def test_a_replicated_stage_gets_the_least_of_its_devices():
    platform = Platform((Device(5, Fraction(2)), Device(9, Fraction(1, 2)), Device(7)), (Level(3, 1),))
    assert platform.slowest([0, 1, 2]) == Device(5, Fraction(1, 2))
    assert platform.slowest([0]) == Device(5, Fraction(2))


def test_updates_come_no_more_often_than_replicas_take_turns():
    assert Policy("stash").update_interval() == 1
    assert Policy(accumulate=6).update_interval(4) == 6
    assert Policy(accumulate=2).update_interval(4) == 4
    assert Policy("stash").update_interval(4) == 4


def test_every_weights_policy_has_a_row():
    assert list(WEIGHTS) == list(get_args(Weights))


def test_an_undecided_interval_is_open_under_2bw_alone():
    assert [weights for weights in get_args(Weights) if Policy(weights).open] == ["2bw", "2bw-uniform"]
    assert not Policy(accumulate=1).open
    assert Policy().update_interval(4) == ENDLESS


def test_with_policy_changes_nothing_else():
    problem = Problem(random_chain(random.Random(0), 3), Platform.flat(2, 10), replicas=False, checkpointing="none")
    other = problem.with_policy(Policy("stash"))
    assert other.policy.weights == "stash"
    assert (other.chain, other.platform, other.replicas, other.checkpointing) == (
        problem.chain, problem.platform, False, "none",
    )  # fmt: skip


def test_sets_are_connected_through_others_in_any_order():
    rng = random.Random(4)
    for _ in range(200):
        sets = [tuple(rng.sample(range(9), rng.randint(1, 3))) for _ in range(rng.randint(0, 6))]
        near = {x: {x} for one in sets for x in one}
        for _ in sets:  # paths are no longer than that
            near = {x: {z for y in reach for one in sets if y in one for z in one} for x, reach in near.items()}
        found = [tuple(sorted(x)) for x in connected(sets)]
        assert sorted(found) == sorted({tuple(sorted(x)) for x in near.values()})


def test_spans_name_the_level_of_every_run_of_devices():
    platform = Platform((Device(1),) * 8, (Level(2, 3), Level(2, 2), Level(2, 1)))
    for a in range(8):
        for b in range(9):
            assert platform.spans[a, b] == (platform.level_of(range(a, b)) if a < b else 0)


def test_the_best_device_has_the_best_of_all():
    devices = (Device(5, Fraction(1)), Device(3, Fraction(2)))
    assert Platform(devices, (Level(2, 1),)).best_device == Device(5, Fraction(2))
    assert Platform(devices, (Level(2, 1),)).slowest((0, 1)) == Device(3, Fraction(1))

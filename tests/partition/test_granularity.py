from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import pytest
from cases.chains import PUBLISHED, published, random_chain

from pipeplan.api.given.problems import problem_of
from pipeplan.api.given.profiles import Profile
from pipeplan.cost.memory_model import weights_of
from pipeplan.cost.saved import entering_bytes, for_weights_bytes, saved_bytes
from pipeplan.cost.time_model import whole_step_ns
from pipeplan.partition.granularity import articulation_cuts, merge_articulation, merge_share, merge_zero_time, merging
from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.carry import matching_chain
from pipeplan.problem import Chain, Layer, SharedWeights, WeightNeeds


def layer(name: str, output: int, **fields: Any) -> Layer:
    return Layer(name, **{"forward_ns": 1, "backward_ns": 2, "weight_bytes": 4, "output_bytes": output, **fields})


RESIDUAL = Chain(
    "residual",
    (layer("conv1", 10), layer("conv2", 20), layer("conv3", 30), layer("add", 40), layer("fc", 50)),
    input_bytes=7,
    edges=((0, 1), (0, 3), (1, 2), (2, 3), (3, 4)),
    tied=((0, 4), (1, 2)),
)


def needing(rng: random.Random, chain: Chain) -> Chain:
    """The chain with random needs of weights' gradients, of what its layers read and make."""
    reads = [{t - 1 for t, readers in enumerate(chain.readers) if i in readers} for i in range(len(chain))]
    layers = []
    for i, one in enumerate(chain.layers):
        may = sorted(reads[i] - {one.view_of} | ({i} if one.view_of is None else set()))
        saves = tuple(x for x in may if rng.random() < 0.4)
        size = sum(chain.tensor_bytes[x + 1] for x in saves if x != i)
        size += one.storage_bytes or one.output_bytes if i in saves else 0
        layers.append(replace(one, weight_needs=WeightNeeds(size + rng.randint(0, 9), saves, rng.randint(0, 9))))
    return replace(chain, layers=tuple(layers))


def cuts_of(merged: Chain, chain: Chain) -> list[int]:
    """Where the layers of ``merged`` end in ``chain``, read from the names."""
    names = [x.name for x in chain.layers]
    return [0, *(names.index(x.name.split("..")[-1]) + 1 for x in merged.layers)]


def assert_same_costs(merged: Chain, chain: Chain) -> None:
    cuts = cuts_of(merged, chain)
    assert cuts[-1] == len(chain)
    assert [merged.cut_bytes[g] for g in range(len(cuts))] == [chain.cut_bytes[c] for c in cuts]
    for a, b in combinations(range(len(cuts)), 2):
        assert saved_bytes(merged, a, b) == saved_bytes(chain, cuts[a], cuts[b])
        assert for_weights_bytes(merged, a, b) == for_weights_bytes(chain, cuts[a], cuts[b])
        for name in ("forward_ns", "backward_ns"):
            ours, theirs = getattr(merged.sums, name), getattr(chain.sums, name)
            assert ours[b] - ours[a] == theirs[cuts[b]] - theirs[cuts[a]]
        assert weights_of(merged, a, b) == weights_of(chain, cuts[a], cuts[b])
        if not chain.shared:  # otherwise shares of steps are guessed from other layers
            assert whole_step_ns(merged, a, b) == whole_step_ns(chain, cuts[a], cuts[b])


def test_a_residual_block_becomes_one_layer() -> None:
    merged = merge_articulation(RESIDUAL)
    assert articulation_cuts(RESIDUAL) == (0, 1, 4, 5)
    assert [x.name for x in merged.layers] == ["conv1", "conv2..add", "fc"]
    assert merged.edges is None
    # conv2 and add both save the output of conv1: 10 once, then 20 and 30
    assert merged.layers[1] == Layer("conv2..add", 3, 6, 12, 40, saved_bytes=60, saves=(0,), parameters=3)
    assert merged.layers[2] == RESIDUAL.layers[4]
    assert merged.tied == ((0, 2),), "a pair inside one layer is no pair any more"


def test_input_accounting_saves_the_input_alone() -> None:
    merged = merge_articulation(RESIDUAL, saved="input")
    assert [saved_bytes(merged, i, i + 1) for i in range(3)] == [7, 10, 40]
    plain = Chain("plain", (layer("a", 10, saved_bytes=50), layer("b", 20)), input_bytes=7)
    assert [saved_bytes(plain, i, i + 1) for i in range(2)] == [50, 10]
    assert [saved_bytes(merge_articulation(plain, saved="input"), i, i + 1) for i in range(2)] == [7, 10]


def test_a_chain_stays_as_it_is() -> None:
    chain = random_chain(random.Random(1), 5, saved=True, optimizer=True)
    assert merge_articulation(chain) == chain


def test_a_tensor_saved_on_both_sides_of_a_cut_counts_once() -> None:
    # the output of layer 0 alone crosses the cut before layer 2, and layers 1 and 2 both save it: it passes layer 1
    chain = Chain("dead end", (layer("a", 10), layer("b", 5), layer("c", 1)), 0, edges=((0, 1), (0, 2)))
    assert articulation_cuts(chain) == (0, 1, 2, 3)
    merged = merge_articulation(chain)
    assert merged.layers[1].view_of == 0
    assert saved_bytes(merged, 1, 3) == 10
    assert_same_costs(merged, chain)


@pytest.mark.parametrize("seed", range(50))
def test_articulation_keeps_every_cost_of_random_dags(seed: int) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(1, 9), edges=True, saved=seed % 2 == 0, optimizer=True, tied=True)
    if seed % 3 == 0 and chain.tied:
        size = min(chain.layers[i].weight_bytes for i in chain.tied[0]) // 2
        middle = sorted({*chain.tied[0], rng.randrange(len(chain))})
        size = min(size, *(chain.layers[i].weight_bytes for i in middle))
        chain = replace(chain, tied=tuple(pairwise(middle)), shared=(SharedWeights(tuple(middle), size, 0),))
    chain = needing(rng, chain)
    merged = merge_articulation(chain)
    assert merged.edges is None
    assert_same_costs(merged, chain)


@pytest.mark.parametrize("name", PUBLISHED)
def test_articulation_keeps_every_cost_of_published_profiles(name: str) -> None:
    chain = published(name)
    merged = merge_articulation(chain)
    assert_same_costs(merged, chain)
    assert len(merged) < len(chain)


def test_articulation_sizes_of_published_profiles() -> None:
    sizes = {name: len(merge_articulation(published(name))) for name in PUBLISHED}
    assert sizes == {"alexnet": 21, "densenet121": 77, "gnmt": 11, "resnet50": 39, "vgg16": 39}


def test_zero_time_layers_join_a_neighbour_across_the_larger_cut() -> None:
    free = {"forward_ns": 0, "backward_ns": 0}
    chain = Chain(
        "zeros",
        (layer("view", 3, **free), layer("a", 9), layer("drop", 5, **free), layer("pad", 8, **free), layer("b", 2),
         layer("end", 1, **free)),
        input_bytes=6,
    )  # fmt: skip
    merged = merge_zero_time(chain)
    assert [x.name for x in merged.layers] == ["view..drop", "pad..end"], "5 bytes after drop are the least"
    assert merged.layers[1].output_bytes == 1
    assert_same_costs(merged, chain)


@pytest.mark.parametrize("seed", range(70))
def test_zero_time_merges_keep_every_cost(seed: int) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(1, 9), edges=seed % 3 > 0, saved=seed % 2 == 0, zero_times=True)
    chain = replace(
        chain,
        layers=tuple(replace(x, backward_ns=0) if not x.forward_ns and i else x for i, x in enumerate(chain.layers)),
    )
    merged = merge_zero_time(chain)
    assert_same_costs(merged, chain)
    cuts = cuts_of(merged, chain)
    for a, b in combinations(range(len(cuts)), 2):
        assert entering_bytes(merged, a, b) == entering_bytes(chain, cuts[a], cuts[b])
    if chain.edges is None:
        assert all(x.forward_ns + x.backward_ns for x in merged.layers)


def test_a_view_of_the_network_s_input_is_not_merged_with_a_tensor_of_its_own() -> None:
    """Saved by the last layer, the view keeps the input's 7 bytes, the other tensor its own 5."""
    nothing = {"saved_bytes": 0, "saves": ()}
    free = {"forward_ns": 0, "backward_ns": 0, **nothing}
    made = (
        layer("first", 20, **nothing), layer("view", 3, view_of=-1, **free), layer("own", 5, **free), layer("last", 2)
    )  # fmt: skip
    chain = Chain("view of the input", made, 7, edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    assert saved_bytes(chain, 0, 4) == 12
    assert_same_costs(merge_zero_time(chain), chain)
    own = replace(chain, layers=(made[0], replace(made[1], view_of=None), *made[2:]))
    assert [x.name for x in merge_zero_time(own).layers] == ["first..own", "last"]


def test_zero_time_merges_happen_in_dags_too() -> None:
    merged = [merge_zero_time(published(name)) for name in ("gnmt", "resnet50", "vgg16")]
    assert [len(x) for x in merged] == [23, 158, 36]


def test_backward_weight_part_survives_only_where_all_know_it() -> None:
    known = Chain(
        "known",
        (layer("a", 1, backward_weight_ns=1), layer("b", 1, backward_weight_ns=2), layer("c", 1)),
        0,
        edges=((0, 1), (0, 2), (1, 2)),
    )
    assert merge_articulation(known).layers[1].backward_weight_ns is None
    both = replace(known, layers=(*known.layers[:2], replace(known.layers[2], backward_weight_ns=2)))
    assert merge_articulation(both).layers[1].backward_weight_ns == 4


@pytest.mark.parametrize("percent", [1, 10, 30, 60])
def test_merging_by_share_keeps_every_cost_at_the_cuts_that_stay(percent: int) -> None:
    share = Fraction(percent, 100)
    chain = published("vgg16")
    merged = merge_share(chain, share)
    assert_same_costs(merged, chain)
    total = sum(x.forward_ns + x.backward_ns for x in chain.layers)
    assert len(merged) <= len(chain)
    times = [x.forward_ns + x.backward_ns for x in merged.layers]
    small = [a for a, b in pairwise(times) if a + b < share * total]
    assert not small, "two neighbours of a chain that are too small together would have been merged"


def test_merging_by_share_leaves_the_ends_of_skips_alone() -> None:
    merged = merge_share(RESIDUAL, Fraction(1, 2))
    # conv1 is read by conv2 and by the sum: it can't be one layer with conv2, but with the whole block
    assert_same_costs(merged, RESIDUAL)
    rng = random.Random(5)
    for _ in range(200):
        chain = needing(rng, random_chain(rng, rng.randint(2, 12), edges=True, saved=rng.random() < 0.5))
        assert_same_costs(merge_share(chain, Fraction(rng.randint(1, 9), 10)), chain)


def test_a_share_smaller_than_every_layer_merges_nothing() -> None:
    for seed in range(20):
        chain = random_chain(random.Random(seed), 8, edges=seed % 2 == 0, saved=True)
        assert merge_share(chain, Fraction(1, 10**9)) == chain


def blocks_of(kinds: str, times: int = 1) -> Chain:
    """A network with an item of a list for each letter, two layers each, of weights that the letter says."""
    names = [(f"m.h.{i}.{part}", ord(kind)) for i, kind in enumerate(kinds) for part in ("attn", "mlp")]
    layers = (Layer(name, times, times, weight, 1) for name, weight in [("m.wte", 1), *names, ("head", 1), ("loss", 0)])
    return Chain("listed", tuple(layers), 1)


@pytest.mark.parametrize(("kinds", "count"), [("aaaa", 7), ("baaa", 7), ("aab", 9), ("abcd", 11)])
def test_blocks_alike_are_planned_whole_unless_somebody_says_node(kinds: str, count: int) -> None:
    """Three of a kind make most of a model; times don't matter."""
    whole = blocks_of(kinds)
    merged = merging()(whole)
    assert len(merged) == len(merging()(blocks_of(kinds, 50))) == count
    assert (merged is whole) == (len(whole) == count)
    assert len(merging("node")(whole)) == len(whole)
    problem, assumed = problem_of(Profile(whole), gpus=2, mem="1GB")
    said = f"whole blocks, {count} layers for {len(whole)}; --granularity node cuts inside blocks, too"
    assert (len(problem.chain), said in assumed) == (count, count < len(whole))
    plan = make_plan(problem, "contiguous").plan
    assert len(matching_chain(plan, whole, blocks_of(kinds, 2))) == count

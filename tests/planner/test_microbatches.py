"""One network at several microbatch sizes: what is taken as profiled, what is scaled, what lies between."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from cases.chains import random_chain

from pipeplan.errors import BadInput
from pipeplan.planner.grids.space import profiles
from pipeplan.problem import Chain, Layer, WeightNeeds


def chain_at(size, forward, saved=100):
    layer = Layer(
        "a",
        forward,
        2 * forward,
        40,
        10 * size,
        saved * size,
        backward_weight_ns=forward,
        optimizer_ns=7,
        parameters=10,
        weight_needs=WeightNeeds(20 * size, (), 10 * size),
    )
    return Chain("n", (layer, layer), 5 * size, microbatch=size)


def test_a_profiled_size_is_taken_as_it_is():
    one, four = chain_at(1, 30), chain_at(4, 60)
    given = profiles([one, four])
    assert given.at(1) is one
    assert given.at(4) is four
    assert given.assumption([1, 4]) is None


def test_one_profile_scales_in_proportion_and_weights_stay():
    layer = profiles([chain_at(4, 100)]).at(2).layers[0]
    assert layer == Layer(
        *("a", 50, 100, 40, 20, 200),
        backward_weight_ns=50,
        optimizer_ns=7,
        parameters=10,
        weight_needs=WeightNeeds(40, (), 20),
    )
    assert profiles([chain_at(4, 100)]).at(8).input_bytes == 40
    assert profiles([chain_at(4, 10)]).at(3).layers[0].forward_ns == 8  # 7.5 up


def test_reading_is_scaled_like_the_forwards_that_it_is_part_of():
    read = replace(chain_at(4, 100), reading_ns=40)
    assert profiles([read]).at(2).reading_ns == 20
    assert profiles([read], fixed_ns=20).at(8).reading_ns == 20 + 2 * 20
    assert profiles([read], fixed_ns=100).at(8).reading_ns == 40
    between = profiles([read, replace(chain_at(8, 180), reading_ns=60)])
    assert [between.at(size).reading_ns for size in (4, 6, 8)] == [40, 50, 60]
    steep = profiles([replace(chain_at(4, 100), reading_ns=100), replace(chain_at(8, 300), reading_ns=100)]).at(2)
    assert steep.reading_ns <= steep.layers[0].forward_ns


def test_a_fixed_part_of_each_pass_stays():
    given = profiles([chain_at(4, 100)], fixed_ns=20)
    assert given.at(1).layers[0].forward_ns == 20 + 80 // 4
    assert given.at(1).layers[0].backward_ns == 20 + 180 // 4
    assert given.at(1).layers[0].output_bytes == 10
    assert profiles([chain_at(4, 100)], fixed_ns=500).at(1).layers[0].forward_ns == 100  # all of it is fixed
    assert "fixed 0.02 us" in given.assumption([1, 4])


def test_sizes_between_two_profiles_lie_on_their_line():
    given = profiles([chain_at(1, 30), chain_at(4, 60)])
    assert given.at(2).layers[0].forward_ns == 40
    assert given.at(3).layers[0].forward_ns == 50
    assert given.at(8).layers[0].forward_ns == 100
    assert "nearest" in given.assumption([1, 2])


@pytest.mark.parametrize(("small", "large"), [(10, 100), (50, 40)])
def test_lines_that_no_machine_follows_are_bent(small, large):
    """Ten times as long for four times the size would make a quarter of the size cost nothing; growing never saves."""
    given = profiles([chain_at(2, small), chain_at(8, large)])
    assert given.at(1).layers[0].forward_ns >= Fraction(small, 2)
    assert given.at(1).layers[0].forward_ns <= small
    assert large <= given.at(16).layers[0].forward_ns <= 2 * large


def test_proportional_scaling_there_and_back_gives_the_same():

    chain = random_chain(random.Random(3), 6, saved=True, optimizer=True)
    big = profiles([chain]).at(4)
    assert profiles([big]).at(1) == replace(chain, microbatch=1)
    assert big.sums.forward_ns[-1] == 4 * chain.sums.forward_ns[-1]
    assert big.cut_bytes == tuple(4 * x for x in chain.cut_bytes)


def test_profiles_of_other_networks_are_refused():
    one, other = chain_at(1, 30), chain_at(4, 60)
    with pytest.raises(BadInput, match="two profiles are for microbatches of 1"):
        profiles([one, one])
    with pytest.raises(BadInput, match="2 layers at microbatches of 1, 1 at 4"):
        profiles([one, replace(other, layers=other.layers[:1])])
    heavier = replace(other.layers[1], weight_bytes=44)
    with pytest.raises(BadInput, match=r"layers\[1\] has weight_bytes 40 at microbatches of 1, 44 at 4"):
        profiles([one, replace(other, layers=(other.layers[0], heavier))])
    with pytest.raises(BadInput, match="edges or tied"):
        profiles([one, replace(other, tied=((0, 1),))])

"""Which layers of two profiles are the same, and where a plan's cuts are in the other profile."""

from __future__ import annotations

import pytest

from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.carry import carried, matched, stages_in
from pipeplan.problem import Chain, Layer, Platform, Problem


def chain(names: str | list[str], parameters: list[int], sizes: list[int] | None = None, time: int = 10) -> Chain:
    sizes = sizes or [100] * len(names)
    layers = tuple(
        Layer(name, time, 2 * time, 4 * count, size) for name, count, size in zip(names, parameters, sizes, strict=True)
    )
    return Chain("network", layers, 100)


CONV = chain(["conv", "relu", "conv", "relu", "pool", "fc"], [9, 0, 25, 0, 0, 49])
FUSED = chain("kvpxyz", [9, 0, 25, 0, 0, 49])


def test_other_names_in_the_same_order() -> None:
    assert matched(CONV, FUSED, "order") == [(i, i) for i in range(6)]
    with pytest.raises(BadInput, match="A has 6 layers, B has 2; match them by name or weights"):
        matched(CONV, chain("ab", [1, 2]), "order")


def test_layers_with_as_many_parameters_are_the_same_and_what_is_between_goes_by_place() -> None:
    assert matched(CONV, FUSED, "weights") == [(i, i) for i in range(6)]
    without = chain("abcd", [9, 25, 0, 49])  # relu is part of its convolution, and one pooling is left
    assert matched(CONV, without, "weights") == [(0, 0), (1, None), (2, 1), (3, None), (4, None), (None, 2), (5, 3)]
    halves = chain("abcdef", [9, 0, 25, 0, 0, 49])  # half the bytes, as many parameters
    assert matched(CONV, halves, "weights") == [(i, i) for i in range(6)]


def test_names_in_order_and_renamed_ones_by_place() -> None:
    assert matched(chain("abc", [0] * 3), chain("axc", [0] * 3)) == [(0, 0), (1, 1), (2, 2)]
    assert matched(chain("abc", [0] * 3), chain("aybc", [0] * 4)) == [(0, 0), (None, 1), (1, 2), (2, 3)]
    assert matched(chain("ab", [0] * 2), chain("xyz", [0] * 3)) == [
        (0, None), (1, None), (None, 0), (None, 1), (None, 2)
    ]  # fmt: skip


def test_cuts_move_with_their_layers_to_where_fewest_bytes_cross() -> None:
    one, other = chain("abcd", [0] * 4), chain("abxycd", [0] * 6, [100, 100, 30, 100, 100, 100])
    stages = (Stage(0, 2, (0,), ((0, 1),)), Stage(2, 4, (1,), ((2, 4),)))
    assert stages_in(stages, one, other, matched(one, other)) == (
        Stage(0, 3, (0,), ((0, 1),)),  # cut behind x, which hands on 30 bytes
        Stage(3, 6, (1,), ((3, 6),)),
    )
    back = stages_in((Stage(0, 3, (0,)), Stage(3, 6, (1,))), other, one, matched(other, one))
    assert [(stage.start, stage.stop) for stage in back] == [(0, 2), (2, 4)]
    lost = (Stage(0, 2, (0,)), Stage(2, 4, (1,)), Stage(4, 6, (0,)))
    with pytest.raises(BadInput, match="B has none of the layers of stage 1, x to y"):
        stages_in(lost, other, one, matched(other, one))


def test_a_plan_is_carried_to_a_profile_of_more_layers() -> None:
    """Each layer in two halves: the same stages take the same time."""
    one = chain("abcd", [0] * 4, time=20)
    halves = chain("axbycvdw", [0] * 8)
    plan = make_plan(Problem(one, Platform.flat(2, 10**6), replicas=False), "contiguous").plan
    stages = stages_in(plan.allocation.stages, one, halves, matched(one, halves))
    assert [(stage.start, stage.stop) for stage in stages] in ([(0, 4), (4, 8)], [(0, 3), (3, 8)])
    result = carried(plan, halves, stages)
    assert result.violations == ()
    assert result.plan.allocation.stages == stages

"""Local search: every neighbour is an allocation of the whole chain, and none of its kinds is missing."""

from __future__ import annotations

from pipeplan.partition.moves.local_search import local_search
from pipeplan.plan import Allocation, Stage
from pipeplan.problem import Chain, Layer, Platform, Problem

CHAIN = Chain("even", (Layer("l", 1, 2, 1, 1),) * 9, 1)
START = (Stage(0, 3, (0,)), Stage(3, 6, (1, 2)), Stage(6, 9, (3,)))


def looked_at(start: tuple[Stage, ...], devices: int, budget: int, parts: bool = False) -> list[tuple[Stage, ...]]:
    """What is looked at from ``start`` on, nothing of it better."""
    seen: list[tuple[Stage, ...]] = []

    def bound(allocation: Allocation) -> None:
        seen.append(allocation.stages)

    problem = Problem(CHAIN, Platform.flat(devices, 10**6))
    count = local_search(problem, Allocation(start), bound, lambda _: False, budget, lambda: False, parts=parts)
    assert count >= min(budget, len(seen))
    return seen


def test_whatever_is_looked_at_covers_the_chain_once() -> None:
    seen = looked_at(START, 6, 1500)
    assert len(seen) == len(set(seen)) > 800
    for stages in seen:
        assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
        assert stages[-1].stop == 9
        groups = {stage.devices for stage in stages}
        used = [d for group in groups for d in group]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(6))


def test_neighbours_merge_grow_and_shrink_groups() -> None:
    seen = set(looked_at(START, 6, 300))
    first, _, last = START
    merged = {
        (Stage(0, 6, (0,)), last), (Stage(0, 6, (1, 2)), last), (first, Stage(3, 9, (1, 2))), (first, Stage(3, 9, (3,)))
    }  # fmt: skip
    assert {stages for stages in seen if len(stages) == 2} >= merged
    groups = {tuple(stage.devices for stage in stages) for stages in seen if len(stages) == 3}
    assert groups >= {
        ((0, 4), (1, 2), (3,)), ((0,), (1, 2, 4), (3,)), ((0,), (1, 2), (3, 4)),  # a spare device
        ((0,), (1,), (3,)), ((0, 2), (1,), (3,)), ((0,), (1,), (3, 2)),  # one taken away, or moved
    }  # fmt: skip


def test_a_boundary_that_moves_leaves_what_is_recomputed() -> None:
    stages = (Stage(0, 5, (0,), ((0, 2), (3, 4))), Stage(5, 9, (1,), ((5, 7),)))
    chosen = {tuple((stage.stop, stage.checkpoint) for stage in found) for found in looked_at(stages, 2, 300, True)}
    assert ((4, ((0, 2), (3, 4))), (9, ((4, 7),))) in chosen  # the segment at the boundary grows
    assert ((6, ((0, 2), (3, 4))), (9, ((6, 7),))) in chosen
    assert ((3, ((0, 2),)), (9, ((3, 7),))) in chosen


def test_neighbours_exchange_what_takes_as_long_on_both_sides_of_their_cut() -> None:
    stages = (Stage(0, 4, (0,)), Stage(4, 9, (1,)))
    found = [x for x in looked_at(stages, 2, 400, True) if [stage.devices for stage in x] == [(0,), (1,), (0,), (1,)]]
    assert any(x[1].stop == 4 and x[2].start == 4 for x in found)

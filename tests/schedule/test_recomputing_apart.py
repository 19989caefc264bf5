"""Recomputation as a pass of its own: by hand, against all orders of tiny problems, in memory, in written orders."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from cases.schedules import balanced, picture, recomputing, staircase, vee
from oracles.orders import best

from pipeplan.deadline import NEVER
from pipeplan.errors import BadInput
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.kinds import drained_programs
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.synthesis.bounds import floor, raised
from pipeplan.schedule.synthesis.problem import NoRoom, order_problem
from pipeplan.schedule.synthesis.recomputing import recomputing_apart
from pipeplan.schedule.synthesis.synthesize import synthesize
from pipeplan.schedule.timeline import activation_steps, lane_use
from pipeplan.schedule.written import incomplete, order_of_program, unfit, written_of, written_program

ALONE = ("0F0,0F1,0R0,0B0,0R1,0B1", "1F0,1R0,1B0,1F1,1R1,1B1")


def two_stages(**more):
    return recomputing(balanced(2, 1, 2), 1, **more)


def test_it_runs_while_the_gradient_is_awaited():
    inside = simulate(written_program(two_stages(), 2, tuple(re.sub(r"\dR\d,", "", row) for row in ALONE)))
    apart = simulate(written_program(two_stages(), 2, ALONE))
    assert picture(inside) == staircase("""
        F0 F1 .  .  .  B0 -- -- .  B1 -- --
        .  F0 B0 -- -- F1 B1 -- --
    """)
    assert picture(apart) == staircase("""
        F0 F1 R0 .  .  B0 -- R1 .  B1 --
        .  F0 R0 B0 -- F1 R1 B1 --
    """)
    assert order_of_program(apart.program) == ALONE
    assert list(activation_steps(apart, 0)) == [(0, 1), (1, 2), (2, 5), (7, 4), (11, 0)]
    assert program_deadlock(apart.program, apart) == []
    early = simulate(written_program(two_stages(), 2, ("0F0,0F1,0R0,0R1,0B0,0B1", ALONE[1])))
    assert lane_use(early, 0).activation_bytes == 8


def test_a_backward_in_two_parts_finds_it_done():
    graph = recomputing(balanced(1, 2, 5, weight_part=2), 3, kept=2, inside=5, whole=7)
    timeline = simulate(written_program(graph, 2, ("0F0,0R0,0F1,0I0,0W0,0R1,0I1,0W1",)))
    assert [work.duration_ns for work in timeline.program.operations] == [2, 3, 2, 3]
    assert timeline.makespan_ns == 2 * 10
    steps = list(activation_steps(timeline, 0))
    assert steps == [(0, 2), (2, 7), (5, 9), (10, 7), (12, 7), (18, 5), (20, 0)]


@pytest.mark.parametrize("split", [False, True])
def test_bound_least_value_of_all_orders_and_what_is_found_agree(split):
    """Instances in which stages hold more where they recompute apart among them."""
    rng, won = random.Random(5), 0
    for _ in range(8):
        homes = rng.choice([[0, 1], [0, 1], [0, 1, 0]])
        times = [rng.randrange(1, 6) for _ in range(3)]
        graph = balanced(len(homes), times[0], times[1] + times[2], weight_part=times[2], homes=homes)
        again = [rng.choice((0, times[0])) for _ in homes]
        graph = recomputing(graph, again, rng.randrange(8, 14), whole=rng.choice((4, 5)))
        count = 2 if split or len(homes) > 2 else 3
        options = {"split": split, "barrier": rng.random() < 0.7}
        try:
            plain = best(order_problem(graph, count, **options))
        except NoRoom:
            continue
        apart = recomputing_apart(graph, count, **options)
        least = plain if apart is None else min(plain, best(apart.problem))
        found = synthesize(graph, count, moves=300, **options)
        assert found.bound_ns <= least <= found.value_ns <= plain
        assert found.value_ns == least
        if apart is not None:
            low = floor(apart.bounding)
            assert raised(apart.bounding, low, plain, "cbc", NEVER) <= least
        won += least < plain
    assert won > 1


def test_never_worse_than_without_within_memory_and_the_same_again():
    won = 0
    for homes, memory, whole in (([0, 1, 2], 14, 6), (vee(2), 20, 4)):
        graph = balanced(len(homes), 20, 40, weight_part=16, homes=homes)
        graph = recomputing(graph, [20, *[0] * (len(homes) - 2), 20], memory, whole=whole)
        inside = replace(graph, stages=tuple(replace(x, recompute_ns=0) for x in graph.stages))
        options = {"moves": 100, "solver": None, "known": drained_programs}
        without, found = (synthesize(one, 5, **options) for one in (inside, graph))
        assert found.bound_ns <= found.value_ns <= without.value_ns
        assert synthesize(graph, 5, **options).program.lanes == found.program.lanes
        for lane in range(max(homes) + 1):
            assert lane_use(found.timeline, lane).activation_bytes <= memory
        if found.program.apart:
            won += found.value_ns < without.value_ns
            order = order_of_program(found.program)
            again = simulate(written_program(graph, 5, order))
            assert again.makespan_ns == found.timeline.makespan_ns
    assert won


def test_the_last_stage_alone_gains_nothing():
    """Its gradient is there as soon as its forward is: F, R, B follow each other."""
    graph = recomputing(balanced(2, 4, 8, weight_part=4), [0, 4], 8)
    found = synthesize(graph, 4, moves=200)
    assert not found.program.apart
    assert found.optimal


def test_orders_that_recompute_wrongly_are_refused():
    for order, said in (
        (("0F0,0R0,0B0,0F1,0B1", ALONE[1]), "0R1 is missing"),
        (("0F0,0B0,0R0,0F1,0R1,0B1", ALONE[1]), "rank 0 runs 0B0 before 0R0, which it needs"),
        (("0R0,0F0,0B0,0F1,0R1,0B1", ALONE[1]), "rank 0 runs 0R0 before 0F0, which it needs"),
        (("0F0,0I0,0R0,0W0,0F1,0R1,0B1", ALONE[1]), "rank 0 runs 0I0 before 0R0, which it needs"),
    ):
        assert incomplete(written_of(order)) == [said]
        assert said in (unfit(two_stages(), order, 2) or "")
    graph = recomputing(balanced(2, 1, 2), [1, 0])
    with pytest.raises(BadInput, match="the order recomputes stage 1, which recomputes nothing here"):
        written_program(graph, 2, ALONE)

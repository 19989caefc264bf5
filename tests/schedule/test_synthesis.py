"""Synthesised orders: against all orders of tiny problems, published figures, memory, and the simulator."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from cases.schedules import balanced, held, looped, vee
from oracles.orders import best, value

from pipeplan.deadline import NEVER, Deadline
from pipeplan.errors import BadInput
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.kinds import drained_programs
from pipeplan.schedule.periodic.ilp import SolverLimits
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.synthesis import synthesize as searching
from pipeplan.schedule.synthesis.bounds import floor, raised
from pipeplan.schedule.synthesis.justify import Orders, justified, shake
from pipeplan.schedule.synthesis.problem import order_problem
from pipeplan.schedule.synthesis.synthesize import synthesize
from pipeplan.schedule.synthesis.time_indexed import Slots, refuted
from pipeplan.schedule.timeline import lane_use, worth


def stages(homes, forward, backward, weight, transfer=0, **more):
    return balanced(len(homes), forward, backward + weight, transfer, weight_part=weight, homes=homes, **more)


def one_by_one(problem):
    return [problem.one_by_one(machine) * problem.microbatches for machine in range(len(problem.on))]


@pytest.mark.parametrize(
    ("homes", "times", "microbatches", "limit"),
    [
        ([0, 1], (1, 1, 1), 3, 1),
        ([0, 1], (3, 2, 4), 3, 2),
        ([0, 1], (2, 5, 1), 3, 3),
        (vee(2), (1, 1, 1), 2, 2),
        (vee(2), (3000, 2000, 5000), 2, 2),  # nothing is tried in steps of 1
    ],
)
@pytest.mark.parametrize("barrier", [True, False])
def test_bound_least_value_of_all_orders_and_what_is_found_agree(homes, times, microbatches, limit, barrier):
    graph = stages(homes, *times)
    problem = order_problem(graph, microbatches, barrier=barrier, limit=limit)
    found = synthesize(graph, microbatches, barrier=barrier, limit=limit, moves=400)
    least = best(problem)
    assert floor(problem) <= found.bound_ns <= least == found.value_ns
    assert found.optimal
    for device, longer in product(problem.devices, (1, 3)):
        length = longer * problem.grain
        alone = Slots(problem, length, least, 1 + max(problem.head) // length, (device,))
        assert not refuted(alone, "cbc", SolverLimits())


def test_a_turn_alone_proves_an_order_of_many_passes_best():
    graph = stages(vee(8), 20, 24, 16)
    problem = order_problem(graph, 32, barrier=False, limit=10)
    assert raised(problem, floor(problem), 4268, "cbc", NEVER) == 4268


def test_orders_are_timed_as_the_simulator_says():
    problem = order_problem(stages(vee(3), 5, 6, 4), 4, barrier=False, limit=4)
    same = []
    for program in drained_programs(stages(vee(3), 5, 6, 4), 4):
        words = [tuple(step.position for step in lane.steps) for lane in simulate(program).program.lanes]
        if program.split:
            orders = Orders(problem, words)
            assert orders.settle()
            same.append(worth(simulate(program), False) - orders.value)
    assert min(same) == 0  # passes that a schedule runs together wait for each other there
    assert same.count(0) >= 3


def test_justified_and_shaken_orders_are_whole_hold_and_are_no_worse():
    rng = random.Random(7)
    for homes, transfer, barrier in ((vee(3), 0, False), (looped(2, 2), 3, True), ([0, 1, 2], 2, True)):
        problem = order_problem(stages(homes, 5, rng.randrange(4, 8), 4, transfer), 5, limit=4, barrier=barrier)
        before = Orders(problem, one_by_one(problem))
        assert before.settle()
        better, words = justified(problem, before.words())
        tried, best, shaken = shake(problem, words, 12, 9, 1, NEVER, 0)
        assert best <= better <= before.value
        assert (tried, best, shaken) == shake(problem, words, 12, 9, 1, NEVER, 0)
        for found, order in ((better, words), (best, shaken)):
            assert problem.complete(order)
            assert all(problem.holds(device, order[device]) for device in problem.devices)
            assert value(problem, order) == found


def test_an_interrupt_ends_the_search_with_the_best_so_far(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    graph = stages([0, 1, 2], 7, 9, 5)
    monkeypatch.setattr(searching, "shake", interrupted)
    found = synthesize(graph, 20, limit=2, solver=None)
    assert (found.cut, found.moves) == ("interrupted", 0)
    assert found.value_ns == synthesize(graph, 20, limit=2, solver=None, moves=0).value_ns


@pytest.mark.parametrize(("limit", "span"), [(4, 59)])
def test_published_spans_are_proved_best(limit, span):
    found = synthesize(stages(vee(4), 1, 1, 1), 8, limit=limit, barrier=False)
    assert (found.value_ns, found.bound_ns) == (span, span)
    assert max(held(found.timeline)) <= limit


def test_no_worse_than_any_known_schedule_and_better_than_published():
    graph = stages(vee(4), 20, 24, 16)
    found = synthesize(graph, 8, limit=4, barrier=False, moves=16000, known=drained_programs, solver=None)
    assert 960 == found.bound_ns <= found.value_ns <= 1300
    assert max(held(found.timeline)) <= 4
    assert program_deadlock(found.program, found.timeline) == []


def test_memory_in_bytes_transfers_pipelines_and_kept_shares():
    graph = stages([0, 1, 2], 20, 24, 16, 3, saved=10**8, pipelines=2)
    for split, keeps in ((True, Fraction(1, 2)), (False, Fraction(1))):
        found = synthesize(
            graph, 7, moves=300, split=split, weight_keeps=keeps, limit=3, known=drained_programs, solver=None
        )
        program = found.program
        assert program.split == split
        assert found.bound_ns <= found.value_ns == worth(simulate(program), True)
        assert program_deadlock(program, found.timeline) == []
        assert sum(len(lane.steps) for lane in program.lanes) == 7 * len(program.operations)


def test_what_is_held_between_the_parts_of_a_backward_stays_within_memory():
    graph = stages([0, 1], 20, 24, 16, saved=3 * 10**8)
    parts = [replace(x, held_between_bytes=5 * 10**8, gradient_bytes=4 * 10**8) for x in graph.stages]
    found = synthesize(replace(graph, stages=tuple(parts)), 4, moves=300, known=drained_programs, solver=None)
    peaks = [lane_use(found.timeline, lane).peak_bytes for lane in (0, 1)]
    assert max(peaks) <= 10**9 == graph.resources[0].memory_bytes


def test_the_same_seed_finds_the_same_and_a_deadline_ends_the_search():
    graph = stages(vee(2), 7, 9, 5)
    one, same = (synthesize(graph, 6, limit=3, moves=500, seed=5, solver=None) for _ in range(2))
    assert one.program.lanes == same.program.lanes
    late = synthesize(graph, 6, limit=3, deadline=Deadline.within(0))
    assert late.bound_ns <= one.bound_ns <= one.value_ns <= late.value_ns


def test_what_has_no_order_is_refused():
    with pytest.raises(BadInput, match="device 0 has no room, of 1 activations at most, for the passes of even one"):
        synthesize(stages(vee(2), 1, 1, 1), 4, limit=1)

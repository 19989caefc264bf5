"""The proof of freedom from deadlock: what it accepts, and the cycle it names."""

from __future__ import annotations

import random

import pytest
from cases.plans import random_plan
from cases.schedules import balanced, looped

from pipeplan.schedule import deadlock as proof
from pipeplan.schedule.deadlock import Action, deadlock, lower, plan_deadlock, program_deadlock
from pipeplan.schedule.kinds import graph_of
from pipeplan.schedule.pattern import most_in_flight, starts_of
from pipeplan.schedule.program import Program, device_of
from pipeplan.schedule.programs.one_f_one_b import gpipe, one_f_one_b
from pipeplan.schedule.simulate import simulate


def naive(program: Program) -> dict[int, list[Action]]:
    """Receive right before use, send right after: what deadlocks without buffers."""
    graph, last = program.graph, len(program.graph.stages) - 1
    ranks: dict[int, list[Action]] = {}
    for lane in simulate(program).program.lanes:
        if lane.device is None:
            continue
        ops = ranks.setdefault(lane.device, [])
        for step in lane.steps:
            work, m = program.operations[step.position], step.microbatch
            before, after = (-1, 1) if work.kind == "F" else (1, -1)
            for way, call in ((before, "RECV_"), (0, ""), (after, "SEND_")):
                other = work.stage + way
                if not 0 <= other <= last:
                    continue
                peer = device_of(graph, other, m)
                if not way:
                    ops.append(Action(work.stage, work.kind, m))
                elif peer != lane.device:
                    ops.append(Action(work.stage, call + work.kind, m, peer))
    return ranks


def test_naive_1f1b_deadlocks_and_the_cycle_is_named():
    found = deadlock(naive(one_f_one_b(balanced(2, 1, 1, 1), 4)))
    assert found == [
        "rank 0 stands at 0SEND_F1, until rank 1 comes to 1RECV_F1",
        "rank 1 stands at 1SEND_B0, until rank 0 comes to 0RECV_B0",
    ]


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_the_total_order_never_deadlocks_where_the_naive_one_does(devices):
    program = one_f_one_b(balanced(devices, 2, 3, 1), 12)
    assert deadlock(naive(program))
    assert program_deadlock(program) == []


def test_gpipe_is_safe_even_when_lowered_naively():
    assert deadlock(naive(gpipe(balanced(4, 1, 1, 1), 6))) == []


def test_longer_cycles_are_followed_around():
    ranks = {
        0: [Action(1, "RECV_F", 0, 2), Action(0, "SEND_F", 1, 1)],
        1: [Action(1, "RECV_F", 1, 0), Action(0, "SEND_F", 2, 2)],
        2: [Action(1, "RECV_F", 2, 1), Action(0, "SEND_F", 0, 0)],
        3: [Action(1, "RECV_F", 5, 0)],
    }
    found = deadlock(ranks)
    assert [sentence.split(" stands")[0] for sentence in found] == ["rank 0", "rank 2", "rank 1"]
    assert found[0] == "rank 0 stands at 1RECV_F0, until rank 2 comes to 0SEND_F0"


def test_a_peer_that_never_answers_is_named():
    found = deadlock({0: [Action(0, "F", 0), Action(0, "SEND_F", 0, 1)], 1: [Action(1, "F", 9)]})
    assert found == ["rank 0 stands at 0SEND_F0, until rank 1 comes to 1RECV_F0"]


@pytest.mark.parametrize("change", [{"microbatch": 7}, {"stage": 0}, {"covers": 2}])
def test_a_receive_must_match_its_send(change):
    from dataclasses import replace

    receive = Action(1, "RECV_F", 0, 0)
    send = [Action(0, "SEND_F", 0, 1)]
    assert deadlock({0: send, 1: [receive]}) == []
    assert len(deadlock({0: send, 1: [replace(receive, **change)]})) == 2


def test_swapping_two_operations_of_a_lowered_program_is_found():
    rng = random.Random(3)
    caught = 0
    for _ in range(40):
        timeline = simulate(one_f_one_b(balanced(4, 2, 3, 1, homes=looped(2, 2)), 6))
        ranks = lower(timeline.program, timeline.start_ns)
        rank = rng.randrange(2)
        exchanges = [i for i, op in enumerate(ranks[rank]) if op.peer is not None]
        i, j = rng.sample(exchanges, 2)
        ranks[rank][i], ranks[rank][j] = ranks[rank][j], ranks[rank][i]
        found = deadlock(ranks)
        caught += bool(found)
        assert all("stands at" in sentence for sentence in found)
    assert caught == 40


def test_every_plan_is_proved():
    rng = random.Random(4)
    for _ in range(80):
        assert plan_deadlock(random_plan(rng)) == []


@pytest.mark.parametrize("late", [0, 1])
def test_an_order_that_is_wrong_only_once_the_pipeline_is_full_is_found(monkeypatch, late):
    """The proof of a plan unrolls the fill and two rounds more: microbatches ``fill`` and ``fill`` + 1 are in it."""
    rng = random.Random(6)
    plan = random_plan(rng)
    while len({stage.devices for stage in plan.allocation.stages}) < 3 or any(
        stage.replicas > 1 for stage in plan.allocation.stages
    ):
        plan = random_plan(rng)
    graph = graph_of(plan)
    fill = most_in_flight(graph, starts_of(plan.pattern), plan.pattern.period_ns)
    assert fill > 2

    def wrong(program, start_ns):
        ranks = lower(program, start_ns)
        for device, operations in ranks.items():
            sends = [op for op in operations if op.kind == "SEND_F" and op.microbatch == fill + late]
            if sends:  # it waits for the peer's receive, which waits for the send behind it
                operations.remove(sends[0])
                operations.append(sends[0])
                return ranks | {device: operations}
        return ranks

    monkeypatch.setattr(proof, "lower", wrong)
    assert plan_deadlock(plan)

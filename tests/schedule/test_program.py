import random
from collections import Counter
from dataclasses import replace

import pytest
from cases.plans import graph_of, random_plan
from oracles.schedules import missing_data, run_ranks

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.deadlock import Action, lower
from pipeplan.schedule.pattern import make_pattern, starts_of
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.program import Lane, Program, Step, device_of, make_program, unroll
from pipeplan.schedule.simulate import simulate


def graph_by_hand(stages, output=1, bandwidth=10**9, duplex=False):
    layers = tuple(Layer(f"{i}", 1, 2, 0, output, 1) for i in range(max(s.stop for s in stages)))
    count = 1 + max(d for s in stages for d in s.devices)
    platform = replace(Platform.flat(count, 10**6, bandwidth), full_duplex=duplex)
    return stage_graph(Chain("c", layers, 0), platform, Policy("stash"), stages)


STRAIGHT = graph_by_hand([Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (2,))], output=0)


def test_unrolling_fills_runs_steadily_and_drains():
    pattern = best_one_f_one_b_star(STRAIGHT)
    assert pattern.period_ns == 3
    assert unroll(STRAIGHT, pattern, 4).text() == (
        "device 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "device 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
        "device 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n"
    )


def test_microbatches_go_round_the_replicas():
    graph = graph_by_hand([Stage(0, 1, (0, 1)), Stage(1, 2, (2,))])
    program = unroll(graph, best_one_f_one_b_star(graph), 5)
    assert [lane.name for lane in program.lanes] == ["device 0", "device 1", "device 2", "link 0 - 2", "link 1 - 2"]
    assert [lane.device for lane in program.lanes] == [0, 1, 2, None, None]
    assert [{step.microbatch for step in lane.steps} for lane in program.lanes] == [
        {0, 2, 4}, {1, 3}, {0, 1, 2, 3, 4}, {0, 2, 4}, {1, 3},
    ]  # fmt: skip
    assert [device_of(graph, 0, m) for m in range(4)] == [0, 1, 0, 1]
    assert [device_of(graph, 1, m) for m in range(2)] == [2, 2]


def test_lanes_follow_the_times_of_the_pattern():
    for seed in range(120):
        rng = random.Random(seed)
        plan = random_plan(rng)
        graph, starts, period = graph_of(plan), starts_of(plan.pattern), plan.pattern.period_ns
        count = rng.randint(0, 9)
        program = unroll(graph, plan.pattern, count)
        seen = Counter(step for lane in program.lanes for step in lane.steps)
        assert seen == Counter(Step(m, p) for m in range(count) for p in range(len(graph.operations)))
        assert program.microbatches == count
        for lane in program.lanes:
            times = [starts[step.position] + step.microbatch * period for step in lane.steps]
            assert times == sorted(times)
            for step in lane.steps:
                resource = graph.resources[graph.operations[step.position].resource]
                if lane.device is None:
                    one, other = (end[step.microbatch % len(end)] for end in resource.ends)
                    assert lane.name == f"link {one} -{'>' * ('>' in resource.name)} {other}"
                else:
                    assert lane.device == resource.devices[step.microbatch % len(resource.devices)]
        in_use = {d for stage in plan.allocation.stages for d in stage.devices}
        assert [lane.device for lane in program.lanes if lane.device is not None] == sorted(in_use)


def test_forwards_that_take_no_time_run_first():
    layers = (Layer("a", 0, 2, 0, 0, 1), Layer("b", 2, 0, 0, 0, 1))
    stages = [Stage(0, 1, (0,)), Stage(1, 2, (1,))]
    graph = stage_graph(Chain("c", layers, 0), Platform.flat(2, 100), Policy("stash"), stages)
    program = unroll(graph, make_pattern(graph, [0, 0, 2, 2], 2), 3)
    assert program.text() == "device 0: 0F0 0F1 0B0 0F2 0B1 0B2\ndevice 1: 1F0 1B0 1F1 1B1 1F2 1B2\n"
    assert simulate(program).makespan_ns == 8


def test_names():
    program = unroll(STRAIGHT, best_one_f_one_b_star(STRAIGHT), 1)
    assert [program.name(step) for step in program.lanes[1].steps] == ["1F0", "1B0"]
    assert program.position["B", 1] == 4
    assert program.release == (5, 4, 3)


def test_make_program_puts_devices_first_and_in_order():
    graph = graph_by_hand([Stage(0, 1, (2,)), Stage(1, 2, (0,))])
    program = make_program(graph, 0, {(0, 0): [], (1, 0): [], (2, 0): []})
    assert [(lane.name, lane.device) for lane in program.lanes] == [
        ("device 0", 0),
        ("device 2", 2),
        ("link 2 - 0", None),
    ]
    assert program == Program(
        graph, 0, (Lane("device 0", 0, ()), Lane("device 2", 2, ()), Lane("link 2 - 0", None, ()))
    )


# --- sends and receives ----------------------------------------------------------------------------------------------


def lowered(graph, program):
    return lower(program, simulate(program).start_ns)


def test_sends_and_receives_of_two_stages():
    graph = graph_by_hand([Stage(0, 1, (0,)), Stage(1, 2, (1,))])
    ranks = lowered(graph, unroll(graph, best_one_f_one_b_star(graph), 1))
    assert ranks == {
        0: [Action(0, "F", 0), Action(0, "SEND_F", 0, 1), Action(0, "RECV_B", 0, 1), Action(0, "B", 0)],
        1: [Action(1, "RECV_F", 0, 0), Action(1, "F", 0), Action(1, "B", 0), Action(1, "SEND_B", 0, 0)],
    }


def test_a_cut_without_bytes_still_orders_its_two_sides():
    graph = graph_by_hand([Stage(0, 1, (0,)), Stage(1, 2, (1,))], output=0)
    assert len(graph.operations) == 4
    kinds = [op.kind for op in lowered(graph, unroll(graph, best_one_f_one_b_star(graph), 1))[1]]
    assert kinds == ["RECV_F", "F", "B", "SEND_B"]


def test_stages_on_one_device_exchange_nothing():
    graph = graph_by_hand([Stage(0, 1, (0,)), Stage(1, 2, (0,)), Stage(2, 3, (1,))], output=0)
    program = unroll(graph, make_pattern(graph, [0, 1, 2, 3, 5, 7], 20), 2)
    kinds = Counter(op.kind for op in lowered(graph, program)[0])
    assert kinds == {"F": 4, "B": 4, "SEND_F": 2, "RECV_B": 2}


def judge(graph, program, ranks):
    """Every list runs to its end under rendezvous, each operation once on its device, with its data there."""
    ran, stuck = run_ranks(ranks)
    assert stuck is None
    assert sum(len(ops) for ops in ranks.values()) == len(ran)
    assert missing_data(ran, len(graph.stages)) is None
    computed = Counter((op.kind, op.stage, op.microbatch, rank) for rank, op in ran if op.peer is None)
    assert computed == Counter(
        (kind, s, m, device_of(graph, s, m))
        for kind in "FB"
        for s in range(len(graph.stages))
        for m in range(program.microbatches)
    )
    crossings = sum(graph.stages[s].resource != graph.stages[s + 1].resource for s in range(len(graph.stages) - 1))
    sends = Counter(op.kind for _, op in ran if op.peer is not None)
    expected = crossings * program.microbatches
    assert all(sends[kind] == expected for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"))
    for _, op in ran:
        assert op.peer is None or op.peer in ranks


def test_random_plans_never_deadlock_under_rendezvous():
    exchanged = 0
    for seed in range(300):
        rng = random.Random(seed)
        plan = random_plan(rng)
        graph = graph_of(plan)
        program = unroll(graph, plan.pattern, rng.randint(1, 8))
        ranks = lowered(graph, program)
        judge(graph, program, ranks)
        exchanged += any(op.peer is not None for ops in ranks.values() for op in ops)
        # compute stays in the order of the lanes
        for lane in program.lanes:
            if lane.device is not None:
                kept = [(op.kind, op.stage, op.microbatch) for op in ranks[lane.device] if op.peer is None]
                works = [(graph.operations[step.position], step.microbatch) for step in lane.steps]
                assert kept == [(work.kind, work.stage, m) for work, m in works]
    assert exchanged > 120


def test_plans_whose_layers_take_no_time_here_and_there_don_t_deadlock():
    judged = 0
    for seed in range(200):
        rng = random.Random(seed)
        plan = random_plan(rng, weights=("stash", "latest"))
        layers = tuple(replace(x, **{rng.choice(("forward_ns", "backward_ns")): 0}) for x in plan.chain.layers)
        plan = replace(plan, chain=replace(plan.chain, layers=layers))
        graph = graph_of(plan)
        if any(stage.total_ns == 0 for stage in graph.stages):
            continue
        program = unroll(graph, make_pattern(graph, starts_of(plan.pattern), plan.pattern.period_ns), rng.randint(1, 6))
        judge(graph, program, lowered(graph, program))
        judged += 1
    assert judged > 50


def test_any_order_that_runs_can_be_lowered():
    """Programs that no pattern gives: all forwards first (GPipe), and a random order that respects the path."""
    for seed in range(80):
        rng = random.Random(seed)
        plan = random_plan(rng, shared=seed % 2 > 0)
        graph, count = graph_of(plan), rng.randint(1, 5)
        half = len(graph.operations) // 2
        steps = [Step(m, p) for m in range(count) for p in range(len(graph.operations))]
        if seed % 4 < 2 or any(graph.sync_periods_ns):  # all-reduces follow the order of the microbatches
            steps.sort(key=lambda step: (step.position >= half, step))
        else:
            left = dict.fromkeys(range(count), 0)
            steps = []
            while left:
                m = rng.choice(list(left))
                steps.append(Step(m, left[m]))
                left[m] += 1
                if left[m] == len(graph.operations):
                    del left[m]
        orders = {(r, k): [] for r, resource in enumerate(graph.resources) for k in range(resource.replicas)}
        for step in steps:
            resource = graph.operations[step.position].resource
            orders[resource, step.microbatch % graph.resources[resource].replicas].append(step)
        program = make_program(graph, count, orders)
        judge(graph, program, lowered(graph, program))


def test_the_interpreter_sees_a_deadlock():
    """The judge can say no: two ranks that both send first, and a receive that nobody sends."""
    ran, stuck = run_ranks({0: [Action(0, "SEND_F", 0, 1)], 1: [Action(1, "SEND_B", 0, 0)]})
    assert ran == []
    assert "SEND_F" in stuck
    assert run_ranks({0: [Action(0, "RECV_B", 0, 1)], 1: []})[1] is not None
    ran, stuck = run_ranks({0: [Action(0, "F", 0), Action(0, "SEND_F", 0, 1)], 1: [Action(1, "RECV_F", 0, 0)]})
    assert stuck is None
    assert missing_data(ran, 2) is None
    assert missing_data([(0, Action(0, "B", 0))], 1) is not None
    assert missing_data([(1, Action(1, "F", 0))], 2) is not None


@pytest.mark.parametrize("duplex", [False, True])
def test_exchanges_follow_the_order_of_the_link(duplex):
    graph = graph_by_hand([Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (0,))], duplex=duplex)
    program = make_program(graph, 3, {})
    timeline = simulate(program)
    judge(graph, timeline.program, lower(timeline.program, timeline.start_ns))

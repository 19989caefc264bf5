import random
from dataclasses import replace
from itertools import pairwise

import pytest
from cases.plans import graph_of, greedy_pattern, random_plan
from oracles.schedules import least_starts

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import PipeplanError
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.pattern import make_pattern, resource_use, starts_of
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from pipeplan.schedule.periodic.retime import order_of, retime
from pipeplan.schedule.program import Step, make_program, unroll
from pipeplan.schedule.programs.deciding import message_driven
from pipeplan.schedule.programs.one_f_one_b import gpipe
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import (
    Timeline,
    activation_changes,
    activation_steps,
    flush_makespan_ns,
    in_flight,
    lane_use,
)


def straight(stages, f=1, b=2, transfer=0, *, replicas=1, weights=0, policy=None):
    """Return the graph of equal stages on a device each, or of one stage on ``replicas`` devices."""
    layers = tuple(Layer(f"{i}", f, b, weights, transfer, 1) for i in range(stages))
    homes = [tuple(range(i * replicas, (i + 1) * replicas)) for i in range(stages)]
    platform = Platform.flat(stages * replicas, 10**6, 10**9)
    parts = [Stage(i, i + 1, home) for i, home in enumerate(homes)]
    return stage_graph(Chain("straight", layers, 0), platform, policy or Policy("stash"), parts)


def run(graph, microbatches, period=None):
    pattern = best_one_f_one_b_star(graph)
    return simulate(unroll(graph, pattern, microbatches))


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 20])
def test_equal_stages_fill_and_drain(stages, microbatches):
    f, b = 3, 5
    timeline = run(straight(stages, f, b), microbatches)
    assert timeline.makespan_ns == (microbatches + stages - 1) * (f + b)
    assert timeline.fill_ns == stages * (f + b)
    for lane in range(stages):
        assert timeline.busy_ns(lane) == microbatches * (f + b)
    # the first device works from the first moment to the last
    assert timeline.bubble(0) == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert timeline.longest_stage_bubble() == pytest.approx(timeline.bubble(0))


def test_transfers_lengthen_fill_and_drain_but_not_the_period():
    f, b, c, stages, count = 4, 6, 2, 4, 12
    timeline = run(straight(stages, f, b, c), count)
    path = stages * (f + b) + 2 * (stages - 1) * c
    assert timeline.fill_ns >= path
    assert timeline.makespan_ns <= (count - 1) * (f + b) + (2 * stages - 1) * (f + b)
    assert timeline.period_ns(4, 8) == f + b


def test_one_microbatch_takes_the_path():
    for seed in range(50):
        plan = random_plan(random.Random(seed))
        graph = graph_of(plan)
        timeline = simulate(unroll(graph, plan.pattern, 1))
        assert timeline.makespan_ns == timeline.fill_ns == graph.path_ns
        ends = [timeline.end_ns(Step(0, i)) for i in range(len(graph.operations))]
        assert list(timeline.start_ns[0]) == [0, *ends[:-1]]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_replicas_take_turns(replicas):
    timeline = run(straight(1, 3, 4, replicas=replicas), 11)
    assert timeline.makespan_ns == -(-11 // replicas) * 7
    assert [len(lane.steps) for lane in timeline.program.lanes] == [
        2 * len(range(r, 11, replicas)) for r in range(replicas)
    ]


@pytest.mark.parametrize(("senders", "receivers", "forwards"), [
    (2, 1, [7, 9, 12, 14, 17, 19]),
    (2, 3, [7, 7, 9, 9, 11, 11]),
    (1, 2, [7, 9, 12, 14, 17, 19]),
    (3, 3, [7, 7, 7, 12, 12, 12]),
])  # fmt: skip
def test_pairs_of_gpus_send_side_by_side(senders, receivers, forwards):
    """By hand: every sender runs a forward of 2 ns every 2 ns, each then 5 ns on the way, on the link of its pair. The
    six pairs of 2 x 3 carry one microbatch each, so nothing waits; two microbatches of a pair are 5 ns apart."""
    layers = (Layer("a", 2, 2, 0, 5, 1), Layer("b", 2, 2, 0, 0, 1))
    homes = tuple(range(senders)), tuple(range(senders, senders + receivers))
    platform = Platform.flat(senders + receivers, 10**6, 10**9)
    graph = stage_graph(Chain("two", layers, 0), platform, Policy("stash"), [
        Stage(s, s + 1, home) for s, home in enumerate(homes)
    ])  # fmt: skip
    timeline = simulate(gpipe(graph, 6))
    at = graph.position["F", 1]
    assert [timeline.start_ns[m][at] for m in range(6)] == forwards
    links = [lane for lane in timeline.program.lanes if lane.device is None]
    assert sorted(lane.name for lane in links) == sorted({
        f"link {homes[0][m % senders]} - {homes[1][m % receivers]}" for m in range(6)
    })  # fmt: skip


@pytest.mark.parametrize("pipelines", [1, 2, 4, 8, 16])
def test_pipelines_side_by_side_take_as_long_as_one_beside_their_sums(pipelines):
    """Four stages, 64 microbatches for each pipeline, 12 MB a cut: 1.95 s without transfers, 24.6 s for 16 pipelines if
    they shared a link for each cut."""
    layers = tuple(Layer(f"{i}", 9_700_000, 19_400_000, 4 * 10**6, 12 * 10**6 * (i < 3), 1) for i in range(4))
    chain, policy = Chain("blocks", layers, 0), Policy("flush", 64 * pipelines)
    stages = [Stage(s, s + 1, tuple(range(s * pipelines, (s + 1) * pipelines))) for s in range(4)]
    graph = stage_graph(chain, Platform.flat(4 * pipelines, 10**9, 10**9), policy, stages)
    timeline = simulate(message_driven(graph, 64 * pipelines))
    work = (64 + 4 - 1) * 29_100_000  # 1.95 s
    assert work <= timeline.makespan_ns <= 1.05 * work
    alone = simulate(message_driven(stage_graph(chain, Platform.flat(4, 10**9, 10**9), Policy("flush", 64), [
        Stage(s, s + 1, (s,)) for s in range(4)
    ]), 64))  # fmt: skip
    assert timeline.makespan_ns == alone.makespan_ns
    ring = 2 * (pipelines - 1) * 4 * 10**6 // pipelines  # ns, at a byte in each
    assert 0 <= flush_makespan_ns(timeline) - timeline.makespan_ns - ring <= 64 * pipelines


def test_all_reduces_pace_the_forwards():
    # 2(r-1)/r * 60 bytes at 1 byte/ns = 60 ns every 2 microbatches; work alone would take 7/2 ns each
    graph = straight(1, 3, 4, replicas=2, weights=60, policy=Policy("stash", accumulate=1))
    timeline = run(graph, 9)
    assert [timeline.start_ns[m][0] for m in range(9)] == [30 * m if m % 2 == 0 else 30 * (m - 1) for m in range(9)]
    assert timeline.steady_period_ns() == 30


def test_stages_on_the_same_devices_pace_each_other():
    layers = tuple(Layer(f"{i}", 3, 4, 60, 0, 1) for i in range(2))
    graph = stage_graph(
        Chain("c", layers, 0),
        Platform.flat(2, 10**6, 10**9),
        Policy("latest", accumulate=1),
        [Stage(0, 1, (0, 1)), Stage(1, 2, (0, 1))],
    )
    assert graph.period_floor_ns == 60
    pattern = make_pattern(graph, [0, 3, 6, 10], 60)
    timeline = simulate(unroll(graph, pattern, 12))
    assert timeline.steady_period_ns() == 60


def test_utilisation_of_naive_model_parallelism():
    """PipeDream figure 2: one microbatch at a time on four workers keeps each of them busy a quarter of the time."""
    graph = straight(4, 1, 2)
    timeline = simulate(unroll(graph, make_pattern(graph, [0, 1, 2, 3, 4, 6, 8, 10], 12), 5))
    assert timeline.makespan_ns == 5 * 12
    assert all(timeline.busy_ns(lane) / timeline.makespan_ns == 1 / 4 for lane in range(4))


def test_1f1b_staircase():
    graph = straight(3, 1, 1)
    timeline = run(graph, 4)
    rows = [["."] * timeline.makespan_ns for _ in range(3)]
    for row, lane in zip(rows, timeline.program.lanes, strict=True):
        for step in lane.steps:
            kind = graph.operations[step.position].kind
            row[timeline.begin_ns(step)] = str(step.microbatch) if kind == "F" else "abcd"[step.microbatch]
    assert ["".join(row) for row in rows] == ["012..a3b.c.d", ".01.a2b3c.d.", "..0a1b2c3d.."]


# --- random plans ----------------------------------------------------------------------------------------------------


def predecessors(program):
    """Each step with what it waits for and how long after its start, from the definition of a program."""
    graph, works = program.graph, program.operations
    waits = {step: [] for lane in program.lanes for step in lane.steps}
    for step in waits:
        if step.position:
            before = Step(step.microbatch, step.position - 1)
            waits[step].append((before, works[before.position].duration_ns))
    for lane in program.lanes:
        for one, other in pairwise(lane.steps):
            waits[other].append((one, works[one.position].duration_ns))
    for s, stage in enumerate(graph.stages):
        load = sum(x.sync_period_ns for x in graph.stages if x.resource == stage.resource) * stage.update_interval
        position = program.position["F", s]
        for m in range(stage.update_interval, program.microbatches):
            if load:
                waits[Step(m, position)].append((Step(m - stage.update_interval, position), load))
    return waits


def test_every_step_starts_as_soon_as_it_can():
    """Against a fixed point computed by sweeping; a pattern's own times are never earlier."""
    synced = 0
    for seed in range(120):
        rng = random.Random(seed)
        plan = random_plan(rng)
        graph = graph_of(plan)
        timeline = simulate(unroll(graph, plan.pattern, rng.randint(1, 9)))
        truth = least_starts(predecessors(timeline.program))
        assert {step: timeline.begin_ns(step) for step in truth} == truth
        for m, row in enumerate(timeline.start_ns):
            for start, planned in zip(row, starts_of(plan.pattern), strict=True):
                assert start <= planned + m * plan.pattern.period_ns
        synced += any(graph.sync_periods_ns)
    assert synced > 20


def test_steps_of_one_lane_never_overlap_and_none_is_missing():
    for seed in range(80):
        rng = random.Random(seed)
        plan = random_plan(rng)
        graph, count = graph_of(plan), rng.randint(0, 8)
        timeline = simulate(unroll(graph, plan.pattern, count))
        for lane in timeline.program.lanes:
            for one, other in pairwise(lane.steps):
                assert timeline.end_ns(one) <= timeline.begin_ns(other)
        ran = [step for lane in timeline.program.lanes for step in lane.steps]
        assert sorted(ran) == [Step(m, p) for m in range(count) for p in range(len(graph.operations))]
        assert timeline.makespan_ns == max((timeline.end_ns(step) for step in ran), default=0)


def test_peaks_of_the_simulation_are_the_predicted_ones():
    """After the fill every device reaches exactly what the circular computation says, and never more."""
    kinds = {"replicas": 0, "recomputed": 0, "shared": 0, "synchronised": 0}
    for seed in range(120):
        rng = random.Random(seed)
        plan = random_plan(rng)
        graph, starts, period = graph_of(plan), starts_of(plan.pattern), plan.pattern.period_ns
        depth = -(-max(op.start_ns + op.duration_ns for op in plan.pattern.operations) // period)
        rounds = max(stage.update_interval for stage in graph.stages) + max(r.replicas for r in graph.resources)
        timeline = simulate(unroll(graph, plan.pattern, 2 * depth + 2 * rounds))
        short = simulate(unroll(graph, plan.pattern, rng.randint(1, depth)))
        for lane, row in enumerate(timeline.program.lanes):
            if row.device is None:
                continue
            index = next(i for i, r in enumerate(graph.resources) if not r.is_link and row.device in r.devices)
            use = resource_use(graph, starts, period, index)
            stages = graph.stages_on(index)
            assert lane_use(timeline, lane).activation_bytes == use.activation_bytes
            assert tuple(in_flight(timeline, lane)[s] for s in stages) == use.in_flight
            assert lane_use(timeline, lane).peak_bytes == use.peak_bytes
            assert max(held for _, held in activation_steps(timeline, lane)) == use.activation_bytes
            assert lane_use(short, lane).peak_bytes <= use.peak_bytes
            kinds["replicas"] += len(graph.resources[index].devices) > 1
            kinds["recomputed"] += any(graph.stages[s].peak_bytes > graph.stages[s].kept_bytes for s in stages)
            kinds["shared"] += len(stages) > 1
        kinds["synchronised"] += graph.period_floor_ns == max(graph.sync_periods_ns)
    assert min(kinds.values()) > 2, kinds


def test_all_memory_is_given_back():
    for seed in range(60):
        plan = random_plan(random.Random(seed))
        timeline = simulate(unroll(graph_of(plan), plan.pattern, 7))
        for lane in range(len(timeline.program.lanes)):
            assert sum(change for _, change in activation_changes(timeline, lane)) == 0
            assert list(activation_steps(timeline, lane))[-1][1] == 0


def test_the_steady_period_is_the_patterns_up_to_the_ceiling():
    """The best period T is the ceiling of what its order can do: the simulation ends between T - 1 and T."""
    exact = below = 0
    for seed in range(80):
        rng = random.Random(seed)
        plan = random_plan(rng, shared=False)
        graph = graph_of(plan)
        pattern = best_one_f_one_b_star(graph)
        count = 240
        timeline = simulate(unroll(graph, pattern, count))
        steady = timeline.steady_period_ns()
        # what remains of the fill is spread over the window of half the run
        slack = 2 * (starts_of(pattern)[-1] + graph.operations[-1].duration_ns + pattern.period_ns) / (count / 2)
        assert pattern.period_ns - 1 - slack <= steady <= pattern.period_ns + slack
        exact += steady == pattern.period_ns
        below += steady < pattern.period_ns
    assert exact > 40
    assert below > 1


def test_the_order_alone_decides_the_steady_period():
    """Any pattern runs at the rate of its order's smallest period, however loose its own was."""
    shared = 0
    for seed in range(50):
        rng = random.Random(seed)
        plan = random_plan(rng, weights=("stash", "latest"), shared=True)
        graph = graph_of(plan)
        loose = greedy_pattern(rng, graph, plan.pattern.period_ns + rng.randint(0, 9))
        if loose is None:
            continue
        tight = retime(graph, order_of(graph, starts_of(loose), loose.period_ns))
        assert tight.period_ns <= loose.period_ns
        count = 240
        timeline = simulate(unroll(graph, loose, count))
        slack = 2 * (starts_of(loose)[-1] + graph.operations[-1].duration_ns + loose.period_ns) / (count / 2)
        assert tight.period_ns - 1 - slack <= timeline.steady_period_ns() <= tight.period_ns + slack
        shared += not graph.contiguous
    assert shared > 20


def test_planned_times_can_be_replaced():
    graph = straight(2, 2, 4)
    program = unroll(graph, best_one_f_one_b_star(graph), 3)
    slow = simulate(program, tuple(tuple(10 for _ in range(4)) for _ in range(3)))
    assert slow.makespan_ns == 80  # (3 + 2 - 1) steps of F and B, each 10 ns
    assert slow.busy_ns(0) == 60
    assert simulate(program, tuple(tuple(op.duration_ns for op in graph.operations) for _ in range(3))).start_ns == (
        simulate(program).start_ns
    )
    uneven = simulate(program, ((2, 2, 4, 4), (2, 2, 4, 50), (2, 2, 4, 4)))
    assert uneven.length_ns(Step(1, 3)) == 50
    assert uneven.makespan_ns == 14 + 50 + 4  # the last backward of device 1 is done long before


# --- edges -----------------------------------------------------------------------------------------------------------


def test_nothing_to_run():
    graph = straight(2)
    timeline = simulate(unroll(graph, best_one_f_one_b_star(graph), 0))
    assert timeline.makespan_ns == 0
    assert timeline.start_ns == ()
    assert timeline.bubble(0) == 0.0
    assert timeline.longest_stage_bubble() == 0.0
    assert timeline.steady_period_ns() is None


def test_too_few_microbatches_have_no_steady_period():
    graph = straight(1, 3, 4, replicas=3)
    pattern = best_one_f_one_b_star(graph)
    assert simulate(unroll(graph, pattern, 5)).steady_period_ns() is None
    assert simulate(unroll(graph, pattern, 6)).steady_period_ns() is not None


def test_a_bad_order_is_a_deadlock_that_names_a_step():
    graph = straight(2)
    steps = [Step(m, p) for m in range(2) for p in (0, 3)]
    backward_first = {(0, 0): [steps[1], steps[0], *steps[2:]], (1, 0): [Step(m, p) for m in range(2) for p in (1, 2)]}
    with pytest.raises(PipeplanError, match=r"deadlocks: 0 of 8 steps can run; 0B0 waits for ever") as caught:
        simulate(make_program(graph, 2, backward_first))
    assert caught.value.exit_code == 1
    # each device waits for the other: 0 wants its first backward, 1 the second forward
    crossed = {
        (0, 0): [Step(0, 0), Step(0, 3), Step(1, 0), Step(1, 3)],
        (1, 0): [Step(1, 1), Step(0, 1), Step(0, 2), Step(1, 2)],
    }
    with pytest.raises(PipeplanError, match=r"deadlocks: 1 of 8 steps can run; 0B0 waits for ever"):
        simulate(make_program(graph, 2, crossed))


def test_a_program_runs_every_step_once():
    graph = straight(2)
    missing = {(0, 0): [Step(0, 0), Step(0, 3)], (1, 0): [Step(0, 1)]}
    with pytest.raises(PipeplanError, match="the program runs 3 steps; its microbatches have 4"):
        simulate(make_program(graph, 1, missing))
    twice = missing | {(1, 0): [Step(0, 1), Step(0, 1)]}
    with pytest.raises(PipeplanError, match="the program runs 1F0 twice"):
        simulate(make_program(graph, 1, twice))


def test_shuffled_orders_either_run_or_are_reported():
    """Reordering a lane at random: simulate and the sweeping oracle agree on what deadlocks."""
    verdicts = {True: 0, False: 0}
    for seed in range(120):
        rng = random.Random(seed)
        plan = random_plan(rng, most_layers=4)
        program = unroll(graph_of(plan), plan.pattern, rng.randint(2, 4))
        lanes = list(program.lanes)
        number = rng.randrange(len(lanes))
        steps = list(lanes[number].steps)
        i, j = sorted(rng.choices(range(len(steps)), k=2)) if steps else (0, 0)
        steps[i:j] = steps[i:j][::-1]
        lanes[number] = replace(lanes[number], steps=tuple(steps))
        shuffled = replace(program, lanes=tuple(lanes))
        try:
            truth = least_starts(predecessors(shuffled))
        except AssertionError:
            with pytest.raises(PipeplanError, match="deadlocks"):
                simulate(shuffled)
            verdicts[False] += 1
        else:
            timeline = simulate(shuffled)
            assert {step: timeline.begin_ns(step) for step in truth} == truth
            verdicts[True] += 1
    assert min(verdicts.values()) > 15


def test_timelines_are_values():
    graph = straight(2)
    assert run(graph, 3) == run(graph, 3)
    assert isinstance(run(graph, 1), Timeline)

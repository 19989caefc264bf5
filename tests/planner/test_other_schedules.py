"""The registry: every schedule on every plan, its stages, its memory, and three views that agree."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from cases.chains import published
from cases.plans import random_plan, straight

from pipeplan.check.evaluate import evaluate
from pipeplan.errors import BadInput, Infeasible
from pipeplan.planner.plan import STATED, make_plan
from pipeplan.planner.simulated.other_schedules import balanced_stages, drains, program_of, schedule_stages
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Platform, Policy, Problem
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.kinds import schedules
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import activation_steps, in_flight, lane_use


@pytest.mark.parametrize(
    ("schedule", "microbatches", "options"),
    [
        ("pattern", 10**6, {}), ("gpipe", 10**6, {}), ("nf1b", 10**6, {"batch": 10**6}), ("nf1b", 64, {"limit": 10**6}),
        ("message-driven", 10**6, {}),
    ],
)  # fmt: skip
def test_endless_runs_are_refused_before_they_begin(schedule, microbatches, options):
    plan = straight()
    with pytest.raises(BadInput, match=r"would take \d+ steps; up to 4194304 are simulated"):
        simulate_plan(plan, microbatches, schedule, options)


@pytest.mark.parametrize("name", schedules())
def test_every_schedule_runs_every_plan_without_deadlock_or_says_why_not(name):
    rng = random.Random(name)
    ran = 0
    for _ in range(6):
        plan = random_plan(rng, weights=("2bw", "flush"))
        try:
            program = program_of(plan, name, 8)
        except BadInput:
            continue
        ran += 1
        timeline = simulate(program)
        assert program_deadlock(program, timeline) == []
        assert sum(len(lane.steps) for lane in timeline.program.lanes) == sum(
            8 // work.covers for work in program.operations
        )
    assert ran >= 2


@pytest.mark.parametrize("name", schedules())
def test_all_memory_is_given_back_and_nothing_is_negative(name):
    timeline = simulate(program_of(straight(checkpoint=[(0, 2), (5, 6)]), name, 12))
    for i, lane in enumerate(timeline.program.lanes):
        if lane.device is not None:
            steps = list(activation_steps(timeline, i))
            assert steps[-1][1] == 0
            assert all(held >= 0 for _, held in steps)
            assert max(held for _, held in steps) == lane_use(timeline, i).activation_bytes > 0


def test_a_drained_schedule_keeps_one_version_of_the_weights_and_pipedream_one_per_microbatch():
    plan = straight()
    sizes = {
        name: lane_use(simulate(program_of(plan, name, 16)), 0).static_bytes
        for name in ("pattern", "1f1b", "pipedream")
    }
    buffers, weights = 2, 16
    assert sizes == {
        "pattern": 3 * weights + buffers,
        "1f1b": 2 * weights + buffers,
        "pipedream": (4 + 1) * weights + buffers,
    }
    assert [drains(plan, name) for name in sizes] == [False, True, False]


def test_chunks_loop_or_turn_back_on_the_plans_devices():
    plan = straight()
    assert [stage.devices[0] for stage in schedule_stages(plan, "interleaved")] == [0, 1, 2, 3] * 2
    assert [stage.devices[0] for stage in schedule_stages(plan, "zbv")] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert schedule_stages(plan, "1f1b") == plan.allocation.stages
    graph = program_of(plan, "interleaved", 8, {"chunks": 1}).graph
    assert len(graph.stages) == 4
    with pytest.raises(BadInput, match="interleaved cuts the model into 12 stages; it has 8 layers"):
        program_of(plan, "interleaved", 8, {"chunks": 3})


def test_stages_cut_anew_recompute_what_the_plan_recomputes():
    stages = balanced_stages(straight(checkpoint=[(0, 2), (5, 6)]), [(d,) for d in [0, 1, 2, 3] * 2], "interleaved")
    assert [stage.checkpoint for stage in stages] == [((0, 1),), ((1, 2),), (), (), (), ((5, 6),), (), ()]


@pytest.mark.parametrize(
    ("replicas", "schedule", "groups"),
    [
        ("2,2", "zb1p", [(0, 1), (2, 3)]), ("2,2", "interleaved", [(0, 1), (2, 3)] * 2),
        ("2,2", "zbv", [(0, 1), (2, 3), (2, 3), (0, 1)]), ("4,2", "zb1p", [(0, 1), (2, 3), (4, 5)]),
        ("4,2", "gpipe", [(0, 1, 2, 3), (4, 5)]), ("2,1", "zb1p", [(0,), (1,), (2,)]),
        ("2,2", "nf1b", [(0,), (1,), (2,), (3,)]),
    ],
)  # fmt: skip
def test_what_needs_other_stages_keeps_as_many_equal_pipelines_as_replicas_make(replicas, schedule, groups):
    problem = Problem(straight().chain, Platform.flat(6, 10**9), Policy("2bw"))
    plan = make_plan(problem, STATED, {"split": "4,4", "replicas": replicas}).plan
    run = simulate_plan(plan, 12, schedule)
    assert [run.timeline.program.graph.resources[x.resource].devices for x in run.timeline.program.graph.stages] == (
        groups
    )


def test_options_reach_the_schedule_that_takes_them():
    plan = straight()
    options = {"depth": 2, "limit": 5, "batch": 3, "weight_keeps": Fraction(1, 3), "chunks": None}
    assert max(in_flight(simulate(program_of(plan, "pipedream", 12, options)), 0).values()) == 2
    assert program_of(plan, "message-driven", 12, options).limit == 5
    assert program_of(plan, "nf1b", 12, options).batch == 3
    assert program_of(plan, "zb1p", 12, options).weight_keeps == Fraction(1, 3)
    assert program_of(plan, "gpipe", 12, options).limit is None


def test_a_split_backward_is_as_long_as_a_whole_one():
    graph = program_of(straight(), "1f1b", 4).graph
    split = program_of(straight(), "zb1p", 4)
    for s, stage in enumerate(graph.stages):
        parts = [split.operations[split.position[kind, s]].duration_ns for kind in ("B", "W")]
        assert sum(parts) == stage.backward_ns == 8
        assert parts == [4, 4]  # nothing measured: half of it


@pytest.mark.parametrize("name", ["densenet121", "gnmt"])
def test_three_views_of_memory_agree_on_published_profiles(name):
    """The circular peak of the pattern, a sweep over its unrolled times, and the simulated program."""
    plans = 0
    for memory, replicas, checkpointing in ((16, True, "stages"), (16, False, "none"), (5, False, "stages")):
        problem = Problem(published(name), Platform.flat(4, memory * 10**9), Policy("2bw"), replicas, checkpointing)
        try:
            plan = make_plan(problem, "contiguous").plan
        except Infeasible:
            continue
        plans += 1
        circular = evaluate(plan)
        timeline = simulate(program_of(plan, "pattern", 6 * circular.most_in_flight))
        for i, lane in enumerate(timeline.program.lanes):
            if lane.device is not None and lane.steps:
                peak = circular.devices[lane.device].peak_bytes
                assert lane_use(timeline, i).peak_bytes == peak
                assert swept_peak(plan, circular, lane.device) == peak
    assert plans


def swept_peak(plan, circular, device):
    """The most bytes at any start of the unrolled pattern; intervals straight from the definition."""
    graph, pattern = circular.graph, plan.pattern
    count = 3 * circular.most_in_flight
    intervals = []
    for op in pattern.operations:
        stage = graph.stages[op.stage]
        devices = graph.resources[stage.resource].devices
        if device not in devices or op.kind not in ("F", "B"):
            continue
        for m in range(devices.index(device), count, len(devices)):
            at = m * pattern.period_ns
            if op.kind == "F":
                back = next(o for o in pattern.operations if (o.kind, o.stage) == ("B", op.stage))
                intervals.append((op.start_ns + at, back.start_ns + back.duration_ns + at, stage.kept_bytes))
            else:
                extra = stage.peak_bytes - stage.kept_bytes
                intervals.append((op.start_ns + at, op.start_ns + op.duration_ns + at, extra))
    starts = [start for start, _, _ in intervals]
    activations = max(sum(size for begin, end, size in intervals if begin <= t < end) for t in starts)
    use = circular.devices[device]
    return use.weights_bytes + use.buffer_bytes + activations

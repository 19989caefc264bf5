"""Chunks round and round: staircases, closed forms, memory, uneven groups; and pipelines side by side."""

from __future__ import annotations

import pytest
from cases.schedules import balanced, held, looped, picture, staircase, vee

from pipeplan.check.shapes import held_at_most, in_flight
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.programs.controlled import v_min
from pipeplan.schedule.programs.loops import breadth_first, interleaved, interleaved_zero_bubble
from pipeplan.schedule.programs.vees import dualpipev, zbv
from pipeplan.schedule.programs.zero_bubble import zb1p, zb2p
from pipeplan.schedule.simulate import simulate


def test_staircase():
    graph = balanced(4, 1, 1, homes=looped(2, 2))
    assert picture(simulate(interleaved(graph, 4))) == staircase("""
        F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
        .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3
    """)


def test_published_value_with_unit_times():
    graph = balanced(16, 1, 2, homes=looped(8, 2))  # half of F = 2, B + W = 4
    assert simulate(interleaved(graph, 24)).makespan_ns == 2 * 82.5


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_closed_form_and_no_deadlock_for_any_number_of_microbatches(devices, chunks):
    graph = balanced(devices * chunks, 2, 3, homes=looped(devices, chunks))
    for microbatches in range(1, 4 * devices + 2):
        program = interleaved(graph, microbatches)
        makespan = simulate(program).makespan_ns
        if microbatches % devices == 0:
            assert makespan == (chunks * microbatches + devices - 1) * 5
        assert makespan >= (chunks * microbatches + devices - 1) * 5
        assert program_deadlock(program) == []


@pytest.mark.parametrize("microbatches", [1, 7, 8])
@pytest.mark.parametrize(
    ("build", "homes"),
    [
        (interleaved, looped(2, 2)), (zb1p, [0, 1, 2]), (zb2p, [0, 1, 2]), (zbv, vee(2)), (v_min, vee(2)),
        (interleaved_zero_bubble, looped(2, 2)), (breadth_first, looped(2, 2)), (dualpipev, vee(2)),
    ],
)  # fmt: skip
def test_replicas_are_pipelines_side_by_side_that_take_microbatches_in_turn(build, homes, microbatches):
    """Each is a run of its own share."""
    together = build(balanced(len(homes), 2, 4, 1, weight_part=2, homes=homes, pipelines=2), microbatches)
    timeline = simulate(together)
    assert program_deadlock(together, timeline) == []
    for pipeline, share in enumerate(((microbatches + 1) // 2, microbatches // 2)):
        alone = simulate(build(balanced(len(homes), 2, 4, 1, weight_part=2, homes=homes), share))
        for device, lane in enumerate(lane for lane in alone.program.lanes if lane.device is not None):
            mine = timeline.program.lanes[2 * device + pipeline]
            expected = [(alone.begin_ns(x), 2 * x.microbatch + pipeline, x.position) for x in lane.steps]
            assert [(timeline.begin_ns(x), x.microbatch, x.position) for x in mine.steps] == expected


def test_what_devices_hold_is_what_the_run_holds():
    for devices, chunks, microbatches in ((2, 2, 4), (3, 2, 7), (4, 3, 12), (3, 1, 2)):
        timeline = simulate(interleaved(balanced(devices * chunks, 1, 2, homes=looped(devices, chunks)), microbatches))
        lanes = [in_flight(timeline, d) for d in range(devices)]
        counts = [lanes[s % devices][s] for s in range(devices * chunks)]
        assert list(held_at_most("interleaved", devices, chunks, microbatches)) == counts


@pytest.mark.parametrize("homes", [[0, 1, 1, 0], [0, 1, 0]])
def test_other_placements_are_refused(homes):
    graph = balanced(len(homes), 1, 2, homes=homes)
    for build, name in (
        (interleaved, "interleaved 1F1B"),
        (breadth_first, "breadth-first"),
        (interleaved_zero_bubble, "interleaved-zb"),
    ):
        with pytest.raises(BadInput, match=f"{name} puts stage s on GPU s mod p"):
            build(graph, 4)


def test_one_stage_with_replicas_is_enough_to_be_refused():
    chain = Chain("pair", (Layer("l", 1, 2, 0, 0, saved_bytes=1),) * 2, 0)
    graph = stage_graph(chain, Platform.flat(3, 10), Policy("flush", 4), [Stage(0, 1, (0, 1)), Stage(1, 2, (2,))])
    with pytest.raises(BadInput, match="equal pipelines side by side; stage 0 of this plan has 2 GPUs, stage 1 has 1"):
        interleaved(graph, 4)


def test_breadth_first_staircase():
    assert picture(simulate(breadth_first(balanced(4, 1, 1, homes=looped(2, 2)), 3))) == staircase("""
        F0 F1 F2 f0 f1 f2 .  .  b2 b1 b0 B2 B1 B0
        .  F0 F1 F2 f0 f1 f2 b2 b1 b0 B2 B1 B0
    """)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_breadth_first_closed_form_and_every_activation_held(devices, chunks):
    graph = balanced(devices * chunks, 2, 3, homes=looped(devices, chunks))
    for microbatches in range(1, 2 * devices + 2):
        program = breadth_first(graph, microbatches)
        timeline = simulate(program)
        least = (chunks * microbatches + devices - 1) * 5
        assert timeline.makespan_ns == least if microbatches >= devices else timeline.makespan_ns >= least
        assert held(timeline) == [chunks * microbatches] * devices
        assert program_deadlock(program, timeline) == []


def test_the_period_is_that_of_microbatches_as_they_leave():
    timeline = simulate(breadth_first(balanced(2, 2, 3), 8))
    assert (timeline.fill_ns, timeline.makespan_ns) == (10 * 2 + 2 * 3 - 2, 45)
    assert timeline.steady_period_ns() == 3


def test_zero_bubble_staircase():
    graph = balanced(4, 1, 2, weight_part=1, homes=looped(2, 2))
    assert picture(simulate(interleaved_zero_bubble(graph, 4))) == staircase("""
        F0 F1 f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
        .  F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
    """)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_zero_bubble_closed_form_and_no_deadlock_for_any_number_of_microbatches(devices, chunks):
    graph = balanced(devices * chunks, 2, 4, weight_part=2, homes=looped(devices, chunks))
    for microbatches in range(1, 3 * devices + 2):
        program = interleaved_zero_bubble(graph, microbatches)
        timeline = simulate(program)
        least = (3 * chunks * microbatches + devices - 1) * 2
        assert timeline.makespan_ns >= least
        if microbatches % devices == 0:
            assert timeline.makespan_ns == least
            assert max(held(timeline)) == min(chunks * devices, chunks * microbatches)
        assert program_deadlock(program, timeline) == []

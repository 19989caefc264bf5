"""V-Min and V-Half against the figures of the public scheduler, and what they hold against what they promise."""

from __future__ import annotations

import pytest
from cases.schedules import balanced, held, picture, staircase, vee

from pipeplan.errors import BadInput
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.programs.controlled import v_half, v_min
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import longest_span_ns

# (devices, microbatches): longest spans of V-Min and V-Half with (F, B, W) = (1, 1, 1), then (20, 24, 16)
PUBLISHED = {
    (4, 8): (59, 53, 1376, 1116), (4, 12): (83, 77, 1952, 1596), (6, 18): (125, 119, 2944, 2468),
    (8, 16): (123, 113, 2868, 2380), (8, 24): (171, 161, 4020, 3340), (8, 32): (219, 209, 5172, 4300),
    (16, 48): (347, 329, 8192, 6832),
}  # fmt: skip


def most(build, devices):
    """The chunk activations that a device may hold."""
    return {v_min: 2 * ((devices + 4) // 3), v_half: 2 * ((devices + 2) // 2)}[build]


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_spans_within_the_published_memory(size):
    devices, microbatches = size
    spans = []
    for forward, backward, weight in ((1, 2, 1), (20, 40, 16)):
        graph = balanced(2 * devices, forward, backward, weight_part=weight, homes=vee(devices))
        for build in (v_min, v_half):
            timeline = simulate(build(graph, microbatches))
            assert max(held(timeline)) == most(build, devices)
            spans.append(longest_span_ns(timeline))
    assert tuple(spans) == PUBLISHED[size]


def test_staircases():
    assert picture(simulate(v_min(balanced(4, 1, 2, weight_part=1, homes=vee(2)), 4))) == staircase("""
        F0 F1 .  f0 i0 w0 .  I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2 F3 I2 W2 f3 i3 w3 .  I3 W3
        .  F0 f0 .  .  i0 I0 F1 f1 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 F3 f3 w2 W2 i3 I3 w3 W3
    """)
    assert picture(simulate(v_half(balanced(6, 1, 2, weight_part=1, homes=vee(3)), 4))) == staircase("""
        F0 F1 F2 .  .  f0 i0 w0 f1 i1 w1 .  I0 W0 F3 f2 i2 w2 I1 W1 .  f3 i3 I2 w3 W2 .  I3 W3
        .  F0 F1 .  f0 .  f1 i0 w0 F2 .  I0 i1 w1 f2 W0 F3 I1 i2 w2 f3 W1 I2 i3 w3 W2 I3 W3
        .  .  F0 f0 F1 f1 .  .  i0 w0 I0 W0 F2 f2 i1 I1 w1 F3 W1 f3 i2 I2 w2 W2 i3 I3 w3 W3
    """)


@pytest.mark.parametrize("build", [v_min, v_half])
def test_no_deadlock_and_no_more_memory_for_any_number_of_microbatches_and_any_durations(build):
    for devices in range(1, 6):
        graph = balanced(2 * devices, 3, 7, 1, weight_part=2, homes=vee(devices))
        for microbatches in (1, 2, 3, 5, 2 * devices + 1):
            program = build(graph, microbatches)
            timeline = simulate(program)
            assert program_deadlock(program, timeline) == []
            assert max(held(timeline)) <= most(build, devices)
            assert sum(len(lane.steps) for lane in program.lanes) == microbatches * len(program.operations)


def test_other_placements_are_refused():
    with pytest.raises(BadInput, match="v-half puts stages d and 2p - 1 - d on GPU d"):
        v_half(balanced(4, 1, 2, homes=[0, 1, 0, 1]), 4)

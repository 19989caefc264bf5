"""DualPipeV: what runs together starts and ends together, the published bubble, memory, and durations that differ."""

from __future__ import annotations

from fractions import Fraction

import pytest
from cases.schedules import balanced, held, picture, staircase, vee

from pipeplan.errors import BadInput
from pipeplan.planner.simulated.simulation import jittered_ns
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.program import Step
from pipeplan.schedule.programs.vees import dualpipev
from pipeplan.schedule.simulate import simulate


def test_staircase():
    assert picture(simulate(dualpipev(balanced(4, 1, 2, weight_part=1, homes=vee(2)), 5))) == staircase("""
        F0 F1 F2 f0 i0 w0 f1 F3 i1 w1 .  f2 I0 W0 F4 i2 w2 f3 I1 W1 i3 w3 .  f4 I2 W2 i4 w4 I3 W3 I4 W4
        .  F0 f0 F1 f1 F2 i0 w0 f2 I0 W0 F3 i1 w1 f3 I1 W1 F4 i2 w2 f4 I2 W2 i3 w3 I3 W3 .  i4 I4 w4 W4
    """)


def test_text_is_torchs():
    text = dualpipev(balanced(2, 1, 2, weight_part=1, homes=vee(1)), 2).text()
    assert text == "device 0: 0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1\n"


@pytest.mark.parametrize("overlap", [Fraction(0), Fraction(1, 2), Fraction(1)])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_published_bubble_and_memory(devices, overlap):
    """On the last device, whose idle time is (p - 1)(F&B + B - 3W)."""
    graph = balanced(2 * devices, 4, 8, weight_part=4, homes=vee(devices))
    for microbatches in (2 * devices, 3 * devices + 1):
        timeline = simulate(dualpipev(graph, microbatches, overlap))
        bubble = (devices - 1) * ((12 - 4 * overlap) + 8 - 12)
        assert timeline.makespan_ns - timeline.busy_ns(devices - 1) == bubble
        assert held(timeline) == [2 * devices + 1] * devices


def test_what_runs_together_starts_when_all_inputs_are_there_and_ends_as_one():
    program = dualpipev(balanced(6, 5, 9, 2, weight_part=3, homes=vee(3)), 7, Fraction(1, 3))
    planned = jittered_ns(program, 0.2, seed=1)
    timeline = simulate(program, planned)
    transfers = {"SEND_F", "SEND_B"}
    sizes = set()
    for group in program.fused:
        sizes.add(len(group))
        starts, ends = [timeline.begin_ns(step) for step in group], [timeline.end_ns(step) for step in group]
        assert starts[1:] == ends[:-1]  # drawn one after the other
        lengths = [planned[step.microbatch][step.position] for step in group]
        hidden = min(lengths[0], sum(lengths[1:])) // 3 if len(group) == 3 else 0
        assert ends[-1] - starts[0] == sum(lengths) - hidden
        for step in group:
            before, after = Step(step.microbatch, step.position - 1), Step(step.microbatch, step.position + 1)
            if program.operations[step.position].kind == "W":
                continue
            if step.position and program.operations[before.position].kind in transfers:
                assert timeline.end_ns(before) <= starts[0]
            if program.operations[after.position].kind in transfers:
                assert timeline.begin_ns(after) >= ends[-1]
    assert sizes == {2, 3}


def test_no_deadlock_for_any_number_of_microbatches():
    for devices in range(1, 5):
        graph = balanced(2 * devices, 3, 7, 1, weight_part=2, homes=vee(devices))
        for microbatches in range(1, 2 * devices + 3):
            program = dualpipev(graph, microbatches)
            timeline = simulate(program)
            assert program_deadlock(program, timeline) == []
            assert max(held(timeline)) <= 2 * devices + 1


def test_other_placements_are_refused():
    with pytest.raises(BadInput, match="dualpipev puts stages d and 2p - 1 - d on GPU d"):
        dualpipev(balanced(4, 1, 2, homes=[0, 1, 0, 1]), 4)

"""Interleaved zero bubble: staircase, closed form, memory."""

from __future__ import annotations

import pytest
from cases.schedules import balanced, held, looped, picture, staircase

from pipeplan.errors import BadInput
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.programs.interleaved_zero_bubble import interleaved_zero_bubble
from pipeplan.schedule.simulate import simulate


def test_staircase():
    graph = balanced(4, 1, 2, weight_part=1, homes=looped(2, 2))
    assert picture(simulate(interleaved_zero_bubble(graph, 4))) == staircase("""
        F0 F1 f0 f1 .  i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
        .  F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
    """)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_closed_form_and_no_deadlock_for_any_number_of_microbatches(devices, chunks):
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


def test_other_placements_are_refused():
    with pytest.raises(BadInput, match="interleaved-zb puts stage s on GPU s mod p"):
        interleaved_zero_bubble(balanced(4, 1, 2, homes=[0, 1, 1, 0]), 4)

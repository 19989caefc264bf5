"""Breadth-first pipelining: staircase, closed form, memory, and the period of a run whose last comes out first."""

from __future__ import annotations

import pytest
from cases.schedules import balanced, held, looped, picture, staircase

from pipeplan.errors import BadInput
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.programs.breadth_first import breadth_first
from pipeplan.schedule.simulate import simulate


def test_staircase():
    assert picture(simulate(breadth_first(balanced(4, 1, 1, homes=looped(2, 2)), 3))) == staircase("""
        F0 F1 F2 f0 f1 f2 .  .  b2 b1 b0 B2 B1 B0
        .  F0 F1 F2 f0 f1 f2 b2 b1 b0 B2 B1 B0
    """)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_closed_form_and_every_activation_held(devices, chunks):
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


def test_other_placements_are_refused():
    with pytest.raises(BadInput, match="breadth-first puts stage s on GPU s mod p"):
        breadth_first(balanced(4, 1, 1, homes=[0, 1, 1, 0]), 4)

"""Interleaved 1F1B: staircase, closed form, uneven groups."""

from __future__ import annotations

import pytest
from cases.schedules import balanced, looped, picture, staircase

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.interleaved import interleaved
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


@pytest.mark.parametrize("homes", [[0, 1, 1, 0], [0, 1, 0]])
def test_other_placements_are_refused(homes):
    with pytest.raises(BadInput, match="stage s on GPU s mod p"):
        interleaved(balanced(len(homes), 1, 1, homes=homes), 4)


def test_one_stage_with_replicas_is_enough_to_be_refused():
    chain = Chain("pair", (Layer("l", 1, 2, 0, 0, saved_bytes=1),) * 2, 0)
    graph = stage_graph(chain, Platform.flat(3, 10), Policy("flush", 4), [Stage(0, 1, (0, 1)), Stage(1, 2, (2,))])
    with pytest.raises(BadInput, match="gives each stage one GPU"):
        interleaved(graph, 4)

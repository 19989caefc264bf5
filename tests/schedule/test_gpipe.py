"""GPipe: its staircase, its closed form, and any placement."""

from __future__ import annotations

import random

import pytest
from cases.plans import random_plan
from cases.schedules import balanced, held, picture, staircase

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.programs.gpipe import gpipe
from pipeplan.schedule.simulate import simulate


def test_staircase():
    assert picture(simulate(gpipe(balanced(3, 1, 1), 3))) == staircase("""
        F0 F1 F2 .  .  .  .  B0 B1 B2
        .  F0 F1 F2 .  .  B0 B1 B2
        .  .  F0 F1 F2 B0 B1 B2
    """)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("devices", [1, 2, 5, 8])
def test_closed_form(devices, microbatches):
    timeline = simulate(gpipe(balanced(devices, 3, 5), microbatches))
    assert timeline.makespan_ns == (microbatches + devices - 1) * 8
    assert held(timeline) == [microbatches] * devices


def test_runs_any_stages_on_any_devices():
    rng = random.Random(1)
    for _ in range(60):
        plan = random_plan(rng)
        graph = stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)
        assert program_deadlock(gpipe(graph, rng.randint(1, 12))) == []

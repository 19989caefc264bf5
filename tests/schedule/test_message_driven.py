"""Message-driven pipelines against Myelin's closed form and the derived values with transfers."""

from __future__ import annotations

import pytest
from cases.schedules import balanced, held, picture, staircase

from pipeplan.errors import BadInput
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.program import Arrival, Step
from pipeplan.schedule.programs.deciding import message_driven, next_message
from pipeplan.schedule.simulate import simulate


def test_staircase():
    lines = picture(simulate(message_driven(balanced(4, 1, 2), 16)))
    assert [line[:53].rstrip() for line in lines] == staircase("""
        F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 B2 --
        .  F0 F1 F2 F3 .  .  .  B0 -- .  B1 -- F4 B2 -- F5 B3
        .  .  F0 F1 F2 F3 B0 -- .  B1 -- .  B2 -- F4 B3 -- F5
        .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 --
    """)


@pytest.mark.parametrize("microbatches", [4, 9, 16])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_closed_form_without_transfers(devices, microbatches):
    timeline = simulate(message_driven(balanced(devices, 10, 20), microbatches))
    assert timeline.makespan_ns == (microbatches + devices - 1) * 30


@pytest.mark.parametrize("devices", [6, 8, 12])
def test_first_come_first_served_loses_a_little_with_many_devices(devices):
    microbatches = 8 * devices
    timeline = simulate(message_driven(balanced(devices, 10, 20), microbatches))
    assert 1 < timeline.makespan_ns / ((microbatches + devices - 1) * 30) < 1.06


def test_holds_the_limit_on_all_devices_but_the_last():
    assert held(simulate(message_driven(balanced(4, 1, 2), 16))) == [4, 4, 4, 1]


@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize(
    ("transfer", "limit", "makespan"),
    [(0, 4, 57), (0, 7, 57), (0.25, 4, 70.5), (0.25, 7, 58.5), (1, 4, 84), (1, 7, 63)],
)
def test_values_with_transfers(transfer, limit, makespan, duplex):
    graph = balanced(4, 4, 8, int(4 * transfer), duplex=duplex)
    assert simulate(message_driven(graph, 16, limit)).makespan_ns == 4 * makespan


@pytest.mark.parametrize("devices", [4, 8, 16])
def test_a_limit_of_p_is_too_small_with_transfers_and_2p_minus_1_is_enough(devices):
    for transfer in (1, 2, 4):
        graph = balanced(devices, 4, 8, transfer)
        small, default, unlimited = (
            simulate(message_driven(graph, 8 * devices, limit)).makespan_ns for limit in (devices, None, 8 * devices)
        )
        assert 1.1 < small / default < 1.8
        assert default <= 1.05 * unlimited


def test_no_deadlock_when_stages_share_devices():
    for homes in ([0, 1, 0], [0, 1, 1, 0], [0, 1, 2, 0, 1]):
        assert program_deadlock(message_driven(balanced(len(homes), 2, 3, 1, homes=homes), 12)) == []


def test_the_decision():
    decide = next_message(4)
    forward = Arrival(5, Step(3, 4), "F", 2)
    backward = Arrival(5, Step(1, 9), "B", 2)
    late = Arrival(7, Step(0, 9), "B", 2)
    inline = Arrival(6, Step(2, 7), "B", 3)
    assert decide(6, [forward, backward, late]) is backward  # backward first at equal times
    assert decide(6, [forward, late]) is forward  # what hasn't come can't run
    assert decide(9, [forward, late]) is forward  # first come, first served
    assert decide(9, [forward, backward, inline]) is inline  # the last stage's backward follows its forward
    assert decide(4, [forward, backward]) is None


def test_the_limit_is_positive():
    with pytest.raises(BadInput, match="limit: 0 is not positive"):
        message_driven(balanced(2, 1, 1), 4, 0)

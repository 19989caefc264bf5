"""Zero-bubble schedules against the published makespans and bubbles."""

from __future__ import annotations

from fractions import Fraction

import pytest
from cases.schedules import balanced, held, picture, staircase, vee

from pipeplan.errors import BadInput
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.programs import zero_bubble
from pipeplan.schedule.programs.vees import zbv
from pipeplan.schedule.programs.zero_bubble import zb1p, zb2p
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import activation_steps, longest_span_ns

# the 1.5B model of the paper: hidden 2304, 24 heads, sequence 1024; activations needed by B and W per token
FORWARD, INPUT, WEIGHT, TRANSFER = 18522, 18086, 9337, 601
WEIGHT_KEEPS = Fraction(32 * 2304, 34 * 2304 + 5 * 24 * 1024)
CASES = [(4, 8), (8, 24), (8, 64)]


def paper(stages, chunks=1):
    """The paper's stages; with chunks, each has an equal part. Times are doubled to stay whole."""
    return balanced(
        stages * chunks,
        2 * FORWARD // chunks,
        2 * (INPUT + WEIGHT) // chunks,
        2 * TRANSFER,
        weight_part=2 * WEIGHT // chunks,
        homes=vee(stages) if chunks == 2 else None,
        saved=WEIGHT_KEEPS.denominator,
    )


def percent(timeline):
    return round(100 * timeline.longest_stage_bubble(), 2)


def test_zb1p_staircase():
    assert picture(simulate(zb1p(balanced(3, 1, 2, weight_part=1), 4))) == staircase("""
        F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """)


def test_zb2p_staircase_has_no_bubble():
    timeline = simulate(zb2p(balanced(3, 1, 2, weight_part=1), 6))
    assert picture(timeline) == staircase("""
        F0 F1 F2 F3 F4 I0 F5 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
        .  F0 F1 F2 I0 F3 I1 F4 I2 F5 W0 I3 W1 I4 W2 I5 W3 W4 W5
        .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 W0 I5 W1 W2 W3 W4 W5
    """)
    assert timeline.longest_stage_bubble() == 0


@pytest.fixture
def tried(monkeypatch):
    """The (microbatches, shape) of every program that is made of a shape, the last one for the result."""
    made, shaped = [], zero_bubble._shaped

    def recorded(graph, microbatches, shape, weight_keeps):
        made.append((microbatches, shape))
        return shaped(graph, microbatches, shape, weight_keeps)

    monkeypatch.setattr(zero_bubble, "_shaped", recorded)
    return made


@pytest.mark.parametrize(("allowed", "simulated"), [(0, 23), (30, 28)])
def test_zb2p_simulates_its_shapes_on_4p_microbatches_within_a_budget_of_steps(tried, monkeypatch, allowed, simulated):
    """At least 24 shapes are looked at; of those one would hold more than 2p activations, so it isn't simulated."""
    graph, microbatches = balanced(2, 1, 2, weight_part=1), 20
    steps_of_one = 8 * (len(graph.operations) + 2)  # with a weight part for each stage
    monkeypatch.setattr(zero_bubble, "SEARCH_STEPS", allowed * steps_of_one)
    zb2p(graph, microbatches)
    assert tried[-1][0] == microbatches
    assert [count for count, _ in tried[:-1]] == [8] * simulated


def test_zb2p_tries_no_fewer_forwards_ahead_than_1f1b_and_no_weight_part_before_its_backward(tried):
    """And both bounds themselves."""
    zb2p(balanced(3, 1, 4, 7, weight_part=1), 6)  # where the search would go on to less
    zb2p(balanced(3, 2, 6, weight_part=5), 6)
    assert min(ahead for _, (ahead, _, _) in tried) == 10
    assert len({lag for _, (ahead, lag, _) in tried if ahead == 10}) > 1
    assert min(lag for _, (_, lag, _) in tried) == 0


def test_zbv_staircase():
    timeline = simulate(zbv(balanced(4, 1, 2, weight_part=1, homes=vee(2)), 4))
    assert picture(timeline) == staircase("""
        F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 I2 w3 I3 W2 W3
        .  F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3
    """)


def test_published_makespan_with_unit_times():
    assert simulate(zb1p(balanced(8, 1, 2, weight_part=1), 24)).makespan_ns == 79


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_closed_forms_with_equal_parts(devices):
    graph = balanced(devices, 1, 2, weight_part=1)
    for microbatches in (2 * devices, 3 * devices + 1):
        assert simulate(zb1p(graph, microbatches)).makespan_ns == 3 * microbatches + devices - 1
        assert simulate(zb2p(graph, microbatches)).longest_stage_bubble() == 0
        chunks = balanced(2 * devices, 1, 2, weight_part=1, homes=vee(devices))
        assert simulate(zbv(chunks, microbatches)).longest_stage_bubble() == 0


@pytest.mark.parametrize(("case", "bubble"), list(zip(CASES, [19.50, 15.85, 6.60], strict=True)))
def test_zb1p_published_bubbles_within_p_activations(case, bubble):
    stages, microbatches = case
    timeline = simulate(zb1p(paper(stages), microbatches))
    assert percent(timeline) <= bubble
    assert max(held(timeline)) <= stages * WEIGHT_KEEPS.denominator


@pytest.mark.parametrize(("case", "bubble"), list(zip(CASES, [11.57, 4.33, 0.18], strict=True)))
def test_zb2p_published_bubbles_within_2p_activations(case, bubble):
    stages, microbatches = case
    timeline = simulate(zb2p(paper(stages), microbatches, WEIGHT_KEEPS))
    assert percent(timeline) <= bubble
    assert max(held(timeline)) <= 2 * stages * WEIGHT_KEEPS.denominator


def test_zb2p_where_weight_gradients_keep_everything_cannot_reach_the_published_bubble():
    """All W but 2p must run before the last stage's last input part, so stage 0 ends no earlier than this."""
    stages, microbatches = 8, 24
    timeline = simulate(zb2p(paper(stages), microbatches))
    earliest = (
        (stages - 1) * (FORWARD + TRANSFER)
        + microbatches * (FORWARD + INPUT)
        + (microbatches - 2 * stages) * WEIGHT
        + (stages - 1) * (INPUT + TRANSFER)
        + WEIGHT
    )
    least = 1 - microbatches * (FORWARD + INPUT + WEIGHT) / earliest
    assert round(100 * least, 2) == 10.15 == percent(timeline)
    assert max(held(timeline)) <= 2 * stages * WEIGHT_KEEPS.denominator


@pytest.mark.parametrize(("case", "bubble"), list(zip(CASES, [8.25, 7.03, 2.76], strict=True)))
def test_zbv_published_bubbles_within_p_activations(case, bubble):
    stages, microbatches = case
    timeline = simulate(zbv(paper(stages, 2), microbatches))
    assert percent(timeline) <= bubble
    assert max(held(timeline)) <= 2 * stages * WEIGHT_KEEPS.denominator  # of chunks, half an activation each


@pytest.mark.parametrize(("case", "span"), [((4, 12), 1488), ((6, 18), 2240)])
def test_zbv_is_as_short_as_the_best_public_schedule_within_its_memory(case, span):
    devices, microbatches = case
    timeline = simulate(zbv(balanced(2 * devices, 20, 40, weight_part=16, homes=vee(devices)), microbatches))
    assert longest_span_ns(timeline) == span
    assert max(held(timeline)) == 2 * devices


def test_no_deadlock_for_any_number_of_microbatches():
    for devices in range(1, 5):
        straight = balanced(devices, 3, 7, 1, weight_part=2)
        chunks = balanced(2 * devices, 3, 7, 1, weight_part=2, homes=vee(devices))
        for microbatches in (1, 2, 3, 5, 8):
            for program in (zb1p(straight, microbatches), zb2p(straight, microbatches), zbv(chunks, microbatches)):
                assert program_deadlock(program) == []
                assert sum(len(lane.steps) for lane in program.lanes) == microbatches * len(program.operations)


def test_other_placements_are_refused():
    with pytest.raises(BadInput, match=r"zb1p gives each GPU one stage; device 0 has stages \[0, 2\]"):
        zb1p(balanced(3, 1, 2, homes=[0, 1, 0]), 4)
    with pytest.raises(BadInput, match="zbv puts stages d and 2p - 1 - d on GPU d"):
        zbv(balanced(4, 1, 2, homes=[0, 1, 0, 1]), 4)


def test_split_backwards_hold_what_weight_gradients_need():
    graph = balanced(1, 1, 2, weight_part=1, saved=100)
    program = zb1p(graph, 1, Fraction(1, 4))
    timeline = simulate(program)
    assert list(activation_steps(timeline, 0)) == [(0, 100), (2, 25), (3, 0)]
    assert list(activation_steps(simulate(zb1p(graph, 1)), 0)) == [(0, 100), (3, 0)]

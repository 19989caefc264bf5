"""V schedules within a given memory: beside the best public ones, and never above the limit, whatever the durations."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from cases.schedules import balanced, held, picture, staircase, vee

from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.deadlock import program_deadlock
from pipeplan.schedule.memory import most_held
from pipeplan.schedule.programs.v_limit import v_limit
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import longest_span_ns

# 4 devices and 12 microbatches: (limit, longest span, that of the best public search)
EQUAL = [(6, 77, 77)]
UNEQUAL = [(5, 1804, 1828), (8, 1488, 1488)]


@pytest.mark.parametrize(("parts", "limits"), [((1, 1, 1), EQUAL), ((20, 24, 16), UNEQUAL)])
def test_spans_beside_the_best_public_search(parts, limits):
    forward, back, weight = parts
    graph = balanced(8, forward, back + weight, weight_part=weight, homes=vee(4))
    for limit, span, public in limits:
        timeline = simulate(v_limit(graph, 12, limit))
        assert longest_span_ns(timeline) <= span
        assert max(held(timeline)) <= limit
        assert span <= public


def test_staircase():
    assert picture(simulate(v_limit(balanced(4, 1, 2, weight_part=1, homes=vee(2)), 4, 3))) == staircase("""
        F0 F1 .  f0 i0 w0 .  I0 W0 f1 i1 F2 w1 I1 W1 F3 f2 i2 w2 .  I2 W2 f3 i3 w3 .  I3 W3
        .  F0 f0 F1 .  i0 I0 w0 f1 W0 .  i1 I1 F2 w1 f2 W1 F3 i2 I2 w2 f3 W2 .  i3 I3 w3 W3
    """)


@pytest.mark.parametrize("weight_keeps", [Fraction(1), Fraction(1, 3)])
def test_any_durations_stay_within_any_limit_and_come_through(weight_keeps, monkeypatch):
    monkeypatch.setattr("pipeplan.schedule.programs.v_limit.SEARCH_STEPS", 1000)
    rng = random.Random(7)
    for _ in range(12):
        devices, microbatches, limit = rng.randint(1, 4), rng.randint(1, 9), rng.randint(2, 9)
        layers = tuple(
            Layer(
                f"l{i}",
                rng.randint(1, 9),
                20,
                0,
                rng.randint(0, 4),
                saved_bytes=3,
                backward_weight_ns=rng.randint(0, 9),
            )
            for i in range(2 * devices)
        )
        stages = [Stage(i, i + 1, (home,)) for i, home in enumerate(vee(devices))]
        graph = stage_graph(Chain("c", layers, 0), Platform.flat(devices, 10**9, 10**9), Policy("flush"), stages)
        program = v_limit(graph, microbatches, limit, weight_keeps)
        timeline = simulate(program)
        assert program_deadlock(program, timeline) == []
        assert max(held(timeline)) <= 3 * limit
        if weight_keeps == 1:
            assert max(most_held(timeline, lane) for lane in range(devices)) <= limit


def test_what_cannot_be():
    graph = balanced(4, 1, 2, homes=vee(2))
    with pytest.raises(BadInput, match="2 chunk activations, not 1"):
        v_limit(graph, 4, 1)
    with pytest.raises(BadInput, match="v-limit puts stages d and 2p - 1 - d on GPU d"):
        v_limit(balanced(4, 1, 2, homes=[0, 1, 0, 1]), 4)

"""The table of the kinds of schedules: it alone says what a kind means, so a new kind is one row."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import pipeplan
from pipeplan.check.evaluate import evaluate
from pipeplan.check.validate import violations
from pipeplan.errors import BadInput
from pipeplan.plan import Schedule
from pipeplan.planner.plan import make_plan
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.planner.what_if.carry import carried
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.report.gantt import plan_window
from pipeplan.report.tables.plan import print_plan
from pipeplan.report.tables.simulations import print_pattern
from pipeplan.runtime.lowering.dry_run import program_lines
from pipeplan.runtime.lowering.lowered_run import lower_run
from pipeplan.schedule.deadlock import plan_deadlock
from pipeplan.schedule.kinds import KINDS, kinds_for, plan_timeline, too_long
from pipeplan.schedule.programs.one_f_one_b import gpipe
from pipeplan.schedule.registered import Kind, Limit
from pipeplan.schedule.timeline import flush_makespan_ns

FLUSHED = [
    *("flush", "message-driven", "1f1b", "interleaved", "gpipe", "breadth-first"),
    *("zb1p", "zb2p", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipev"),
]
TOY = Kind(
    weights=("flush",),
    refusal="the toy drains its toys; the policy is {weights}",
    build=lambda graph, count, limit: gpipe(graph, count),
    summary="toys",
    source="the attic",
    drains=True,
    options=("limit",),
    limit=Limit("toy", "toys", " per child", lambda graph: (3,)),
    headline=lambda schedule: ("toys", f"{schedule.microbatches} of them"),
)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(KINDS, "toy", TOY)
    layers = tuple(Layer(f"layer{i}", 10 + i, 20 + i, 1000, 100) for i in range(6))
    problem = Problem(Chain("toys", layers, 100), Platform.flat(3, 10**6, 10**9), Policy("flush", accumulate=6))
    return make_plan(problem, "balance", schedule="toy").plan


def test_a_kind_that_is_one_row_is_planned_and_judged(toy):
    assert toy.schedule == Schedule("toy", 6, 3)
    assert toy.pattern is None
    assert violations(toy) == []
    assert violations(replace(toy, schedule=Schedule("toy", 6))) == [
        "schedule.limit is missing; toy needs the toys per child that it admits, at least 1"
    ]
    assert violations(replace(toy, policy=replace(toy.policy, weights="stash")))[0] == (
        "the toy drains its toys; the policy is stash"
    )
    assert violations(replace(toy, schedule=Schedule("toy", 10**6, 3)))[0].startswith("the schedule drains mini-b")
    much = replace(toy, policy=replace(toy.policy, accumulate=10**7), schedule=Schedule("toy", 10**7, 3))
    assert violations(much)[0].startswith("schedule: a mini-batch of 10000000 microbatches would take")
    assert carried(toy, toy.chain).period_ns == evaluate(toy).period_ns


def test_a_kind_that_is_one_row_is_simulated_lowered_and_shown(toy, capsys):
    timeline = plan_timeline(toy)
    assert timeline.program.text() == gpipe(timeline.program.graph, 6).text()
    result = evaluate(toy)
    assert result.makespan_ns == flush_makespan_ns(timeline) == simulate_plan(toy).makespan_ns
    assert simulate_plan(toy).own
    assert max(map(max, (use.in_flight for use in result.devices))) == 6
    assert plan_deadlock(toy) == []
    assert "0F5v0" in program_lines(lower_run(toy, 1))[0]
    assert plan_window(toy).title == "one mini-batch of 6 microbatches, toy"
    print_plan(toy)
    assert "toys        6 of them" in capsys.readouterr().out


def test_a_new_kind_is_offered_for_its_weights(toy):
    assert kinds_for("flush") == [*FLUSHED, "toy"]
    with pytest.raises(BadInput, match="toy doesn't go with weights 2bw; only pattern"):
        make_plan(Problem(toy.chain, toy.platform, Policy("2bw")), schedule="toy")
    with pytest.raises(BadInput, match=r"a flush schedule has a fixed order; .* and toy have a limit"):
        make_plan(Problem(toy.chain, toy.platform, Policy("flush")), schedule="flush", limit=2)


def test_a_split_backward_is_planned_and_shown(capsys):
    layers = tuple(Layer(f"layer{i}", 10 + i, 20 + i, 1000, 100, backward_weight_ns=9) for i in range(6))
    problem = Problem(Chain("six", layers, 100), Platform.flat(3, 10**6, 10**9), Policy("flush", accumulate=6))
    plan = make_plan(problem, "balance", schedule="zb1p").plan
    assert violations(plan) == []
    timeline = plan_timeline(plan)
    assert timeline.program.split
    assert evaluate(plan).makespan_ns == flush_makespan_ns(timeline)
    print_pattern(plan, 320)
    out = capsys.readouterr().out
    assert "W weight gradient +" in " ".join(out.split())
    assert "W5" in out


@pytest.mark.parametrize(
    ("weights", "kinds"),
    [("2bw", ["pattern"]), ("stash", ["pattern"]), ("flush", FLUSHED), ("latest", ["nf1b", "pattern"])],
)
def test_weights_go_with_kinds_and_the_first_is_the_default(weights, kinds):
    assert kinds_for(weights) == kinds


def test_what_is_simulated_says_how():
    for kind in KINDS.values():
        assert kind.build is not None or kind.limit is None
        assert kind.limit is not None or not (kind.by_arrival or kind.joins)
        assert kind.build is None or kind.drains != (kind.steady is not None)
        assert kind.joins == (kind.steady is not None)


def test_a_plan_is_judged_up_to_a_number_of_steps(monkeypatch):
    schedule = Schedule("message-driven", 16, 2)
    monkeypatch.setattr("pipeplan.schedule.kinds.MOST_STEPS", 160)
    assert too_long(10, schedule) is None
    assert too_long(11, schedule).startswith("a mini-batch of 16 microbatches would take 176 steps")


def test_nothing_asks_for_a_kind_by_its_name():
    asks = re.compile(r"schedule\.kind (==|!=|in|not in)|match .*schedule\.kind")
    package = Path(pipeplan.__file__).parent
    assert [path.name for path in package.rglob("*.py") if asks.search(path.read_text())] == []

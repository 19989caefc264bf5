"""A bound in a file is a claim: it is called one, and derived anew on request."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cases.chains import random_chain, random_platform
from cases.files import CHAIN, edited, written

from pipeplan.deadline import Deadline, OutOfTime
from pipeplan.errors import Infeasible
from pipeplan.files.plans import load_plan, plan_text
from pipeplan.files.profiles import read_profile
from pipeplan.planner.claims import derived
from pipeplan.planner.plan import make_plan
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Platform, Policy, Problem
from pipeplan.report.page.html import report_html
from pipeplan.report.tables.plan import headline, print_plan
from pipeplan.report.words import bound_figures

PROFILES = Path(__file__).parents[2] / "profiles"
OPTIMUM_NS = 172478586  # of contiguous plans without replicas on four GPUs of 16 GB


@pytest.fixture(scope="module")
def slow():
    """PipeDream's plan of ResNet-50, of twice the period that is optimal in its class."""
    problem = Problem(
        read_profile(str(PROFILES / "resnet50-1000-b8-v100.json")),
        Platform.flat(4, 16 * 10**9),
        Policy(accumulate=8),
        False,
    )
    plan = make_plan(problem, "pipedream").plan
    assert plan.pattern is not None
    assert plan.pattern.period_ns > 2 * OPTIMUM_NS
    return plan


def forged_file(plan, tmp_path, period_ns, kind="contiguous", replicas=False, checkpointing="stages"):
    """Return the file of the plan with one more bound."""
    claim = {"class": kind, "replicas": replicas, "checkpointing": checkpointing, "period_ns": period_ns,
             "any_interval": False, "schedule": None}  # fmt: skip
    return written(tmp_path, edited(json.loads(plan_text(plan)), ("lower_bounds",), lambda bounds: [claim, *bounds]))


def forged(*arguments, **keywords):
    return load_plan(forged_file(*arguments, **keywords))


def test_check_says_what_it_has_not_checked_and_refutes_it_on_request(slow, tmp_path, pipeplan):
    file = forged_file(slow, tmp_path, slow.pattern.period_ns)
    code, out, _ = pipeplan("check", file)
    assert code == 0
    assert "claimed, not checked" in out
    code, out, err = pipeplan("check", "--bounds", file)
    assert (code, out) == (1, "")
    assert err == (
        f"error: {file}: lower_bounds: {slow.pattern.period_ns} ns of class contiguous is more than can be derived "
        f"({OPTIMUM_NS} ns)\n"
    )
    code, out, _ = pipeplan("check", "--json", "--bounds", file)
    assert (code, json.loads(out)["valid"]) == (1, False)
    code, out, _ = pipeplan("check", "--bounds", forged_file(slow, tmp_path, OPTIMUM_NS))
    assert code == 0
    assert "claimed" not in out


def test_a_forged_bound_is_called_a_claim_wherever_bounds_are_shown(slow, tmp_path, capsys):
    plan = forged(slow, tmp_path, slow.pattern.period_ns)
    assert [bound.claimed for bound in plan.lower_bounds] == [True, False]
    assert (
        "(class contiguous with checkpointing of stages, this interval), claimed, not checked; lower bound 135"
        in headline(plan)
    )
    print_plan(plan)
    out = capsys.readouterr().out
    assert (
        "bound       358.092 ms for class contiguous with checkpointing of stages, this interval: claimed, not checked"
        in out
    )
    assert "bound       135.692 ms for class any with checkpointing of stages, this interval: gap 163.90%" in out
    page = report_html(simulate_plan(plan, 8))
    assert (
        "bound, class contiguous with checkpointing of stages, this interval: 358.092 ms, claimed, not checked<" in page
    )
    assert "<b>163.90%</b>above the best lower bound" in page
    figures = bound_figures(plan)
    assert [(x["class"], x["checked"], x["gap"] is None) for x in figures] == [
        ("contiguous", False, True),
        ("any", True, False),
    ]
    for shown in (headline(plan), out, page):
        assert "gap 0.00%" not in shown
        assert "optimal" not in shown


def test_a_forged_bound_is_refuted_with_both_numbers(slow, tmp_path):
    plan = forged(slow, tmp_path, slow.pattern.period_ns)
    assert derived(plan)[1] == [
        f"lower_bounds: {slow.pattern.period_ns} ns of class contiguous is more than can be derived ({OPTIMUM_NS} ns)"
    ]
    again, found = derived(forged(slow, tmp_path, OPTIMUM_NS))
    assert found == []
    assert not any(bound.claimed for bound in again.lower_bounds)
    assert "ms (class contiguous with checkpointing of stages, this interval), gap 107.62%" in headline(again)
    assert derived(forged(slow, tmp_path, OPTIMUM_NS + 1))[1]


def test_a_proof_that_is_cut_short_refutes_nothing(slow, tmp_path, pipeplan):
    plan = forged(slow, tmp_path, OPTIMUM_NS + 1)
    with pytest.raises(OutOfTime):
        derived(plan, Deadline(lambda: 0.0))
    code, out, err = pipeplan("check", written(tmp_path, plan_text(plan)), "--bounds", "--time-limit", "1ns")
    assert (code, out) == (1, "")
    assert err.endswith(": the time limit came before its claimed bounds were derived; but for them it is valid\n")


@pytest.mark.parametrize(
    ("claim", "sentence"),
    [
        (("one-special", False, "none"), "ns of class one-special is more than can be derived ("),
        (
            ("one-special", True, "none"),
            "cannot be derived with replicas True and checkpointing none: nothing proves such",
        ),
        (("contiguous", True, "segments"), "ns of class contiguous is more than can be derived ("),
    ],
)
def test_every_class_of_bounds_is_derived_or_refused(claim, sentence, slow, tmp_path):
    _, found = derived(forged(slow, tmp_path, slow.pattern.period_ns, *claim))
    assert len(found) == 1
    assert sentence in found[0]


@pytest.mark.parametrize(("weights", "kind"), [("flush", "flush"), ("flush", "message-driven"), ("latest", "nf1b")])
def test_bounds_on_patterns_prove_nothing_where_there_is_none_or_it_drains(weights, kind, tmp_path):
    problem = Problem(CHAIN, Platform.flat(2, 10**9), Policy(weights), False)
    plan = make_plan(problem, "balance", schedule=kind).plan
    drains = weights == "flush"
    assert [bound.allocation for bound in plan.lower_bounds] == ["contiguous"] * 2 * drains + ["any"]
    claim = forged(plan, tmp_path, 1, "one-special", False, "none")
    assert claim.lower_bounds[0].claimed
    assert f"never drain; the schedule is {kind}" in derived(claim)[1][0]


def test_what_the_planner_proves_can_be_derived_from_the_file(tmp_path):
    problem = Problem(read_profile(str(PROFILES / "vgg16-224-b32-v100.json")), Platform.flat(2, 6 * 10**9))
    given = replace(problem, policy=Policy(accumulate=4), replicas=False, checkpointing="none")
    plans = [make_plan(given).plan, make_plan(replace(given, policy=Policy("flush", 4)), schedule="flush").plan]
    assert [bound.allocation for bound in plans[0].lower_bounds] == ["contiguous", "one-special", "any"]
    for seed in range(18):
        rng = random.Random(seed)
        chain, platform = random_chain(rng, 6, edges=seed % 2 == 0, optimizer=True), random_platform(rng, 3)
        weights, checkpointing = rng.choice(("2bw", "stash")), rng.choice(("none", "stages", "segments"))
        problem = Problem(chain, platform, Policy(weights), rng.random() < 0.5, checkpointing)
        with suppress(Infeasible):
            plans.append(make_plan(problem, effort="quick").plan)
    assert sum(plan.lower_bounds[0].allocation == "contiguous" for plan in plans) > 4
    for plan in plans:
        proved, found = derived(load_plan(written(tmp_path, plan_text(plan))))
        assert found == []
        assert proved.lower_bounds == plan.lower_bounds

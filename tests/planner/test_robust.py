"""Plans for durations that vary: better under drawn ones, valid, reproducible, and honest about the nominal plan."""

from __future__ import annotations

import pytest

from pipeplan.check.validate import violations
from pipeplan.errors import BadInput
from pipeplan.planner.plan import STATED, Jitter, make_plan
from pipeplan.planner.simulated.simulation import percentile_95, run_seeds, simulate_plan, under_jitter
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.report.words import robustness
from pipeplan.schedule.pattern import most_in_flight, starts_of

JITTER = Jitter(0.3, seed=3, runs=5)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.planner.robust.MOST_STEPS", 4 * 10**4)


def even(memory: int = 10**9, devices: int = 3, **policy: object) -> Problem:
    """Equal layers, whose transfers take a good part of their time."""
    layers = tuple(Layer(f"l{i}", 2000, 4000, 10, 2000, saved_bytes=1000) for i in range(2 * devices))
    options = {"weights": "2bw", "accumulate": 24, **policy}
    return Problem(
        Chain("even", layers, 0),
        Platform.flat(devices, memory, 10**9),
        Policy(**options),  # type: ignore[arg-type]
        replicas=False,
        checkpointing="none",
    )


def figures(found) -> dict:
    return found.plan.provenance.options["robust"]


def p95(plan, told) -> int:
    """What ``simulate --jitter`` finds for a plan."""
    run = simulate_plan(plan, told["microbatches"])
    drawn = under_jitter(run, told["jitter"], run_seeds(told["seed"], told["runs"]))
    return round(percentile_95(drawn.jitter_ns))


def test_more_in_flight_hides_what_comes_late_and_the_period_stays():
    nominal, found = make_plan(even(), "contiguous"), make_plan(even(), "contiguous", robust=JITTER)
    assert violations(found.plan) == []
    assert found.evaluation.period_ns == nominal.evaluation.period_ns
    told = figures(found)
    assert told["nominal"] == {"period_ns": nominal.evaluation.period_ns, "p95_ns": p95(nominal.plan, told)}
    assert told["p95_ns"] == p95(found.plan, told) < told["nominal"]["p95_ns"]
    assert found.evaluation.most_in_flight > nominal.evaluation.most_in_flight
    lines = robustness(found.plan)
    assert "p95" in lines[0]
    assert "% longer" in lines[1]
    assert make_plan(even(), "contiguous", robust=JITTER).plan.pattern == found.plan.pattern


def test_memory_forbids_it():
    nominal = make_plan(even(), "contiguous")
    full = max(use.peak_bytes for use in nominal.evaluation.devices)
    found = make_plan(even(full), "contiguous", robust=JITTER)
    assert violations(found.plan) == []
    told = figures(found)
    assert told["p95_ns"] == p95(found.plan, told) <= told["nominal"]["p95_ns"]
    assert max(use.peak_bytes for use in found.evaluation.devices) <= full


def test_an_open_interval_grows_with_what_is_in_flight_and_a_given_one_bounds_it():
    found = make_plan(even(accumulate=None), "contiguous", robust=JITTER)
    pattern = found.plan.pattern
    assert violations(found.plan) == []
    assert most_in_flight(found.evaluation.graph, starts_of(pattern), pattern.period_ns) <= found.plan.interval
    assert found.plan.interval > make_plan(even(accumulate=None), "contiguous").plan.interval
    nominal = make_plan(even(accumulate=None), "contiguous")
    given = make_plan(even(accumulate=nominal.plan.interval), "contiguous", robust=JITTER)
    assert given.evaluation.most_in_flight <= nominal.plan.interval


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [({"weights": "flush"}, None), ({"weights": "flush"}, "message-driven"), ({"weights": "latest"}, "nf1b")],
)
def test_drained_and_admitted_plans(policy, schedule, monkeypatch):
    monkeypatch.setattr("pipeplan.planner.robust.MOST_STEPS", 5000)
    problem = even(devices=2, accumulate=4, **policy)
    found = make_plan(problem, "contiguous", schedule=schedule, robust=Jitter(0.1, runs=3))
    told = figures(found)
    assert violations(found.plan) == []
    assert told["p95_ns"] == p95(found.plan, told) <= told["nominal"]["p95_ns"]


def test_stated_stages_stay_and_a_stage_alone_waits_for_nobody():
    stated = make_plan(even(), STATED, {"split": "2,4"}, robust=JITTER)
    assert [stage.stop for stage in stated.plan.allocation.stages] == [2, 6]
    alone = make_plan(even(devices=1), "contiguous", robust=JITTER)
    assert alone.evaluation.most_in_flight == 1
    assert robustness(alone.plan)[1].endswith("is this")


def test_without_any_work_allowed_the_nominal_plan_is_told_of(monkeypatch):
    monkeypatch.setattr("pipeplan.planner.robust.MOST_STEPS", 0)
    found = make_plan(even(), STATED, {"split": "2,4"}, robust=JITTER)
    assert figures(found)["p95_ns"] == figures(found)["nominal"]["p95_ns"]
    assert robustness(found.plan)[1].endswith("is this")


@pytest.mark.parametrize("told", [None, 3, {}, {"nominal": {}}, {"jitter": 0.1, "nominal": {"p95_ns": "x"}, "runs": 3}])
def test_files_may_say_anything(told):
    plan = make_plan(even(), STATED, {"split": "3,3"}).plan
    plan.provenance.options["robust"] = told
    assert robustness(plan) == []


def test_bad_shares_and_runs():
    with pytest.raises(BadInput, match="--robust: 0 is not above 0 and at most 1"):
        Jitter(0.0)
    with pytest.raises(BadInput, match="--robust: nan is not above 0"):
        Jitter(float("nan"))
    with pytest.raises(BadInput, match="-O runs: 0 is not positive"):
        Jitter(0.1, runs=0)


def test_the_command_says_both_and_refuses_what_searches_for_itself(pipeplan, tmp_path):
    asked = ["plan", "example:gpt2-small-b4-a100", "--gpus", "2", "--mem", "16GB", "--split", "8,8", "--robust", "5%"]
    code, out, _ = pipeplan(*asked, "-O", "runs=3")
    assert (code, "\nrobust      p95 " in out, "\nnominal     what is" in out) == (0, True, True)
    code, _, err = pipeplan("plan", asked[1], "--gpus", "2", "--mem", "16GB", "--robust", "5%", "--for", "megatron")
    assert (code, "--for has a search of its own" in err) == (2, True), err

"""Which batch and weights does a plan have where nobody said them? A stated rule, and the least late gradients."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from statistics import mean

import pytest
from cases.chains import random_chain, random_platform

import pipeplan as pp
from pipeplan.api.given.problems import problem_of
from pipeplan.api.given.profiles import as_profile
from pipeplan.check.lateness import plan_delays
from pipeplan.check.validate import check
from pipeplan.errors import BadInput, Infeasible
from pipeplan.planner.least_late import drained_quickly, fresher, least_late
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.periodic.interval import at_interval
from pipeplan.planner.plan import Planned, make_plan
from pipeplan.planner.what_if.alternatives import with_alternatives
from pipeplan.problem import MICROBATCHES_PER_DEVICE, Chain, Layer, Platform, Policy, Problem
from pipeplan.runtime.lowering.instructions import Forward
from pipeplan.runtime.lowering.lowered_run import lower_run

GPT, RESNET, TINY = "example:gpt2-small-b4-a100", "example:resnet50", "example:gpt-tiny"


def stashed(seed: int, interval: int, weights: str = "stash") -> Planned:
    rng = random.Random(seed)
    problem = Problem(random_chain(rng, 5), random_platform(rng, 3), Policy(weights, interval), replicas=seed % 2 == 0)
    return make_plan(problem, "contiguous")


@pytest.mark.parametrize("weights", ["stash", "2bw"])
def test_how_late_gradients_are_is_what_a_long_run_counts(weights: str) -> None:
    """By how many updates each forward's version is behind its mini-batch, over whole updates of the lowered run."""
    seen = set()
    for seed in range(3):
        for interval in (1, 2, 5):
            try:
                plan, found = (x := stashed(seed, interval, weights)).plan, x.evaluation
            except Infeasible:
                continue
            if plan.interval != interval:
                continue
            lists = lower_run(plan, 24 + 24 // interval).instructions
            for s, delay in enumerate(plan_delays(plan, found.graph)):
                late = {
                    x.microbatch: x.microbatch // interval - x.version
                    for listing in lists
                    for x in listing
                    if isinstance(x, Forward) and x.stage == s and 12 * interval <= x.microbatch < 24 * interval
                }
                assert (sum(late.values()) / len(late), max(late.values())) == (delay.mean, delay.most)
                seen.add(delay.most)
    assert seen >= ({0, 1, 2} if weights == "stash" else {1})


def test_what_drains_is_late_by_none() -> None:
    found = stashed(1, 8, "flush")
    assert {(x.mean, x.most) for x in plan_delays(found.plan, found.evaluation.graph)} == {(0, 0)}


@pytest.mark.parametrize("weights", ["stash", "2bw", "2bw-uniform"])
def test_of_patterns_the_one_whose_gradients_are_less_late(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.planner.least_late.LONGER", (Fraction(1, 20), Fraction(1, 4)))
    monkeypatch.setattr("pipeplan.planner.least_late.WORTH", 0.1)
    less = 0
    for seed in range(10):
        try:
            found = stashed(seed, 8, weights)
        except Infeasible:
            continue
        problem = Problem(found.plan.chain, found.plan.platform, found.plan.policy)
        other = fresher(found, problem)
        before, after = (mean(x.mean for x in plan_delays(y.plan, y.evaluation.graph)) for y in (found, other))
        assert other.evaluation.period_ns <= found.evaluation.period_ns * 1.25
        assert other.plan.allocation == found.plan.allocation
        assert after < before or other is found
        less += after < before
    assert less if weights != "2bw-uniform" else less == 0


def test_equal_stages_are_not_late_for_the_sake_of_a_transfer() -> None:
    """That takes nanoseconds: of 16 microbatches an update 3, 2, 1 and 0 are in flight, and not 6, 4, 2 and 0."""
    layer = Layer("like", 10**6, 2 * 10**6, 4000, 1000, saved_bytes=1000, parameters=1000)
    problem = Problem(
        Chain("like", (layer,) * 16, 1000), Platform.flat(4, 10**12), Policy("2bw", 16), False, checkpointing="none"
    )
    found = make_plan(problem)
    other = fresher(found, problem)
    late = [[x.mean * 16 for x in plan_delays(y.plan, y.evaluation.graph)] for y in (found, other)]
    assert late == [[6, 4, 2, 0], [3, 2, 1, 0]]
    assert (found.evaluation.period_ns, other.evaluation.period_ns) == (12 * 10**6, 12 * 10**6 + 168)


def test_the_least_late_is_taken_within_two_percent_of_the_best() -> None:
    problem = Problem(random_chain(random.Random(2), 5), random_platform(random.Random(2), 3), Policy("2bw", 12))
    asked: list[str] = []

    def find_with(longer: Fraction):
        def find(problem: Problem) -> tuple[Planned, Problem]:
            found = make_plan(problem, "contiguous")
            asked.append(problem.policy.weights)
            period = int(best * longer) if problem.policy.weights == "stash" else best
            return replace(found, evaluation=replace(found.evaluation, period_ns=period)), problem

        return find

    best = 10**6
    for share, weights in ((Fraction(1), "stash"), (Fraction(102, 100), "stash"), (Fraction(104, 100), "2bw")):
        found, _ = least_late(problem, find_with(share))
        assert found.plan.policy.weights == weights
        others = [x for x in found.plan.provenance.alternatives if x.weights != weights]
        assert all(x.microbatches == 12 for x in others)
        assert found.evaluation.period_ns <= best * Fraction(102, 100)
    assert "2bw" in asked


def test_without_replicas_one_search_is_enough() -> None:
    problem = Problem(random_chain(random.Random(3), 5), random_platform(random.Random(3), 2), Policy("2bw", 8), False)
    asked = []
    least_late(problem, lambda x: (asked.append(x.policy.weights), (make_plan(x, "contiguous"), x))[1])
    assert asked == ["stash"]
    asked.clear()
    least_late(at_interval(problem, None), lambda x: (asked.append(x.policy.weights), (make_plan(x), x))[1])
    assert asked == ["2bw"], "only 2bw has any interval"


def test_what_a_quick_search_finds_far_longer_is_not_looked_for() -> None:
    """What replicas sum is waited for under stash, not under 2bw."""
    layers = Layer("most", 10_000, 20_000, 13_000, 10), Layer("rest", 100, 200, 10, 10)
    problem = Problem(Chain("two", layers, 10), Platform.flat(2, 10**9, 10**9), Policy("2bw", 2))
    asked: list[str] = []

    def find(problem: Problem) -> tuple[Planned, Problem]:
        asked.append(problem.policy.weights)
        return make_plan(problem, "contiguous"), problem

    without = least_late(problem, find)[0]
    assert asked == ["stash", "2bw"]
    quick = least_late(problem, find, hint=lambda x: make_plan(x, effort="quick"))[0]
    assert (asked[2:], quick.plan.allocation) == (["2bw"], without.plan.allocation)
    (stash,) = quick.plan.provenance.alternatives
    assert stash.quick
    assert (stash.period_ns or 0) > 1.25 * quick.evaluation.period_ns


@pytest.mark.parametrize("weights", [None, "2bw", "stash", "flush", "latest"])
def test_the_batch_is_a_rule_and_the_same_under_every_policy(weights: str | None) -> None:
    problem, said = problem_of(as_profile(GPT), gpus=3, mem="16GB", weights=weights)
    assert problem.policy.accumulate == MICROBATCHES_PER_DEVICE * 3
    assert said[0] == "batch 48 samples (assumed; --batch says another, --batch any the best of any)"
    for asked in ({"batch": 16}, {"accumulate": 4}, {"batch": "any"}):
        problem, said = problem_of(as_profile(GPT), gpus=3, mem="16GB", weights=weights, **asked)
        assert problem.policy.accumulate == (None if asked == {"batch": "any"} else 4)
        assert not any("batch" in x for x in said)
    with pytest.raises(BadInput, match="--batch any leaves the batch open, --accumulate 3 fixes it"):
        problem_of(as_profile(GPT), gpus=3, mem="16GB", batch="any", accumulate=3)
    with pytest.raises(BadInput, match="--batch: 'some' is neither a number of samples nor any"):
        problem_of(as_profile(GPT), gpus=3, mem="16GB", batch="some")


def test_what_drains_is_taken_where_it_takes_no_longer() -> None:
    rng = random.Random(2)
    problem = Problem(random_chain(rng, 5), random_platform(rng, 3), Policy("2bw", 12))
    plain = make_plan(problem.with_policy(Policy("flush", 12)), "contiguous")
    for period, weights in ((1000, "flush"), (1001, "flush"), (1002, "stash")):
        quick = replace(plain, evaluation=replace(plain.evaluation, period_ns=period))

        def find(problem: Problem, quick: Planned = quick) -> tuple[Planned, Problem]:
            if problem.policy.drains:
                return quick, problem
            found = make_plan(problem, "contiguous")
            return replace(found, evaluation=replace(found.evaluation, period_ns=1000)), problem

        found, _ = least_late(problem, find, lambda interval, quick=quick: quick)
        assert found.plan.policy.weights == weights
        named = {(x.weights, x.period_ns, x.quick) for x in found.plan.provenance.alternatives}
        assert ("stash", 1000, False) in named if weights == "flush" else ("flush", period, True) in named
        assert least_late(problem, find)[0].plan.policy.weights == "stash", "nobody asked for one that drains"
    assert drained_quickly(problem, 12, Settings()) is not None


def test_by_default_nothing_is_late_without_gain() -> None:
    asked = {"mem": "32GB", "effort": "quick"}
    found = pp.plan(TINY, gpus=2, **asked)
    assert found.plan.policy.weights == "flush"
    late = [x for x in found.plan.provenance.alternatives if x.weights != "flush"]
    assert late
    assert all(x.period_ns * 1.001 >= found.period_ns for x in late if x.weights == "stash")
    assert found.period_ns <= pp.plan(TINY, gpus=2, weights="flush", **asked).period_ns
    (row,) = pp.compare(TINY, gpus="2", algorithms=["auto"], **asked).rows
    assert (row.cells[0].period_ns, row.cells[0].late_updates) == (found.period_ns, 0)


def test_plan_and_compare_take_the_same_and_say_what_draining_takes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"mem": "16GB", "no_replicas": True, "effort": "quick"}
    found = pp.plan(TINY, gpus=2, **asked)
    assert (found.plan.policy.weights, found.plan.interval) == ("stash", 8)
    found.show()
    text = capsys.readouterr().out
    assert "batch 64 samples (assumed; --batch says another, --batch any the best of any)" in text
    late = plan_delays(found.plan, found.evaluation.graph)
    average, most = mean(x.mean for x in late), max(x.most for x in late)
    assert f"late        gradients by {average:.2f} updates on average, {most} at most; by stage" in text
    drained = pp.plan(TINY, gpus=2, weights="flush", **asked)
    flush = next(x for x in found.plan.provenance.alternatives if x.weights == "flush")
    assert (flush.microbatches, flush.period_ns) == (8, drained.period_ns), "what plan --weights flush finds"
    (row,) = pp.compare(TINY, gpus="2", algorithms=["auto", "gpipe"], **asked).rows
    assert row.update_microbatches == 8
    assert row.cells[0].period_ns == found.period_ns


def test_room_is_kept_for_predicted_weights_where_they_are_late(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"gpus": 2, "mem": "16GB", "no_replicas": True, "algorithm": "contiguous", "optimizer": "momentum"}
    for weights in ("stash", "flush"):
        one, other = (pp.plan(GPT, weights=weights, predicted=x, **asked) for x in (True, False))
        held = [sum(x.weights_bytes for x in y.evaluation.devices) for y in (one, other)]
        assert held[0] > held[1] if weights == "stash" else held[0] == held[1]
        one.show(width=160)
        assert ("weights predicted" in capsys.readouterr().out) == (weights == "stash")
    with pytest.raises(BadInput, match="predicted: backwards with newest weights read the true ones"):
        pp.plan(GPT, weights="latest", predicted=True, zero=1, gpus=2, mem="16GB")


def test_two_delayed_policies_say_the_same_of_each_other() -> None:
    """Each asked by itself, and named by the other, at one interval: none is called longer than it is."""
    rng = random.Random(1)
    problem = Problem(random_chain(rng, 5), random_platform(rng, 3), Policy("2bw", 8))
    of = {x: problem.with_policy(Policy(x, 8)) for x in ("2bw", "stash")}
    own = {x: make_plan(asked, "contiguous") for x, asked in of.items()}
    for weights, other in (("2bw", "stash"), ("stash", "2bw")):
        told = with_alternatives(own[weights], of[weights])
        (said,) = [x.period_ns for x in told.plan.provenance.alternatives if x.weights == other]
        assert said <= max(own[other].evaluation.period_ns, own[weights].evaluation.period_ns)


@pytest.mark.parametrize("seed", range(3))
def test_draining_takes_no_longer_than_what_needs_no_search(seed: int) -> None:
    rng = random.Random(seed)
    problem = Problem(random_chain(rng, 5), random_platform(rng, 3), Policy("flush", 6))
    try:
        simple = make_plan(problem, "data-parallel").evaluation.makespan_ns
    except Infeasible:
        return
    found = make_plan(problem, effort="quick").evaluation.makespan_ns
    assert found - found // 1000 <= simple, "fewer stages are taken for a thousandth"


def test_what_is_recomputed_whole_is_not_cut_up_under_other_schedules() -> None:
    problem, _ = problem_of(as_profile(RESNET), gpus=2, mem="16GB", no_replicas=True, checkpointing="stages", batch=64)
    found = make_plan(problem.with_policy(Policy("flush", 8)), effort="quick")
    assert check(found.plan)


def test_plain_data_parallelism_is_said_first_with_what_a_pipeline_takes(capsys: pytest.CaptureFixture[str]) -> None:
    found = pp.plan(TINY, gpus=2, mem="32GB", weights="stash", effort="quick")
    assert found.plan.allocation.data_parallel
    alone = pp.plan(TINY, gpus=2, mem="32GB", algorithm="contiguous", weights="stash", no_replicas=True)
    found.show()
    lines = capsys.readouterr().out.splitlines()
    said = "best        plain data parallelism, one stage on 2 GPUs; the best pipeline of single GPUs takes "
    (line,) = [x for x in lines if x.startswith(said)]
    assert lines[lines.index(line) + 1].startswith("period")
    assert f"{alone.period_ns / 1e6:.3f} ms" in line

"""An update as often as costs next to nothing: the smallest interval close to the best, and bounds for every one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases.chains import random_chain, random_platform

from pipeplan.check.bounds import any_bound
from pipeplan.errors import Infeasible
from pipeplan.files.profiles import read_profile
from pipeplan.planner.claims import derived
from pipeplan.planner.periodic.incumbent import Scheduled, Settings
from pipeplan.planner.periodic.interval import at_interval
from pipeplan.planner.plan import make_plan, with_interval
from pipeplan.planner.what_if.alternatives import with_alternatives
from pipeplan.planner.what_if.compare import compare
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem

RESNET = str(Path(__file__).parents[2] / "profiles" / "resnet50-1000-b8-v100.json")
SLOW = Problem(read_profile(RESNET), Platform.flat(8, 16 * 10**9, 125 * 10**6), checkpointing="stages")


def test_an_open_interval_is_the_smallest_within_a_thousandth_of_the_best_of_any():
    found = make_plan(SLOW, "contiguous")
    assert found.plan.interval == found.plan.policy.accumulate == 28
    assert found.plan.lower_bounds[0].any_interval
    best = min(make_plan(at_interval(SLOW, n), "contiguous").evaluation.period_ns for n in (64, 256, 10**6))
    assert best <= found.evaluation.period_ns <= best * 1.001
    for fewer in (8, 16, 20, 27):
        assert make_plan(at_interval(SLOW, fewer), "contiguous").evaluation.period_ns > best * 1.001
    (sooner,) = found.plan.provenance.alternatives
    assert (sooner.weights, sooner.microbatches) == ("2bw", 8)
    assert sooner.period_ns >= make_plan(at_interval(SLOW, 8), "contiguous").evaluation.period_ns  # of other stages


def tiny(seed):
    rng = random.Random(seed)
    chain, platform = random_chain(rng, 5, edges=seed % 3 == 0, optimizer=True), random_platform(rng, 3)
    return Problem(chain, platform, Policy(), rng.random() < 0.6, rng.choice(("none", "stages")))


def test_no_interval_beats_the_bounds_of_any_and_none_smaller_is_close():
    """By planning at every interval from 1 to 16; replicas see a microbatch of every update."""
    seen = 0
    for seed in range(4):
        problem = tiny(seed)
        try:
            found = make_plan(problem, "contiguous")
        except Infeasible:
            continue
        periods = {}
        for interval in range(1, 17):
            here = make_plan(at_interval(problem, interval), "contiguous")
            periods[interval] = here.evaluation.period_ns
            if interval % 8 == 1:
                assert any_bound(problem).period_ns <= any_bound(at_interval(problem, interval)).period_ns
            assert all(bound.period_ns <= periods[interval] for bound in found.plan.lower_bounds), seed
            best = min(found.evaluation.period_ns, periods[interval])
            assert found.evaluation.period_ns <= best + best // 1000 + 1, (seed, interval)
        replicas = max(stage.replicas for stage in found.plan.allocation.stages)
        limit = found.plan.lower_bounds[0].period_ns * 1.001
        close = [n for n, period in periods.items() if period <= limit and n < found.plan.interval]
        assert found.plan.interval == replicas or not close, seed
        assert derived(found.plan)[1] == []
        seen += 1
    assert seen > 1


def test_both_solvers_decide_on_the_same_interval():
    for seed in (3, 5, 8):
        problem = replace(tiny(seed), replicas=False)
        try:
            found = [make_plan(problem, settings=Settings(solver)) for solver in ("cbc", "highs")]
        except Infeasible:
            continue
        assert found[0].plan.interval == found[1].plan.interval
        assert found[0].evaluation.period_ns == found[1].evaluation.period_ns


def test_the_other_policies_have_the_same_interval_and_are_bounded_by_work():
    found = with_alternatives(make_plan(SLOW, "contiguous"), SLOW)
    assert [(x.weights, x.microbatches) for x in found.plan.provenance.alternatives] == [
        ("flush", 28), ("2bw", 8), ("stash", 28),
    ]  # fmt: skip
    flush, _, stash = found.plan.provenance.alternatives
    same = make_plan(SLOW.with_policy(Policy("stash", accumulate=28)), "contiguous")
    assert stash.period_ns == same.evaluation.period_ns
    assert flush.period_ns > found.evaluation.period_ns
    rare = with_interval(make_plan(SLOW, "contiguous"), 10**6)  # a mini-batch that takes minutes to simulate
    assert [x.weights for x in with_alternatives(rare, SLOW).plan.provenance.alternatives] == ["2bw", "stash"]


def test_all_columns_of_a_comparison_have_one_interval():
    names = ["data-parallel", "pipedream", "contiguous", "gpipe"]
    (row,) = compare(SLOW, [8], [16 * 10**9], names, clock=lambda: 0.0)
    assert (row.update_microbatches, row.update_samples) == (28, 224)
    periods = {cell.algorithm: cell.period_ns for cell in row.cells}
    assert periods["data-parallel"] == periods["contiguous"], "one allocation, one period"
    (given,) = compare(at_interval(SLOW, 16), [8], [16 * 10**9], ["contiguous"], clock=lambda: 0.0)
    assert given.update_samples == 128


def test_an_open_interval_is_as_good_as_the_one_that_fills_the_pipeline():
    chain = read_profile(RESNET)
    chain = replace(chain, layers=chain.layers[:8])
    problem = Problem(chain, Platform.flat(2, 8 * 10**9), replicas=False, checkpointing="stages")
    given = make_plan(at_interval(problem, 3)).evaluation.period_ns
    assert make_plan(problem).evaluation.period_ns <= given * 1.001


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--batch", "20"],
            "20 samples aren't a multiple of the profile's microbatches of 8; the nearest are 16 and 24",
        ),
        (["--batch", "3"], "the nearest is 8"),
        (["--batch", "16", "--accumulate", "3"], "--batch 16 is 2 microbatches of 8 samples an update"),
    ],
)
def test_a_batch_of_broken_microbatches_is_refused(options, message, pipeplan):
    for command in ("plan", "compare"):
        code, _, err = pipeplan(command, RESNET, "--gpus", "2", "--mem", "16GB", *options)
        assert code != 0
        assert message in err


def test_an_interrupt_before_any_interval_is_decided_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Iterator[tuple[int, Scheduled]]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("pipeplan.planner.plan.smaller_intervals", interrupted)
    chain = Chain("two", tuple(Layer(f"l{i}", 10, 20, 40, 8) for i in range(2)), 8)
    with pytest.raises(KeyboardInterrupt):
        make_plan(Problem(chain, Platform.flat(2, 10**6)), "contiguous")

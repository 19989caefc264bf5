"""The portfolio: never worse than exact contiguous, nearly always the best of all, the same every time, anytime."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from cases.chains import published, random_chain
from cases.classes import figures, instance, worse
from oracles.any_class import optimum

from pipeplan.check.bounds import any_bound
from pipeplan.check.evaluate import evaluate
from pipeplan.cost.saved import storages
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.deadline import Deadline
from pipeplan.errors import Infeasible
from pipeplan.files.plans import plan_text
from pipeplan.partition.contiguous.contiguous import contiguous
from pipeplan.partition.granularity import merge_articulation, merge_share
from pipeplan.partition.madpipe.exact import one_special_bound
from pipeplan.plan import Stage
from pipeplan.planner.periodic import incumbent
from pipeplan.planner.periodic.incumbent import Settings, Status
from pipeplan.planner.periodic.portfolio import EFFORTS
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.schedule.pattern import one_at_a_time
from pipeplan.schedule.periodic.ilp import IlpResult, IlpStatus
from pipeplan.schedule.periodic.turns import Settled

HIGHS = Settings("highs")


def small_problem(rng: random.Random, full: bool) -> Problem:
    """Return a chain of at most 5 layers on at most 3 devices whose memory matters (``full``: 4 layers, 3 devices)."""
    chain = random_chain(rng, rng.randint(2, 4 if full else 5), saved=rng.random() < 0.3)
    memory = int(chain.sums.weight_bytes[-1]) * 2 + int(storages(chain).totals[-1]) * rng.choice([1, 2, 3]) + 20
    platform = Platform.flat(rng.randint(2, 3), memory, rng.choice([1, 2, 10]) * 10**9)
    return Problem(chain, platform, Policy(accumulate=64), full, "stages" if full else "none")


@pytest.mark.parametrize("full", [False, True], ids=["MadPipe's class", "full class"])
def test_reaches_the_optimum_over_all_allocations(full: bool) -> None:
    rng = random.Random(3 + full)
    compared = equal = 0
    while compared < 10:
        problem = small_problem(rng, full)
        best = optimum(problem, waits=True)
        try:
            plan = make_plan(problem, settings=HIGHS).plan
        except Infeasible:
            assert best is None
            continue
        assert best is not None
        found = evaluate(plan).period_ns
        assert best >= found >= any_bound(problem).period_ns
        compared += 1
        equal += found == best  # else by a longer pattern for which updates wait less than for the shortest
    assert equal >= 9


def test_is_never_worse_than_exact_contiguous_and_says_what_it_proved() -> None:
    rng = random.Random(8)
    better = 0
    for _ in range(12):
        chain = random_chain(rng, rng.randint(3, 9))
        platform = Platform.flat(
            rng.randint(2, 4), int(storages(chain).totals[-1]) * 2 + 3 * int(chain.sums.weight_bytes[-1]) + 9
        )
        problem = Problem(chain, platform, Policy(accumulate=64), False, "none")
        exact = next(contiguous(problem), None)
        if exact is None:
            continue
        plan = make_plan(problem, settings=HIGHS).plan
        assert exact.claimed_period_ns is not None
        assert plan.pattern.period_ns <= exact.claimed_period_ns
        better += plan.pattern.period_ns < exact.claimed_period_ns
        classes = [bound.allocation for bound in plan.lower_bounds]
        assert classes[-1] == "any"
        assert ("contiguous" in classes) == plan.allocation.contiguous
        if "one-special" in classes:
            assert plan.lower_bounds[classes.index("one-special")].period_ns == one_special_bound(problem)
    assert better > 5


def test_same_input_same_bytes() -> None:
    chain = random_chain(random.Random(5), 9)
    problem = Problem(
        chain, Platform.flat(3, int(storages(chain).totals[-1]) * 2 + 3 * int(chain.sums.weight_bytes[-1]))
    )
    assert plan_text(make_plan(problem, settings=HIGHS).plan) == plan_text(make_plan(problem, settings=HIGHS).plan)


def uneven() -> Problem:
    """Return work of 3, 1, 3, 1, 1 for 3 devices: one stage each takes 4, several on one device take 3."""
    chain = Chain("uneven", tuple(Layer(f"l{i}", 1000 * w, 2000 * w, 0, 1) for i, w in enumerate((3, 1, 3, 1, 1))), 1)
    return Problem(chain, Platform.flat(3, 10**6), Policy(accumulate=64), False, "none")


def test_an_interrupt_returns_the_best_plan_so_far() -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    plan = make_plan(uneven(), settings=replace(HIGHS, progress=interrupt)).plan
    assert plan.provenance.solver_status == "interrupted"
    assert plan.allocation.contiguous
    free = make_plan(uneven(), settings=HIGHS).plan
    assert free.provenance.solver_status != "interrupted"
    assert evaluate(free).period_ns < evaluate(plan).period_ns


def test_an_interrupt_while_drained_plans_are_searched_returns_the_best_so_far() -> None:
    told: list[str] = []

    def interrupt() -> float:
        if told:
            raise KeyboardInterrupt
        return 1.0

    drained = replace(uneven(), policy=Policy("flush", accumulate=8), deadline=Deadline(interrupt))
    plan = make_plan(drained, settings=replace(HIGHS, progress=told.append)).plan
    assert plan.provenance.solver_status == "interrupted"
    assert plan.schedule.kind == "flush"


def counted(looks: int) -> Deadline:
    """Return the deadline that passes when it has been looked at so often."""
    left = itertools.count(looks, -1)
    return Deadline(lambda: float(next(left)))


def test_a_clock_that_has_run_out_leaves_the_best_of_the_simplest_plans_and_says_so() -> None:
    plan = make_plan(replace(uneven(), deadline=counted(0)), settings=HIGHS).plan
    assert plan.provenance.solver_status == "time limit"
    assert plan.allocation.contiguous
    assert plan.lower_bounds == (any_bound(uneven()),)
    small = replace(uneven(), platform=Platform.flat(3, 1), deadline=counted(0))
    with pytest.raises(Infeasible, match="the time limit ended the search before it found a plan that fits"):
        make_plan(small, settings=HIGHS)


def test_quick_effort_takes_the_better_of_the_contiguous_plan_and_madpipes() -> None:
    def period(name: str) -> int:
        return make_plan(uneven(), name, settings=HIGHS, effort="quick").evaluation.period_ns

    assert period("auto") == period("madpipe") < period("contiguous")


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_a_class_of_plans_is_never_worse_than_one_that_it_contains(seed: int) -> None:
    """More of them, and brute force: scripts/checks/classes.py."""
    found = figures(instance(seed, most_layers=3))
    assert any(found.values())
    assert list(worse(found)) == []


def test_a_data_parallel_plan_that_recomputes_gives_way_to_stages_beside_it() -> None:
    """VGG-16 in parts on 8 GPUs of 8 GB: 101.2 ms on all of them, with segments; seven of them without the last layers,
    and their weights, in stages that end early, recompute less."""
    whole = merge_share(merge_articulation(published("vgg16"), "input"), Fraction(4, 100))
    problem = Problem(whole, Platform.flat(8, 8 * 10**9), checkpointing="segments")
    [shared] = contiguous(problem)
    assert shared.data_parallel
    found = make_plan(problem, settings=Settings("highs")).evaluation.period_ns
    assert shared.claimed_period_ns is not None
    assert found < 96_000_000 < 101_000_000 < shared.claimed_period_ns


def test_the_search_stops_within_the_gap_and_goes_on_without_one() -> None:
    looked = {}
    for gap in (0.0, 0.5):
        status = Status()
        planned = make_plan(uneven(), settings=replace(HIGHS, gap=gap, status=status))
        looked[gap] = status.candidates
        assert planned.plan.provenance.options["gap"] == gap
        assert planned.evaluation.period_ns <= (1 + gap) * any_bound(uneven()).period_ns
        assert status.floor_ns == any_bound(uneven()).period_ns
    assert looked[0.5] == 1  # the contiguous plan is a third above
    assert looked[0.0] > 1


def test_high_effort_is_never_worse_than_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where its own search finds less."""
    problem = small_problem(random.Random(12), full=False)
    quick, normal = (make_plan(problem, settings=HIGHS, effort=x).evaluation.period_ns for x in ("quick", "normal"))
    assert normal < quick
    monkeypatch.setitem(EFFORTS, "high", EFFORTS["quick"])
    found = make_plan(problem, settings=replace(HIGHS, gap=0.0), effort="high")
    assert (found.evaluation.period_ns, found.plan.provenance.options["effort"]) == (normal, "high")


@pytest.mark.parametrize(("said", "told"), [("node limit", "node limit"), ("cutoff", "optimal"), ("failed", "failed")])
def test_what_propagation_found_stays_where_the_integer_program_finds_nothing_better(
    said: IlpStatus, told: IlpStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = uneven()
    stages = (Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 5, (0,)))
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    known = one_at_a_time(graph)
    monkeypatch.setattr(incumbent, "settle", lambda *_: Settled(known, 1, 1, False))
    monkeypatch.setattr(incumbent, "schedule_ilp", lambda *_, **told: IlpResult(None, said, told["lower_bound_ns"]))
    assert incumbent.Incumbent(problem, HIGHS).schedule(graph, None) == (known, told)

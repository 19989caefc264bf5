"""Time limits: a search that is stopped anywhere has a valid plan, and one that isn't the same plan as ever."""

from __future__ import annotations

import itertools
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from math import inf

import pytest
from cases.chains import random_chain

from pipeplan.check.bounds import load_bound
from pipeplan.check.evaluate import evaluate, evaluate_simulated
from pipeplan.check.validate import violations
from pipeplan.cost.saved import storages
from pipeplan.deadline import Deadline, OutOfTime
from pipeplan.errors import Infeasible
from pipeplan.files.plans import plan_text
from pipeplan.partition import ALGORITHMS
from pipeplan.partition.balance import simplest
from pipeplan.partition.contiguous.contiguous import contiguous
from pipeplan.partition.tables import stages as tables
from pipeplan.planner.grids.grid_search import make_grid_plan
from pipeplan.planner.grids.space import grid_problem
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.schedule.programs.deciding import steady_nf1b

HIGHS = Settings("highs")
POLICIES = {
    "2bw": (Policy(), None),
    "drained": (Policy("flush", 6), None),
    "by messages": (Policy("flush", 6), "message-driven"),
    "nf1b": (Policy("latest"), None),
}


class Looks:
    """A clock that counts how often it is looked at, and says that time is up from the ``last`` look on."""

    def __init__(self, last: float = inf) -> None:
        self.count, self.last = 0, last

    def __call__(self) -> float:
        self.count += 1
        return 1.0 if self.count <= self.last else 0.0


def small(seed: int = 4, layers: int = 7, devices: int = 3) -> Problem:
    chain = random_chain(random.Random(seed), layers, saved=True)
    memory = 3 * int(chain.sums.weight_bytes[-1]) + 2 * int(storages(chain).totals[-1]) + 20
    return Problem(chain, Platform.flat(devices, memory, 10**9), checkpointing="segments")


def stopped_everywhere(find, problem: Problem, parts: int = 4) -> None:
    """Check what ``find`` finds for the problem, stopped at the first look at the clock, the last, and in between."""
    evaluate_simulated.cache_clear()
    steady_nf1b.cache_clear()
    looks = Looks()
    whole = find(replace(problem, deadline=Deadline(looks))).plan
    assert plan_text(whole) == plan_text(find(problem).plan)
    assert looks.count > parts
    limited = 0
    for last in [round(looks.count * part / parts) for part in range(parts)]:
        evaluate_simulated.cache_clear()
        steady_nf1b.cache_clear()
        found = find(replace(problem, deadline=Deadline(Looks(last)))).plan
        assert violations(found) == []
        assert any(bound.allocation == "any" for bound in found.lower_bounds)
        best = evaluate(whole).period_ns if found.schedule.kind == whole.schedule.kind else inf
        for bound in found.lower_bounds:
            assert evaluate(found).makespan_ns is not None or bound.period_ns <= min(best, evaluate(found).period_ns)
        limited += found.provenance.solver_status == "time limit"
    assert limited  # behind the search, what others take is looked for by looks of its own


@pytest.mark.parametrize("policy", POLICIES)
def test_the_portfolio_can_be_stopped_anywhere(policy):
    kept, schedule = POLICIES[policy]
    problem = small(layers=5 if schedule or kept.weights != "2bw" else 7).with_policy(kept)
    stopped_everywhere(lambda p: make_plan(p, settings=HIGHS, schedule=schedule), problem)


@pytest.mark.parametrize("algorithm", ["contiguous", "madpipe", "pipedream", "balance"])
def test_each_algorithm_can_be_stopped_anywhere(algorithm):
    problem = replace(small(), checkpointing="stages")
    stopped_everywhere(lambda p: make_plan(p, algorithm, settings=HIGHS), problem)


def test_a_search_for_grids_can_be_stopped_anywhere():
    asked, _ = grid_problem(small().with_policy(Policy("flush")), 12, [small().chain], [1])

    def find(problem):
        return make_grid_plan(replace(asked, problem=problem))

    stopped_everywhere(find, asked.problem)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_partitioner_asks_the_clock(algorithm):
    """All but the one that has nothing to search."""
    problem = replace(small(), checkpointing="stages", deadline=Deadline(lambda: 0.0))
    if algorithm == "data-parallel":
        assert list(ALGORITHMS[algorithm].partition(problem))
    else:
        with pytest.raises(OutOfTime):
            list(ALGORITHMS[algorithm].partition(problem))


def test_the_exact_search_hands_over_what_it_has():
    """Its best allocation, with the bound that was proved by then, which never exceeds the shortest period."""
    problem = replace(small(3, 60, 8), checkpointing="stages", replicas=False)
    looks = Looks()
    exact = next(contiguous(replace(problem, deadline=Deadline(looks))))
    assert exact.lower_bound_ns == exact.claimed_period_ns
    found = 0
    for last in range(0, looks.count, max(1, looks.count // 20)):
        try:
            best = next(contiguous(replace(problem, deadline=Deadline(Looks(last)))))
        except OutOfTime:
            continue
        found += 1
        assert best.lower_bound_ns <= exact.claimed_period_ns <= best.claimed_period_ns
    assert found > 5


def test_where_nothing_simple_fits_one_sentence_says_so():
    problem = replace(small(), platform=Platform.flat(3, 1), deadline=Deadline(lambda: 0.0))
    with pytest.raises(Infeasible, match="the time limit ended the search before it found a plan that fits"):
        make_plan(problem)


def test_simple_plans_cover_the_chain_on_every_device_or_one():
    problem = small()
    found = [allocation.stages for allocation in simplest(problem)]
    assert len(found) == 9
    for stages in found:
        assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
        assert stages[-1].stop == len(problem.chain)
    assert {len(stages) for stages in found} == {1, 3}


def test_chains_too_long_for_tables_of_all_cuts_are_cut_between_some_of_them(monkeypatch):
    problem = Problem(random_chain(random.Random(1), 60), Platform.flat(4, 10**9), replicas=False, checkpointing="none")
    exact = next(contiguous(problem))
    monkeypatch.setattr(tables, "_MOST_ENTRIES", 11 * 30**2)
    found = next(contiguous(problem))
    assert found.claimed_period_ns >= exact.claimed_period_ns >= found.lower_bound_ns >= load_bound(problem)
    assert found.claimed_period_ns < 1.2 * exact.claimed_period_ns


def test_a_long_chain_is_planned_within_its_limit():
    """Layers by the thousand, on many devices; the limit is far from what the whole search takes."""
    rng = random.Random(3)
    layers = tuple(Layer(f"l{i}", rng.randint(1, 10**6), rng.randint(1, 10**6), 10, 10) for i in range(3000))
    began = time.process_time()  # other processes don't count
    plan = make_plan(Problem(Chain("long", layers, 10), Platform.flat(64, 10**9), deadline=Deadline.within(0.05))).plan
    assert time.process_time() - began < 60
    assert plan.provenance.solver_status == "time limit"


def loses_one_alarm() -> None:
    with suppress(OutOfTime):
        while True:
            pass
    while True:
        pass


def cleans_up(cleaned: list[bool]) -> None:
    try:
        raise KeyboardInterrupt
    finally:
        time.sleep(1.0)
        cleaned.append(True)


def test_what_never_asks_is_ended_wherever_it_is():
    """Even where one alarm is lost, as in a destructor; and no alarm is left for what comes after."""
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    before = signal.setitimer(signal.ITIMER_REAL, 1000.0)
    with pytest.raises(OutOfTime), Deadline.within(0.0).insist():
        loses_one_alarm()
    left, again = signal.setitimer(signal.ITIMER_REAL, *before)
    assert 900 < left < 1000
    assert again == 0.0
    assert signal.signal(signal.SIGALRM, handler) not in (signal.SIG_DFL, handler)


def test_an_alarm_disturbs_nobody_who_is_leaving():
    """What cleans up behind an error that ends the command does so to its end."""
    cleaned: list[bool] = []
    with pytest.raises(KeyboardInterrupt), Deadline.within(0.0).insist():
        cleans_up(cleaned)
    assert cleaned


def test_threads_have_no_alarm():
    def insist() -> bool:
        before = signal.getsignal(signal.SIGALRM)
        with Deadline.within(0.0).insist():
            return signal.getsignal(signal.SIGALRM) is before

    with ThreadPoolExecutor() as pool:
        assert pool.submit(insist).result()


def test_a_search_that_never_asks_has_the_best_so_far(monkeypatch):
    def endless(incumbent, effort):
        incumbent.try_(next(contiguous(incumbent.problem)))
        while True:
            pass

    monkeypatch.setattr("pipeplan.planner.plan.search", endless)
    plan = make_plan(replace(small(), deadline=Deadline.within(1.0))).plan
    assert plan.provenance.solver_status == "time limit"
    assert violations(plan) == []


def test_deadlines_are_no_part_of_what_is_asked():
    assert Deadline(lambda: 1.0) == Deadline(lambda: 2.0)
    assert hash(replace(small(), deadline=Deadline.within(1)).policy) == hash(small().policy)
    ticks = itertools.count(3, -1)
    later = Deadline(lambda: float(next(ticks))).later(-1)
    later.check()
    later.check(0.5)
    with pytest.raises(OutOfTime):
        later.check()
    assert Deadline.within(-1).passed

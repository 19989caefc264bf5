"""One grid of equal pipelines: which limits are tried, and what lies one move away from the best split."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from cases.chains import random_chain

from pipeplan.planner.grids import pipelines as module
from pipeplan.planner.grids.pipelines import Pipelines, Proposal, Split, batch_time, drained_bound, held, limits
from pipeplan.planner.grids.space import GridProblem, configs, profiles
from pipeplan.problem import Level, Platform, Policy, Problem


def tried(seed: int, stages: int, microbatches: int, limit: int | None = None) -> Pipelines:
    """Return pipelines of one device per stage after a few splits of ten layers were simulated."""
    chain = random_chain(random.Random(seed), 10)
    problem = Problem(chain, Platform.flat(stages, 10**6), Policy("flush", microbatches), checkpointing="segments")
    pipelines = Pipelines(problem, [(s,) for s in range(stages)], microbatches, limit)
    assert list(pipelines.try_(pipelines.probe(3)))
    return pipelines


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stages", [2, 4])
def test_moves_are_all_nearby_cuts_and_limits_and_what_was_simulated(stages: int, seed: int) -> None:
    pipelines = tried(seed, stages, 6)
    best = pipelines.best
    assert best is not None
    moves = list(pipelines.moves())
    assert len(moves) == len(set(moves))
    near = set()
    for s in range(1, stages):
        near |= {(s, 1, step) for step in (-2, -1, 1, 2)} | (
            {(s, 2, step) for step in (-1, 1)} if s + 1 < stages else set()
        )
    shifted = {
        tuple(cut + (step if s <= i < s + count else 0) for i, cut in enumerate(best.cuts)) for s, count, step in near
    }
    legal = {cuts for cuts in shifted if all(a < b for a, b in pairwise(cuts))}
    assert {cuts for cuts, in_flight, limit in moves if (in_flight, limit) == (best.in_flight, best.limit)} == legal
    others = [x for x in moves if x[1:] != (best.in_flight, best.limit)]
    assert all(cuts == best.cuts for cuts, _, _ in others)
    simulated = best.result.in_flight
    assert ((best.cuts, simulated, best.limit) in moves) == (simulated != best.in_flight)
    largest = min(2 * stages - 1, 6)
    assert {x for *_, x in others if x != best.limit} == {best.limit - 1, best.limit + 1} & set(range(1, largest + 1))


@pytest.mark.parametrize("microbatches", [3, 6, 20])
def test_another_limit_lets_the_stages_hold_what_it_admits(microbatches: int) -> None:
    pipelines = tried(2, 4, microbatches)
    assert pipelines.best is not None
    others = [x for x in pipelines.moves() if x[2] != pipelines.best.limit]
    assert others
    for _, in_flight, limit in others:
        assert in_flight == held(4, min(limit, microbatches))[0]
        assert (len(in_flight), max(in_flight)) == (4, min(limit, microbatches))


def test_probing_ends_after_the_second_limit_where_a_split_fits() -> None:
    pipelines, seen = tried(3, 4, 6), []
    for *_, limit in pipelines.probe(2):
        seen.append(limit)
    assert list(dict.fromkeys(seen)) == limits(4, 6)[:2]


def test_some_splits_hold_less_when_simulated_than_they_might() -> None:
    found = [tried(seed, 4, 6).best for seed in range(6)]
    assert any(x is not None and x.result.in_flight != x.in_flight for x in found)


def test_a_batch_is_simulated_in_full_up_to_so_many_steps_and_in_part_beyond() -> None:
    """A microbatch takes four steps on each stage: it runs and is sent, forward and backward."""
    chain = random_chain(random.Random(2), 4)
    for microbatches, whole in ((2500, True), (2501, False)):  # of 8 steps each; the limit is 20,000
        problem = Problem(chain, Platform.flat(4, 10**6), Policy("flush", 2 * microbatches))
        pipelines = Pipelines(problem, [(0, 1), (2, 3)], microbatches, limit=2)
        assert next(pipelines.try_(pipelines.probe(1))).result.exact == whole


@pytest.mark.parametrize("seed", [1, 3, 8])
def test_a_bound_by_limits_is_asked_for_and_higher_where_memory_is_short(seed: int) -> None:
    problem = Problem(random_chain(random.Random(seed), 10), Platform.flat(4, 60), Policy("flush", 6), True, "segments")
    pipelines = Pipelines(problem, [(s,) for s in range(4)], 6)
    assert pipelines.tables is not None
    pipelines.bound(None)
    plain = pipelines.bound_ns
    assert plain == drained_bound(pipelines.tables, pipelines.groups)
    pipelines.bound(None, by_limit=True)
    assert pipelines.bound_ns > plain


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, [(1, 1), (2, 2), (3, 4), (5, 5), (6, 6), (7, 8), (9, None)]), (3, [(3, 3)])]
)
def test_a_bound_by_limits_leaves_none_out(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, expected: list[tuple[int, int | None]]
) -> None:
    spans = []

    def bound(
        tables: object, groups: object, least: int = 1, most: int | None = None, enough: int | None = None
    ) -> int:
        spans.append((least, most))
        return 100 + len(spans)

    monkeypatch.setattr(module, "drained_bound", bound)
    pipelines = tried(1, 5, 20, limit)
    pipelines.bound(None, by_limit=True)
    assert spans == expected
    assert pipelines.bound_ns == 101


def test_what_cannot_win_does_not_end_a_search() -> None:
    """Neither a split that takes longer than the best, nor one that doesn't fit."""
    pipelines = tried(4, 4, 6)
    best = pipelines.best
    assert best is not None
    pipelines.best = None
    empty = ((0, 0, 1, 2, 10), best.in_flight, best.limit)
    assert list(pipelines.try_([empty, best_proposal(best)])) == [best]
    slower = (best.cuts, best.in_flight, 1)
    pipelines.best = replace(best, result=replace(best.result, batch_ns=best.result.batch_ns + 1))
    assert list(pipelines.try_([slower, best_proposal(best)])) == [best]


def best_proposal(best: Split) -> Proposal:
    return best.cuts, best.in_flight, best.limit


def test_the_best_is_simulated_in_full_at_the_end_and_dropped_where_it_does_not_fit_then() -> None:
    """A part is simulated at first of a batch that is too long otherwise."""
    chain = random_chain(random.Random(2), 4)
    problem = Problem(chain, Platform.flat(4, 10**6), Policy("flush", 2 * 2501))
    pipelines = Pipelines(problem, [(0, 1), (2, 3)], 2501, limit=2)
    first = next(pipelines.try_(pipelines.probe(1)))
    pipelines.simulate_in_full()
    assert pipelines.best == replace(first, result=batch_time(problem, first.stages, 2501, 2))
    pipelines.best = first
    pipelines.problem = replace(problem, platform=Platform.flat(4, 1))
    pipelines.simulate_in_full()
    assert pipelines.best is None


def test_a_given_limit_is_not_moved() -> None:
    pipelines = tried(1, 4, 6, limit=3)
    assert {limit for *_, limit in pipelines.moves()} == {3}


@pytest.mark.parametrize(("stages", "microbatches", "expected"), [
    (1, 9, [1]),
    (2, 9, [2, 3, 1]),
    (4, 100, [4, 7, 5, 6, 3, 2, 1]),
    (4, 5, [4, 5, 3, 2, 1]),
    (16, 100, [16, 31, 20, 24, 12, 8, 4, 2, 1]),
    (5, 4, [4, 3, 2, 1]),
])  # fmt: skip
def test_limits_worth_trying_are_from_one_to_what_never_waits(
    stages: int, microbatches: int, expected: list[int]
) -> None:
    assert limits(stages, microbatches) == expected


def test_no_two_configurations_are_the_same_pipelines() -> None:
    """Stages in rows or in columns of a server make a difference only where there are several of both."""
    chain = random_chain(random.Random(0), 6)
    platform = Platform(Platform.flat(4, 10**6).devices, (Level(2, 10**9), Level(2, 10**8)))
    problem = Problem(chain, platform, Policy("flush"), checkpointing="segments")
    found = [(x.groups(), x.microbatch) for x in configs(GridProblem(problem, profiles([chain]), 8, (1, 2), (False,)))]
    assert len(found) == len(set(found))
    assert {groups for groups, _ in found if len(groups) == len(groups[0]) == 2} == {((0, 1), (2, 3)), ((0, 2), (1, 3))}

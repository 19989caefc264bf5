"""One pipeline's splits against all splits: the shortest paths are shortest, and no split beats the bound."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from cases.chains import random_chain, random_platform

from pipeplan.cost.saved import storages
from pipeplan.integers import NEVER, ceil_div
from pipeplan.plan import Stage
from pipeplan.planner.drained.layout import Layout
from pipeplan.planner.drained.tables import tables_of_pipelines
from pipeplan.planner.grids.pipelines import batch_time, drained_bound, held
from pipeplan.problem import Platform, Policy, Problem


def instance(seed, checkpointing="segments"):
    rng = random.Random(seed)
    stages, pipelines = rng.randint(1, 3), rng.choice((1, 1, 2))
    layers, microbatches = stages + rng.randint(0, 3), rng.randint(1, 6)
    chain = random_chain(rng, layers, saved=True, optimizer=seed % 3 == 0)
    size = 2 * int(chain.sums.weight_bytes[-1]) + int(storages(chain).totals[-1]) * 2
    memory = max(1, int(size * rng.choice((0.4, 0.8, 4))))
    platform = random_platform(rng, stages * pipelines, memory=(memory, memory * 5 // 4), latency=True, speeds=True)
    policy = Policy("flush", microbatches * pipelines, coarsening=rng.choice((None, 1)))
    if seed % 4 == 1:  # the pipelines share what updates take
        policy = replace(policy, optimizer="adam", zero=1)
    problem = Problem(chain, platform, policy, checkpointing=checkpointing)
    groups = [tuple(range(s * pipelines, (s + 1) * pipelines)) for s in range(stages)]
    return problem, groups, microbatches


def every_split(layout):
    size = layout.tables.size
    for inner in combinations(range(1, size - 1), len(layout.groups) - 1):
        yield (0, *inner, size - 1)


def at_most(pipeline, groups, limit):
    """Return the layout of stages that hold what a limit lets them at most."""
    return Layout(pipeline, tuple(groups), held(len(groups), min(limit, pipeline.microbatches))[0])


@pytest.mark.parametrize("seed", range(20))
def test_no_simulated_split_beats_the_bound_or_its_own(seed):
    problem, groups, microbatches = instance(seed, ("segments", "stages", "none")[seed % 3])
    pipeline = tables_of_pipelines(problem, groups, microbatches)
    if pipeline is None:  # then not even whole stages recomputed fit
        for inner in combinations(range(1, len(problem.chain)), len(groups) - 1):
            parts = zip(pairwise((0, *inner, len(problem.chain))), groups, strict=True)
            stages = [Stage(a, b, group) for (a, b), group in parts]
            assert not batch_time(problem, stages, microbatches, 1).fits
        return
    whole = drained_bound(pipeline, groups)
    for limit in range(1, 2 * len(groups)):
        own = drained_bound(pipeline, groups, limit, limit)
        assert own >= whole
        layout = at_most(pipeline, groups, limit if len(groups) > 1 else 1)
        for cuts in every_split(layout):
            if not layout.fits(cuts):
                continue
            stages = layout.stages(cuts)
            run = batch_time(problem, stages, microbatches, limit if len(groups) > 1 else 1)
            assert run.fits  # whatever arrives when, no stage holds more
            assert all(held <= most for held, most in zip(run.in_flight, layout.held, strict=True))
            assert own <= run.batch_ns
            assert layout.least_ns(cuts, ceil_div(microbatches, limit)) <= run.batch_ns


@pytest.mark.parametrize("seed", range(20))
def test_splits_are_the_shortest_paths_of_their_longest_stage(seed):
    problem, groups, microbatches = instance(seed)
    pipeline = tables_of_pipelines(problem, groups, microbatches)
    if pipeline is None:
        return
    layout = at_most(pipeline, groups, 1)

    def figures(cuts):
        times = [int(layout.times[s][pair]) for s, pair in enumerate(pairwise(cuts))]
        loads = [int(layout.loads[s][cuts[s + 1]]) for s in range(len(cuts) - 2)]
        trips = [int(layout.trips[s][cuts[s + 1]]) for s in range(len(cuts) - 2)]
        return max(times + loads), sum(times) + sum(trips)

    every = [figures(cuts) for cuts in every_split(layout)]
    every = [pair for pair in every if pair[0] < NEVER]
    found = [figures(cuts) for cuts in layout.starts()]
    assert bool(found) == bool(every)
    if found:
        assert found[0][0] == min(longest for longest, _ in every)
    for longest, path in found:
        assert path == min(other for most, other in every if most <= longest)


def test_a_bound_that_is_enough_is_returned():
    cases = [instance(seed) for seed in range(4, 60)]
    pipelines = ((tables_of_pipelines(*case), case[1]) for case in cases)
    pipeline, groups = next(pair for pair in pipelines if pair[0] is not None and len(pair[1]) > 1)
    bound = drained_bound(pipeline, groups)
    assert drained_bound(pipeline, groups, enough=1) == 1
    assert drained_bound(pipeline, groups, enough=bound) == bound
    assert drained_bound(pipeline, groups, enough=10 * bound) in (bound, bound + 1)


def test_what_fits_nowhere_is_none():
    problem, groups, microbatches = instance(4)
    tiny = Platform.flat(len(problem.platform), 1)
    starved = Problem(problem.chain, tiny, problem.policy, checkpointing="segments")
    assert tables_of_pipelines(starved, groups, microbatches) is None

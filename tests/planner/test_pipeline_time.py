"""What a search takes of a grid's run is what the simulator says of all of it."""

import random
from dataclasses import replace
from functools import partial

import pytest
from cases.chains import random_chain, random_platform

from pipeplan.check.validate import structure_violations
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.balance import balance
from pipeplan.partition.moves.wander import _Changes
from pipeplan.plan import Stage
from pipeplan.planner.grids.pipelines import batch_time
from pipeplan.problem import Chain, Layer, Level, Platform, Policy, Problem
from pipeplan.schedule.programs.deciding import message_driven
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.timeline import flush_makespan_ns, in_flight, lane_use


def random_split(rng, layers, groups):
    cuts = [0, *sorted(rng.sample(range(1, layers), len(groups) - 1)), layers]
    return tuple(
        Stage(a, b, group, rng.choice([(), ((a, b),), ((b - 1, b),)]))
        for a, b, group in zip(cuts[:-1], cuts[1:], groups, strict=True)
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_grid_runs_as_the_simulator_says(seed):
    rng = random.Random(seed)
    stages, pipelines = rng.randint(1, 5), 1 + seed % 3
    layers, microbatches = stages + rng.randint(0, 4), rng.randint(1, 12)
    chain = random_chain(rng, layers, optimizer=seed % 2 == 0, saved=True, tied=seed % 4 < 2)
    gpus = stages * pipelines
    platform = random_platform(rng, gpus, memory=(50, 120), levels=seed % 5 < 3, duplex=True, latency=True, speeds=True)
    if seed % 3 == 1:  # all pipelines send by the same few links
        *lower, top = platform.levels
        platform = replace(platform, levels=(*lower, replace(top, links=1 + seed % 2)))
    platform = replace(platform, blocking=seed % 7 == 0, overhead_ns=2 * (seed % 14 < 2))
    policy = Policy(
        "flush",
        microbatches * pipelines,
        rng.choice(("sgd", "adam")),
        rng.choice(("fp32", "mixed")),
        offload=rng.random() < 0.5,
        bucket_parameters=rng.randint(1, 40),
        coarsening=rng.choice((None, 1, 3)),
    )
    problem = Problem(chain, platform, policy)
    side_by_side = [tuple(range(s, gpus, stages)) for s in range(stages)]
    together = [tuple(range(s * pipelines, (s + 1) * pipelines)) for s in range(stages)]
    split = random_split(rng, layers, rng.choice((side_by_side, together)))
    limit = rng.randint(1, 2 * stages)
    graph = stage_graph(chain, platform, problem.policy, split)
    timeline = simulate(message_driven(graph, microbatches * pipelines, limit))
    found = batch_time(problem, split, microbatches, limit)
    assert found.exact
    steps = sum(len(lane.steps) for lane in timeline.program.lanes)
    alone = all(resource.replicas == pipelines for resource in graph.resources)  # one stands for all
    assert found.steps == (steps // pipelines if alone else steps)
    assert found.batch_ns == flush_makespan_ns(timeline)
    lanes = {lane.device: i for i, lane in enumerate(timeline.program.lanes)}
    for s, stage in enumerate(split):
        assert found.in_flight[s] == max(in_flight(timeline, lanes[d])[s] for d in stage.devices)
        memory = platform.slowest(stage.devices).memory_bytes
        assert found.over_bytes[s] == max(lane_use(timeline, lanes[d]).peak_bytes - memory for d in stage.devices)
    assert found.fits == (max(found.over_bytes) <= 0)


@pytest.mark.parametrize("seed", range(20))
def test_queues_of_messages_decide_as_the_rule_does(seed):
    """Devices with several stages, stages with unlike replicas: what local search walks through."""
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(2, 8), optimizer=seed % 2 == 0, saved=True, tied=seed % 4 < 2)
    platform = random_platform(rng, rng.randint(1, 6), memory=(50, 400), levels=seed % 5 < 3, latency=True, speeds=True)
    policy = Policy("flush", rng.randint(1, 24), rng.choice(("sgd", "adam")), coarsening=rng.choice((None, 1)))
    problem = Problem(chain, platform, policy, True, "segments")
    stages = next(iter(balance(problem))).stages
    for _ in range(24):
        stages = _Changes(problem).one(stages, rng) or stages
        if structure_violations(chain, platform, policy, stages):
            continue
        graph, limit = stage_graph(chain, platform, policy, stages), rng.randint(1, 2 * len(stages))
        program = message_driven(graph, policy.accumulate, limit)
        assert simulate(program).start_ns == simulate(asking_rules(program)).start_ns


def asking_rules(program):
    """The program with rules that are functions like any other."""

    def asked(rule):
        return lambda: partial(rule())

    lanes = (lane if lane.rule is None else replace(lane, rule=asked(lane.rule)) for lane in program.lanes)
    return replace(program, lanes=tuple(lanes))


def test_a_backward_goes_before_a_forward_of_an_older_microbatch_that_comes_at_the_same_time():
    """Replicas let microbatches overtake each other on the way to a device that has two stages."""
    figures = [(2, 3, 0), (1, 2, 0), (4, 1, 1), (4, 4, 0)]
    layers = tuple(Layer(f"l{i}", f, b, 0, size, 1) for i, (f, b, size) in enumerate(figures))
    stages = [Stage(i, i + 1, group) for i, group in enumerate([(0,), (1, 2), (0,), (1, 2)])]
    graph = stage_graph(Chain("overtaken", layers, 0), Platform.flat(3, 100, 10**9), Policy("flush", 6), stages)
    assert flush_makespan_ns(simulate(message_driven(graph, 6, 3))) == 76


@pytest.mark.parametrize("seed", range(20))
def test_one_pipeline_stands_for_all_and_a_part_for_a_long_batch(seed):
    rng = random.Random(seed)
    stages, pipelines = rng.randint(2, 4), rng.choice((2, 4))
    chain = random_chain(rng, 2 * stages, largest=1000)
    platform = random_platform(rng, stages * pipelines)
    platform = replace(platform, levels=(Level(stages * pipelines, 2 * 10**10),))
    groups = [tuple(range(s * pipelines, (s + 1) * pipelines)) for s in range(stages)]
    split = tuple(Stage(2 * s, 2 * s + 2, group) for s, group in enumerate(groups))
    problem = Problem(chain, platform, Policy("flush", 200 * pipelines))
    whole = batch_time(problem, split, 200, 2 * stages - 1)
    part = batch_time(problem, split, 200, 2 * stages - 1, whole=False)
    assert whole.exact
    assert not part.exact
    assert part.steps < whole.steps
    assert part.batch_ns == pytest.approx(whole.batch_ns, rel=0.06)
    assert all(abs(one - other) <= 1 for one, other in zip(part.in_flight, whole.in_flight, strict=True))

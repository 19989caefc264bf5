"""Small instances of the exact contiguous search, and what its answers attain."""

from __future__ import annotations

import random
from dataclasses import replace

from cases.chains import random_chain, random_problem
from oracles.partition import ContiguousJudge, contiguous_optimum

from pipeplan.check.validate import pattern_violations
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.contiguous.contiguous import feasible, smallest_period
from pipeplan.plan import Allocation
from pipeplan.problem import Problem
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star

WEIGHTS = ("flush", "2bw", "stash", "latest")


def varied_problem(seed: int) -> Problem:
    """Return a small instance; the features it has depend on the seed."""
    rng = random.Random(seed)
    layers, devices = rng.choice((1, 2, 3, 4, 5, 5, 6, 6)), rng.choice((1, 2, 3, 3, 4, 4))

    def maybe(chance: float = 0.4) -> bool:
        return rng.random() < chance

    problem = random_problem(
        rng,
        layers,
        devices,
        weights=WEIGHTS,
        checkpointing=rng.choice(("none", "stages", "stages", "stages")),
        replicas=maybe(0.6),
        edges=maybe(),
        saved=maybe(),
        optimizer=maybe(),
        levels=maybe(0.6),
        latency=maybe(),
        speeds=maybe(),
        duplex=maybe(),
    )
    chain = problem.chain
    if maybe(0.5):  # light weights, so that memory binds through what is in flight
        chain = replace(chain, layers=tuple(replace(x, weight_bytes=x.weight_bytes // 3) for x in chain.layers))
    if maybe(0.5):  # much to save behind small inputs, so that recomputation pays
        saved = [replace(x, saved_bytes=rng.randint(5, 30)) for x in chain.layers]
        chain = replace(chain, layers=tuple(replace(x, output_bytes=min(x.output_bytes, 3)) for x in saved))
    if layers > 2 and maybe(0.2):
        i = rng.randrange(layers - 1)
        chain = replace(chain, tied=((i, rng.randrange(i + 1, layers)),))
    if maybe(0.2):
        chain = replace(chain, layers=tuple(replace(x, parameters=rng.randint(0, 9)) for x in chain.layers))
    if maybe(0.2):
        zeros = random_chain(rng, layers, zero_times=True)
        pairs = zip(chain.layers, zeros.layers, strict=True)
        timed = (replace(x, forward_ns=y.forward_ns, backward_ns=y.backward_ns) for x, y in pairs)
        chain = replace(chain, layers=tuple(timed))
    policy = replace(
        problem.policy,
        accumulate=rng.randint(1, 5) if maybe() else None,
        optimizer=rng.choice(("sgd", "sgd", "momentum", "adam")),
        precision=rng.choice(("fp32", "fp32", "mixed")),
        offload=maybe(0.2),
        vertical_sync=maybe(0.3),
        bucket_parameters=5,
    )
    spare = rng.choice((0, 0, 5, 10, 20, 40, 60))
    larger = tuple(replace(x, memory_bytes=x.memory_bytes + spare) for x in problem.platform.devices)
    if maybe(0.3):  # replicas share what they keep and do to update
        policy = replace(policy, zero=1, optimizer=rng.choice(("sgd", "adam", "adam")))
        timed = (replace(x, optimizer_ns=rng.choice((0, 2, 9))) for x in chain.layers)
        chain = replace(chain, layers=tuple(timed))
    if seed % 3 == 1:  # passes work with memory of their own
        chain = replace(chain, layers=tuple(replace(x, working_bytes=rng.randint(0, 15)) for x in chain.layers))
    return replace(problem, chain=chain, policy=policy, platform=replace(problem.platform, devices=larger))


def assert_attains(problem: Problem, allocation: Allocation) -> None:
    """The stages are an allocation that keeps units together, whose own smallest period is the claimed one."""
    stages = allocation.stages
    assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
    assert stages[-1].stop == len(problem.chain)
    assert allocation.contiguous
    assert allocation.keeps_units(problem.platform)
    period = allocation.claimed_period_ns
    assert period is not None
    judge = ContiguousJudge(problem)
    assert judge.valid(stages, period)
    assert not judge.valid(stages, period - 1)


def assert_schedules(problem: Problem, found: Allocation) -> None:
    """1F1B* gives the claimed period to the scheduler and the validator."""
    graph = stage_graph(problem.chain, problem.platform, problem.policy, found.stages)
    pattern = best_one_f_one_b_star(graph)
    assert pattern is not None
    assert found.claimed_period_ns is not None
    if problem.policy.vertical_sync:  # the first stage may need more versions than a stage was searched with
        assert pattern.period_ns >= found.claimed_period_ns
    else:
        assert pattern.period_ns == found.claimed_period_ns
    assert pattern_violations(graph, pattern) == []


def assert_brute_force_agrees(seed: int) -> bool:
    """The exact search finds what trying every cut finds, on one instance; return whether there is a plan."""
    problem = varied_problem(seed)
    as_listed = seed % 5 > 0  # all orders take brute force long
    truth = contiguous_optimum(problem, as_listed)
    found = smallest_period(problem, as_listed=as_listed)
    assert (found is None) == (truth is None), seed
    if found is None or truth is None:
        return False
    assert found.claimed_period_ns == truth[0], seed
    assert_attains(problem, found)
    if not as_listed or len(set(problem.platform.devices)) == 1:
        assert feasible(problem, truth[0] - 1) is None, seed
    return True


def segments_problem(seed: int) -> Problem:
    """Return an instance small enough to try all segments, any policy, levels, devices, skip connections."""
    problem = replace(varied_problem(seed), checkpointing="segments")
    most = 5 if len(problem.platform) < 4 else 4
    if len(problem.chain) <= most:
        return problem
    count = len(problem.chain) - most
    chain = problem.chain
    edges = None if chain.edges is None else tuple((i, j) for i, j in chain.edges if j < most)
    tied = tuple(pair for pair in chain.tied if max(pair) < most)
    return replace(problem, chain=replace(chain, layers=chain.layers[:-count], edges=edges, tied=tied))


def assert_brute_force_agrees_on_segments(seed: int) -> bool:
    """The exact search finds what trying all segments in all cuts finds; return whether there is a plan."""
    problem = segments_problem(seed)
    truth = contiguous_optimum(problem)
    found = smallest_period(problem)
    assert (found is None) == (truth is None), seed
    if found is None or truth is None:
        assert feasible(problem, 10**9) is None, seed
        return False
    assert found.claimed_period_ns == found.lower_bound_ns == truth[0], seed
    assert_attains(problem, found)
    assert feasible(problem, truth[0] - 1) is None, seed
    at = feasible(problem, truth[0])
    assert at is not None, seed
    assert at.claimed_period_ns == truth[0], seed
    assert feasible(problem, 10**9) is not None, seed
    return True

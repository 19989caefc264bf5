"""Stages that each choose a tensor degree: the exact search against all placements, and against one degree for all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipeplan.check.bounds import proof
from pipeplan.check.validate import structure_violations
from pipeplan.cost.group_bound import group_bound
from pipeplan.cost.stage_cost import least_load_ns, stage_cost
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.contiguous.contiguous import smallest_period
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Checkpointing, Device, Layer, Level, Platform, Policy, Problem, Variant, Weights

MOST = 10**18


def narrow(rng: random.Random, layer: Layer, width: int) -> Layer:
    """Return one rank's part of a layer: less of all, but for what is whole everywhere, and never free of loss."""
    extra = rng.randrange(0, 30)
    return replace(
        layer,
        forward_ns=layer.forward_ns // width + extra,
        backward_ns=layer.backward_ns // width + 2 * extra,
        weight_bytes=layer.weight_bytes // width + 4 * rng.randrange(0, 3),
        output_bytes=layer.output_bytes if rng.random() < 0.5 else layer.output_bytes // width,
        saved_bytes=(layer.saved_bytes or 0) // width + rng.randrange(0, 20),
    )


def random_instance(seed: int, checkpointing: Checkpointing = "none") -> Problem:
    """Return a tiny network with two or three degrees, on up to eight GPUs of one or two servers."""
    rng = random.Random(seed)
    layers = tuple(
        Layer(f"l{i}", rng.randrange(20, 400), rng.randrange(20, 600), 4 * rng.randrange(0, 200),
              rng.randrange(0, 300), rng.randrange(0, 500))
        for i in range(rng.randint(2, 4))
    )  # fmt: skip
    inside, servers = rng.choice([(2, 2), (4, 1), (4, 2)] if checkpointing == "none" else [(2, 2), (4, 1)])
    variants = tuple(Variant(w, True, tuple(narrow(rng, x, w) for x in layers)) for w in (2, 4) if w <= inside)
    if seed % 4 == 0:  # the widest is none, but one GPU's layers that keep nothing and take longer
        kept = tuple(replace(x, saved_bytes=0, backward_ns=x.backward_ns + (x.saved_bytes or 0)) for x in layers)
        variants = (*variants[: 1 if inside == 2 else -1], Variant(1, False, kept, offloaded=10**9))
    chain = Chain("tiny", layers, rng.randrange(0, 300), variants=variants)
    whole = sum(x.weight_bytes * 4 + 2 * x.output_bytes + (x.saved_bytes or 0) for x in layers)
    memory = int(whole * rng.choice((0.25, 0.4, 0.7, 1.5, 4)))
    levels: tuple[Level, ...] = (Level(inside, rng.choice((10**9, 10**10)), rng.randrange(0, 20)),)
    levels += (Level(servers, rng.choice((10**8, 10**9)), rng.randrange(0, 60)),) * (servers > 1)
    duplex = rng.random() < 0.3
    platform = Platform((Device(memory),) * (inside * servers), levels, full_duplex=duplex)
    weights: Weights = rng.choice(("2bw", "stash", "latest"))
    policy = Policy(weights, rng.choice((4, 8)) if weights == "2bw" else None)
    return Problem(chain, platform, policy, replicas=rng.random() < 0.7, checkpointing=checkpointing)


def placements(problem: Problem, layer: int = 0, gpu: int = 0) -> Iterator[tuple[Stage, ...]]:
    """Yield all stages from a layer and a GPU on, in the order of the GPUs, of which any may be left out."""
    count, inside = len(problem.platform), problem.platform.unit_sizes[0]
    if layer == len(problem.chain):
        yield ()
        return
    for stop in range(layer + 1, len(problem.chain) + 1):
        ways = ((), ((layer, stop),)) if problem.checkpointing == "stages" else ((),)
        for name in problem.chain.names:
            width = name[0]
            for first in range(gpu, count):
                most = (count - first) // width if problem.replicas else min(1, (count - first) // width)
                for replicas in range(1, most + 1):
                    devices = tuple(range(first, first + replicas * width, width))
                    if any(d // inside != (d + width - 1) // inside for d in devices):
                        continue
                    for behind in placements(problem, stop, first + replicas * width):
                        for way in ways:
                            yield (named(Stage(layer, stop, devices, way), *name), *behind)


def named(stage: Stage, tensor: int, selective: bool, offloaded: bool) -> Stage:
    """Return the stage of a variant of this name."""
    return replace(stage, tensor=tensor, selective=((stage.start, stage.stop),) * selective, offloaded=offloaded)


def best_of_all(problem: Problem) -> int | None:
    """Return the shortest period of any placement."""
    best = MOST
    for stages in placements(problem):
        if least_load_ns(problem.chain, problem.platform, stages) >= best:
            continue
        graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
        if graph.period_floor_ns >= best or structure_violations(
            problem.chain, problem.platform, problem.policy, stages
        ):
            continue
        found = group_bound(graph)
        best = min(best, MOST if found is None else found)
    return None if best == MOST else best


def with_branches(problem: Problem, seed: int) -> Problem:
    """Return the problem of layers that read any earlier ones or the network's input, such as two towers do."""
    rng, count = random.Random(seed), len(problem.chain)
    edges = {(i, j) for j in range(count) for i in range(j) if rng.random() < 0.5}
    edges |= {(i, count - 1) for i in range(count - 1) if all(source != i for source, _ in edges)}
    return replace(problem, chain=replace(problem.chain, edges=tuple(sorted(edges))))


@pytest.mark.parametrize(("block", "branches"), [(0, False), (1, False), (4, True)])
def test_each_stage_chooses_as_all_placements_say(block: int, branches: bool) -> None:
    differing = 0
    for seed in range(10 * block + 5, 10 * block + 10):
        problem = random_instance(seed, "stages" if seed % 3 == 2 else "none")
        problem = with_branches(problem, seed) if branches else problem
        truth, found = best_of_all(problem), smallest_period(problem)
        assert (found is None) == (truth is None), seed
        if found is not None and found.claimed_period_ns is not None:
            assert found.claimed_period_ns == found.lower_bound_ns == truth, seed
            assert proof(problem).period_ns <= found.claimed_period_ns, seed
            differing += len({x.tensor for x in found.stages}) > 1
    assert differing


@pytest.mark.parametrize("checkpointing", ["none", "stages", "segments"])
def test_a_degree_for_each_stage_is_no_worse_than_one_for_all(checkpointing: Checkpointing) -> None:
    better = 0
    for seed in range(112, 120):
        problem = random_instance(seed, checkpointing)
        alike = [found for x in problem.uniform if (found := smallest_period(x)) is not None]
        found = smallest_period(problem)
        if found is None or found.claimed_period_ns is None:
            assert not alike, seed
            continue
        least = min((x.claimed_period_ns or MOST for x in alike), default=MOST)
        assert found.claimed_period_ns <= least, seed
        assert proof(problem).period_ns <= found.claimed_period_ns, seed
        better += found.claimed_period_ns < least
    assert better


def test_a_stage_costs_what_it_does_where_all_have_its_degree() -> None:
    """Stages between the same cuts, each on one group: what they hold, take and exchange is their own variant's."""
    for seed in range(200, 230):
        problem = random_instance(seed)
        for own, name in zip(problem.uniform, problem.chain.names, strict=True):
            stage = named(Stage(0, len(problem.chain), (0,)), *name)
            here = stage_cost(problem.chain, problem.platform, problem.policy, stage, 0, False, False, ())
            alike = Stage(0, len(problem.chain), (0,))
            assert here == stage_cost(own.chain, own.platform, own.policy, alike, 0, False, False, ())


def test_memory_bounds_where_it_forces_groups() -> None:
    """Layers that are quickest on one GPU and held by groups alone: the bound says so, and isn't above the plan."""
    seen = set()
    for seed in range(30):
        rng = random.Random(seed)
        layers = tuple(Layer(f"l{i}", rng.randrange(50, 90), 150, 0, 4, 1000) for i in range(4))
        parts = (
            Variant(w, True, tuple(replace(x, forward_ns=x.forward_ns // w + 40, output_bytes=1,
                                           saved_bytes=1000 // w) for x in layers))
            for w in (2, 4)
        )  # fmt: skip
        chain = Chain("held", layers, 4, variants=tuple(parts))
        platform = Platform.flat(4, rng.randrange(1100, 5000), 10**12)
        problem = Problem(chain, platform, Policy("latest"), checkpointing="none")
        found, bound = smallest_period(problem), proof(problem)
        assert found is None or bound.period_ns <= (found.claimed_period_ns or 0), seed
        seen.add(bound.part)
    assert "averages" in seen

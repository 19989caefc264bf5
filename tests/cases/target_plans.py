"""All plans of a small network that a target can express, tried one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, islice

from pipeplan.check.evaluate import evaluate_simulated, fits
from pipeplan.check.targets import TARGETS, Shape, as_run_by, refusals, weight_bytes
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.cuts import legal_cuts
from pipeplan.plan import Schedule, ScheduleKind, Stage
from pipeplan.planner.drained.block_search import MOST_CHUNKS
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, Problem
from pipeplan.schedule.kinds import KINDS

from .drained import times_of_its_own

NAMES = ["embedding", *(f"layers.{i}" for i in range(4)), "norm", "head", "loss"]


def network(seed: int = 0, tied: bool = False) -> Chain:
    """A small decoder, whose layers differ."""
    layers = [
        Layer(name, 7 + (5 * i + seed) % 11, 15 + (7 * i + 3 * seed) % 17, 100 + 10 * i, 40, saved_bytes=90)
        for i, name in enumerate(NAMES)
    ]
    layers[-1] = replace(layers[-1], weight_bytes=0)
    return Chain("decoder", tuple(layers), 30, tied=((0, 6),) if tied else ())


def every_plan(problem: Problem, name: str) -> Iterator[tuple[ScheduleKind, Shape, int]]:
    """Yield the kind, the shape and the period of each plan of the class that fits, found by trying all."""
    target, count = TARGETS[name], problem.policy.accumulate
    units = target.units(problem.chain)
    cuts = {unit.stop for unit in units[:-1]} & set(
        legal_cuts(problem if target.ties else replace(problem, tied="together")).tolist()
    )
    weights = weight_bytes(problem.chain)
    for kind in target.kinds:
        for ranks in range(1, len(problem.platform) + 1):
            for pipelines in range(1, len(problem.platform) // ranks + 1):
                several = {"interleaved": MOST_CHUNKS, "interleaved-zb": MOST_CHUNKS, "zbv": 2}.get(kind, 1)
                for chunks in range(min(2, several), several + 1) if ranks > 1 or several == 1 else []:
                    shape = Shape(ranks, pipelines, chunks, kind == "zbv")
                    if refusals(target, kind, shape, count):
                        continue
                    own = [tuple(range(s * pipelines, (s + 1) * pipelines)) for s in range(ranks)]
                    groups = own + own[::-1] if kind == "zbv" else own * chunks
                    for inner in combinations(sorted(cuts), len(groups) - 1):
                        ends = [0, *inner, len(problem.chain)]
                        ways = target.ways(len(units), range(1, len(units) + 1))
                        for way in islice(ways, 1) if KINDS[kind].splits else ways:
                            stages = []
                            for a, b, group in zip(ends, ends[1:], groups, strict=False):
                                own = [unit for unit in units if a <= unit.start < b]
                                stages.append(Stage(a, b, group, way.segments(target, own, weights)))
                            graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
                            found = evaluate_simulated(graph, Schedule(kind, count), problem.platform, problem.deadline)
                            if fits(found):
                                yield kind, shape, found.period_ns


def target_instance(seed: int) -> tuple[str, Problem]:
    """Return a target, and a tiny problem as its runtime holds it: 2 or 3 GPUs, some of them unequal or with their own
    profiles, some whose messages keep them from computing, 4 or 5 units."""
    rng = random.Random(seed)
    name = sorted(TARGETS)[seed % len(TARGETS)]
    layers = [
        Layer(
            unit,
            rng.randint(1, 20),
            (backward := rng.randint(2, 40)),
            rng.randint(0, 120),
            rng.choice((2, 40)),
            saved_bytes=rng.randint(0, 100),
            optimizer_ns=rng.choice((0, 9)),
            backward_weight_ns=rng.randint(0, backward),
        )
        for unit in (NAMES if seed % 2 else [*NAMES[:4], *NAMES[5:]])
    ]
    layers[-1] = replace(layers[-1], weight_bytes=0)
    if seed % 4 == 1:  # blocks that are alike
        layers = [layers[0], *(replace(layers[1], name=x.name) for x in layers[1:-3]), *layers[-3:]]
    head = len(layers) - 2
    tied = ((0, head),) if seed % 5 == 4 else ()
    if tied:
        layers[head] = replace(layers[head], weight_bytes=layers[0].weight_bytes)
    gpus, memory = rng.choice((2, 3)), rng.randint(500, 2200)
    devices = tuple(
        Device(memory + rng.choice((0, 0, 200)), Fraction(rng.choice((1, 1, 2)))) if seed % 3 else Device(memory)
        for _ in range(gpus)
    )
    platform = Platform(devices, (Level(gpus, rng.choice((10**9, 10**10)), rng.choice((0, 3))),), bool(seed % 2))
    policy = Policy("flush", gpus * rng.choice((1, 2, 3)))
    platform = replace(platform, blocking=seed % 6 == 2, overhead_ns=rng.choice((1, 4)) * (seed % 5 == 3))
    if seed % 7 in (2, 6):
        devices = tuple(replace(x, times=times_of_its_own(rng, len(layers))) for x in devices)
        platform = replace(platform, devices=devices)
    problem = Problem(Chain("decoder", tuple(layers), 30, tied=tied), platform, policy, checkpointing="segments")
    return name, as_run_by(problem, name)

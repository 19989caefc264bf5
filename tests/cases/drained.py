"""Drained plans on tiny instances: all of class ``contiguous``, tried one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

from pipeplan.check.evaluate import evaluate_simulated, fits
from pipeplan.check.targets import Shape
from pipeplan.check.validate import structure_violations
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.deadline import NEVER
from pipeplan.plan import Schedule, ScheduleKind, Stage
from pipeplan.planner.drained.run import drained_run
from pipeplan.problem import LayerTimes, Policy, Problem
from pipeplan.schedule.kinds import refused
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.synthesis.recomputing import recomputed_early
from pipeplan.schedule.timeline import flush_makespan_ns

from .chains import random_chain, random_platform

VEES: tuple[ScheduleKind, ...] = ("zbv", "v-half", "v-min", "dualpipev")
LOOPS: tuple[ScheduleKind, ...] = ("interleaved", "breadth-first", "interleaved-zb")


def drained_instance(seed: int, more: int = 0, tied: bool = False) -> Problem:
    """Return a tiny problem that drains: 3 GPUs, some with their own profiles, 3 or 4 layers, or so many ``more``, some
    of them ``tied``, and up to 5 microbatches."""
    rng = random.Random(seed)
    chain = random_chain(rng, 3 + seed % 2 + more, optimizer=seed % 3 == 0, saved=True, tied=tied)
    if seed % 2:
        layers = (replace(x, backward_weight_ns=rng.randint(0, x.backward_ns)) for x in chain.layers)
        chain = replace(chain, layers=tuple(layers))
    platform = random_platform(rng, 3, memory=(60, 160), levels=seed % 5 == 0, duplex=True, latency=True, speeds=True)
    platform = replace(platform, blocking=seed % 9 == 4, overhead_ns=2 * (seed % 4 == 1))
    count = rng.randint(1, 5)
    if seed % 7 == 6:
        devices = tuple(replace(x, times=times_of_its_own(rng, len(chain))) for x in platform.devices)
        platform = replace(platform, devices=devices)
    return Problem(chain, platform, Policy("flush", count), replicas=seed % 4 != 3, checkpointing="segments")


def times_of_its_own(rng: random.Random, layers: int) -> LayerTimes:
    """Return random times of a device's own profile."""
    forward, backward = ([rng.randint(1, most) for _ in range(layers)] for most in (20, 40))
    return LayerTimes("", tuple(forward), tuple(backward), tuple(rng.randint(0, x) for x in backward), (0,) * layers)


def soonest(problem: Problem) -> dict[ScheduleKind, int]:
    """Return the shortest mini-batch of all contiguous allocations, by the kinds of schedules, all limits tried, and of
    some orders, in which stages recompute early."""
    layers, gpus, count = len(problem.chain), len(problem.platform), problem.policy.accumulate or 1
    best: dict[ScheduleKind, int] = {}
    for used in range(1, gpus + 1):
        for stages in range(1 if problem.replicas else used, min(used, layers) + 1):
            for ends, cuts in product(
                combinations(range(1, used), stages - 1), combinations(range(1, layers), stages - 1)
            ):
                groups, parts = pairwise((0, *ends, used)), pairwise((0, *cuts, layers))
                places = [(part, tuple(range(*group))) for part, group in zip(parts, groups, strict=True)]
                for again in product(*([(), (part,)] for part, _ in places)):
                    made = tuple(Stage(*part, group, some) for (part, group), some in zip(places, again, strict=True))
                    for kind, ns in _times(problem, made, count):
                        best[kind] = min(ns, best.get(kind, ns))
    return best


def soonest_placed(problem: Problem, kinds: Sequence[ScheduleKind] = VEES) -> dict[ScheduleKind, int]:
    """Return the shortest mini-batch of all stages that are placed like a V, and of all that go round and round, by
    ``kinds`` of schedules that do so."""
    layers, count = len(problem.chain), problem.policy.accumulate or 1
    best: dict[ScheduleKind, int] = {}
    for shape in _shapes(problem, kinds):
        groups = shape.groups()
        for cuts in combinations(range(1, layers), len(groups) - 1):
            places = list(zip(pairwise((0, *cuts, layers)), groups, strict=True))
            for again in product(*([(), (part,)] for part, _ in places)):
                made = tuple(Stage(*part, group, some) for (part, group), some in zip(places, again, strict=True))
                if structure_violations(problem.chain, problem.platform, problem.policy, made):
                    continue
                graph = stage_graph(problem.chain, problem.platform, problem.policy, made)
                for kind in kinds:
                    if (kind in VEES) != shape.vee:
                        continue
                    schedule = Schedule(kind, count)
                    result = evaluate_simulated(graph, schedule, problem.platform, NEVER)
                    if fits(result) and result.makespan_ns is not None:
                        best[kind] = min(result.makespan_ns, best.get(kind, result.makespan_ns))
    return best


def _shapes(problem: Problem, kinds: Sequence[ScheduleKind]) -> Iterator[Shape]:
    """Yield what V's there are, and what loops, as far as there are layers for them."""
    layers, gpus = len(problem.chain), len(problem.platform)
    for ranks in range(1, min(gpus, layers) + 1):
        for pipelines in range(1, gpus // ranks + 1 if problem.replicas else 2):
            if 2 * ranks <= layers and any(kind in VEES for kind in kinds):
                yield Shape(ranks, pipelines, 2, vee=True)
            if any(kind in LOOPS for kind in kinds):
                yield from (Shape(ranks, pipelines, chunks) for chunks in range(1, layers // ranks + 1))


def _times(problem: Problem, stages: tuple[Stage, ...], count: int) -> list[tuple[ScheduleKind, int]]:
    if structure_violations(problem.chain, problem.platform, problem.policy, stages):
        return []
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    found: list[tuple[ScheduleKind, int]] = []
    used = sum(stage.replicas for stage in stages)
    kinds: tuple[ScheduleKind, ...] = ("flush", "1f1b", "zb1p")
    for kind in kinds:
        if refused(graph, Schedule(kind, count)) is None:
            run = drained_run(problem, stages, kind)
            found += [] if run is None else [(kind, run.makespan_ns)]
            early = None if run is None or len(stages) < used else recomputed_early(graph, run.timeline.program, count)
            if early is not None:
                found.append(("written", flush_makespan_ns(simulate(early))))
    for limit in range(1, 2 * len(stages)):
        result = evaluate_simulated(graph, Schedule("message-driven", count, limit), problem.platform, NEVER)
        if fits(result):
            assert result.makespan_ns is not None
            found.append(("message-driven", result.makespan_ns))
    return found

"""Drained plans on tiny instances: all of class ``contiguous``, tried one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

from pipeplan.check.evaluate import evaluate_simulated, fits
from pipeplan.check.targets import Shape
from pipeplan.check.validate import structure_violations
from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.deadline import NEVER
from pipeplan.errors import Infeasible, PipeplanError
from pipeplan.plan import Schedule, ScheduleKind, Stage
from pipeplan.planner.drained.run import drained_run
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Checkpointing, LayerTimes, Policy, Problem
from pipeplan.schedule.kinds import KINDS, drained_programs, kinds_for, refused
from pipeplan.schedule.simulate import simulate
from pipeplan.schedule.synthesis.problem import NoRoom
from pipeplan.schedule.synthesis.recomputing import recomputed_early
from pipeplan.schedule.synthesis.synthesize import least_ns, synthesize
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


def open_instance(seed: int, layers: int = 5, replicas: bool | None = None) -> Problem:
    """Return a tiny problem that drains: 3 to so many layers, 2 or 3 GPUs, up to 5 microbatches."""
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(3, layers), optimizer=seed % 3 == 0, saved=True)
    if seed % 2:
        parted = (replace(x, backward_weight_ns=rng.randint(0, x.backward_ns)) for x in chain.layers)
        chain = replace(chain, layers=tuple(parted))
    platform = random_platform(rng, rng.randint(2, 3), memory=(60, 200), duplex=True, latency=True, speeds=seed % 3 > 0)
    checkpointing: Checkpointing = ("segments", "none", "stages")[seed % 3]
    policy = Policy("flush", rng.randint(1, 5))
    replicas = seed % 4 != 3 if replicas is None else replicas
    return Problem(chain, platform, policy, replicas=replicas, checkpointing=checkpointing)


def open_and_named(problem: Problem) -> dict[str, int | None]:
    """Return how long the open question's plan takes, under ``{}``, and that of each named algorithm and schedule that
    has one."""
    named: list[dict[str, Any]] = [{"algorithm": name} for name in ("contiguous", "pipedream", "data-parallel")]
    named += [{"schedule": kind} for kind in kinds_for("flush") if not KINDS[kind].searches]
    found = {}
    for options in ({}, *named):
        with suppress(Infeasible):
            found[str(options)] = make_plan(problem, **options).evaluation.makespan_ns
    return found


def soonest_in_any_order(problem: Problem, known: int | None = None) -> int | None:
    """Return the shortest mini-batch of stages without replicas on any GPUs, each in the best order that is found, or
    what is ``known``."""
    best, count = known, problem.policy.accumulate or 1
    for least, graph in sorted(_placed(problem, count), key=lambda one: one[0]):
        if best is not None and least >= best:
            break
        with suppress(PipeplanError):
            ns = synthesize(graph, count, known=drained_programs, moves=20_000, solver=None).value_ns
            best = ns if best is None else min(best, ns)
    return best


def _placed(problem: Problem, count: int) -> Iterator[tuple[int, StageGraph]]:
    """Yield all stages without replicas that there are room for, and what they take at least."""
    layers, gpus = len(problem.chain), range(len(problem.platform))
    for stages in range(1, layers + 1):
        for cuts, homes in product(combinations(range(1, layers), stages - 1), product(gpus, repeat=stages)):
            parts = list(pairwise((0, *cuts, layers)))
            menu = [((),) if problem.checkpointing == "none" else ((), (part,)) for part in parts]
            for again in product(*menu) if all(a != b for a, b in pairwise(homes)) else ():
                made = tuple(Stage(*part, (home,), some) for part, home, some in zip(parts, homes, again, strict=True))
                if structure_violations(problem.chain, problem.platform, problem.policy, made):
                    continue
                graph = stage_graph(problem.chain, problem.platform, problem.policy, made)
                with suppress(NoRoom):
                    yield least_ns(graph, count), graph


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

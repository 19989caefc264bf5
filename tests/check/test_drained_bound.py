"""No drained plan whose stages have GPUs of their own is sooner than its bound says."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from cases.chains import random_chain, random_platform

from pipeplan.check.drained_bound import drained_bound
from pipeplan.check.evaluate import evaluate_simulated, fits
from pipeplan.check.validate import structure_violations
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.deadline import NEVER
from pipeplan.integers import ceil_div
from pipeplan.plan import Schedule, ScheduleKind, Stage
from pipeplan.planner.drained_run import drained_run
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem
from pipeplan.schedule.kinds import KINDS, refused


def _soonest(problem: Problem) -> dict[ScheduleKind, int]:
    """Return the shortest mini-batch of all contiguous allocations, by the kinds of schedules, all limits tried."""
    layers, gpus, count = len(problem.chain), len(problem.platform), problem.policy.accumulate or 1
    best: dict[ScheduleKind, int] = {}
    for used in range(1, gpus + 1):
        for stages in range(1, min(used, layers) + 1):
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


def _times(problem: Problem, stages: tuple[Stage, ...], count: int) -> list[tuple[ScheduleKind, int]]:
    if structure_violations(problem.chain, problem.platform, problem.policy, stages):
        return []
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    found: list[tuple[ScheduleKind, int]] = []
    kinds: tuple[ScheduleKind, ...] = ("flush", "1f1b", "zb1p")
    for kind in kinds:
        if refused(graph, Schedule(kind, count)) is None:
            run = drained_run(problem, stages, kind)
            found += [] if run is None else [(kind, run.makespan_ns)]
    for limit in range(1, 2 * len(stages)):
        result = evaluate_simulated(graph, Schedule("message-driven", count, limit), problem.platform, NEVER)
        if fits(result):
            assert result.makespan_ns is not None
            found.append(("message-driven", result.makespan_ns))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_sooner(seed: int) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng, 3 + seed % 2, optimizer=seed % 3 == 0, saved=True, tied=False)
    if seed % 2:
        layers = (replace(x, backward_weight_ns=rng.randint(0, x.backward_ns)) for x in chain.layers)
        chain = replace(chain, layers=tuple(layers))
    platform = random_platform(rng, 3, memory=(60, 160), levels=seed % 5 == 0, duplex=True, latency=True, speeds=True)
    count = rng.randint(1, 5)
    problem = Problem(chain, platform, Policy("flush", count), checkpointing="segments")
    soonest = _soonest(problem)
    if not soonest:
        return
    best = min(soonest.values())
    found = drained_bound(problem, best)
    assert found is not None
    assert found.period_ns <= ceil_div(best, count)
    for kind, ns in soonest.items():
        own = drained_bound(problem, ns, kind)
        assert own is not None
        assert own.period_ns <= ceil_div(ns, count)
        assert own.schedule == kind
        assert own.period_ns >= found.period_ns - ceil_div(ns, 4096) or KINDS[kind].splits


def test_it_counts_what_fills_and_drains() -> None:
    """Four layers of 1 + 2 on four GPUs of their own, no replicas: (m + p - 1) of 3, which is optimal."""
    layers = tuple(Layer(f"l{i}", 1000, 2000, 0, 0) for i in range(4))
    chain, platform = Chain("even", layers, 0), Platform.flat(4, 10**9, 10**9)
    problem = Problem(chain, platform, Policy("flush", 8), replicas=False, checkpointing="none")
    run = drained_run(problem, tuple(Stage(i, i + 1, (i,)) for i in range(4)), "1f1b")
    assert run is not None
    assert run.makespan_ns == 11 * 3000
    found = drained_bound(problem, run.makespan_ns, "1f1b")
    assert found is not None
    assert ceil_div(11 * 3000, 8) - 10 <= found.period_ns <= ceil_div(11 * 3000, 8)

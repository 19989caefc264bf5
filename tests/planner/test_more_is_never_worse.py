"""Is more never worse? More room, GPUs, effort or freedom, and nothing named where something may be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from cases.chains import random_chain

from pipeplan.errors import BadInput, Infeasible
from pipeplan.partition import ALGORITHMS
from pipeplan.planner.least_late import drained_quickly, least_late
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Platform, Policy, Problem
from pipeplan.schedule.kinds import kinds_for

FEWER_STAGES = 1.001  # that a plan may take longer with


def asked(seed: int, weights: str, layers: int = 5) -> Problem:
    rng = random.Random(seed)
    chain = random_chain(rng, layers, optimizer=True, edges=seed % 2 == 1)
    held = sum(6 * x.weight_bytes + x.output_bytes for x in chain.layers)
    platform = Platform.flat(3, max(1, held * rng.choice((1, 2, 4))), 10**9)
    return Problem(chain, platform, Policy(weights, 4), checkpointing="segments")


def period(problem: Problem, algorithm: str = "auto", effort: str = "quick", kind: str | None = None) -> float:
    try:
        return make_plan(problem, algorithm, effort=effort, schedule=kind).evaluation.period_ns  # type: ignore[arg-type]
    except (Infeasible, BadInput):
        return float("inf")


def less(problem: Problem) -> Iterator[tuple[str, Problem]]:
    platform = problem.platform
    yield "GPUs", replace(problem, platform=Platform.flat(2, platform.devices[0].memory_bytes, 10**9))
    for tenths in (9, 7):
        yield (
            f"{tenths} tenths",
            replace(problem, platform=Platform.flat(3, platform.devices[0].memory_bytes * tenths // 10, 10**9)),
        )
    yield "replicas", replace(problem, replicas=False)
    yield "recomputed", replace(problem, checkpointing="stages")
    yield "not recomputed", replace(problem, checkpointing="none")


@pytest.mark.parametrize(("seed", "weights"), [(0, "2bw"), (4, "stash"), (1, "flush")])
def test_more_is_never_worse(seed: int, weights: str) -> None:
    problem = asked(seed, weights, 3 if weights == "flush" else 5)
    own = period(problem, effort="normal")
    assert own < float("inf")
    narrower = {name: period(other, effort="normal") for name, other in less(problem)}
    narrower |= {name: period(problem, name) for name in ALGORITHMS}
    narrower |= {kind: period(problem, kind=kind) for kind in kinds_for(problem.policy.weights)}
    narrower["quick"] = period(problem)
    assert {name: own / x for name, x in narrower.items() if own > x * FEWER_STAGES} == {}


@pytest.mark.parametrize("seed", [1])
def test_what_nobody_says_is_no_worse_than_what_is_named(seed: int) -> None:
    problem = asked(seed, "2bw", 4)

    def find(problem: Problem):
        return make_plan(problem), problem

    try:
        own = least_late(problem, find, lambda n: drained_quickly(problem, n, Settings()))[0].evaluation.period_ns
    except Infeasible:
        own = float("inf")
    named = {x: period(problem.with_policy(Policy(x, 4)), effort="normal") for x in ("2bw", "stash", "flush")}
    assert {name: own / x for name, x in named.items() if own > x * 1.02} == {}

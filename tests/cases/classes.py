"""Tiny problems on unequal devices with little memory, planned in every class of plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from cases.chains import random_chain

from pipeplan.cost.saved import storages
from pipeplan.errors import Infeasible
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Checkpointing, Device, Level, Platform, Policy, Problem

WAYS: tuple[Checkpointing, ...] = ("none", "stages", "segments")
Figures = dict[tuple[str, bool, Checkpointing], int | None]


def instance(seed: int, most_layers: int = 4) -> Problem:
    """Return a chain of 2 to 4 layers on 2 or 3 unequal devices whose memory binds."""
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(2, most_layers), saved=rng.random() < 0.5)
    need = 3 * int(chain.sums.weight_bytes[-1]) + int(storages(chain).totals[-1])
    speeds = (Fraction(1, 2), Fraction(1), Fraction(1), Fraction(2))
    devices = tuple(
        Device(max(8, need * rng.choice((2, 3, 4, 6, 9)) // 6), rng.choice(speeds)) for _ in range(rng.randint(2, 3))
    )
    platform = Platform(devices, (Level(len(devices), rng.choice((1, 2, 10)) * 10**9),))
    return Problem(chain, platform, Policy(accumulate=64))


def figures(problem: Problem) -> Figures:
    """Return the period (ns) of each class's plan, None where it has none."""
    found: Figures = {}
    for algorithm in ("contiguous", "auto"):
        for replicas in (False, True):
            for way in WAYS:
                one = replace(problem, replicas=replicas, checkpointing=way)
                try:
                    planned = make_plan(one, algorithm, settings=Settings("highs"))
                    found[algorithm, replicas, way] = planned.evaluation.period_ns
                except Infeasible:
                    found[algorithm, replicas, way] = None
    return found


def worse(found: Figures) -> Iterator[str]:
    """Yield a sentence for each class that comes out worse than one that it contains."""
    for large, period in found.items():
        for small, best in found.items():
            contains = (large[0] == "auto" or small[0] == "contiguous") and large[1] >= small[1]
            contains &= WAYS.index(large[2]) >= WAYS.index(small[2])
            if contains and best is not None and (period is None or period > best):
                yield f"{large} has {period}, {small} {best}"

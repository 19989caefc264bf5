"""Tiny networks whose layers have variants, and whether plans that choose among these are the best of all of them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from oracles.partition import contiguous_optimum

import pipeplan as pp
from pipeplan.api.given.problems import problem_of
from pipeplan.api.given.tensor import parts
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer


def plain_layers(
    draw: Random, forward_us: tuple[int, int], backward_us: tuple[int, int], least: int, output: int, saved: int
) -> tuple[Layer, ...]:
    """Return three layers, each with its times between these, ``least`` to nine hundred bytes of weights, and so many
    bytes that it puts out and saves."""
    return tuple(
        Layer(
            f"l{i}",
            draw.randint(*forward_us) * 1000,
            draw.randint(*backward_us) * 1000,
            draw.randint(least, 9) * 100,
            output,
            saved,
        )
        for i in range(3)
    )


def assert_best_of_all_variants(chain: Chain, words: dict[str, Any]) -> None:
    """Each variant's plan is what brute force finds, no bound is above it, and the plan of all is the best of them."""
    periods = []
    for part in parts(pp.Profile(chain), {}):
        problem = problem_of(part, **words)[0]
        least = contiguous_optimum(problem)
        if least is None:
            with pytest.raises(pp.Infeasible):
                make_plan(problem, "contiguous")
            continue
        found = make_plan(problem, "contiguous")  # which the validator has passed
        assert found.plan.allocation.claimed_period_ns == least[0]
        assert all(x.period_ns <= least[0] for x in found.plan.lower_bounds)
        periods.append(found.evaluation.period_ns // part.chain.several)
    best = pp.plan(chain, algorithm="contiguous", **words)
    assert best.period_ns // best.plan.chain.several == min(periods)
    for told in best.plan.provenance.options["tensor"].values():
        assert told["bound_ns"] is None or told["period_ns"] is None or told["bound_ns"] <= told["period_ns"]

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import ceil

from cases.chains import published, random_problem

from pipeplan.cost import time_model
from pipeplan.cost.saved import saved_bytes
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.granularity import merge_articulation
from pipeplan.partition.madpipe.paper import madpipe_paper
from pipeplan.problem import Device, Platform, Policy, Problem


def small_problem(seed: int) -> Problem:
    rng = random.Random(seed)
    layers, devices = rng.randint(2, 5), rng.randint(1, 3)
    problem = random_problem(rng, layers, devices, checkpointing="none", replicas=False, saved=rng.random() < 0.5)
    device = Device(problem.platform.devices[0].memory_bytes * rng.choice((1, 2, 3)))
    return replace(problem, platform=replace(problem.platform, devices=(device,) * devices))


def recursion(problem: Problem) -> tuple[Callable[[int], int | None], int, int]:
    """Return (MadPipe-DP, U(1, L), U(1, L) + sum C): section 4.2.2 as printed, layers from 1, in exact fractions.

    The values t_P, m_P and V are rounded up to the grid when the table is entered; V stops at its end.
    """
    chain, memory = problem.chain, problem.platform.devices[0].memory_bytes
    last = len(chain)

    def work(k: int, m: int) -> int:
        return int(time_model.Passes(chain, problem.policy, k - 1, m).work_ns())

    def transfer(k: int) -> int:
        return 2 * problem.platform.transfer_ns(chain.cut_bytes[k], 0) if 0 < k < last else 0

    def size(k: int, m: int, g: int) -> int:
        weights = 3 * int(chain.sums.weight_bytes[m] - chain.sums.weight_bytes[k - 1])
        ends = sum(2 * chain.cut_bytes[cut] for cut in (k - 1, m) if 0 < cut < last)
        return weights + g * saved_bytes(chain, k - 1, m) + ends

    total = work(1, last)
    longest = total + sum(transfer(k) for k in range(1, last))

    def up(value: Fraction | int, top: int, steps: int) -> Fraction:
        return Fraction(ceil(Fraction(value) * steps / top) * top, steps)

    def dp(target: int) -> int | None:
        def plus(x: Fraction, y: int) -> Fraction:
            full = ceil(x / target)
            return x + y if ceil((x + y) / target) == full else full * target + y

        @cache
        def best(m: int, p: int, t: Fraction, held: Fraction, delay: Fraction) -> Fraction | None:
            if m == 0:
                return t
            options = []
            for k in range(1, m + 1) if p else [1]:
                if work(k, m) == 0:
                    continue
                g = ceil((delay + work(k, m)) / target)
                behind = min(up(plus(plus(delay, work(k, m)), transfer(k - 1)), longest, 50), Fraction(longest))
                if p and size(k, m, g) <= memory:
                    rest = best(k - 1, p - 1, t, held, behind)
                    if rest is not None:
                        options.append(max(work(k, m), transfer(k - 1), rest))
                more, full = up(t + work(k, m), total, 100), up(held + size(k, m, g - 1), memory, 10)
                if more <= total and full <= memory:
                    rest = best(k - 1, p, more, full, behind)
                    if rest is not None:
                        options.append(max(more, Fraction(transfer(k - 1)), rest))
            return min(options, default=None)

        found = best(last, len(problem.platform) - 1, Fraction(0), Fraction(0), Fraction(0))
        return None if found is None else ceil(found)

    return dp, total, longest


def algorithm_1(problem: Problem) -> int | None:
    """Algorithm 1, line 7 with That_i, on integers."""
    dp, total, longest = recursion(problem)
    low, high = max(1, ceil(Fraction(total, len(problem.platform)))), longest
    target, claims = low, []
    for _ in range(10):
        found = dp(target)
        period = 10**9 if found is None else found
        if found is not None:
            claims.append(max(period, target))
        low = max(low, min(period, target))
        high = min(high, max(period, target))
        target = (low + high) // 2
    return min(claims, default=None)


def test_equals_the_printed_recursion():
    seen = Counter()
    for seed in range(30):
        problem = small_problem(seed)
        claims = [found.claimed_period_ns for found in madpipe_paper(problem)]
        expected = algorithm_1(problem)
        assert claims == ([] if expected is None else [expected]), seed
        seen["feasible"] += expected is not None
    assert 15 <= seen["feasible"] < 30


def test_allocations_are_of_the_class_with_neighbours_merged():
    several = 0
    for seed in range(150):
        problem = small_problem(seed)
        for found in madpipe_paper(problem):
            stages = found.stages
            assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
            assert stages[-1].stop == len(problem.chain)
            assert all(one.devices != other.devices for one, other in pairwise(stages))
            held = Counter(stage.devices[0] for stage in stages)
            assert len(held) <= len(problem.platform)
            assert sum(count > 1 for count in held.values()) <= 1
            several += len(held) < len(stages)
    assert several >= 5


def test_published_profile():
    chain = merge_articulation(published("alexnet"))
    problem = Problem(chain, Platform.flat(4, 12 * 10**9), Policy(), False, "none")
    first, second = (list(madpipe_paper(problem)) for _ in range(2))
    assert first == second
    graph = stage_graph(chain, problem.platform, problem.policy, first[0].stages)
    assert first[0].claimed_period_ns is not None
    assert first[0].claimed_period_ns >= max(graph.period_floor_ns, sum(s.total_ns for s in graph.stages) // 4)

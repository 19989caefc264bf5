"""Which degree, replicas and stages has each of several modules for itself? As Megatron-MIMO runs them: one after the
other on GPUs of their own, each in its own degree, recomputed in whole or not, all in as many replicas.

Every such plan of stages with even numbers of blocks, or in the last module of even times, is bounded by what its
longest stage takes and the memory of each; the rest is the validator's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from heapq import heapify, heappop
from itertools import accumulate, pairwise, product

from ...check.bounds import any_bound
from ...check.units import Tower, towers
from ...cost.memory_model import held_bytes, weights_bytes
from ...cost.stage_cost import StageCost, stage_cost
from ...errors import Infeasible, InvalidPlan, NoBetter
from ...integers import ceil_div, smallest
from ...plan import Provenance, Schedule, Stage
from ...problem import MICROBATCHES_PER_DEVICE, Problem
from ...version import __version__
from ..periodic.interval import at_interval
from ..plan import Planned, checked

Way = tuple[int, int, int, bool]  # of a module: tensor degree, stages, replicas, whether its blocks run again


def make_towers_plan(problem: Problem, name: str, beat_ns: int | None = None) -> Planned:
    """Return the validated plan, with a bound on all plans, of which no other of those in the order of their bounds is
    shorter; Infeasible where none fits, NoBetter if none has a period below ``beat_ns``.

    CannotExpress where the network isn't several modules.
    """
    if problem.policy.accumulate is None:
        problem = at_interval(problem, MICROBATCHES_PER_DEVICE * len(problem.platform))
    best: Planned | None = None
    least = any_bound(problem)
    for bound, stages in _in_order(problem, towers(problem.chain)):
        known = beat_ns if best is None else best.evaluation.period_ns
        if known is not None and (bound >= known or problem.deadline.passed):
            break
        told = Provenance("target", {"for": name}, version=__version__)
        try:
            found = checked(problem, stages, (least,), told, Schedule("1f1b", problem.policy.accumulate))
        except InvalidPlan:
            continue
        if known is None or found.evaluation.period_ns < known:
            best = found
    if best is None and beat_ns is not None:
        raise NoBetter(least.period_ns)
    if best is None:
        raise Infeasible(f"{name}: no degrees of the modules fit, each on GPUs of its own")
    return best


def _in_order(problem: Problem, modules: Sequence[Tower]) -> Iterator[tuple[int, tuple[Stage, ...]]]:
    """Yield the stages of all ways that may fit with what none of their periods is below, least first."""
    gpus, chain, count = len(problem.platform), problem.chain, problem.policy.accumulate or 1

    @cache
    def cost(stage: Stage) -> StageCost:
        return stage_cost(chain, problem.platform, problem.policy, stage, 0, True, True, ())

    @cache
    def split(k: int, way: Way) -> tuple[Stage, ...]:
        return tuple(_split(problem, modules[k], way, even=k + 1 < len(modules)))

    @cache
    def longest(k: int, way: Way) -> int:
        return ceil_div(max(cost(x).total_ns for x in split(k, way)), way[2])

    def fits(stages: Sequence[Stage]) -> bool:
        for s, stage in enumerate(stages):
            own, r = cost(stage), stage.replicas
            held = min(len(stages) - s, ceil_div(count, r))
            room = problem.platform.slowest(stage.devices).memory_bytes
            room -= weights_bytes(problem.policy, own.weight_bytes, own.parameters, 1, r, own.own)
            if held_bytes(own.kept_bytes, own.peak_bytes, held) > room:
                return False
        return True

    widths = [width for width, *others in chain.names if not any(others)]
    again = (False,) if problem.checkpointing == "none" else (False, True)
    queue: list[tuple[int, tuple[Way, ...]]] = []
    for r in (x for x in range(1, gpus + 1) if count % x == 0 and (x == 1 or problem.replicas)):
        if problem.deadline.passed:
            break
        ways = [
            [(w, p, r, a) for w, p, a in product(widths, range(1, gpus // r + 1), again) if split(k, (w, p, r, a))]
            for k in range(len(modules))
        ]
        for several in product(*ways):
            if sum(w * p for w, p, *_ in several) * r <= gpus:
                queue.append((max(longest(k, way) for k, way in enumerate(several)), several))
    heapify(queue)
    while queue:
        bound, several = heappop(queue)
        stages = _placed([split(k, way) for k, way in enumerate(several)])
        if fits(stages):
            yield bound, stages


def _split(problem: Problem, module: Tower, way: Way, even: bool) -> Iterator[Stage]:
    """Yield a module's stages, on the first GPUs; nothing where its blocks can't be shared so."""
    width, count, replicas, again = way
    blocks, devices = len(module.blocks), tuple(range(0, width * replicas, width))
    if count > blocks or (even and blocks % count):
        return
    passes = problem.chain.names[width, False, False].sums.passes_ns
    ends = [module.start, *module.blocks[1:], module.stop]
    times = [int(passes[b] - passes[a]) for a, b in pairwise(ends)]
    counts = [blocks // count] * count if even else _shares(times, count)
    for a, b in pairwise([0, *accumulate(counts)]):
        own = [(x, x + 1) for x in module.blocks[a:b]]
        yield Stage(ends[a], ends[b], devices, tuple(own) if again else (), width)


def _shares(times: Sequence[int], count: int) -> list[int]:
    """Return how many of ``times`` in a row each of ``count`` parts has, so that the longest part is shortest."""

    def within(limit: int) -> list[int] | None:
        found, total = [0], 0
        for i, x in enumerate(times):
            rest = len(times) - i
            if found[-1] and len(found) < count and (total + x > limit or rest < count - len(found) + 1):
                found.append(0)
                total = 0
            found[-1] += 1
            total += x
        return found if all(sum(times[a:b]) <= limit for a, b in pairwise([0, *accumulate(found)])) else None

    shortest = smallest(within, min(1, sum(times)), sum(times))
    assert shortest is not None, "all of them fit into their sum"
    return shortest[1]


def _placed(modules: Sequence[Sequence[Stage]]) -> tuple[Stage, ...]:
    """Return the stages of all modules on GPUs of their own, the widest module first, so that none crosses servers."""
    order, first = sorted(range(len(modules)), key=lambda k: -modules[k][0].tensor), 0
    found: dict[int, list[Stage]] = {}
    for k in order:
        found[k] = []
        for stage in modules[k]:
            found[k].append(replace(stage, devices=tuple(first + d for d in stage.devices)))
            first += stage.tensor * stage.replicas
    return tuple(stage for k in range(len(modules)) for stage in found[k])

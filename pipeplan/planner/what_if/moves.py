"""Which plan, of those about as good as the best, leaves most of what was trained where it is? Cuts, moved one by one.

A unit is a server, or a GPU where all are in one. It keeps its number, so those with the highest numbers are lost; what
a plan gives it that it hasn't had comes to it, of weights and optimizer state. Alike units of the best plan change
places, so that each has what it had, as far as may be. Then that cut is moved which spares the most bytes, as long as
the period stays within :data:`SHARE` of the best, and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

from ...check.evaluate import evaluate
from ...check.validate import judged
from ...cost.memory_model import gradient_bytes, versioned_bytes
from ...plan import Allocation, Plan, Stage
from ...problem import Platform
from ..plan import Planned
from .carry import carried

SHARE: Final = 0.02  # of the best period, that fewer moves may cost
TRIES: Final = 200  # plans that are judged
MOST_UNITS: Final = 128  # that change places

Held = dict[int, set[int]]  # the layers of each unit


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that come to units which haven't had them, and bytes that units hold in all."""

    coming: int
    held: int


def moved(plan: Plan, stages: Sequence[Stage], before: Plan) -> Moved:
    """Return what comes to units where ``plan`` has these ``stages``, of the same layers as ``before``."""
    return _moved(_held(plan, stages), _held(before, before.allocation.stages), _sizes(plan))


def _moved(has: Held, had: Held, sizes: Sequence[int]) -> Moved:
    coming = sum(sizes[i] for unit, layers in has.items() for i in layers - had.get(unit, set()))
    return Moved(coming, sum(sizes[i] for layers in has.values() for i in layers))


def _unit(platform: Platform) -> int:
    """Return how many GPUs a unit has."""
    return platform.levels[0].count if len(platform.levels) > 1 else 1


def _held(plan: Plan, stages: Sequence[Stage]) -> Held:
    """Return the layers that each unit has."""
    size = _unit(plan.platform.whole or plan.platform)
    found: Held = {}
    for stage in stages:
        for gpu in (gpu for device in stage.members for gpu in plan.platform.gpus(device)):
            found.setdefault(gpu // size, set()).update(range(stage.start, stage.stop))
    return found


def _sizes(plan: Plan) -> list[int]:
    """Return the bytes of each layer's weights and optimizer state, of all that run it together."""
    policy = replace(plan.policy, zero=0, offload=False)
    each = [(layer.weight_bytes, layer.parameter_count) for layer in plan.chain.layers]
    states = (versioned_bytes(policy, *one, 1) - gradient_bytes(policy, *one) for one in each)
    return [int(state) * plan.chain.tensor for state in states]


def nearest(found: Planned, before: Plan) -> tuple[Planned, Moved, Moved]:
    """Return the plan with the fewest bytes that move, what it moves, and what the one that was ``found`` would."""
    had, sizes = _held(before, before.allocation.stages), _sizes(found.plan)
    plan = _in_place(found.plan, had, sizes)
    best = now = _moved(_held(plan, plan.allocation.stages), had, sizes)
    limit, left = found.evaluation.period_ns * (1 + SHARE), TRIES
    while left > 0:
        choices = sorted(
            ((own, i, stages) for i, stages in enumerate(_others(plan, limit))
             if (own := _moved(_held(plan, stages), had, sizes)).coming < now.coming),
            key=lambda one: (one[0].coming, one[1]),
        )  # fmt: skip
        for own, _, stages in choices[:left]:
            left -= 1
            other = carried(replace(plan, allocation=Allocation(stages)), plan.chain)
            if other.period_ns is not None and other.period_ns <= limit:
                plan, now = replace(other.plan, lower_bounds=plan.lower_bounds), own
                break
        else:
            break
    return (found if plan is found.plan else Planned(plan, evaluate(plan))), now, best


def _in_place(plan: Plan, had: Held, sizes: Sequence[int]) -> Plan:
    """Return the plan with equal units in other places, two of them exchanged as long as more stays where it was."""
    platform, stages = plan.platform, plan.allocation.stages
    size, has = _unit(platform), _held(plan, stages)
    units = range(len(platform) // size)
    parted = len(platform.levels) == 1 and (plan.chain.variants or platform.width > 1)
    if parted or len(platform.levels) > 2 or len(set(platform.devices)) > 1 or len(units) > MOST_UNITS:
        return plan
    none, places = set[int](), list(units)
    kept = [[sum(sizes[i] for i in has.get(u, none) & had.get(v, none)) for v in units] for u in units]
    changed = True
    while changed:
        changed = False
        for u, v in combinations(units, 2):
            here, there = places[u], places[v]
            if kept[u][there] + kept[v][here] > kept[u][here] + kept[v][there]:
                places[u], places[v], changed = there, here, True
    stages = tuple(replace(x, devices=tuple(places[d // size] * size + d % size for d in x.devices)) for x in stages)
    moving = replace(plan, allocation=replace(plan.allocation, stages=stages))
    result, wrong = judged(moving)
    return plan if result is None or wrong else moving


def _others(plan: Plan, limit_ns: float) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages with one cut elsewhere, but for those whose layers alone take longer than the limit."""
    stages, sums = plan.allocation.stages, plan.chain.sums
    total = sums.forward_ns + sums.backward_ns
    segments = [segment for stage in stages for segment in stage.checkpoint]
    for s in range(len(stages) - 1):
        for cut in range(stages[s].start + 1, stages[s + 1].stop):
            pair = replace(stages[s], stop=cut), replace(stages[s + 1], start=cut)
            work = (int(total[x.stop] - total[x.start]) / x.replicas / x.tensor for x in pair)
            if cut != stages[s].stop and max(work) <= limit_ns:
                yield (*stages[:s], *(x.recomputing(segments) for x in pair), *stages[s + 2 :])

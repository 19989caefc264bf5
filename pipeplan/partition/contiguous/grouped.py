"""Which few large devices can stand for very many while stages are sought?

A *group* of q neighbouring devices counts as one. Whatever stages take r groups at a period of q T, with an update
every k / q microbatches, runs q times side by side at T: each stage has q r replicas, each of which holds as much and
has as long for a microbatch. So the search sees only multiples of q replicas, and of all sums of gradients those of one
device of every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt

from ...integers import ceil_div
from ...plan import Stage
from ...problem import Level, Platform, Problem
from ..cuts import legal_cuts
from ..tables.stages import SPREAD, most_cuts

MOST_PLACES = 4_200_000  # cuts times devices squared, for which one decision takes less than a second
_FEWEST = 8  # groups


@dataclass(frozen=True)
class Grouped:
    """A problem whose devices are groups of ``size`` devices of ``whole``."""

    whole: Problem
    problem: Problem
    size: int

    def stages(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return stages on groups as stages on all their devices."""
        size = self.size
        return tuple(
            replace(stage, devices=tuple(d for group in stage.devices for d in range(group * size, (group + 1) * size)))
            for stage in stages
        )

    def groups(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return stages between the same cuts on any groups."""
        return tuple(replace(stage, devices=(0,)) for stage in stages)


def group_sizes(problem: Problem) -> list[int]:
    """Return the sizes of groups to try in turn, the largest first, each a quarter of the one before; empty where the
    devices themselves are few enough."""
    count, cuts = len(problem.platform), min(len(legal_cuts(problem)), SPREAD)
    if not problem.replicas or cuts * count**2 <= MOST_PLACES:
        return []
    most = max(_FEWEST, isqrt(MOST_PLACES // cuts))
    found = [_size(problem.platform, most), _size(problem.platform, 2 * most)]
    return [size for size in dict.fromkeys(found) if size > 1]


def coarseness(problem: Problem) -> str | None:
    """Return in words what a contiguous search leaves out first, or altogether; None where it looks at everything."""
    cuts, sizes = len(legal_cuts(problem)), group_sizes(problem)
    found = [f"GPUs in groups of {' or '.join(map(str, sizes))}"] if sizes else []
    if cuts > most_cuts(problem):
        found.append(f"about {SPREAD} of {cuts - 2} cuts, then those near the best")
    return f"{'; '.join(found)}; bounds are of all GPUs and cuts" if found else None


def grouped(problem: Problem, size: int) -> Grouped:
    """Return the problem on groups of ``size`` devices, each as large and as quick as the least of them.

    Devices that are left over stay unused.
    """
    platform = problem.platform
    count = len(platform) // size
    devices = tuple(platform.slowest(range(g * size, (g + 1) * size)) for g in range(count))
    policy = replace(problem.policy, pipelines=problem.policy.pipelines * size)
    if policy.accumulate is not None:
        policy = replace(policy, accumulate=max(1, ceil_div(policy.accumulate, size)))
    coarse = replace(platform, devices=devices, levels=_levels(platform, size, count))
    return Grouped(problem, replace(problem, platform=coarse, policy=policy), size)


def _levels(platform: Platform, size: int, count: int) -> tuple[Level, ...]:
    """Return the levels that join groups: those above their own, the lowest of which joins parts of its unit."""
    found = []
    for k, (level, unit) in enumerate(zip(platform.levels, platform.unit_sizes, strict=True)):
        below = platform.unit_sizes[k - 1] if k else 1
        joined = count if len(platform.levels) == 1 else unit // max(size, below)
        if joined > 1:
            bandwidth, latency = platform.paths[k]
            found.append(replace(level, count=joined, bandwidth=bandwidth, latency_ns=latency))
    return tuple(found) or (replace(platform.levels[-1], count=1),)


def _size(platform: Platform, most: int) -> int:
    """Return the least size of groups that are ``most`` at most, within units or of whole units, with few devices left
    over."""
    count = len(platform)
    for size in range(1, count):
        within = [unit for unit in platform.unit_sizes[:-1] if unit % size and size % unit]
        left = count % size
        if count // size <= most and 64 * left <= (count if len(platform.levels) == 1 else 0) and not within:
            return size
    return count

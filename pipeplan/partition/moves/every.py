"""Which allocations are there at all, where a problem is so small that they are few?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, islice, pairwise, product

from ...plan import Stage
from ...problem import Problem

FEW, FEW_LAYERS, FEW_GPUS = 15_000, 8, 4  # as many as walks make steps on such small problems

Stages = tuple[Stage, ...]
Group = tuple[int, ...]
Segment = tuple[int, int]


def every_allocation(problem: Problem) -> Iterator[Stages] | None:
    """Yield all stages on all groups of GPUs, equal GPUs in one order, with all that may be recomputed, few stages
    first; None where these are more than :data:`FEW`. Not all of them keep a plan's rules."""
    layers = len(problem.chain)
    if layers > FEW_LAYERS or len(problem.platform) > FEW_GPUS or problem.chain.variants:
        return None
    left, homes = FEW, []
    for count in range(1, layers + 1):
        found = list(islice(_homes(problem, count), left + 1))
        left -= len(found) * sum(1 for _ in islice(_parts(problem, count), left + 1))
        if left < 0:
            return None
        homes.append(found)
    return (
        tuple(Stage(*part, home, again) for (part, again), home in zip(parts, groups, strict=True))
        for count, several in enumerate(homes, 1)
        for parts, groups in product(_parts(problem, count), several)
    )


def _parts(problem: Problem, count: int) -> Iterator[tuple[tuple[Segment, tuple[Segment, ...]], ...]]:
    """Yield all splits into so many stages that all work, with what each recomputes."""
    layers, work = len(problem.chain), problem.chain.sums.passes_ns
    for cuts in combinations(range(1, layers), count - 1):
        parts = list(pairwise((0, *cuts, layers)))
        if all(work[stop] > work[start] for start, stop in parts):
            for again in product(*(_checkpoints(problem.checkpointing, *part) for part in parts)):
                yield tuple(zip(parts, again, strict=True))


@cache
def _checkpoints(way: str, start: int, stop: int) -> list[tuple[Segment, ...]]:
    """Return all that a stage may recompute."""
    if way != "segments":
        return [()] if way == "none" else [(), ((start, stop),)]
    if start == stop:
        return [()]
    first = [((start, end), *rest) for end in range(start + 1, stop + 1) for rest in _checkpoints(way, end, stop)]
    return [*_checkpoints(way, start + 1, stop), *first]


def _homes(problem: Problem, count: int) -> Iterator[tuple[Group, ...]]:
    """Yield all groups, equal or disjoint, for so many stages."""
    devices, near = problem.platform.devices, len(problem.platform.levels) == 1

    def grow(chosen: tuple[Group, ...], free: Group) -> Iterator[tuple[Group, ...]]:
        if len(chosen) == count:
            yield chosen
            return
        for group in dict.fromkeys(chosen):
            yield from grow((*chosen, group), free)
        alike: dict[Group, Group] = {}  # those of equal GPUs
        for size in range(1, (len(free) if problem.replicas else min(1, len(free))) + 1):
            for group in combinations(free, size):
                alike.setdefault(tuple(devices.index(devices[d]) if near else d for d in group), group)
        for group in alike.values():
            yield from grow((*chosen, group), tuple(d for d in free if d not in group))

    yield from grow((), tuple(range(len(devices))))

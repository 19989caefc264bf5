"""In which ways may stages, each on GPUs of its own, share the GPUs?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise, permutations, product

from ...plan import Allocation
from ...problem import Problem

Groups = tuple[tuple[int, ...], ...]  # the GPUs of each stage
_FEW = 8  # GPUs of which every way to share them is looked at
_FEW_ORDERED = 4  # GPUs that differ of which every order is looked at


def shared_gpus(problem: Problem, most: int, known: Allocation | None = None) -> Iterator[Groups]:
    """Yield the GPUs of at most ``most`` stages: those of a ``known`` allocation first, and ways to share all GPUs.

    In the listed order, and where they differ slowest or fastest first, and of few in every order.
    """
    devices, seen = problem.platform.devices, set()
    kinds = [devices.index(x) for x in devices]
    listed = tuple(range(len(devices)))
    slowest = tuple(sorted(listed, key=lambda d: (devices[d].speed, devices[d].memory_bytes)))
    every = permutations(listed) if len(listed) <= _FEW_ORDERED else ()
    orders = (listed, slowest, slowest[::-1], *every)[: None if len(set(kinds)) > 1 else 1]

    def shared() -> Iterator[Groups]:
        own = () if known is None else tuple(stage.devices for stage in known.stages)
        if own and sum(map(len, own)) == len(set().union(*own)):
            yield own
        for order, replicas in product(orders, list(_replicas(problem, most))):
            yield tuple(tuple(sorted(order[low:high])) for low, high in pairwise(accumulate(replicas, initial=0)))

    for groups in shared():
        alike = tuple(tuple(sorted(kinds[d] for d in group)) for group in groups)
        if alike not in seen:
            seen.add(alike)
            yield groups


def _replicas(problem: Problem, most: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of replicas of the stages: one each, and every way to share a few devices over stages, as often as
    there are so many devices; as few pipelines as can be first."""
    count = len(problem.platform)
    if count > _FEW or not problem.replicas:
        yield from ((1,) * stages for stages in range(min(count, most), 0, -1))
    if problem.replicas:
        for few in range(min(_FEW, count), 0, -1):
            for stages in range(min(few, most), 0, -1):
                for ends in combinations(range(1, few), stages - 1):
                    shares = (high - low for low, high in pairwise((0, *ends, few)))
                    yield tuple(count // few * r for r in shares)

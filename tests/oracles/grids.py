"""The best grid by brute force: every grid, split, segment length of every stage and limit of a tiny instance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

from pipeplan.plan import Stage
from pipeplan.planner.grids.pipelines import batch_time
from pipeplan.planner.grids.space import GridProblem, configs


def segments(start: int, stop: int, length: int | None) -> tuple[tuple[int, int], ...]:
    """Return segments of ``length`` layers, the last maybe shorter; none for None."""
    if length is None:
        return ()
    return tuple((first, min(first + length, stop)) for first in range(start, stop, length))


def every_grid(asked: GridProblem) -> Iterator[int]:
    """Yield the time of a batch for every plan that fits."""
    layers = len(asked.problem.chain)
    total = asked.problem.chain.sums.forward_ns + asked.problem.chain.sums.backward_ns
    for config in configs(asked):
        problem, groups, count = asked.of(config), config.groups(), config.microbatches(asked.batch)
        for inner in combinations(range(1, layers), config.stages - 1):
            cuts = (0, *inner, layers)
            if any(total[a] == total[b] for a, b in pairwise(cuts)):
                continue
            plain = [Stage(a, b, group) for a, b, group in zip(cuts[:-1], cuts[1:], groups, strict=True)]
            menus = [
                [replace(s, checkpoint=segments(s.start, s.stop, ac)) for ac in (None, *range(1, s.stop - s.start + 1))]
                for s in plain
            ]
            for stages in product(*menus):
                for limit in range(1, min(2 * config.stages - 1, count) + 1):
                    found = batch_time(problem, stages, count, limit)
                    if found.fits:
                        yield found.batch_ns

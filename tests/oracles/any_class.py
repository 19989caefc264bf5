"""The truth for class ``any`` on small chains: every allocation, each scheduled by the integer program."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from pipeplan.cost.group_bound import group_bound
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Stage
from pipeplan.problem import Problem
from pipeplan.schedule.periodic.ilp import schedule_ilp
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star


def device_groups(problem: Problem, stages: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield the devices of each stage, on equal devices: groups are equal or disjoint, numbered by first use."""

    def extend(chosen: list[tuple[int, ...]], groups: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        if len(chosen) == stages:
            yield chosen
            return
        used = sum(map(len, groups))
        fresh = range(
            1, len(problem.platform) - used + 1 if problem.replicas else min(1, len(problem.platform) - used) + 1
        )
        new = [tuple(range(used, used + size)) for size in fresh]
        for group in [*groups, *new]:
            yield from extend([*chosen, group], groups if group in groups else [*groups, group])

    yield from extend([], [])


def allocations(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """Yield every allocation of the class, up to the names of equal devices; recomputed stages as a whole."""
    count = len(problem.chain)
    total = problem.chain.sums.forward_ns + problem.chain.sums.backward_ns
    for size in range(1, count + 1):
        for inner in combinations(range(1, count), size - 1):
            cuts = (0, *inner, count)
            if any(total[a] == total[b] for a, b in pairwise(cuts)):
                continue
            for groups in device_groups(problem, size):
                for flags in product((False, True), repeat=0 if problem.checkpointing == "none" else size):
                    whole = flags or (False,) * size
                    yield tuple(
                        Stage(cuts[s], cuts[s + 1], groups[s], ((cuts[s], cuts[s + 1]),) if whole[s] else ())
                        for s in range(size)
                    )


def optimum(problem: Problem, solver: str = "highs") -> int | None:
    """Return the shortest period (ns) of all allocations, or None when none fits."""
    ranked = []
    for i, stages in enumerate(allocations(problem)):
        graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
        bound = group_bound(graph)
        if bound is not None:
            ranked.append((bound, i, graph))
    best = None
    for bound, _, graph in sorted(ranked, key=lambda item: item[:2]):
        if best is not None and bound >= best:
            break
        if graph.contiguous:
            pattern = best_one_f_one_b_star(graph)
        else:
            result = schedule_ilp(graph, solver=solver, cutoff_period_ns=best)  # type: ignore[arg-type]
            assert result.status in ("optimal", "cutoff", "infeasible"), result
            pattern = result.pattern
        if pattern is not None and (best is None or pattern.period_ns < best):
            best = pattern.period_ns
    return best

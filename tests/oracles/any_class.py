"""The truth for class ``any`` on small chains: every allocation, each scheduled by the integer program."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

from oracles.partition import checkpoints

from pipeplan.check.evaluate import waiting_period_ns
from pipeplan.cost.group_bound import group_bound
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.plan import Allocation, Stage
from pipeplan.problem import Problem
from pipeplan.schedule.periodic.ilp import schedule_ilp
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star


def device_groups(problem: Problem, stages: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield the devices of each stage: groups are equal or disjoint, equal devices numbered by first use."""
    kinds = problem.platform.devices
    if len(set(kinds)) > 1:
        yield from _unequal_groups(problem, stages)
        return

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


def _unequal_groups(problem: Problem, stages: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield every way, and of those that differ in equal devices alone the first."""
    kinds, count = problem.platform.devices, len(problem.platform)
    sizes = range(1, count + 1 if problem.replicas else 2)
    subsets = [group for size in sizes for group in combinations(range(count), size)]
    seen = set()
    for groups in product(subsets, repeat=stages):
        if all(a == b or not set(a) & set(b) for a, b in combinations(groups, 2)):
            first = {group: groups.index(group) for group in groups}
            look = tuple((first[group], tuple(sorted(map(str, (kinds[d] for d in group))))) for group in groups)
            if look not in seen:
                seen.add(look)
                yield list(groups)


def allocations(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """Yield every allocation of the class, up to the names of equal devices."""
    count = len(problem.chain)
    total = problem.chain.sums.forward_ns + problem.chain.sums.backward_ns
    for size in range(1, count + 1):
        for inner in combinations(range(1, count), size - 1):
            cuts = (0, *inner, count)
            if any(total[a] == total[b] for a, b in pairwise(cuts)):
                continue
            for groups in device_groups(problem, size):
                for recomputed in product(*(checkpoints(problem, a, b) for a, b in pairwise(cuts))):
                    yield tuple(Stage(cuts[s], cuts[s + 1], groups[s], recomputed[s]) for s in range(size))


def optimum(problem: Problem, solver: str = "highs", special: bool = False, waits: bool = False) -> int | None:
    """Return the shortest period (ns) of all allocations, or None when none fits; with ``special`` of those that have
    one stage on every device but one, and with ``waits`` with what updates wait for the sums of replicas."""
    ranked = []
    for i, stages in enumerate(allocations(problem)):
        if special and not Allocation(stages).one_special:
            continue
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
        if pattern is not None:
            tied, platform = problem.chain.tied, problem.platform
            period = waiting_period_ns(graph, tied, pattern, platform) if waits else pattern.period_ns
            best = period if best is None else min(period, best)
    return best

"""Is a bound on drained plans ever above the soonest, and how near do it and ``plan`` come?

On random tiny instances, of which every contiguous allocation is run under schedules that drain; and with ``--targets``
of which every plan is run that a target can express, straight, looped or like a V; with ``--placed``
of which all stages are run that are placed like a V or go round and round the GPUs. With ``--open`` whether ``plan``
without a schedule is worse than a named one or algorithm, and with ``--orders`` than any stages without replicas, each
in the best order that is found (some 20 s an instance).

    python scripts/checks/drained.py --instances 120
    python scripts/checks/drained.py --instances 300 --targets
    python scripts/checks/drained.py --instances 120 --placed
    python scripts/checks/drained.py --instances 500 --open
    python scripts/checks/drained.py --instances 60 --orders
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.drained import (
    LOOPS,
    VEES,
    drained_instance,
    open_and_named,
    open_instance,
    soonest,
    soonest_in_any_order,
    soonest_placed,
)
from cases.target_plans import every_plan, target_instance

from pipeplan.check.bounds import any_bound
from pipeplan.check.bounds.drained.proofs import drained_bound, proved
from pipeplan.check.targets import TARGETS, Shape
from pipeplan.errors import Infeasible
from pipeplan.plan import ScheduleKind
from pipeplan.planner.drained.block_search import BlockSearch
from pipeplan.planner.drained.search import search_stages
from pipeplan.planner.periodic.incumbent import Incumbent, Settings
from pipeplan.planner.plan import make_plan


def main() -> None:
    """Print what is wrong, and the ratios of what was found and of the bound to the soonest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=120)
    parser.add_argument("--first", type=int, default=0)
    for mode in MODES:
        parser.add_argument(f"--{mode}", action="store_true")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.instances)
    chosen = next((mode for mode in MODES if getattr(options, mode)), None)
    (bound_contiguous if chosen is None else MODES[chosen])(seeds)


def bound_targets(seeds: range) -> None:
    """Hold the bounds on all shapes of pipelines under each schedule of a target to all plans that there are."""
    ratios: dict[ScheduleKind, list[float]] = {}
    for seed in seeds:
        name, problem = target_instance(seed)
        search = BlockSearch(problem, name, TARGETS[name], TARGETS[name].kinds, Settings())
        best: dict[tuple[ScheduleKind, Shape], int] = {}
        for kind, shape, period in every_plan(problem, name):
            best[kind, shape] = min(period, best.get((kind, shape), period))
        for config in search.configs:
            period = best.get((config.kind, config.shape), 0)
            if not period:
                continue
            bound = search.chunked_bound(config) if config.shape.chunks > 1 else config.bound_ns
            if -(-bound // (problem.policy.accumulate or 1)) > period:
                print(f"{seed}: {name}, {config}: {bound} is above the soonest, {period} a microbatch")
            ratios.setdefault(config.kind, []).append(period * (problem.policy.accumulate or 1) / bound)
    for kind, found in ratios.items():
        print(f"{kind}: {len(found)} shapes, soonest / bound {geometric_mean(found):.3f} in the geometric mean")


def bound_placed(seeds: range) -> None:
    """Hold the bounds on stages that are placed like a V or round and round, in turn, to all that there are."""
    ratios: dict[ScheduleKind, list[float]] = {}
    for seed in seeds:
        problem = drained_instance(seed, more=1, tied=seed % 3 == 1)
        if seed % 3 == 0:  # what fills and drains is then little
            problem = problem.with_policy(replace(problem.policy, accumulate=9 + seed % 5))
        count, free = problem.policy.accumulate or 1, any_bound(problem).period_ns
        for kind, best in soonest_placed(problem, (VEES, LOOPS)[seed // 2 % 2]).items():
            bound = proved(problem, "any", kind)
            if bound is None or max(free, bound.period_ns) > -(-best // count):
                print(f"{seed}: {bound} is above the soonest, {best} / {count}, under {kind}", flush=True)
            else:
                ratios.setdefault(kind, []).append(best / (bound.period_ns * count))
    for kind, found in ratios.items():
        print(f"{kind}: {len(found)} instances, soonest / bound {geometric_mean(found):.3f} in the geometric mean")


def bound_contiguous(seeds: range) -> None:
    """Hold the bounds of class contiguous, and the search, to all plans that there are."""
    bounds, plans = [], []
    for seed in seeds:
        problem, count = drained_instance(seed), drained_instance(seed).policy.accumulate or 1
        times = soonest(problem)
        if not times:
            continue
        best = min(times.values())
        bound = drained_bound(problem)
        assert bound is not None, "these are small"
        for one in (bound, any_bound(problem)):
            if one.period_ns > -(-best // count):
                print(f"{seed}: {one} is above the soonest, {best} / {count}")
        bounds.append(best / (bound.period_ns * count))
        search = Incumbent(problem, Settings())
        search_stages(search, ("flush", "1f1b"), "normal")
        straight = min((ns for kind, ns in times.items() if kind in ("flush", "1f1b")), default=None)
        if straight is not None and search.best is not None:
            plans.append(search.best.cost / straight)
        elif straight is not None:
            print(f"{seed}: nothing was found where {straight} is possible")
    print(f"{len(bounds)} instances: soonest / bound {geometric_mean(bounds):.3f} in the geometric mean")
    print(f"{len(plans)} with 1F1B: found / soonest {geometric_mean(plans):.4f}, {max(plans):.3f} at most")


def open_question(seeds: range) -> None:
    """Hold the open question to every named schedule and algorithm."""
    worse = 0
    for seed in seeds:
        found = open_and_named(open_instance(seed))
        if found and found.get("{}") != min(found.values()):
            worse += 1
            print(f"{seed}: {found}", flush=True)
        if seed % 50 == 49:
            print(f"up to {seed}: worse in {worse}", flush=True)
    print(f"{len(seeds)} instances: the open question is worse than a named one in {worse}")


def any_order(seeds: range) -> None:
    """Hold the open question to all stages, each in the best order that is found."""
    ratios = []
    for seed in seeds:
        problem = open_instance(seed, layers=4, replicas=False)
        found = None
        with suppress(Infeasible):
            found = make_plan(problem).evaluation.makespan_ns
        best = soonest_in_any_order(problem, found)
        if best is not None:
            ratios.append(inf if found is None else found / best)
            if ratios[-1] > 1:
                print(f"{seed}: {ratios[-1]:.3f} of {best}", flush=True)
    print(f"{sum(x <= 1 for x in ratios)} of {len(ratios)} are best, {max(ratios):.3f} at worst")


MODES = {"targets": bound_targets, "placed": bound_placed, "open": open_question, "orders": any_order}

if __name__ == "__main__":
    main()

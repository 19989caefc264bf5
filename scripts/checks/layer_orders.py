"""Is the best between all sets of layers the best of all orders of a DAG, and what does the order gain?

First random tiny networks, with equal and unequal devices, replicas, recomputed stages and segments, and layers that
take no time: in every order of the layers every contiguous allocation, by brute force, beside the search between all
ideals; and no bound for all orders above any of them, nor, of some, above the best plan of any kind in any order.
Exits with 1 where one differs. Then the published profiles that are DAGs: contiguous stages in the given order and in
the best, with and without replicas, on links from 12 to 0.3 GB/s.

    python scripts/checks/layer_orders.py --instances 300
    python scripts/checks/layer_orders.py --only gnmt resnet50
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.chains import PUBLISHED_FOLDER
from cases.dags import all_orders, best_of_all_orders, free_problem
from oracles.any_class import optimum

from pipeplan.check.bounds import proof
from pipeplan.cost.layer_orders import several_orders
from pipeplan.files.profiles import read_profile
from pipeplan.partition.contiguous.contiguous import smallest_period
from pipeplan.partition.layer_orders.layer_order import EFFORTS, OrderEffort, best_ordered
from pipeplan.problem import Checkpointing, Platform, Policy, Problem

GPUS, BANDWIDTHS = (2, 4, 8), (12, 1.25, 0.3)  # GB/s


def main() -> None:
    """Print what differs, and of each profile the gains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--any", type=int, default=20, help="so many of them with every plan, not only contiguous ones")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these published profiles alone")
    parser.add_argument("--checkpointing", default="stages")
    parser.add_argument("--effort", default="normal", choices=list(EFFORTS))
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.instances)
    wrong = compare(seeds, options.any) if options.only is None else 0
    effort = EFFORTS[options.effort]
    for path in sorted(PUBLISHED_FOLDER.glob("*.json")):
        if options.only is None or path.stem in options.only:
            published(path, options.checkpointing, effort)
    sys.exit(1 if wrong else 0)


def compare(seeds: range, every: int) -> int:
    """Compare the search with the truth; return how many instances differ."""
    wrong = found = infeasible = better = 0
    gains, gaps, kinds = list[float](), list[float](), Counter[str]()
    for seed in seeds:
        problem = free_problem(seed)
        if problem is None:
            continue
        truth, best, proved = best_of_all_orders(problem), best_ordered(problem), proof(problem, any_order=True)
        claim = None if best is None else best.allocation.claimed_period_ns
        if claim != truth or (best is not None and not best.exact):
            wrong += 1
            print(f"instance {seed}: the search found {claim}, the truth is {truth}")
        kinds[problem.checkpointing] += 1
        kinds["replicas"] += problem.replicas
        kinds["unequal devices"] += len(set(problem.platform.devices)) > 1
        if truth is None:
            infeasible += 1
            continue
        found += 1
        least = truth
        if len(gaps) < every:
            orders = (replace(problem, chain=problem.chain.reordered(x)) for x in all_orders(problem.chain))
            least = min((x for x in map(optimum, orders) if x is not None), default=truth)
            gaps.append(least / proved.period_ns)
        if proved.period_ns > least or proved.infeasible:
            wrong += 1
            print(f"instance {seed}: bound {proved}, though {least} ns are possible")
        given = smallest_period(problem)
        if given is None or given.claimed_period_ns is None or given.claimed_period_ns > truth:
            better += 1
            gains += [given.claimed_period_ns / truth] if given is not None and given.claimed_period_ns else []
    print(
        f"{found + infeasible} networks of several orders ({', '.join(f'{n} {x}' for x, n in sorted(kinds.items()))}): "
        f"{wrong} wrong, {infeasible} fit in none; in {better} of {found} another order is better than the given one, "
        f"by {_mean(gains) - 1:.1%} in the geometric mean where that fits; of {len(gaps)} the best plan of any kind is "
        f"{_mean(gaps):.3f} times the bound for all orders",
        flush=True,
    )
    return wrong


def published(path: Path, checkpointing: Checkpointing, effort: OrderEffort) -> None:
    """Print what the order gains on a profile."""
    chain = read_profile(str(path))
    if not several_orders(chain):
        print(f"{path.stem}: the layers stand in one order alone")
        return
    for gpus in GPUS:
        for bandwidth in BANDWIDTHS:
            for replicas in (False, True):
                platform = Platform.flat(gpus, 16 * 10**9, int(bandwidth * 10**9))
                gain(path.stem, Problem(chain, platform, Policy(), replicas, checkpointing), effort)


def gain(name: str, problem: Problem, effort: OrderEffort) -> None:
    """Print the periods of contiguous stages in the given order and the best, the bound, and CPU seconds."""
    began = time.process_time()
    given = smallest_period(problem)
    middle = time.process_time()
    best = best_ordered(problem, effort)
    seconds = f"{middle - began:.2f} -> {time.process_time() - middle:.2f} s"
    bandwidth = problem.platform.levels[0].bandwidth / 10**9
    what = f"{name}, {len(problem.platform)} GPUs, {bandwidth:g} GB/s, {problem.checkpointing}"
    what += ", replicas" * problem.replicas
    if best is None or not best.allocation.claimed_period_ns:
        print(f"{what}: nothing fits")
        return
    found, bound = best.allocation.claimed_period_ns, best.allocation.lower_bound_ns or 0
    before = given.claimed_period_ns if given is not None else None
    more = f"{before / 1e6:.3f} -> {found / 1e6:.3f} ms, {before / found - 1:.2%}" if before else f"- -> {found / 1e6}"
    which = f"{'all' if best.complete else 'some'} {best.ideals} ideals"
    far = "exact" if best.exact else f"gap {found / bound - 1:.3%}" if best.complete else "no bound for all orders"
    print(f"{what}: {more}, {which}, {far}; {seconds}", flush=True)


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0


if __name__ == "__main__":
    main()

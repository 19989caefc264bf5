"""What do the few orders of a DAG's layers that are tried gain, and how near do they come to the best of all orders?

First random tiny networks, in every order of the layers every contiguous allocation by brute force. Then the published
profiles that are DAGs: contiguous stages in the given order and in the best that is tried, on links of 12 to 0.3 GB/s.

    python scripts/checks/layer_orders.py --instances 300
    python scripts/checks/layer_orders.py --only gnmt resnet50
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.chains import PUBLISHED_FOLDER
from cases.dags import best_of_all_orders, free_problem

from pipeplan.files.profiles import read_profile
from pipeplan.partition.contiguous.contiguous import smallest_period
from pipeplan.planner.layer_orders import other_orders, several_orders
from pipeplan.problem import Platform, Policy, Problem

GPUS, BANDWIDTHS = (2, 4, 8), (12, 1.25, 0.3)  # GB/s


def main() -> None:
    """Print what orders gain, of random networks and of each profile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these published profiles alone")
    options = parser.parse_args()
    if options.only is None:
        compare(range(options.instances))
    for path in sorted(PUBLISHED_FOLDER.glob("*.json")):
        if options.only is None or path.stem in options.only:
            published(path)


def compare(seeds: range) -> None:
    """Print how far random networks in the given order, and in the best that is tried, are from the best of all."""
    ratios = []
    for problem in filter(None, map(free_problem, seeds)):
        truth, given, best = best_of_all_orders(problem), period(problem), tried(problem)
        if truth is not None:
            ratios.append((given / truth, best / truth))
    for name, found in zip(("given", "best of those tried"), zip(*ratios, strict=True), strict=True):
        fits = [x for x in found if x < math.inf]
        best, mean = sum(x == 1 for x in fits), math.exp(sum(map(math.log, fits)) / len(fits))
        print(
            f"{name}: the best of all orders in {best} of {len(found)}, {len(found) - len(fits)} don't fit, {mean:.3f}"
        )


def period(problem: Problem) -> float:
    """Return the shortest period of contiguous stages in the problem's order."""
    found = smallest_period(problem)
    return math.inf if found is None or found.claimed_period_ns is None else found.claimed_period_ns


def tried(problem: Problem) -> float:
    """Return the shortest of those orders that are tried."""
    others = (replace(problem, chain=problem.chain.reordered(x)) for x in other_orders(problem.chain))
    return min(map(period, [problem, *others]))


def published(path: Path) -> None:
    """Print what orders gain on a profile, and CPU seconds."""
    chain = read_profile(str(path))
    if not several_orders(chain):
        print(f"{path.stem}: the layers stand in one order alone")
        return
    for gpus in GPUS:
        for bandwidth in BANDWIDTHS:
            for replicas in (False, True):
                platform = Platform.flat(gpus, 16 * 10**9, int(bandwidth * 10**9))
                problem, began = Problem(chain, platform, Policy(), replicas), time.process_time()
                given, best = period(problem), tried(problem)
                what = f"{path.stem}, {gpus} GPUs, {bandwidth:g} GB/s{', replicas' if replicas else ''}"
                print(f"{what}: {given / best - 1:.2%} in {time.process_time() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()

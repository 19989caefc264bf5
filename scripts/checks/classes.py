"""Does a plan that may do more ever come out worse, and how often is ``auto`` the best there is?

On random tiny instances with unequal devices and little memory: what every class of plans gives (replicas or none;
nothing, whole stages or segments recomputed; contiguous or any), and the truth by brute force.

    python scripts/checks/classes.py --instances 200
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.classes import figures, instance, worse
from oracles.any_class import optimum


def main() -> None:
    """Print what is worse than it should be, and how often ``auto`` equals brute force."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    inverted, feasible, reached, worst = 0, 0, 0, 1.0
    began = time.perf_counter()
    for seed in range(options.first, options.first + options.instances):
        problem = instance(seed)
        found = figures(problem)
        said = list(worse(found))
        inverted += bool(said)
        for sentence in said:
            print(f"{seed}: {sentence}")
        truth, period = optimum(replace(problem, checkpointing="segments")), found["auto", True, "segments"]
        if truth is None:
            assert period is None
            continue
        feasible += 1
        reached += period == truth
        if period != truth:
            print(f"{seed}: auto {period}, brute force {truth}")
            worst = max(worst, float("inf") if period is None else period / truth)
    print(f"{options.instances} instances in {time.perf_counter() - began:.0f} s")
    print(f"where a class beats one that contains it: {inverted}")
    print(f"where auto equals brute force: {reached} of {feasible} feasible ones; {worst:.3f} times it at worst")


if __name__ == "__main__":
    main()

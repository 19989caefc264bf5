"""Does a plan that may do more ever come out worse, and how often is ``auto`` the best there is?

On random tiny instances with unequal devices and little memory: what every class of plans gives (replicas or none;
nothing, whole stages or segments recomputed; contiguous or any), and the truth by brute force.

    python scripts/checks/classes.py --instances 200

With profiles, ladders instead: which plan of more memory, more GPUs or a faster network takes longer than one of less?

    python scripts/checks/classes.py profiles/*.json
    python scripts/checks/classes.py profiles/*.json --weights 2bw --gap 0.0001

``auto`` may stop, and prefer fewer stages, within its gap; with one of 0.01% no step may be longer by more than that.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.classes import figures, instance, worse
from oracles.any_class import optimum

import pipeplan
from pipeplan.errors import Infeasible

FEW: dict[str, Any] = {"gpus": 4, "mem": "8GB", "bandwidth": "12GB/s"}
LADDERS: dict[str, list[Any]] = {
    "mem": ["4GB", "6GB", "8GB", "9GB", "12GB", "16GB"],
    "gpus": [2, 4, 6, 8],
    "bandwidth": ["3GB/s", "12GB/s", "25GB/s"],
}
LONGER = 1.0001  # than with less


def main() -> None:
    """Print what is worse than it should be, and how often ``auto`` equals brute force."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("profiles", nargs="*", help="to climb ladders on")
    parser.add_argument("--weights", help="their policy")
    parser.add_argument("--gap", type=float, help="at which their plans are good enough")
    options = parser.parse_args()
    for profile in options.profiles:
        climb(profile, {name: said for name in ("weights", "gap") if (said := getattr(options, name)) is not None})
    if options.profiles:
        return
    inverted, feasible, reached, worst = 0, 0, 0, 1.0
    began = time.perf_counter()
    for seed in range(options.first, options.first + options.instances):
        problem = instance(seed)
        found = figures(problem)
        said = list(worse(found))
        inverted += bool(said)
        for sentence in said:
            print(f"{seed}: {sentence}")
        truth, period = optimum(replace(problem, checkpointing="segments"), waits=True), found["auto", True, "segments"]
        if truth is None:
            assert period is None
            continue
        feasible += 1
        reached += period is not None and period <= truth  # updates may wait less with another pattern than tried there
        if period is None or period > truth:
            print(f"{seed}: auto {period}, brute force {truth}")
            worst = max(worst, float("inf") if period is None else period / truth)
    print(f"{options.instances} instances in {time.perf_counter() - began:.0f} s")
    print(f"where a class beats one that contains it: {inverted}")
    print(f"where auto is as good as brute force: {reached} of {feasible} feasible ones; {worst:.3f} times it at worst")


def climb(profile: str, more: dict[str, Any]) -> None:
    """Print the periods of a profile's plans along each ladder, and those that are longer than with less."""
    known: dict[tuple[Any, ...], float] = {}  # where ladders meet
    for name, steps in LADDERS.items():
        began = time.process_time()
        for step in steps:
            asked = {**FEW, name: step, **more}
            if (key := tuple(asked.values())) not in known:
                try:
                    known[key] = pipeplan.plan(profile, **asked).period_ns
                except Infeasible:
                    known[key] = inf
        periods = [known[tuple({**FEW, name: step, **more}.values())] for step in steps]
        least = [min(periods[: i + 1]) for i in range(len(steps))]
        bad = [f"{x / y - 1:.3%} at {step}" for step, x, y in zip(steps, periods, least, strict=True) if x > y * LONGER]
        shown, seconds = " ".join(f"{x / 1e6:.3f}" for x in periods), time.process_time() - began
        print(
            f"{Path(profile).stem:28s} {name:9s} {seconds:5.1f} s  {shown}  {'LONGER ' if bad else ''}{', '.join(bad)}",
            flush=True,
        )


if __name__ == "__main__":
    main()

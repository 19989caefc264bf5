"""How far are the plans that `auto` makes above what is proved that no plan can beat, case by case?

Usage: python scripts/bench/gaps.py [CLASS ...] [--networks NAME ...] [--only TEXT] [--save FILE] [--against FILE]

The cases and classes of scripts/bench/bounds.py: three published networks on 2 to 8 GPUs (60 cases of each class), and
20 of chains of transformer blocks. A line a case: the plan's period and kind, its bound of class any and what binds,
the gap, the bound of the narrowest class that contains the plan, and CPU seconds. Then by class and network: how many
plans are within 1% of the bound of class any, and within 1% of one of their class. --save keeps all of it, --against
compares with what was kept: better, worse, seconds. --only leaves cases whose name contains a text ("8 x 4.0 GB").
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bounds import CLASSES, NAMES, grid, ladder
from planner import PUBLISHED, beside, gpt, mean

from pipeplan.check.bounds import proof
from pipeplan.errors import Infeasible
from pipeplan.files.profiles import read_profile
from pipeplan.partition.granularity import merge_articulation
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Problem

ENOUGH = 1.01
Row = tuple[int | None, float, int, int]  # period, seconds, bound of class any, best bound of the plan's own class


def main() -> None:
    """Print a line for each case, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", choices=[*CLASSES, []], metavar="CLASS", help="default: plain full")
    parser.add_argument("--networks", nargs="*", default=[*NAMES, "gpt-12", "gpt-24"])
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    rows: dict[str, Row] = {}
    for name in options.classes or ("plain", "full"):
        for network in options.networks:
            for key, problem in cases(name, network):
                if options.only in key:
                    rows[key] = measured(key, problem, options.effort)
    table(rows)
    if options.save:
        options.save.write_text(json.dumps(rows, indent=1))
    if options.against:
        beside(json.loads(options.against.read_text()), {key: (row[0], row[1]) for key, row in rows.items()})


def cases(name: str, network: str) -> Iterator[tuple[str, Problem]]:
    """Yield the cases of a class and network, with what they are called."""
    if network.startswith("gpt-"):
        problems = ladder(gpt(int(network.removeprefix("gpt-"))))
    else:
        problems = grid(merge_articulation(read_profile(str(PUBLISHED / f"{network}.json")), "input"))
    replicas, checkpointing = CLASSES[name]
    for problem in problems:
        memory = problem.platform.devices[0].memory_bytes / 1e9
        key = f"{name} {network} {len(problem.platform)} x {memory:.1f} GB"
        yield key, replace(problem, replicas=replicas, checkpointing=checkpointing)


def measured(key: str, problem: Problem, effort: str) -> Row:
    """Plan for a case and print its line."""
    began = time.process_time()
    try:
        found = make_plan(problem, settings=Settings("highs"), effort=effort)
    except Infeasible as error:
        spent = time.process_time() - began
        proved = proof(problem)
        none = "none (proved)" if proved.infeasible else "none"
        print(f"{key:32s} {none} {spent:.1f} s: {str(error)[:60]}", flush=True)
        return None, spent, proved.period_ns, proved.period_ns
    spent = time.process_time() - began
    period, bounds, stages = found.evaluation.period_ns, found.plan.lower_bounds, found.plan.allocation.stages
    every = max(bound.period_ns for bound in bounds if bound.allocation == "any")
    best = max(bounds, key=lambda bound: bound.period_ns)
    kind = "data-parallel" if found.plan.allocation.data_parallel else f"{len(stages)} stages"
    print(
        f"{key:32s} {period / 1e6:8.3f} ms {kind:13s} any {every / 1e6:8.3f} {proof(problem).part:10s} "
        f"gap {period / every - 1:7.2%}  {best.allocation} {period / best.period_ns - 1:7.2%}  {spent:5.1f} s",
        flush=True,
    )
    return period, spent, every, best.period_ns


def table(rows: dict[str, Row]) -> None:
    """Print how near the plans of each class and network are to their bounds."""
    groups: dict[str, list[Row]] = {}
    for key, row in rows.items():
        name, network, *_ = key.split()
        for group in (f"{name} {network}", f"{name} all", "all"):
            groups.setdefault(group, []).append(row)
    print(f"\n{'':24s} plans  within 1% of any  of their class  plan/any     median s  most s")
    for group, found in groups.items():
        there = [(period, every, best) for period, _, every, best in found if period is not None]
        near = [sum(row[0] <= ENOUGH * row[i] for row in there) for i in (1, 2)]
        seconds = sorted(row[1] for row in found)
        ratio = mean([row[0] / row[1] for row in there])
        share, middle = near[0] / max(1, len(there)), seconds[len(seconds) // 2]
        print(
            f"{group:24s} {len(there):2d}/{len(found):3d} {near[0]:9d} {share:6.0%} {near[1]:11d}"
            f" {ratio:12.3f} {middle:12.2f} {seconds[-1]:7.1f}"
        )


if __name__ == "__main__":
    sys.exit(main())

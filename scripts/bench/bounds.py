"""How far are the best plans above the bounds of class any: by averages alone, and by all that is known?

Usage: python scripts/bench/bounds.py [CLASS ...]

PipeDream's vgg16, resnet50 and densenet121, cut where one tensor is live, saved = input, on 2, 4, 6, 8 devices of 3, 4,
6, 8, 12 GB at 12 GB/s (60 cases), and chains of 12 and 24 transformer blocks with large weights on 8 and 16 devices,
from the least memory that any plan needs to four times that (20 cases). Classes: plain (neither replicas nor
recomputation), segments (recomputed, no replicas), full (both). The plans are the exact contiguous ones. Prints for
each class and network: cases with a plan, cases proved to have none, geometric means of bound / (U / P) and of plan /
bound before and after, how many plans are within 1% of their bound, and the seconds of the bounds.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from contiguous import ideal, timed
from planner import PUBLISHED, gpt, mean

from pipeplan.check.bounds import proof, quick_proof
from pipeplan.files.profiles import read_profile
from pipeplan.partition.granularity import merge_articulation
from pipeplan.planner.periodic.explain import least_memory
from pipeplan.problem import Chain, Checkpointing, Platform, Problem

GB = 10**9
CLASSES: dict[str, tuple[bool, Checkpointing]] = {
    "plain": (False, "none"),
    "segments": (False, "segments"),
    "full": (True, "segments"),
}
NAMES = ("vgg16", "resnet50", "densenet121")


def main() -> None:
    """Print a table for each class that the arguments name."""
    chains = [merge_articulation(read_profile(str(Path(PUBLISHED) / f"{name}.json")), "input") for name in NAMES]
    for name in sys.argv[1:] or list(CLASSES):
        replicas, checkpointing = CLASSES[name]
        print(f"\n{name:14s} plans  proved none  bound/(U/P)        plan/bound         within 1%       seconds, most")
        rows = [*map(grid, chains), *([ladder(gpt(12)), ladder(gpt(24))])]
        every = []
        for problems in rows:
            figures = [figure(replace(x, replicas=replicas, checkpointing=checkpointing)) for x in problems]
            every += figures
            print(line(problems[0].chain.name, figures), flush=True)
        print(line("all", every))


def grid(chain: Chain) -> list[Problem]:
    return [Problem(chain, Platform.flat(p, m * GB)) for p in (2, 4, 6, 8) for m in (3, 4, 6, 8, 12)]


def ladder(chain: Chain) -> list[Problem]:
    rows = []
    for gpus in (8, 16):
        least = least_memory(Problem(chain, Platform.flat(gpus, GB), checkpointing="segments"))
        assert least is not None
        rows += [Problem(chain, Platform.flat(gpus, least * share // 100)) for share in (100, 115, 140, 200, 400)]
    return rows


Figure = tuple[float, float, float | None, bool, float]


def figure(problem: Problem) -> Figure:
    """Return the bound before and after and the best plan over U / P, whether none is proved, and seconds."""
    unit = ideal(problem)
    before = quick_proof(problem).period_ns
    began = time.process_time()
    after = proof(problem)
    seconds = time.process_time() - began
    best = None if after.infeasible else timed(problem)[0]
    plan = None if best is None or best.claimed_period_ns is None else best.claimed_period_ns / unit
    return before / unit, after.period_ns / unit, plan, after.infeasible, seconds


def line(name: str, figures: list[Figure]) -> str:
    """Return one row."""
    there = [(before, after, plan) for before, after, plan, _, _ in figures if plan is not None]
    bounds = [mean([row[i] for row in there]) for i in (0, 1)]
    gaps = [mean([row[2] / row[i] for row in there]) for i in (0, 1)]
    near = [sum(row[2] <= 1.01 * row[i] for row in there) for i in (0, 1)]
    none = sum(figure[3] for figure in figures)
    return (
        f"{name:14.14s} {len(there):2d}/{len(figures):2d} {none:12d}  {bounds[0]:7.3f} -> {bounds[1]:6.3f}  "
        f"{gaps[0]:7.3f} -> {gaps[1]:6.3f}  {near[0]:4d} -> {near[1]:3d}  {max(x[4] for x in figures):12.2f}"
    )


if __name__ == "__main__":
    main()

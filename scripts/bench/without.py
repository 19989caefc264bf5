"""What does a part of the search earn? Plans of shipped profiles and of tiny problems are made with and without it.

Usage: python scripts/bench/without.py [NAME ...]

A part's name goes to something that finds nothing, and the same plans are asked for again. A line a part: the lines of
its files and functions, how many of its plans' periods grow and shrink, the geometric mean and the largest of their
ratios, the same of the lower bounds, and CPU seconds without it, as a ratio. A part that moves nothing here and costs
time is one to take out. Plans are asked for without a deadline, so a line is the same each time but for its seconds.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from planner import mean

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from cases.classes import instance
from cases.drained import open_instance

import pipeplan as pp
from pipeplan.planner.plan import make_plan

ROOT = Path(__file__).parents[2]
PROFILES = (
    "published/gnmt", "published/resnet50", "inception-v3-1000-b8-v100", "vgg16-224-b32-v100", "gpt2-small-b4-a100",
)  # fmt: skip
MACHINES = (4, "4GB"), (8, "12GB")
WAYS: dict[str, dict[str, Any]] = {
    "patterns": {"weights": "2bw"},
    "alone": {"weights": "2bw", "no_replicas": True, "checkpointing": "none"},
    "drained": {"weights": "flush"},
    "drained alone": {"weights": "flush", "no_replicas": True, "checkpointing": "none"},
    "open": {},
    "megatron": {"for_": "megatron"},
}
TINY = {"tiny patterns": instance, "tiny drained": open_instance}
SEEDS = 60
PATTERNS = "patterns", "alone", "tiny patterns"
DRAINED = "drained", "drained alone", "tiny drained"
Answer = tuple[int, int, float] | None  # period, bound, CPU seconds; None where there is no plan


@dataclass(frozen=True)
class Part:
    """What a name of a module does, which ``nothing`` stands for; its own files, and the ways to ask that it serves."""

    path: str
    nothing: Callable[..., Any]
    ways: Sequence[str]
    files: str = ""

    @property
    def lines(self) -> int:
        """The lines of its files, or of its function."""
        texts = [(ROOT / "pipeplan" / file).read_text() for file in self.files.split()]
        return sum(x.count("\n") for x in texts or [inspect.getsource(resolve_name(f"pipeplan.{self.path}"))])


def none(*_: Any, **__: Any) -> None:
    """Find nothing."""


def no(*_: Any, **__: Any) -> tuple[()]:
    """Propose nothing."""
    return ()


def same(found: Any, *_: Any, **__: Any) -> Any:
    """Leave what was found."""
    return found


WALKS, DRAIN, BOUNDS = "planner.periodic.walks.", "planner.drained.", "check.bounds."
PARTS = {
    "one special GPU": Part("planner.periodic.special.one_special", no, PATTERNS, "planner/periodic/special.py"),
    "every allocation": Part(WALKS + "every_allocation", none, PATTERNS, "partition/moves/every.py"),
    "walks": Part(WALKS + "_walked", none, PATTERNS, "partition/moves/wander.py partition/moves/misfits.py"),
    "hotter walks": Part(WALKS + "_walk_hotter", none, PATTERNS),
    "walks that store": Part(WALKS + "_walk_stored", none, PATTERNS),
    "beside data parallelism": Part(WALKS + "_beside", no, PATTERNS),
    "more starts": Part(WALKS + "_widen", none, PATTERNS),
    "less memory": Part(WALKS + "_elsewhere", none, PATTERNS),
    "smaller intervals": Part("planner.plan._decided", lambda found, *_: (found, None), ("patterns",)),
    "own stages": Part(DRAIN + "search._Search._on_own_gpus", no, DRAINED),
    "equal pipelines": Part(DRAIN + "search._Search._placed", no, DRAINED),
    "drained special GPU": Part("planner.periodic.special.try_smallest", none, DRAINED),
    "parts of all layers": Part("planner.grids.pipelines.try_parts", none, DRAINED),
    "other schedules": Part(DRAIN + "plan._under_others", none, DRAINED),
    "by messages": Part(DRAIN + "plan._by_arrival", none, DRAINED),
    "orders of their own": Part("planner.what_if.best_order.in_own_order", none, DRAINED),
    "local moves": Part(DRAIN + "plan.move", none, DRAINED),
    "wider proposals": Part(DRAIN + "plan.widened", same, DRAINED, "planner/drained/proposals.py"),
    "moves of a target's blocks": Part("planner.drained.block_search.BlockSearch._improve", none, ("megatron",)),
    "fresher patterns": Part("planner.least_late.fresher", same, ("open",)),
    "orders of layers": Part("planner.layer_orders.other_orders", no, ("open",)),
    "covers": Part(BOUNDS + "deeper", lambda _, known, *__: known, PATTERNS, "check/bounds/covers.py"),
    "pooled": Part(BOUNDS + "strong.too_much", lambda *_: False, PATTERNS),
    "blocks of bounds": Part(BOUNDS + "strong.Blocks.too_many", lambda *_: False, PATTERNS, "check/bounds/blocks.py"),
}


@cache
def answers(part: str | None, way: str) -> list[Answer]:
    """Return what comes of the questions of a way, without a part or with all, by a process of its own."""
    with get_context("fork").Pool(1) as pool:
        return pool.apply(_answers, (part, way))


def _answers(part: str | None, way: str) -> list[Answer]:
    taken = PARTS[part] if part else None
    with patch(f"pipeplan.{taken.path}", taken.nothing) if taken else nullcontext():
        if way in TINY:
            return [answer(partial(_tiny, way, seed)) for seed in range(SEEDS)]
        asked = [(str(ROOT / "profiles" / f"{x}.json"), *machine) for x in PROFILES for machine in MACHINES]
        return [answer(partial(_plan, *one, **WAYS[way])) for one in asked]


def answer(find: Callable[[], tuple[int, int]]) -> Answer:
    """Return what comes of one question."""
    began = time.process_time()
    try:
        return *find(), time.process_time() - began
    except pp.PipeplanError:
        return None


def _plan(profile: str, gpus: int, memory: str, **how: Any) -> tuple[int, int]:
    found = pp.plan(profile, gpus=gpus, mem=memory, bandwidth="12GB/s", **how)
    return found.period_ns, found.bound_ns


def _tiny(way: str, seed: int) -> tuple[int, int]:
    found = make_plan(TINY[way](seed))
    return found.evaluation.period_ns, max(x.period_ns for x in found.plan.lower_bounds if x.allocation == "any")


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*PARTS, []])
    names = parser.parse_args().names or list(PARTS)
    print(f"{'without':26s} lines  plans  longer  shorter   none  period  most  bound  seconds")
    for name in names:
        part = PARTS[name]
        before, after = (list(chain.from_iterable(answers(x, way) for way in part.ways)) for x in (None, name))
        print(f"{name:26s} {line(part, before, after)}", flush=True)


def line(part: Part, before: Sequence[Answer], after: Sequence[Answer]) -> str:
    """Return what a part's line says."""
    both = [(old, new) for old, new in zip(before, after, strict=True) if old and new]
    lost = sum(old is not None and new is None for old, new in zip(before, after, strict=True))
    periods, bounds = ([new[i] / old[i] for old, new in both] for i in (0, 1))
    seconds = sum(new[2] for _, new in both) / sum(old[2] for old, _ in both)
    longer, shorter = sum(x > 1 for x in periods), sum(x < 1 for x in periods)
    return (
        f"{part.lines:5d}  {len(both):5d}  {longer:6d}  {shorter:7d}  {lost:5d}  {mean(periods):6.4f} "
        f"{max(periods):6.3f} {mean(bounds):6.4f}  {seconds:6.2f}"
    )


if __name__ == "__main__":
    main()

"""Measure the exact contiguous partitioner: 1,000 layers on 64 devices, and the published profiles.

``python scripts/bench_contiguous.py [large|published]``; the published profiles lie in the folder that tests/cases.py
names. The tables print, for every profile and option, how many of the 20 instances (2, 4, 6, 8 devices of 3, 4, 6, 8,
12 GB at 12 GB/s) have a plan, the geometric mean of period / (work / devices) over those, how many of these plans are
plain data parallelism, and the seconds.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from pathlib import Path

from pipeplan.partition.contiguous import smallest_period
from pipeplan.plan import Allocation
from pipeplan.problem import Chain, Checkpointing, Layer, Platform, Policy, Problem
from pipeplan.profiles import merge_articulation, read_graph_text

FOLDER = Path(__file__).parents[1].parent / "shared" / "data" / "pipedream-profiles"
PROFILES = ("vgg16", "resnet50", "densenet121")


def main() -> None:
    """Print what the arguments ask for."""
    which = sys.argv[1:] or ["large", "published"]
    if "large" in which:
        large()
    if "published" in which:
        published()


def large() -> None:
    """Print seconds for random chains of 1,000 layers on 64 devices at 12 GB/s."""
    print("1,000 layers x 64 devices             GB   period ms  / ideal  stages  replicas  recomputed  seconds")
    for kind, chain in (("random", random_chain(1000)), ("equal layers", equal_chain(1000))):
        for replicas, checkpointing in ((False, "none"), (True, "none"), (False, "stages"), (True, "stages")):
            for memory in (4, 8, 16, 32, 64):
                problem = Problem(chain, Platform.flat(64, memory * 10**9), Policy(), replicas, checkpointing)
                found, seconds = timed(problem)
                name = f"{kind}{', replicas' if replicas else ''}{', recompute' if checkpointing != 'none' else ''}"
                print(f"{name:35s} {memory:4d} {described(problem, found)} {seconds:8.2f}", flush=True)


def described(problem: Problem, found: Allocation | None) -> str:
    """Return the columns that tell what the plan is like."""
    if found is None:
        return f"{'no plan':>11s} {'':47s}"
    period = found.claimed_period_ns or 0
    recomputed = sum(bool(stage.checkpoint) for stage in found.stages)
    replicas = max(stage.replicas for stage in found.stages)
    columns = f"{period / 1e6:11.3f} {period / ideal(problem):8.3f} {len(found.stages):7d} {replicas:9d}"
    return f"{columns} {recomputed:11d}"


def published() -> None:
    """Print the table over the published profiles."""
    rows: list[tuple[str, bool, Checkpointing]] = [
        ("replicas, recompute", True, "stages"),
        ("recompute", False, "stages"),
        ("replicas", True, "none"),
        ("neither", False, "none"),
    ]
    for title, convert in (
        ("cut where one tensor is live, saved = input", lambda chain: merge_articulation(chain, saved="input")),
        ("cut anywhere, distinct saved tensors", lambda chain: chain),
    ):
        print(f"\n{title:45s} layers  feasible  period / ideal  data-parallel  median s     max s")
        for name in PROFILES:
            chain = convert(read_graph_text((FOLDER / f"{name}.graph.txt").read_text(), name, name))
            for label, replicas, checkpointing in rows:
                ratios, seconds, parallel = [], [], 0
                for devices in (2, 4, 6, 8):
                    for memory in (3, 4, 6, 8, 12):
                        platform = Platform.flat(devices, memory * 10**9)
                        problem = Problem(chain, platform, Policy(), replicas, checkpointing)
                        found, duration = timed(problem)
                        seconds.append(duration)
                        if found is not None and found.claimed_period_ns is not None:
                            ratios.append(found.claimed_period_ns / ideal(problem))
                            parallel += found.data_parallel
                mean = math.exp(statistics.mean(map(math.log, ratios))) if ratios else math.nan
                print(
                    f"{name + ', ' + label:45s} {len(chain):6d} {len(ratios):6d}/20 {mean:15.4f} {parallel:14d} "
                    f"{statistics.median(seconds):9.3f} {max(seconds):9.3f}",
                    flush=True,
                )


def ideal(problem: Problem) -> float:
    """Return the work of a microbatch divided by the number of devices, in ns."""
    sums = problem.chain.sums
    return int(sums.forward_ns[-1] + sums.backward_ns[-1]) / len(problem.platform)


def timed(problem: Problem) -> tuple[Allocation | None, float]:
    """Return the best allocation and the seconds that it took."""
    begin = time.perf_counter()
    found = smallest_period(problem)
    return found, time.perf_counter() - begin


def random_chain(layers: int) -> Chain:
    """Return a chain with times of 0.3 to 9 ms and sizes of 1 to 200 MB, seeded."""
    rng = random.Random(1)
    return Chain(
        "random",
        tuple(
            Layer(
                f"layer{i}",
                forward_ns=rng.randint(10**5, 3 * 10**6),
                backward_ns=rng.randint(2 * 10**5, 6 * 10**6),
                weight_bytes=rng.randint(10**6, 2 * 10**7),
                output_bytes=rng.randint(10**6, 5 * 10**7),
                saved_bytes=rng.randint(10**7, 2 * 10**8),
            )
            for i in range(layers)
        ),
        input_bytes=10**7,
    )


def equal_chain(layers: int) -> Chain:
    """Return a chain of equal layers, where everything ties."""
    return Chain("equal", (Layer("layer", 10**6, 2 * 10**6, 5 * 10**6, 10**7, 5 * 10**7),) * layers, 10**7)


if __name__ == "__main__":
    main()

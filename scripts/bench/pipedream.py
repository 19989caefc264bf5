"""Print what PipeDream's partitioner claims, in both modes, and how long it takes.

    python scripts/bench/pipedream.py [PROFILE ...]

The default are the profiles published with it, in ``profiles/published``. Four platforms (4 at 10 GB/s, 8 at 30 GB/s,
16 flat at 1.25 GB/s, 4x4 at 10 and 1.25 GB/s), then a chain of 400 made-up layers on 8 servers of 8.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from pipeplan.files.profiles import read_profile
from pipeplan.partition.pipedream.paper import pipedream
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Problem

MEMORY = 16 * 10**9


def platform(*levels: tuple[int, float]) -> Platform:
    count = 1
    for units, _ in levels:
        count *= units
    return Platform((Device(MEMORY),) * count, tuple(Level(units, int(rate * 10**9)) for units, rate in levels))


PLATFORMS = {
    "4 @ 10": platform((4, 10)),
    "8 @ 30": platform((8, 30)),
    "16 @ 1.25": platform((16, 1.25)),
    "4x4 @ 10/1.25": platform((4, 10), (4, 1.25)),
}


def report(chain: Chain, where: str, machine: Platform) -> None:
    columns = []
    for mode in ("paper", "released"):
        begin = time.perf_counter()
        allocation = next(pipedream(Problem(chain, machine), mode=mode))
        seconds = time.perf_counter() - begin
        shape = "-".join(str(stage.replicas) for stage in allocation.stages)
        columns.append(f"{(allocation.claimed_period_ns or 0) / 10**6:11.6f} {seconds:6.3f}  {shape:24}")
    print(f"{chain.name:12} {where:14} {columns[0]} {columns[1]}".rstrip())


def main() -> None:
    files = sys.argv[1:] or sorted(map(str, (Path(__file__).parents[2] / "profiles" / "published").glob("*.json")))
    print(
        f"{'profile':12} {'GB/s':14} {'paper ms':>11} {'s':>6}  {'replicas':24} {'released ms':>11} {'s':>6}  replicas"
    )
    for path in files:
        chain = read_profile(path)
        for where, machine in PLATFORMS.items():
            report(chain, where, machine)
    rng = random.Random(0)
    layers = tuple(
        Layer(f"layer{i}", *(rng.randint(10**5, 10**7) for _ in range(3)), rng.randint(10**5, 10**7))
        for i in range(400)
    )
    report(Chain("made-up 400", layers, 10**6), "8x8 @ 10/1.25", platform((8, 10), (8, 1.25)))


if __name__ == "__main__":
    main()

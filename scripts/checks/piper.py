"""Compare Piper's partitioner with what Piper's own code printed on its own input, row by row.

    python scripts/checks/piper.py bert32a100.json

The input is of github.com/msr-fiddle/piper (MIT; inputs/bert32a100.json). ``TABLE`` was printed by that repository's
algo.cpp, built from source, with 25 GiB/s and 1920 microbatches: GiB of each GPU, GPUs, seconds per sample, None where
nothing fits. Exit code 1 where a row is not equalled or beaten. Stages: layers/run again/replicas/degree.

On two cores of an EPYC the twelve rows took that code 4.6 s of CPU (g++ -O3; 3.1 of them 512 GPUs), this search 37 s.
"""

from __future__ import annotations

import json
import sys
import time
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np

from pipeplan.partition.piper import OnGroups, Piper

GIB = 2**30
TABLE = [
    (1, 8, None), (1, 64, None), (2, 8, None), (2, 32, 0.0665495), (2, 64, 0.0320301), (8, 8, 0.165856),
    (8, 32, 0.0415155), (8, 64, 0.0202006), (8, 128, 0.0101209), (8, 512, 0.00256113), (80, 8, 0.122007),
    (80, 64, 0.0156502),
]  # fmt: skip


def variant(read: dict[str, Any], degree: int) -> OnGroups:
    """Return the layers of an input on so many GPUs, at its own figures."""
    before: dict[int, list[int]] = {node["id"]: [] for node in read["nodes"]}
    for edge in read["edges"]:
        before[edge["destId"]].append(edge["sourceId"])
    order = list(TopologicalSorter(before).static_order())
    place, count = {node: k for k, node in enumerate(order)}, len(order)
    nodes = {node["id"]: {x["id"]: x for x in node["TMPCs"][str(degree)]} for node in read["nodes"]}
    rows = [nodes[node] for node in order]

    def both(key: str) -> Any:
        kept = [x["vanilla"][key] for x in rows]
        return np.array([kept, [x.get("activation recomp", x["vanilla"])[key] for x in rows]])

    over = np.zeros((count + 1, count + 1))
    first, stop = np.arange(count + 1)[:, None], np.arange(count + 1)[None, :]
    for edge in read["edges"]:
        source, target = place[edge["sourceId"]], place[edge["destId"]]
        enters = (source < first) & (first <= target) & (target < stop)
        leaves = (first <= source) & (source < stop) & (stop <= target)
        gathered = rows[target]["vanilla"]["syncTimeFw"][str(edge["sourceId"])]
        summed = rows[source]["vanilla"]["syncTimeBw"][str(edge["destId"])]
        over += 2 * (enters * (edge["communicationCost"] + gathered) + leaves * (edge["communicationCost"] + summed))
    each, fixed = both("memoryUsageA"), both("memoryUsageB")
    return OnGroups(degree, both("timePerSample"), each, fixed, both("parameterSize")[0], over)


def main(path: str) -> int:
    """Print the table; return the exit code."""
    read = json.loads(Path(path).read_text())
    variants, worse = [variant(read, degree) for degree in (1, 2, 4, 8)], 0
    for gib, gpus, printed in TABLE:
        began = time.perf_counter()
        found = Piper(variants, gpus, gib * GIB, 25 * GIB, 1920).best()
        spent = time.perf_counter() - began
        least = None if found is None else found[0]
        as_good = (least is None) == (printed is None) and (least or 0) <= (printed or 0) * (1 + 1e-5)
        worse += not as_good
        stages = () if found is None else found[1]
        shapes = " ".join(f"{x.stop - x.start}/{len(x.again)}/{x.replicas}/{variants[x.variant].width}" for x in stages)
        print(f"{gib:3} GiB {gpus:4} GPUs  Piper {printed}  here {least and round(least, 10)}  {spent:.1f} s  {shapes}")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Simulate Zero Bubble's measured iterations with the kernel times that its authors measured: what is off, by schedule?

    python scripts/checks/zero_bubble.py

The rows are those of Table 4 in ``published/runs.csv``, the times of a stage those of Table 9 (Qi et al. 2024):
forward, backward of inputs, of weights, and a message. Nothing is fitted or estimated, so what is off is the
simulator's, or what kernels don't show: the optimizer's step, and hosts. GPUs under Megatron-LM wait for their messages
(``--blocking-transfers``), and interleaved stages send three times as many; beside that the table has what comes out if
messages overlap.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from pipeplan.planner.calibrate.costed import Configuration, costed
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy

ROWS = Path(__file__).parent / "published" / "runs.csv"
TIMES_NS = {  # blocks of the model -> forward, backward of inputs, of weights, message, of one stage and microbatch
    22: (18_522_000, 18_086_000, 9_337_000, 601_000),
    46: (11_347_000, 11_248_000, 8_132_000, 377_000),
}
CHUNKS = 3  # of a stage; each is as large as the embedding's and the head's
Row = dict[str, str]


def rows() -> list[Row]:
    """Return the rows of Table 4."""
    with ROWS.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["source"] == "zero-bubble"]


def ratio(row: Row, blocking: bool) -> float:
    """Return the simulated iteration over the measured one."""
    stages = int(row["stages"])
    forward, inputs, weights, message = TIMES_NS[int(row["blocks"])]
    count = stages * CHUNKS
    times = (forward // CHUNKS, (inputs + weights) // CHUNKS)
    layers = tuple(Layer(f"chunk{i}", *times, 1, message, backward_weight_ns=weights // CHUNKS) for i in range(count))
    platform = Platform((Device(10**15),) * stages, (Level(stages, 10**9),), blocking=blocking)  # a byte takes 1 ns
    split, on = (1, range(count)) if row["schedule"] == "interleaved" else (CHUNKS, range(stages))
    configuration = Configuration(
        split=",".join(str(split) for _ in on),
        on="/".join(str(i % stages) for i in on),
        schedule=row["schedule"],
        batch=int(row["batch"]) // int(row["microbatch"]),
        barrier=not row["schedule"].startswith("zb"),
    )
    found = costed(Chain("Zero Bubble", layers, 0), platform, Policy("flush"), configuration)
    return found.iteration_ns / 1e6 / float(row["ms"])


def main() -> None:
    """Print the table."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows():
        found[int(row["blocks"]), row["schedule"]].append((ratio(row, True), ratio(row, False)))
    print("simulated / measured, means over numbers of microbatches\nblocks  schedule     waiting  overlapping")
    for (blocks, schedule), pairs in found.items():
        print(f"{blocks:6}  {schedule:12} {fmean(x for x, _ in pairs):7.3f}  {fmean(x for _, x in pairs):11.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    main()

"""Time the simulator: up to 64 devices x 1,024 microbatches, and whether the cost grows with the operations alone.

    python scripts/bench/simulate.py

Prints, for several schedules and sizes, operations, seconds and microseconds per operation; the last column stays the
same when the cost is linear. Then the time of 64 x 1,024 against the limit of 5 s; exit 1 when it is missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.program import Program
from pipeplan.schedule.programs.message_driven import message_driven
from pipeplan.schedule.programs.one_f_one_b import one_f_one_b
from pipeplan.schedule.programs.zero_bubble import zb1p
from pipeplan.schedule.simulate import simulate

LIMIT_SECONDS = 5.0
SIZES = [(8, 128), (16, 256), (32, 512), (64, 512), (64, 1024)]
SCHEDULES: dict[str, Callable[[StageGraph, int], Program]] = {
    "1f1b": one_f_one_b,
    "zb1p": zb1p,
    "message-driven": message_driven,
}


def graph(devices: int) -> StageGraph:
    """Return unequal stages with transfers between them."""
    layers = [Layer(f"l{i}", 10_000 + 37 * i % 500, 20_000 + 91 * i % 900, 8, 500, 700) for i in range(devices)]
    stages = [Stage(i, i + 1, (i,)) for i in range(devices)]
    platform = Platform.flat(devices, 10**9, 10**9)
    return stage_graph(Chain("benchmark", tuple(layers), 0), platform, Policy("flush"), stages)


def main() -> int:
    print(f"{'schedule':15} devices microbatches operations  build s  run s  us/op")
    worst = 0.0
    for name, build in SCHEDULES.items():
        for devices, microbatches in SIZES:
            began = time.perf_counter()
            program = build(graph(devices), microbatches)
            built = time.perf_counter()
            simulate(program)
            ended = time.perf_counter()
            count = sum(len(lane.steps) for lane in program.lanes)
            run = ended - built
            print(
                f"{name:15} {devices:7} {microbatches:12} {count:10} {built - began:8.2f} {run:6.2f} "
                f"{1e6 * run / count:6.2f}"
            )
            if (devices, microbatches) == SIZES[-1]:
                worst = max(worst, run)
    print(f"64 x 1024 in at most {worst:.2f} s; the limit is {LIMIT_SECONDS} s")
    return int(worst > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())

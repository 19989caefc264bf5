"""How long the ILP of periodic patterns takes: 14 stages with 6 on one device, and 16 stages dealt to 4 devices.

Layers are of the sizes of large-image networks (1-30 ms forward, 5-200 MB activations, 12 GB/s); memory is 1.02, 1.15
and 1.4 times the least with which any pattern exists. One line per instance and solver:

    python scripts/bench/ilp.py [--seeds 4] [--solvers cbc,highs] [--limit 60]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from pipeplan.cost.group_bound import group_bound
from pipeplan.cost.stage_graph import StageGraph, stage_graph
from pipeplan.integers import smallest
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Layer, Platform, Policy
from pipeplan.schedule.periodic.ilp import schedule_ilp
from pipeplan.schedule.periodic.solvers import SolverLimits

INSTANCES = {
    "14 stages, 6 on one device": [0, 1, 0, 2, 3, 0, 4, 0, 5, 6, 0, 7, 0, 8],
    "16 stages dealt to 4 devices": [i % 4 for i in range(16)],
}
HEADER = "instance                         memory  seed  solver  status          period       bound     time"


def instance(owner: Sequence[int], roomy: float, seed: int) -> StageGraph:
    """Return one stage per layer on its owner, with ``roomy`` times the least memory of any pattern; 12 GB/s."""
    rng = random.Random(seed)
    layers = [
        Layer(
            f"layer{i}",
            forward_ns=rng.randint(10**6, 3 * 10**7),
            backward_ns=rng.randint(2 * 10**6, 6 * 10**7),
            weight_bytes=rng.randint(1, 80) * 10**6,
            output_bytes=rng.randint(5, 200) * 10**6,
        )
        for i in range(len(owner))
    ]
    chain = Chain("network", tuple(layers), 150 * 10**6)
    stages = [Stage(i, i + 1, (device,)) for i, device in enumerate(owner)]

    def with_memory(size: int) -> StageGraph:
        return stage_graph(chain, Platform.flat(max(owner) + 1, size), Policy(), stages)

    found = smallest(lambda size: None if group_bound(with_memory(size)) is None else size, 1, 10**12)
    assert found is not None, "a terabyte is enough"
    return with_memory(int(found[0] * roomy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--solvers", default="cbc,highs")
    parser.add_argument("--limit", type=float, default=60, help="seconds per instance")
    options = parser.parse_args()
    print(HEADER)
    for name, owner in INSTANCES.items():
        for roomy in (1.02, 1.15, 1.4):
            for seed in range(options.seeds):
                graph = instance(owner, roomy, seed)
                for solver in options.solvers.split(","):
                    start = time.perf_counter()
                    result = schedule_ilp(graph, solver=solver, limits=SolverLimits(own_s=options.limit))
                    seconds = time.perf_counter() - start
                    period = "-" if result.pattern is None else f"{result.pattern.period_ns / 1e6:.3f}"
                    print(
                        f"{name:28}  x {roomy:<7}  {seed:4}  {solver:6}  {result.status:10}  {period:>7} ms  "
                        f"{result.lower_bound_ns / 1e6:7.3f} ms  {seconds:5.2f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

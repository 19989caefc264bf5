"""How long does ``auto`` search beyond exact ``contiguous``, and for what gap?

Chains of 100 random layers and some shipped profiles on 8 GPUs; CPU seconds, milliseconds, and the gap to class any.

    python scripts/bench/stopping.py [--gap 0.001]
"""

from __future__ import annotations

import argparse
import random
import time

from pipeplan.check.evaluate import gap
from pipeplan.files.profiles import read_profile
from pipeplan.planner.periodic.incumbent import GAP, Settings
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem


def hundred_layers() -> Chain:
    rng = random.Random(1)
    spans = ((1, 30, 10**5), (2, 60, 10**5), (0, 40, 10**6), (1, 20, 10**6), (10, 80, 10**6))
    made = ([rng.randint(low, high) * unit for low, high, unit in spans] for _ in range(100))
    return Chain("hundred", tuple(Layer(f"layer{i}", *figures) for i, figures in enumerate(made)), 10**7, microbatch=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gap", type=float, default=GAP)
    arguments = parser.parse_args()
    shipped = {name: read_profile(f"profiles/{name}.json") for name in ("resnet50-1000-b8-v100", "vgg16-224-b32-v100")}
    print(f"{'profile':<24}{'GB':>5}  {'replicas':<9}{'contiguous':>22}{'auto':>22}{'gap':>8}")
    for chain, memory in ((hundred_layers(), 3), (hundred_layers(), 2.5), *((chain, 8) for chain in shipped.values())):
        for replicas in (True, False):
            platform = Platform.flat(8, int(memory * 10**9))
            problem = Problem(chain, platform, Policy(accumulate=64), replicas, "segments")
            cells, plan = "", None
            for algorithm in ("contiguous", "auto"):
                began = time.process_time()
                plan = make_plan(problem, algorithm, settings=Settings(gap=arguments.gap))
                cells += f"{time.process_time() - began:>9.1f} s{plan.evaluation.period_ns / 1e6:>8.2f} ms"
            assert plan is not None
            above = gap(plan.evaluation.period_ns, plan.plan.lower_bounds[-1])
            print(f"{chain.name:<24}{memory:>5}  {'yes' if replicas else 'no':<9}{cells}{above:>8.1%}", flush=True)


if __name__ == "__main__":
    main()

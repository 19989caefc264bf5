"""How good the planner is: algorithms on many cases, against each case's bounds and against each other.

Usage: python scripts/bench/planner.py [--full] [--no-replicas] [--bandwidth 12GB/s] [--distinct] [--gpt] [PROFILE ...]
       ... --save before.json, and after a change ... --against before.json

MadPipe's class (no replicas, no recomputation) unless --full. Profiles default to PipeDream's vgg16, resnet50 and
densenet121 where they are at hand, cut where one tensor is live; saved bytes are the input's (MadPipe's accounting)
unless --distinct. --gpt adds chains of 12 and 24 transformer blocks with large weights. P in 2, 4, 6, 8 and M in 3, 4,
6, 8, 12 GB (GPT: P 8 and 16, from barely feasible to ample). Prints, per network and algorithm: feasible cases,
geometric mean and worst of period / (U / P), of period / bound, the share of cases within 0.1% and 5% of the bound,
plain data parallelism, CPU seconds. Then the ratio of each algorithm's period to the portfolio's, where both exist.
--save keeps the portfolio's periods and seconds by case, --against sets them beside those of another version.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from math import exp, log
from pathlib import Path

from pipeplan.check.bounds import any_bound
from pipeplan.check.evaluate import evaluate
from pipeplan.errors import Infeasible
from pipeplan.files.profiles import read_profile
from pipeplan.partition.granularity import merge_articulation
from pipeplan.partition.madpipe.exact import one_special_bound
from pipeplan.planner.periodic.explain import least_memory
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Chain, Checkpointing, Layer, Platform, Problem
from pipeplan.units import parse_bandwidth

PUBLISHED = Path(__file__).parents[2] / "profiles" / "published"
GB = 10**9


def gpt(blocks: int, hidden: int = 4096, sequence: int = 1024, vocabulary: int = 50_000) -> Chain:
    """A transformer's costs from flop and byte counts: 100 TFLOP/s, fp32 weights, half-precision activations."""
    flops_per_ns = 100_000
    block = 12 * hidden * hidden
    output = 2 * sequence * hidden
    forward = 2 * block * sequence // flops_per_ns
    table = vocabulary * hidden
    head = 2 * table * sequence // flops_per_ns
    layers = [Layer("embedding", 50_000, 100_000, 4 * table, output, saved_bytes=4 * sequence)]
    layers += [
        Layer(f"block{i}", forward, 2 * forward, 4 * block, output, saved_bytes=17 * output) for i in range(blocks)
    ]
    layers.append(Layer("head", head, 2 * head, 4 * table, 4, saved_bytes=output + 4 * sequence * vocabulary))
    return Chain(f"gpt-{blocks}", tuple(layers), 4 * sequence)


def cases(arguments: argparse.Namespace) -> dict[str, list[Problem]]:
    replicas = arguments.full and not arguments.no_replicas
    checkpointing: Checkpointing = arguments.checkpointing if arguments.full else "none"
    bandwidth = parse_bandwidth(arguments.bandwidth)

    def problem(chain: Chain, gpus: int, memory: int) -> Problem:
        return Problem(chain, Platform.flat(gpus, memory, bandwidth), replicas=replicas, checkpointing=checkpointing)

    paths = arguments.profiles or [PUBLISHED / f"{name}.json" for name in ("vgg16", "resnet50", "densenet121")]
    made = {}
    for path in paths:
        chain = merge_articulation(read_profile(str(path)), "distinct" if arguments.distinct else "input")
        made[chain.name] = [problem(chain, p, m * GB) for p in (2, 4, 6, 8) for m in (3, 4, 6, 8, 12)]
    if arguments.gpt:
        for blocks in (12, 24):
            chain = gpt(blocks)
            rows = []
            for gpus in (8, 16):
                least = least_memory(problem(chain, gpus, GB))
                assert least is not None
                rows += [problem(chain, gpus, least * share // 100) for share in (100, 115, 140, 200, 400)]
            made[chain.name] = rows
    return made


def mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values)) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="*", metavar="PROFILE")
    parser.add_argument("--full", action="store_true", help="allow replicas and recomputation")
    parser.add_argument("--checkpointing", choices=["none", "stages", "segments"], default="segments")
    parser.add_argument("--no-replicas", action="store_true")
    parser.add_argument("--bandwidth", default="12GB/s")
    parser.add_argument("--distinct", action="store_true")
    parser.add_argument("--gpt", action="store_true")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--solver", choices=["cbc", "highs"], default="cbc")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    parser.add_argument("--only", help="one of the algorithms")
    parser.add_argument("--details", action="store_true", help="print every case")
    arguments = parser.parse_args()
    algorithms = ["pipedream", "contiguous", "auto"]
    if not arguments.full:
        algorithms[1:1] = ["madpipe-paper", "madpipe"]
    if arguments.only:
        algorithms = [arguments.only]
    found: dict[str, dict[tuple[str, int], int]] = {name: {} for name in algorithms}
    taken: dict[str, tuple[int | None, float]] = {}
    print(
        f"{'network':14s}{'algorithm':15s}  feasible  mean/(U/P)  worst  mean/bound  0.1%    5%   dp  median s  most s"
    )
    every: dict[str, list[float]] = {name: [] for name in algorithms}
    for network, problems in cases(arguments).items():
        limits = [bound(problem, arguments.full) for problem in problems]
        for name in algorithms:
            over_load, over_bound, seconds, dp = [], [], [], 0
            for i, (problem, limit) in enumerate(zip(problems, limits, strict=True)):
                began = time.process_time()
                try:
                    plan = make_plan(problem, name, settings=Settings(arguments.solver), effort=arguments.effort).plan
                except Infeasible:
                    seconds.append(time.process_time() - began)
                    taken[f"{name} {network} {i}"] = None, seconds[-1]
                    continue
                seconds.append(time.process_time() - began)
                period = evaluate(plan).period_ns
                taken[f"{name} {network} {i}"] = period, seconds[-1]
                found[name][network, i] = period
                sums = problem.chain.sums
                work = int(sums.forward_ns[-1] + sums.backward_ns[-1])
                over_load.append(period * len(problem.platform) / work)
                over_bound.append(period / limit)
                dp += plan.allocation.data_parallel
                if arguments.details:
                    memory = problem.platform.devices[0].memory_bytes / GB
                    print(
                        f"  {len(problem.platform)} x {memory:.1f} GB {name} {period / 1e6:.3f} ms, "
                        f"bound {limit / 1e6:.3f}"
                    )
            every[name] += over_bound
            near = [sum(x <= 1 + share for x in over_bound) / max(1, len(over_bound)) for share in (0.001, 0.05)]
            print(
                f"{network:14s}{name:15s}  {len(over_load):3d}/{len(problems):3d}  {mean(over_load):10.3f}"
                f"  {max(over_load, default=float('nan')):5.2f}  {mean(over_bound):10.3f}  "
                f"{near[0]:4.0%}  {near[1]:4.0%}  {dp:3d}  {statistics.median(seconds):8.2f}  {max(seconds):6.2f}",
                flush=True,
            )
    if arguments.save is not None:
        arguments.save.write_text(json.dumps(taken, indent=1))
    if arguments.against is not None:
        beside(json.loads(arguments.against.read_text()), taken)
    if "auto" not in algorithms:
        return
    print(
        "\nperiod of each algorithm over auto's, geometric mean where both are feasible; cases feasible for auto alone"
    )
    for name in algorithms[:-1]:
        both = found[name].keys() & found["auto"].keys()
        ratios = [found[name][key] / found["auto"][key] for key in both]
        print(
            f"{name:15s} {mean(ratios):6.3f}  worst {max(ratios, default=float('nan')):5.2f}  "
            f"alone {len(found['auto']) - len(both)}"
        )
    within = [sum(x <= 1 + share for x in every["auto"]) / max(1, len(every["auto"])) for share in (0.001, 0.05)]
    print(f"auto within 0.1% of the bound in {within[0]:.0%} of its cases, within 5% in {within[1]:.0%}")


def beside(before: dict[str, list[float | None]], after: dict[str, tuple[int | None, float]]) -> None:
    """Print how cases came out before and now: better, worse, feasible now or no longer, and the median seconds."""
    both = [name for name in after if name in before]
    ratios = {}
    for name in both:
        old, new = before[name][0], after[name][0]
        if (old is None) != (new is None):
            print(f"{name}: {'feasible now' if old is None else 'no longer feasible'}")
        elif old is not None and new is not None and new != old:
            ratios[name] = new / old
    for name, ratio in sorted(ratios.items(), key=lambda x: x[1]):
        print(f"{name}: {ratio - 1:+.2%}")
    old_s, new_s = (statistics.median(float(x[name][1] or 0) for name in both) for x in (before, after))
    worse = sum(ratio > 1 for ratio in ratios.values())
    counts = f"{len(ratios) - worse} better, {worse} worse"
    print(f"{len(both)} cases: {counts}; median {old_s:.2f} s before, {new_s:.2f} s now")


def bound(problem: Problem, full: bool) -> int:
    """The bound of the class compared in: one-special for MadPipe's (for auto's general plans it may be beaten)."""
    special = None if full else one_special_bound(problem)
    return special or any_bound(problem).period_ns


if __name__ == "__main__":
    main()

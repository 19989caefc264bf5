"""PipeDream's Figure 18: pipeline depth against throughput and memory, for GNMT (and others) on four GPUs.

    python -m scripts.studies.depth [PROFILE ...] [-o FIGURE]

For each profile (default: PipeDream's gnmt and resnet50) the model is cut into four straight
stages by PipeDream's partitioner, and its 1F1B schedule is simulated with 1, 2, .. microbatches in flight at the input
stage, weights stashed. The paper finds that throughput grows with the depth, by less and less, while memory grows in
proportion.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeplan.files.profiles import read_profile
from pipeplan.planner.plan import make_plan
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Platform, Policy, Problem
from pipeplan.units import format_bytes, parse_bandwidth

PUBLISHED = Path(__file__).parents[2] / "profiles" / "published"
GPUS, MICROBATCHES, DEPTHS = 4, 96, range(1, 9)
BANDWIDTH = "10GB/s"


def curve(path: str) -> list[tuple[int, float, int, list[int]]]:
    """Return (depth, microbatches per second, most bytes on a GPU, microbatches held by each GPU) for each depth."""
    platform = Platform.flat(GPUS, 10**12, parse_bandwidth(BANDWIDTH))
    problem = Problem(read_profile(path), platform, Policy("stash", accumulate=1), replicas=False, checkpointing="none")
    plan = make_plan(problem, "pipedream", {"straight": True}).plan
    found = []
    for depth in DEPTHS:
        run = simulate_plan(plan, MICROBATCHES, "pipedream", {"depth": depth})
        devices = [row for row in run.figures()["devices"] if row["in_flight"]]
        peak = max(row["peak_bytes"] for row in devices)
        held = [max(row["in_flight"].values()) for row in devices]
        found.append((depth, 1e9 / run.per_microbatch_ns, peak, held))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profiles", nargs="*")
    parser.add_argument("-o", "--output", help="draw the curves into this .svg, .png or .pdf")
    arguments = parser.parse_args()
    profiles = arguments.profiles or [str(PUBLISHED / f"{name}.json") for name in ("gnmt", "resnet50")]
    curves = {Path(path).name.split(".")[0]: curve(path) for path in profiles}
    for name, points in curves.items():
        print(f"{name}: {GPUS} straight stages, {BANDWIDTH}, weights stashed")
        print(f"{'depth':>5} {'throughput/s':>12} {'of best':>8} {'largest GPU':>12}  in flight per GPU")
        best = max(rate for _, rate, _, _ in points)
        for depth, rate, peak, held in points:
            print(f"{depth:5} {rate:12.2f} {rate / best:8.1%} {format_bytes(peak):>12}  {held}")
    if arguments.output:
        draw(curves, arguments.output)
    return 0


def draw(curves: dict[str, list[tuple[int, float, int, list[int]]]], path: str) -> None:
    """Draw throughput (left) and memory (right) over the depth, one line per profile."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, points in curves.items():
        depths = [depth for depth, _, _, _ in points]
        best = max(rate for _, rate, _, _ in points)
        left.plot(depths, [rate / best for _, rate, _, _ in points], marker="o", label=name)
        right.plot(depths, [peak / points[0][2] for _, _, peak, _ in points], marker="o", label=name)
    left.set_ylabel("throughput / best")
    right.set_ylabel("largest GPU / depth 1")
    for axes in (left, right):
        axes.set_xlabel("pipeline depth")
        axes.set_ylim(0, None)
        axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())

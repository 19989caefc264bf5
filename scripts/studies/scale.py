"""Measure `pipeplan plan` on long chains and many GPUs: CPU seconds and peak memory, as a table and two pictures.

Usage: python -m scripts.studies.scale [--layers 100,1000,10000] [--gpus 8,64,1024] [--mem 80GB] [-o FOLDER] [...]

Random chains (0.3 to 9 ms a layer, weights of 1 to 20 MB, 10 to 200 MB kept for the backward), each planned by a
process of its own with default options, and others that follow. Writes seconds.png and memory.png into the folder, if
one is given.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipeplan.files.profiles import profile_text
from scripts.bench.contiguous import random_chain
from scripts.bench.many_stages import taken


@dataclass(frozen=True)
class Point:
    """What one plan took, how long its period is above its best lower bound, and the GPUs' number."""

    layers: int
    gpus: int
    seconds: float
    megabytes: float
    gap: float | None


def measured(profile: Path, layers: int, gpus: int, memory: str, options: list[str]) -> Point:
    """Plan in a new process."""
    ran = taken("plan", str(profile), "--gpus", str(gpus), "--mem", memory, "--json", *options)
    gap = None
    if ran.code == 0:
        figures = json.loads(ran.output)
        gap = figures["pattern"]["period_ns"] / max(bound["period_ns"] for bound in figures["lower_bounds"]) - 1
    return Point(layers, gpus, ran.seconds, ran.megabytes, gap)


def drawn(points: list[Point], folder: Path) -> None:
    """Write both pictures: against layers, one line for each number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, label in (("seconds", "CPU seconds"), ("memory", "peak memory, MB")):
        figure, axes = plt.subplots(figsize=(6, 4))
        for gpus in sorted({point.gpus for point in points}):
            some = [point for point in points if point.gpus == gpus]
            values = [point.seconds if name == "seconds" else point.megabytes for point in some]
            axes.plot([point.layers for point in some], values, marker="o", label=f"{gpus:,} GPUs")
        axes.set(xscale="log", yscale="log", xlabel="layers", ylabel=label)
        axes.grid(which="both", alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="100,1000,10000")
    parser.add_argument("--gpus", default="8,64,1024")
    parser.add_argument("--mem", default="80GB")
    parser.add_argument("-o", "--output", type=Path)
    arguments, options = parser.parse_known_args()
    points = []
    print(f"{'layers':>7s} {'GPUs':>6s} {'seconds':>8s} {'MB':>6s}  gap")
    with tempfile.TemporaryDirectory() as folder:
        for layers in map(int, arguments.layers.split(",")):
            profile = Path(folder) / f"{layers}.json"
            profile.write_text(profile_text(random_chain(layers)))
            for gpus in map(int, arguments.gpus.split(",")):
                point = measured(profile, layers, gpus, arguments.mem, options)
                points.append(point)
                gap = "no plan" if point.gap is None else f"{point.gap:.1%}"
                print(f"{layers:7d} {gpus:6d} {point.seconds:8.1f} {point.megabytes:6.0f}  {gap}", flush=True)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        drawn(points, arguments.output)


if __name__ == "__main__":
    main()

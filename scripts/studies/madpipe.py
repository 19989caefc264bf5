"""Redraw Figures 6, 7 and 8 of MadPipe for any profiles: PNG and the CSV that they are drawn from.

Usage: python -m scripts.studies.madpipe PROFILE... [--gpus 2,4,8] [--mem 3GB,4GB] [--bandwidth 12GB/s,24GB/s] [-o out]

Figure 6: period against memory for the first profile, dashed what the dynamic program claims, solid what is scheduled.
Figure 7: geometric mean over GPUs and bandwidths of each algorithm's period over the portfolio's, one line per network.
Figure 8: speed-up over one GPU against the number of GPUs, for each memory. In MadPipe's class (no replicas, no
recomputation) unless --full. Also prints where the paper's claim (PipeDream more than 20% behind below 10 GB) holds.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pipeplan.files.profiles import read_profile
from pipeplan.partition.granularity import merge_articulation
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.planner.what_if.compare import compare
from pipeplan.problem import Chain, Platform, Problem
from pipeplan.units import parse_bandwidth, parse_bytes

ALGORITHMS = ("pipedream", "madpipe-paper", "auto")
COLOURS = {"pipedream": "tab:red", "madpipe-paper": "tab:orange", "auto": "tab:blue"}


@dataclass(frozen=True)
class Point:
    """One algorithm on one platform: what it claimed and what was scheduled, in ns; None where nothing fits."""

    network: str
    bandwidth: int
    gpus: int
    memory: int
    algorithm: str
    claimed_ns: int | None
    period_ns: int | None


def measure(chain: Chain, arguments: argparse.Namespace) -> list[Point]:
    points = []
    for bandwidth in arguments.bandwidth:
        checkpointing = "segments" if arguments.full else "none"
        problem = Problem(chain, Platform.flat(1, 1, bandwidth), replicas=arguments.full, checkpointing=checkpointing)
        rows = compare(
            problem,
            arguments.gpus,
            arguments.mem,
            ALGORITHMS,
            clock=time.process_time,
            settings=Settings(arguments.solver),
        )
        for row in rows:
            print(f"{chain.name}: {row.gpus} GPUs of {row.memory_bytes / 1e9:g} GB", file=sys.stderr)
            points += [
                Point(chain.name, bandwidth, row.gpus, row.memory_bytes, c.algorithm, c.claimed_ns, c.period_ns)
                for c in row.cells
            ]
    return points


def figure6(points: list[Point], gpus: list[int], bandwidth: int, path: Path) -> None:
    figure, axes = plt.subplots(1, len(gpus), figsize=(4 * len(gpus), 3.4), squeeze=False)
    for axis, count in zip(axes[0], gpus, strict=True):
        for algorithm in ALGORITHMS:
            mine = [p for p in points if (p.gpus, p.algorithm, p.bandwidth) == (count, algorithm, bandwidth)]
            for field, style in (("claimed_ns", "--"), ("period_ns", "-")):
                if algorithm == "auto" and field == "claimed_ns":  # the winners' claims are of several algorithms
                    continue
                xy = [(p.memory / 1e9, getattr(p, field) / 1e6) for p in mine if getattr(p, field) is not None]
                if xy:
                    label = algorithm if style == "-" else None
                    axis.plot(*zip(*xy, strict=True), style, color=COLOURS[algorithm], marker=".", label=label)
        axis.set(title=f"{points[0].network}, {count} GPUs", xlabel="memory of each GPU (GB)", ylabel="period (ms)")
        axis.set_ylim(bottom=0)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def ratios(points: list[Point], network: str, algorithm: str) -> dict[int, float]:
    """Geometric mean of the algorithm's period over auto's, for each memory at which both are ever feasible."""
    best = {
        (p.bandwidth, p.gpus, p.memory): p.period_ns for p in points if (p.network, p.algorithm) == (network, "auto")
    }
    logs: dict[int, list[float]] = {}
    for p in points:
        reference = best.get((p.bandwidth, p.gpus, p.memory))
        if (p.network, p.algorithm) == (network, algorithm) and p.period_ns and reference:
            logs.setdefault(p.memory, []).append(log(p.period_ns / reference))
    return {memory: exp(sum(values) / len(values)) for memory, values in sorted(logs.items())}


def figure7(points: list[Point], path: Path) -> None:
    networks = sorted({p.network for p in points})
    figure, axes = plt.subplots(1, len(networks), figsize=(4 * len(networks), 3.4), squeeze=False, sharey=True)
    for axis, network in zip(axes[0], networks, strict=True):
        for algorithm in ALGORITHMS:
            found = ratios(points, network, algorithm)
            axis.plot(
                [m / 1e9 for m in found], list(found.values()), marker=".", color=COLOURS[algorithm], label=algorithm
            )
        axis.set(title=network, xlabel="memory of each GPU (GB)", ylabel="period over auto's (geometric mean)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def figure8(points: list[Point], serial_ns: dict[str, int], bandwidth: int, path: Path) -> None:
    networks = sorted(serial_ns)
    figure, axes = plt.subplots(1, len(networks), figsize=(4 * len(networks), 3.4), squeeze=False, sharey=True)
    memories = sorted({p.memory for p in points})
    for axis, network in zip(axes[0], networks, strict=True):
        for i, memory in enumerate(memories):
            for algorithm, style in (("pipedream", "--"), ("auto", "-")):
                xy = [
                    (p.gpus, serial_ns[network] / p.period_ns)
                    for p in points
                    if (p.network, p.memory, p.algorithm, p.bandwidth) == (network, memory, algorithm, bandwidth)
                    and p.period_ns
                ]
                if xy:
                    label = f"{memory / 1e9:g} GB" if style == "-" else None
                    axis.plot(*zip(*xy, strict=True), style, marker=".", color=f"C{i}", label=label)
        counts = sorted({p.gpus for p in points})
        axis.plot(counts, counts, ":", color="grey")
        axis.set(title=f"{network} (dashed: pipedream)", xlabel="GPUs", ylabel="speed-up over one GPU")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def claim(points: list[Point]) -> None:
    """Say, per network, whether PipeDream is more than 20% behind the portfolio at every memory below 10 GB."""
    for network in sorted({p.network for p in points}):
        below = {m: r for m, r in ratios(points, network, "pipedream").items() if m < 10 * 10**9}
        figures = ", ".join(f"{m / 1e9:g} GB {r - 1:+.0%}" for m, r in below.items()) or "pipedream never fits"
        verdict = "holds" if below and min(below.values()) > 1.2 else "does not hold"
        print(f"{network}: PipeDream behind by {figures}: 'over 20% below 10 GB' {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="+", metavar="PROFILE")
    parser.add_argument("--gpus", type=lambda s: [int(x) for x in s.split(",")], default=[2, 4, 8])
    parser.add_argument(
        "--mem",
        type=lambda s: [parse_bytes(x) for x in s.split(",")],
        default=[m * 10**9 for m in (3, 4, 5, 6, 8, 10, 12, 16)],
    )
    parser.add_argument(
        "--bandwidth", type=lambda s: [parse_bandwidth(x) for x in s.split(",")], default=[12 * 10**9, 24 * 10**9]
    )
    parser.add_argument("--full", action="store_true", help="allow replicas and recomputation")
    parser.add_argument("--solver", choices=["cbc", "highs"], default="cbc")
    parser.add_argument("-o", "--output", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    points: list[Point] = []
    serial: dict[str, int] = {}
    for path in arguments.profiles:
        chain = merge_articulation(read_profile(path))
        serial[chain.name] = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
        points += measure(chain, arguments)
    with (arguments.output / "madpipe_figures.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Point.__dataclass_fields__)
        writer.writerows([getattr(p, name) for name in Point.__dataclass_fields__] for p in points)
    first = points[0].network
    figure6(
        [p for p in points if p.network == first],
        arguments.gpus,
        arguments.bandwidth[0],
        arguments.output / "figure6.png",
    )
    figure7(points, arguments.output / "figure7.png")
    figure8(points, serial, arguments.bandwidth[0], arguments.output / "figure8.png")
    claim(points)
    print(f"figure6.png, figure7.png, figure8.png and madpipe_figures.csv are in {arguments.output}")


if __name__ == "__main__":
    main()

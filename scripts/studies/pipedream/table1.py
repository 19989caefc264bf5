"""PipeDream's Table 1: which speed-ups over data parallelism follow from the published profiles, and which don't?

    python -m scripts.studies.pipedream.table1 [--models vgg16,gnmt] [--markdown]

Each row of the table whose network has a published profile, on its cluster: PCIe (10 GB/s) or NVLink (30 GB/s) inside
servers, 10 or 25 Gbit/s between them. Times and activations are scaled from the profile's batch to that of section 5.1.
Three predictions of the speed-up of the configuration that the row names, its best cut, and of the best of all:

formula:  the recurrence of section 3.1; data parallelism hides its all-reduce behind its work and takes the longer.
exposed:  the same for the pipeline, but data parallelism waits for its whole all-reduce.
released: what the published optimizer claims for its own best configuration and for data parallelism.

``wire`` is the share of the slowest level's bandwidth at which exposed data parallelism would be slower by the
published factor than the row's configuration is at all of it: what the measurement says about their all-reduce if all
else is as modelled. A row comes out where a prediction is within a factor of 1.25. Memory is not looked at.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from pipeplan.files.profiles import read_profile
from pipeplan.partition.pipedream.paper import pipedream
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Device, Level, Platform, Policy, Problem

from .released import released_period_ns

PROFILES = Path(__file__).parents[3] / "profiles" / "published"
CLUSTERS = {"A": (10.0, 1.25), "B": (30.0, 3.125)}  # GB/s inside a server and between servers (Table 2)
BATCHES = {
    "vgg16": (128, 64),
    "resnet50": (128, 128),
    "alexnet": (256, 256),
    "gnmt": (32, 64),
}  # profile's, section 5.1's
AGREES = 1.25  # a factor between two speed-ups within which they are called equal


@dataclass(frozen=True)
class Row:
    """A row of Table 1: servers x GPUs of a cluster, the configuration found there, its epoch time over DP's."""

    model: str
    servers: int
    gpus: int
    cluster: str
    config: str
    speedup: float


TABLE = (
    Row("vgg16", 4, 4, "A", "15-1", 5.28),
    Row("vgg16", 2, 8, "B", "15-1", 2.98),
    Row("resnet50", 4, 4, "A", "16", 1.0),
    Row("resnet50", 2, 8, "B", "16", 1.0),
    Row("alexnet", 4, 4, "A", "15-1", 4.92),
    Row("alexnet", 2, 8, "B", "15-1", 2.04),
    Row("gnmt_large", 1, 4, "A", "straight", 1.46),
    Row("gnmt_large", 4, 4, "A", "straight", 2.34),
    Row("gnmt_large", 2, 8, "B", "straight", 3.14),
    Row("gnmt", 1, 4, "A", "straight", 1.5),
    Row("gnmt", 3, 4, "A", "straight", 2.95),
    Row("gnmt", 2, 8, "B", "16", 1.0),
)


@dataclass(frozen=True)
class Predicted:
    """Milliseconds per microbatch of data parallelism and of pipelines, and what follows for a row."""

    row: Row
    data_parallel: float
    exposed: float
    named: float
    best: float
    best_config: str
    released: float
    released_data_parallel: float
    wire: float

    @property
    def speedups(self) -> dict[str, float]:
        """Predicted speed-ups; of a row that names data parallelism, those of the best configuration over it."""
        found = {"formula": self.data_parallel / self.named, "exposed": self.exposed / self.named}
        if self.row.config == "16":
            found = {"formula": self.data_parallel / self.best}
        return found | {"released": self.released_data_parallel / self.released}

    @property
    def agreeing(self) -> list[str]:
        """Which predictions are within a quarter of the published speed-up."""
        published = self.row.speedup
        return [k for k, x in self.speedups.items() if max(x / published, published / x) <= AGREES]


def scaled(chain: Chain, model: str) -> Chain:
    """Return the chain with times and activations of the batch that section 5.1 names."""
    profiled, used = BATCHES.get(model, (1, 1))
    layers = tuple(
        replace(
            x,
            forward_ns=x.forward_ns * used // profiled,
            backward_ns=x.backward_ns * used // profiled,
            output_bytes=x.output_bytes * used // profiled,
        )
        for x in chain.layers
    )
    return replace(chain, layers=layers, input_bytes=chain.input_bytes * used // profiled)


def platform_of(row: Row) -> Platform:
    inside, between = (int(rate * 10**9) for rate in CLUSTERS[row.cluster])
    levels = (Level(row.gpus, inside), *((Level(row.servers, between),) if row.servers > 1 else ()))
    return Platform((Device(10**13),) * (row.servers * row.gpus), levels)


def predicted(row: Row) -> Predicted:
    """Return the predictions for a row."""
    chain = scaled(read_profile(str(PROFILES / f"{row.model}.json")), row.model)
    platform = platform_of(row)
    problem = Problem(chain, platform, Policy("stash"))
    gpus = len(platform)
    work = float(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
    weights = float(chain.sums.weight_bytes[-1])
    rate = platform.paths[-1][0] / 10**9
    sync = 2 * (gpus - 1) / gpus * weights / rate
    best = next(pipedream(problem))
    named = named_period(problem, row)
    of_released, below = work, 1
    for level in platform.levels:
        m = level.count
        of_released = (of_released + 4 * (m - 1) * weights / (level.bandwidth / 10**9 * m) / below) / m
        below = m
    slack = row.speedup * named * gpus - work
    return Predicted(
        row,
        max(work, sync) / gpus / 1e6,
        (work + sync) / gpus / 1e6,
        named / 1e6,
        (best.claimed_period_ns or 0) / 1e6,
        shape(best.stages),
        released_period_ns(problem) / 1e6,
        of_released / 1e6,
        sync / slack if slack > 0 else float("inf"),
    )


def named_period(problem: Problem, row: Row) -> float:
    """Return the least period (ns) of the recurrence among stages of the configuration that the row names."""
    chain, platform = problem.chain, problem.platform
    gpus = len(platform)
    if row.config == "straight":
        return next(pipedream(problem, straight=True)).claimed_period_ns or 0
    counts = [int(x) for x in row.config.split("-")]
    if len(counts) == 1:
        counts.append(0)
    sums = chain.sums
    rate = platform.paths[-1][0] / 10**9

    def stage(start: int, stop: int, replicas: int) -> float:
        work = float(sums.forward_ns[stop] + sums.backward_ns[stop] - sums.forward_ns[start] - sums.backward_ns[start])
        weights = float(sums.weight_bytes[stop] - sums.weight_bytes[start])
        spans = platform.paths[platform.level_of(range(replicas))][0] / 10**9 if start == 0 else rate
        return max(work, 2 * (replicas - 1) / replicas * weights / spans) / replicas

    if not counts[1]:
        return stage(0, len(chain), gpus)
    return min(
        max(stage(0, cut, counts[0]), 2 * chain.cut_bytes[cut] / rate, stage(cut, len(chain), counts[1]))
        for cut in range(1, len(chain))
    )


def shape(stages: tuple[Stage, ...]) -> str:
    counts = [stage.replicas for stage in stages]
    return f"straight, {len(counts)}" if len(counts) > 1 and set(counts) == {1} else "-".join(map(str, counts))


COLUMNS = ("network", "cluster", "config", "published", "formula", "exposed", "released", "best by formula",
           "speed-up", "wire", "comes out")  # fmt: skip


def cells(row: Row) -> list[str]:
    """Return a row's line of the table."""
    found = predicted(row)
    speedups = found.speedups
    return [
        row.model,
        f"{row.servers}x{row.gpus} {row.cluster}",
        row.config,
        f"{row.speedup:.2f}",
        *(f"{speedups[name]:.2f}" if name in speedups else "-" for name in ("formula", "exposed", "released")),
        found.best_config,
        f"{found.data_parallel / found.best:.2f}",
        "-" if row.config == "16" else f"{found.wire:.0%}",
        ", ".join(found.agreeing) or "no",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="networks such as vgg16,gnmt; all by default")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    arguments = parser.parse_args()
    table = [list(COLUMNS), *(cells(x) for x in TABLE if x.model in (arguments.models or x.model).split(","))]
    if arguments.markdown:
        table.insert(1, ["---"] * len(COLUMNS))
        print("\n".join(f"| {' | '.join(line)} |" for line in table))
        return
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()

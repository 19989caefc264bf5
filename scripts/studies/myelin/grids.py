"""Plan Myelin's weak scaling, Table II: the grids that the planner picks for its networks against the published ones.

    python -m scripts.studies.myelin.grids [--models myelin-12b,..] [--between 1.613GB/s] [--effort quick] [-o out]

Networks of Table I on 48 to 384 V100s of 16 GB, six in a server, batches of 16384, Adam in mixed precision. For each:
the published grid with the published microbatch, its layers spread evenly, with every ac that fits, limit G_inter as in
section IV-A; the best plan on the same grid with the same microbatch; and the best plan of all.

Nothing was profiled; two measurements calibrate what a pass of a layer takes, fixed + flops / rate: the 34.05 s of the
pipeline phase with microbatches of 1 (section V-B), and 54.78% of peak, taken to be the 12B row's with microbatches of
8 (abstract). The fixed part is taken to be the same for wider layers. The optimizer takes 4.32 s / 2.5 for 2e9
parameters, offloaded (sections V-B and V-C), and overlaps with the all-reduce in chunks of 4 buckets. Between servers
a GPU has the 1.613 GB/s that the measured all-reduce of 0.62 s says (section V-B); inside 50 GB/s (section VI). The
model charges the pipelines' messages between two stages to one link, which makes many pipelines look worse.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pipeplan.plan import Stage
from pipeplan.planner.grids.grid_search import search_grids, segment_length
from pipeplan.planner.grids.pipelines import batch_time
from pipeplan.planner.grids.space import Found, GridConfig, GridProblem, Profiles
from pipeplan.planner.periodic.incumbent import Settings
from pipeplan.problem import Device, Level, Platform, Problem
from pipeplan.units import parse_bandwidth
from pipeplan.zoo.text.sizes import TRANSFORMERS

from .formulas import MIXED, Grid, layer_flops, share_seconds, stage_layers
from .unprofiled import predicted_time, transformer_chain

PEAK = 125e12  # flop/s of a V100 in half precision
BATCH = 16384
SIZES = (1, 2, 4, 8, 16)
TABLE_2 = {"myelin-12b": (6, 8, 8), "myelin-24b": (12, 8, 4), "myelin-50b": (24, 8, 4), "myelin-100b": (48, 8, 2)}
OPTIMIZER_NS = 4.32e9 / 2.5 / 2e9  # per parameter
BETWEEN = round(2 * 12e9 / 24 / 0.62)  # bytes/s


@dataclass(frozen=True)
class Line:
    """One plan in the table; seconds per batch."""

    model: str
    gpus: int
    plan: str
    inter: int
    data: int
    microbatch: int
    ac: int | None
    limit: int
    offload: bool
    placement: str
    seconds: float
    share: float
    bound: float | None = None


def calibrate() -> tuple[float, int]:
    """Return flop/s and the fixed ns of a layer's forward from the two measurements of the 12B network."""
    model = TRANSFORMERS["myelin-12b"]
    small = predicted_time(model, Grid(6, 8, 1, 2048, 1), PEAK, 1, BETWEEN).pipeline / 34.05
    grid = Grid(6, 8, 8, BATCH, 1)
    whole = predicted_time(model, grid, PEAK, 1, BETWEEN)
    large = whole.pipeline / (share_seconds(model, grid, PEAK, 0.5478) - whole.all_reduce)
    one = layer_flops(model, 1, recompute=False) / 3
    slow, fast = one / (small * PEAK), 8 * one / (large * PEAK)  # seconds of a forward with 1 and with 8 samples
    rate = 7 * one / (fast - slow)
    return rate, round((slow - one / rate) * 1e9)


def question(name: str, gpus: int, between: int, rate: float, fixed_ns: int) -> GridProblem:
    model = TRANSFORMERS[name]
    chains = {size: transformer_chain(model, size, rate, fixed_ns, OPTIMIZER_NS, name) for size in SIZES}
    platform = Platform((Device(16 * 10**9),) * gpus, (Level(6, 50 * 10**9), Level(gpus // 6, between)))
    policy = replace(MIXED, coarsening=4)
    problem = Problem(chains[1], platform, policy, checkpointing="segments")
    return GridProblem(problem, Profiles(chains), BATCH, SIZES, (False, True))


def published(asked: GridProblem, name: str) -> Found | None:
    """Return the published grid with even stages, limit G_inter, offload, and the ac with the least time that fits."""
    inter, data, size = TABLE_2[name]
    best = None
    for placement in ("stage", "pipeline"):
        config = GridConfig(inter, data, size, True, placement)
        problem, groups = asked.of(config), config.groups()
        counts = stage_layers(TRANSFORMERS[name].layers, inter)
        for ac in range(1, max(counts) + 1):
            stages, first = [], 0
            for s, count in enumerate(counts):
                start, stop = first, first + count + (s == 0) + (s == inter - 1)
                blocks = range(start + (s == 0), stop - (s == inter - 1), ac)
                last = stop - (s == inter - 1)
                stages.append(Stage(start, stop, groups[s], tuple((i, min(i + ac, last)) for i in blocks)))
                first = stop
            run = batch_time(problem, stages, config.microbatches(BATCH), inter, whole=False)
            if run.fits and (best is None or run.batch_ns < best.batch_ns):
                best = Found(config, tuple(stages), inter, run.batch_ns, run.exact)
    return best


def line(name: str, plan: str, found: Found, bound_ns: int | None = None) -> Line:
    config = found.config
    model = TRANSFORMERS[name]
    flops_s = share_seconds(model, Grid(config.stages, config.pipelines, config.microbatch, BATCH, 1), PEAK, 1)
    inter, data, _ = TABLE_2[name]
    flops_s *= config.gpus / (inter * data)
    return Line(
        name,
        config.gpus,
        plan,
        config.stages,
        config.pipelines,
        config.microbatch,
        segment_length(found.stages),
        found.limit,
        config.offload,
        config.placement,
        found.batch_ns / 1e9,
        flops_s / (found.batch_ns / 1e9),
        None if bound_ns is None else bound_ns / 1e9,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TABLE_2))
    parser.add_argument("--between", type=parse_bandwidth, default=BETWEEN, metavar="RATE")
    parser.add_argument("--effort", choices=["quick", "normal", "high"], default="quick")
    parser.add_argument("-o", "--output", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    rate, fixed_ns = calibrate()
    print(f"a forward takes {fixed_ns / 1000:.0f} us and its flops at {rate / 1e12:.1f} Tflop/s")
    lines: list[Line] = []
    for name in arguments.models.split(","):
        inter, data, size = TABLE_2[name]
        began = time.perf_counter()
        asked = question(name, inter * data, arguments.between, rate, fixed_ns)
        theirs = published(asked, name)
        if theirs is not None:
            lines.append(line(name, "published", theirs))
        settings = Settings(progress=lambda text: print(f"  {text}", file=sys.stderr))
        same = search_grids(replace(asked, sizes=(size,), pipelines=data), settings, arguments.effort)
        row = next(row for row in same.rows if (row.stages, row.pipelines) == (inter, data))
        if row.found is not None:
            lines.append(line(name, "same grid", row.found, row.bound_ns))
        free = search_grids(asked, settings, arguments.effort)
        if free.best is not None:
            lines.append(line(name, "best", free.best, free.bound_ns))
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        for x in [x for x in lines if x.model == name]:
            print(
                f"{x.model:11} {x.gpus:3} GPUs  {x.plan:9}  {x.inter:2} x {x.data:3}, microbatch {x.microbatch:2}, "
                f"ac {x.ac or '-':>2}, limit {x.limit:2}, {'offload' if x.offload else 'on GPU'}, {x.placement:8}: "
                f"{x.seconds:8.2f} s per batch, {x.share:6.2%} of peak"
                + ("" if x.bound is None else f", bound {x.bound:.2f} s")
            )
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (arguments.output / "grid_figures.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Line.__dataclass_fields__)
        writer.writerows([getattr(x, field) for field in Line.__dataclass_fields__] for x in lines)
    print(f"grid_figures.csv is in {arguments.output}")


if __name__ == "__main__":
    main()

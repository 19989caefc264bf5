"""Predict Figures 10 and 11 of Myelin, days of training and share of peak, from the model: PNG and CSV.

    python -m scripts.studies.myelin.figures [--efficiency 54%] [--bandwidth 1.613GB/s] [-o out]

Figure 10: the four networks of Table I on 48 to 384 V100s as Table II tunes them, 300e9 tokens in batches of 16384.
Figure 11: the 12B network on 48 to 384 GPUs, batches of 4096 to 32768.

Two numbers calibrate the model. The all-reduce's bandwidth is what the measured 0.62 s (section V-B, G_inter = 24)
says. The share of peak that kernels reach comes from the 34.05 s that a batch of 2048 spends in the pipeline with
G_inter = 6 and microbatches of 1 (`section V-B`), and again from the best share that the paper reaches, 54.78%, taken
to be the first row's (`first row`). The rest is predicted: the pipeline's ends, the head that makes the last stage
the slowest, the all-reduce. Not in the model: messages, which overlap with work, and kernels that run better on
larger microbatches, which is why the first calibration stays below the published shares.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.units import parse_bandwidth
from pipeplan.zoo.text.sizes import TRANSFORMERS

from .formulas import Grid, share_seconds, training_days
from .unprofiled import predicted_time

PEAK = 125e12  # flop/s of a V100 in half precision
TOKENS = 3 * 10**11
TABLE_2 = {"myelin-12b": (6, 8, 8), "myelin-24b": (12, 8, 4), "myelin-50b": (24, 8, 4), "myelin-100b": (48, 8, 2)}
MEASURED = {24: 46.08, 6: 34.05}  # G_inter -> seconds of the pipeline phase, batch of 2048 (section V-B)
PUBLISHED = (0.494, 0.5478)  # least and best share of peak (abstract)
IMPLIED_DAYS = 22 / 0.18  # of the 100B row: 22 days less and 1.18 times faster than DeepSpeed (section VII-B)
AC = 1  # any: every layer is recomputed once


@dataclass(frozen=True)
class Point:
    """One predicted training run; times in seconds per batch."""

    figure: int
    calibration: str
    model: str
    gpus: int
    inter: int
    data: int
    microbatch: int
    batch: int
    efficiency: float
    pipeline_seconds: float
    idle_seconds: float
    all_reduce_seconds: float
    share: float
    days: float


def point(figure: int, calibration: str, name: str, grid: Grid, efficiency: float, bandwidth: int) -> Point:
    model = TRANSFORMERS[name]
    time = predicted_time(model, grid, PEAK, efficiency, bandwidth)
    return Point(
        figure=figure,
        calibration=calibration,
        model=name,
        gpus=grid.gpus,
        inter=grid.inter,
        data=grid.data,
        microbatch=grid.microbatch,
        batch=grid.batch,
        efficiency=efficiency,
        pipeline_seconds=time.pipeline,
        idle_seconds=time.idle,
        all_reduce_seconds=time.all_reduce,
        share=share_seconds(model, grid, PEAK, 1) / time.total,
        days=training_days(model, grid, TOKENS, time.total),
    )


def weak_scaling(calibration: str, efficiency: float, bandwidth: int) -> list[Point]:
    grids = {name: Grid(i, d, size, 16384, AC) for name, (i, d, size) in TABLE_2.items()}
    return [point(10, calibration, name, grid, efficiency, bandwidth) for name, grid in grids.items()]


def strong_scaling(calibration: str, efficiency: float, bandwidth: int) -> list[Point]:
    inter, _, size = TABLE_2["myelin-12b"]
    grids = [Grid(inter, gpus // inter, size, 4096 * gpus // 48, AC) for gpus in (48, 96, 192, 384)]
    return [point(11, calibration, "myelin-12b", grid, efficiency, bandwidth) for grid in grids]


def pipeline_seconds(inter: int, efficiency: float, bandwidth: int) -> float:
    grid = Grid(inter, 48 // inter, 1, 2048, AC)
    return predicted_time(TRANSFORMERS["myelin-12b"], grid, PEAK, efficiency, bandwidth).pipeline


def efficiency_of_first_row(bandwidth: int) -> float:
    """Return the efficiency at which the 12B row reaches the best published share."""
    model, (inter, data, size) = TRANSFORMERS["myelin-12b"], TABLE_2["myelin-12b"]
    grid = Grid(inter, data, size, 16384, AC)
    time = predicted_time(model, grid, PEAK, 1, bandwidth)
    return time.pipeline / (share_seconds(model, grid, PEAK, PUBLISHED[1]) - time.all_reduce)


def draw(points: list[Point], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    calibrations = list(dict.fromkeys(p.calibration for p in points))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    width = 0.8 / len(calibrations)
    names = list(TABLE_2)
    for k, calibration in enumerate(calibrations):
        rows = [p for p in points if (p.figure, p.calibration) == (10, calibration)]
        places = [i + (k + 0.5) * width - 0.4 for i in range(len(rows))]
        label = f"{calibration}: kernels at {rows[0].efficiency:.1%}"
        for axes, values in ((left, [p.days for p in rows]), (right, [100 * p.share for p in rows])):
            axes.bar_label(axes.bar(places, values, width, label=label), fmt="%.0f", fontsize=8, padding=2)
    left.plot([2.6, 3.4], [IMPLIED_DAYS] * 2, color="black", linestyle=":", label="implied by the paper's text")
    right.axhspan(*(100 * s for s in PUBLISHED), color="#dddddd", zorder=0, label="published, all four")
    left.set_ylabel("days for 300e9 tokens")
    right.set_ylabel("% of peak")
    for axes in (left, right):
        axes.set_xticks(range(len(names)), [f"{n.removeprefix('myelin-')}\n{_gpus(n)} GPUs" for n in names])
        axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    figure.savefig(folder / "figure10.png", dpi=130)
    plt.close(figure)

    figure, axes = plt.subplots(figsize=(5, 3.8), layout="constrained")
    for calibration in calibrations:
        rows = [p for p in points if (p.figure, p.calibration) == (11, calibration)]
        axes.plot([p.gpus for p in rows], [p.days for p in rows], marker="o", label=calibration)
    ticks = [p.gpus for p in rows]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="GPUs", ylabel="days for 300e9 tokens", title="12B parameters, batch grows with the GPUs")
    axes.legend(frameon=False)
    figure.savefig(folder / "figure11.png", dpi=130)
    plt.close(figure)


def _gpus(name: str) -> int:
    inter, data, _ = TABLE_2[name]
    return inter * data


def _percent(text: str) -> float:
    if not text.endswith("%"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage, such as 54%")
    return float(text[:-1]) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--efficiency", type=_percent, help="of busy kernels, instead of the two calibrations")
    parser.add_argument("--bandwidth", type=parse_bandwidth, default=round(2 * 12e9 / 24 / 0.62), metavar="RATE")
    parser.add_argument("-o", "--output", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    bandwidth = arguments.bandwidth
    if arguments.efficiency:
        calibrations = {"as given": arguments.efficiency}
    else:
        calibrations = {
            "section V-B": pipeline_seconds(6, 1, bandwidth) / MEASURED[6],
            "first row": efficiency_of_first_row(bandwidth),
        }
    points: list[Point] = []
    for calibration, efficiency in calibrations.items():
        points += weak_scaling(calibration, efficiency, bandwidth) + strong_scaling(calibration, efficiency, bandwidth)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (arguments.output / "myelin_figures.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Point.__dataclass_fields__)
        writer.writerows([_cell(getattr(p, name)) for name in Point.__dataclass_fields__] for p in points)
    draw(points, arguments.output)
    for p in points:
        print(
            f"figure {p.figure}, {p.calibration:11} {p.model:11} {p.gpus:4} GPUs {p.inter:3} x {p.data:2}, batch "
            f"{p.batch:5}: {p.share:6.2%} of peak, {p.days:6.1f} days; {p.idle_seconds / p.pipeline_seconds:5.1%} idle"
        )
    for calibration, efficiency in calibrations.items():
        found = pipeline_seconds(24, efficiency, bandwidth)
        print(
            f"pipeline phase with 24 stages, {calibration}: {found:.2f} s, measured {MEASURED[24]} s (with 6: 34.05 s)"
        )
    print(
        f"published: {PUBLISHED[0]:.1%} to {PUBLISHED[1]:.2%} of peak; "
        f"its text implies {IMPLIED_DAYS:.0f} days for 100B"
    )
    print(f"figure10.png, figure11.png and myelin_figures.csv are in {arguments.output}")


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()

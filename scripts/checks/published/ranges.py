"""Do the ranges of estimates hold nine of ten rows of a source that they know nothing of?

``ratios.csv`` has for each published row its source, its GPU, whether the network has convolutions, measured over
estimated time, and by what the estimate's passes are multiplied with the least and with the most that a host may take
(``range_of``): any host where the usual one is guessed, half as much again or less where it is said.

What is left, measured over estimated time of a fast host and of a slow one, is how far kernels are off. Sources count
the same, however many rows they have: a range is from where a twentieth of them is below to where a twentieth is above,
and wider by :data:`MARGIN`, as sources differ by more than rows do. It is that of the nearest class: networks with
convolutions or without on the same GPU, where no other source has any on all GPUs.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BELOW, MARGIN = 0.05, 1.1


@dataclass(frozen=True)
class Row:
    """A measured row: measured over estimated time, and by what a fast and a slow host multiply the estimate."""

    source: str
    gpu: str
    convolutions: bool
    ratio: float
    fast: float
    slow: float

    @property
    def rows(self) -> str:
        """What was measured: with another engine's constants the rows are the same."""
        return self.source.split()[0]

    def within(self, low: float, high: float) -> bool:
        """Whether it was measured within what an estimate says that is off by ``low`` to ``high``."""
        return low * self.fast <= self.ratio <= high * self.slow


def ratios() -> list[Row]:
    """Return all rows."""
    with open(Path(__file__).with_name("ratios.csv"), encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return [Row(source, gpu, has == "yes", *map(float, more)) for source, gpu, has, *more in rows]


def kernels_within(rows: Sequence[Row]) -> tuple[float, float]:
    """Return what nine of ten rows' estimates are multiplied by at most and at least, but for their host."""
    counts = Counter(row.source for row in rows)
    weights = np.array([1 / counts[row.source] for row in rows])

    def quantile(values: np.ndarray, share: float) -> float:
        order = np.argsort(values)
        place = np.searchsorted(np.cumsum(weights[order]), share * weights.sum())
        return float(values[order][min(place, len(rows) - 1)])

    fast, slow = (np.array([row.ratio / getattr(row, name) for row in rows]) for name in ("fast", "slow"))
    return quantile(fast, BELOW) / MARGIN, quantile(slow, 1 - BELOW) * MARGIN


def nearest(row: Row, others: Sequence[Row]) -> list[Row]:
    """Return the rows of others that are like it."""
    like = [x for x in others if x.convolutions == row.convolutions]
    return [x for x in like if x.gpu == row.gpu] or like


def left_out(rows: Sequence[Row]) -> dict[str, float]:
    """Return for each source the share of its rows within what the other sources show."""
    found = {}
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source]
        others = [row for row in rows if row.rows != own[0].rows]
        ranges = {(x.gpu, x.convolutions): kernels_within(nearest(x, others)) for x in own}
        found[source] = sum(x.within(*ranges[x.gpu, x.convolutions]) for x in own) / len(own)
    return found


def usual(rows: Sequence[Row]) -> dict[bool, tuple[float, float]]:
    """Return the ranges of estimates without and with convolutions that all rows show, those of an engine left out."""
    every = {has: [x for x in rows if x.convolutions == has and x.source == x.rows] for has in (False, True)}
    return {has: kernels_within(some) for has, some in every.items()}


def judge_ranges() -> None:
    """Print what share of each source's rows is within what the others show."""
    rows = ratios()
    for source, share in left_out(rows).items():
        print(f"{source:26}{sum(x.source == source for x in rows):4} rows{share:8.0%} within what other sources show")
    for has, (low, high) in usual(rows).items():
        print(f"with{'' if has else 'out'} convolutions: measured {low:.2f} to {high:.2f} times as long as estimated")

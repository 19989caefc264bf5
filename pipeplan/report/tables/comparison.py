"""Which algorithm finds the best plan where? The table of ``pipeplan compare``."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean

from rich.text import Text

from ...names import shown
from ...planner.what_if.compare import OnePlatform, Reached
from ...problem import Problem
from ..looks import console, make_table, print_fitted
from ..words import assumed


def print_rows(
    problem: Problem, rows: Sequence[OnePlatform], assumptions: Sequence[str] = (), width: int | None = None
) -> None:
    """Print periods in ms, one row per platform and one column per algorithm, and a line of means.

    The best of a row is bold; ``dp`` marks plain data parallelism. The last lines count feasible cases and give the
    geometric mean of the ratio to the row's best, over the rows where both are feasible, by how many updates gradients
    are late on average, and CPU seconds at most.
    """
    out = console(width)
    counted = "samples" if problem.chain.microbatch > 1 else "microbatches"
    what = f": period in ms per microbatch, an update every so many {counted}, - where nothing fits"
    out.print(Text.assemble((shown(problem.chain.name), "bold"), what))
    for line in assumed(assumptions):
        out.print(line)
    names = [cell.algorithm for cell in rows[0].cells]
    degrees = len({row.tensor for row in rows}) > 1 or rows[0].tensor > 1
    table = make_table(*["tensor"] * degrees, "GPUs", "memory", counted, "bound", *names)
    for row in rows:
        table.add_row(
            *[str(row.tensor)] * degrees,
            str(row.gpus),
            f"{row.memory_bytes / 1e9:g} GB",
            str(row.update_samples),
            f"{row.bound_ns / 1e6:.2f}",
            *(_period(cell, row) for cell in row.cells),
        )
    table.add_section()
    columns, blank = [[row.cells[i] for row in rows] for i in range(len(names))], [""] * (3 + degrees)
    feasible = (sum(cell.period_ns is not None for cell in column) for column in columns)
    table.add_row("feasible", *blank, *map(str, feasible))
    table.add_row("over best", *blank, *(_mean_ratio(column, rows) for column in columns))
    table.add_row("updates late", *blank, *map(_mean_late, columns))
    table.add_row("most CPU s", *blank, *(f"{max(cell.seconds for cell in column):.2f}" for column in columns))
    print_fitted(out, table)


def _period(cell: Reached, row: OnePlatform) -> Text:
    if cell.period_ns is None:
        return Text("-")
    text = f"{'dp ' if cell.data_parallel else ''}{cell.period_ns / 1e6:.2f}"
    return Text(text, "bold" if cell.period_ns == row.best_ns else "")


def _mean_late(column: Sequence[Reached]) -> str:
    late = [cell.late_updates for cell in column if cell.late_updates is not None]
    return f"{fmean(late):.2f}" if late else "-"


def _mean_ratio(column: Sequence[Reached], rows: Sequence[OnePlatform]) -> str:
    ratios = [
        cell.period_ns / row.best_ns
        for cell, row in zip(column, rows, strict=True)
        if cell.period_ns is not None and row.best_ns is not None
    ]
    return f"{exp(sum(map(log, ratios)) / len(ratios)):.3f}" if ratios else "-"

"""What does ``pipeplan timeprest`` print? The schedule as the paper draws it, versions, sequences, memory, a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeplan.report.looks import console, make_table, print_fitted

from .analysis import (
    NEAR,
    Analysis,
    BackwardTime,
    activations_of_1f1b,
    fewest_microbatches,
    most_workers,
    paper_holds,
    paper_version_difference,
)

STYLES = {("F", 1): "black on bright_blue", ("F", 0): "white on blue", ("B", 1): "black on bright_green"}
SHOWN = 6  # members of a sequence that are printed
MOST_SEQUENCES = 8
MOST_PARTS = 4  # of a time point, in a staircase in characters


@dataclass(frozen=True, slots=True)
class Box:
    """One pass on ``worker`` (from 0), [start, end) in ns: of a microbatch forward, or of a mini-batch backward.

    ``mini_batch`` counts from 1. ``version`` is that of the weights which the pass uses.
    """

    worker: int
    start_ns: int
    end_ns: int
    kind: str
    mini_batch: int
    label: str
    version: int

    @property
    def parity(self) -> int:
        """1, but 0 for the forwards of mini-batches with even numbers, which the paper draws darker."""
        return self.mini_batch % 2 if self.kind == "F" else 1


def cells(analysis: Analysis) -> Iterator[Box]:
    """Yield every pass of the run as the paper labels it: ``3C`` microbatch C of mini-batch 3, ``3`` its backward."""
    timeline, program = analysis.timeline, analysis.timeline.program
    for worker, lane in enumerate(program.lanes):
        for step in lane.steps:
            kind = program.operations[step.position].kind
            mini_batch, place = divmod(step.microbatch, program.batch)
            label = f"{mini_batch + 1}{letters(place) if kind == 'F' else ''}"
            version = analysis.version[step]
            yield Box(worker, timeline.begin_ns(step), timeline.end_ns(step), kind, mini_batch + 1, label, version)


def letters(place: int) -> str:
    """Return A, B, .., Z, AA, AB, .. for 0, 1, ..."""
    text = ""
    place += 1
    while place:
        place, rest = divmod(place - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def staircase(analysis: Analysis, width: int) -> list[Text]:
    """Return one line per worker, as many columns as fit, one column for the shortest time that all passes are made of.

    ``--`` continues a pass, a backward is ``b3``, idle time ``.``.
    """
    column_ns = analysis.unit_ns // analysis.backward.denominator
    margin = len(f"worker {analysis.workers} ")
    found, size, needed = list(cells(analysis)), 0, 2
    while needed > size:  # wider columns are fewer, and may leave out what needs them so wide
        size = needed
        columns = max(1, (width - margin) // (size + 1))
        shown = [cell for cell in found if cell.start_ns < columns * column_ns]
        needed = max(len(cell.label) + (cell.kind == "B") for cell in shown)
    rows: list[list[tuple[str, str]]] = [[(".", "dim")] * columns for _ in range(analysis.workers)]
    for cell in shown:
        style = STYLES[cell.kind, cell.parity]
        for column in range(cell.start_ns // column_ns, min(columns, cell.end_ns // column_ns)):
            label = f"b{cell.label}" if cell.kind == "B" else cell.label
            first = column * column_ns == cell.start_ns
            rows[cell.worker][column] = (label if first else "-" * size, style)
    lines = []
    for worker, row in enumerate(rows, 1):
        line = Text(f"worker {worker}".ljust(margin), no_wrap=True)
        for i, (text, style) in enumerate(row):
            line.append(text.ljust(size), style)
            if i + 1 < columns:
                line.append(" ")
        lines.append(line)
    return lines


def print_analysis(analysis: Analysis, backward: BackwardTime, width: int | None = None) -> None:
    """Print one schedule: its staircase, v beside the paper's, sequences, when v = 1, and memory beside 1F1B's."""
    out = console(width)
    out.print(Text.assemble(("TiMePReSt", "bold"), f" in unit time: {_setting(analysis)}"))
    parts = analysis.backward.denominator
    if parts <= MOST_PARTS:
        column = "time point" if parts == 1 else f"1/{parts} time point"
        out.print(
            f"one column per {column}; 3C is the forward of microbatch C of mini-batch 3, b3 its backward, . idle"
        )
        for line in staircase(analysis, out.width):
            out.print(line, overflow="crop")
    out.print()
    for name, text in _facts(analysis, backward):
        out.print(Text(f"{name:<20}{text}"))
    out.print()
    out.print(_memory(analysis))
    out.print(
        Text(
            "most held at once: activations in microbatches, versions of the weights; 1F1B is PipeDream's with weight "
            "stashing",
            "dim",
        )
    )


def _setting(analysis: Analysis) -> str:
    parts = [
        _count(analysis.workers, "worker"),
        f"{_count(analysis.microbatches, 'microbatch')} per mini-batch",
        f"backward {_points(_decimal(analysis.backward))}",
        "vertical sync" if analysis.vertical_sync else "no vertical sync",
    ]
    if analysis.limit is not None:
        parts.append(f"at most {_count(analysis.limit, 'mini-batch')} admitted")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _decimal(value: Fraction) -> str:
    """Return 1.5 for 3/2, but 7/3 for itself."""
    text = f"{float(value):g}"
    return text if Fraction(text) == value else str(value)


def _points(backward: str) -> str:
    return f"{backward} time point" + "s" * (backward != "1")


def _facts(analysis: Analysis, backward: BackwardTime) -> Iterator[tuple[str, str]]:
    v = _or(analysis.version_differences)
    made = _or([f"k-{difference}" for difference in analysis.version_differences])
    formula = paper_version_difference(analysis.workers, analysis.microbatches)
    beside = {None: "", True: "; the paper's formula agrees", False: f"; the paper's formula says {formula}"}
    yield (
        "version difference",
        f"{v}: mini-batch k takes its gradient at the weights that {made} made{beside[paper_holds(analysis)]}",
    )
    lags = _entry_lags(analysis)
    if lags is not None:
        yield "forward on weights", f"microbatches of mini-batch k start on {_grouped(lags)}"
    times = analysis.forward_times
    steady = _or([_decimal(time) for time in sorted({times[k] for k in analysis.steady})])
    yield (
        "forward takes",
        f"f1 = {_decimal(times[0])}, f2 = {_decimal(times[1])}, in the steady state {steady} time points",
    )
    shown = [_sequence(chain) for chain in analysis.sequences[:MOST_SEQUENCES]]
    yield "sequences", " ".join(shown) + (" .." if len(analysis.sequences) > MOST_SEQUENCES else "")
    if analysis.vertical_sync:
        without = replace(analysis, vertical_sync=False)
        yield (
            "no vertical sync",
            f"version difference {_or(without.version_differences)}; "
            f"most versions of the weights on a worker: {max(without.live_versions)}",
        )
        workers = most_workers(analysis.microbatches, backward, analysis.limit)
        few = fewest_microbatches(analysis.workers, backward, analysis.limit)
        yield (
            "v = 1",
            f"with {_count(analysis.microbatches, 'microbatch')}: {_workers(workers)}; "
            f"with {_count(analysis.workers, 'worker')}: "
            + (f"not with up to {NEAR} microbatches" if few is None else f"from {_count(few, 'microbatch')} on"),
        )


def _workers(most: int | None) -> str:
    if most is None:
        return "however many workers"
    return "with 1 worker only" if most == 1 else f"up to {most} workers"


def _entry_lags(analysis: Analysis) -> tuple[int, ...] | None:
    """Return k - version for each microbatch of a steady mini-batch as it enters, None when mini-batches differ."""
    found = {tuple(k + 1 - version for version in analysis.forward_versions[k]) for k in analysis.steady}
    return found.pop() if len(found) == 1 else None


def _grouped(lags: Sequence[int]) -> str:
    """Return ``k-3 (A, B), k-2 (C, D)``; of three and more microbatches the first and the last."""
    texts = []
    for lag, group in groupby(range(len(lags)), key=lags.__getitem__):
        names = [letters(place) for place in group]
        texts.append(f"k-{lag} ({', '.join(names) if len(names) < 3 else f'{names[0]} to {names[-1]}'})")
    return ", ".join(texts)


def _or(values: Sequence[Any]) -> str:
    return " or ".join(map(str, values))


def _sequence(chain: Sequence[int]) -> str:
    members = [str(k) for k in chain[:SHOWN]] + [".."] * (len(chain) > SHOWN)
    return "{" + ",".join(members) + "}"


def _memory(analysis: Analysis) -> Table:
    others = activations_of_1f1b(analysis.workers, analysis.microbatches, analysis.backward)
    table = make_table("worker", "activations", "with 1F1B", "weight versions", "with 1F1B")
    for worker in range(analysis.workers):
        table.add_row(
            str(worker + 1),
            str(analysis.activations[worker]),
            str(others[worker]),
            str(analysis.live_versions[worker]),
            str(others[worker] // analysis.microbatches),
        )
    return table


def print_table(rows: Sequence[Sequence[Analysis]], backward: BackwardTime, width: int | None = None) -> None:
    """Print v over workers (rows) and microbatches (columns), in brackets the paper's value where it differs."""
    out = console(width)
    first = rows[0][0]
    sync = "vertical sync" if first.vertical_sync else "no vertical sync"
    limit = "" if first.limit is None else f", at most {_count(first.limit, 'mini-batch')} admitted"
    what = f" by the schedule: backward {_points(str(backward))}, {sync}{limit}"
    out.print(Text.assemble(("version difference v", "bold"), what))
    known = [paper_holds(analysis) for row in rows for analysis in row]
    if any(holds is not None for holds in known):
        out.print("in brackets: what the paper's formula says where that is something else")
    table = make_table("W", *(f"N={analysis.microbatches}" for analysis in rows[0]))
    for row in rows:
        table.add_row(str(row[0].workers), *map(_cell, row))
    print_fitted(out, table)
    if any(holds is not None for holds in known):
        wrong = [f"({a.workers},{a.microbatches})" for row in rows for a in row if paper_holds(a) is False]
        out.print(f"the paper's formula differs at {', '.join(wrong) or 'none of them'}")


def _cell(analysis: Analysis) -> Text:
    text = "-".join(map(str, analysis.version_differences))
    if paper_holds(analysis) is False:
        text += f" ({paper_version_difference(analysis.workers, analysis.microbatches)})"
    return Text(text, "bold" if analysis.version_differences == (1,) else "")


def analysis_figures(analysis: Analysis) -> dict[str, Any]:
    """Return one analysis as plain data; times in time points, activations in microbatches, counted from 1."""
    others = activations_of_1f1b(analysis.workers, analysis.microbatches, analysis.backward)
    holds = paper_holds(analysis)
    formula = None if holds is None else paper_version_difference(analysis.workers, analysis.microbatches)
    times = [_number(time) for time in analysis.forward_times]
    return {
        "workers": analysis.workers,
        "microbatches": analysis.microbatches,
        "backward_time_points": _number(analysis.backward),
        "limit": analysis.limit,
        "vertical_sync": analysis.vertical_sync,
        "version_difference": analysis.version_difference,
        "version_differences": list(analysis.version_differences),
        "paper_version_difference": formula,
        "paper_holds": holds,
        "forward_time_points": {"f1": times[0], "f2": times[1], "steady": times[analysis.steady.start]},
        "sequences": [list(chain) for chain in analysis.sequences],
        "backward_versions": list(analysis.backward_versions),
        "forward_versions": [list(versions) for versions in analysis.forward_versions],
        "stages": [
            {
                "worker": worker + 1,
                "activations": analysis.activations[worker],
                "weight_versions": analysis.live_versions[worker],
                "activations_1f1b": others[worker],
                "weight_versions_1f1b": others[worker] // analysis.microbatches,
            }
            for worker in range(analysis.workers)
        ],
    }


def threshold_figures(analysis: Analysis, backward: BackwardTime) -> dict[str, Any]:
    """Return where v is 1 under vertical sync: the most workers for its microbatches, the fewest microbatches for its
    workers; None where no bound was found."""
    return {
        "most_workers_at_1": most_workers(analysis.microbatches, backward, analysis.limit),
        "fewest_microbatches_at_1": fewest_microbatches(analysis.workers, backward, analysis.limit),
    }


def _number(value: Any) -> int | float:
    return int(value) if value == int(value) else float(value)

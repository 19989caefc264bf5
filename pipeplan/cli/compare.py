"""``pipeplan compare``: which algorithm finds the best plan, over GPUs and memories?"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..deadline import NEVER, Deadline
from ..errors import BadInput, PipeplanError
from ..partition import ALGORITHMS
from ..units import parse_bytes
from .options import (
    EFFORT,
    GAP,
    JSON,
    SOLVER,
    Output,
    parse_counts,
    problem_options,
    read_problem,
    refuse_two_documents,
    time_limit,
)

if TYPE_CHECKING:
    from ..planner.compare import OnePlatform

NAMES = ["auto", "gpipe", *ALGORITHMS]
MOST_CASES = 1000  # without a time limit
FEW_CASES = 20  # of which nothing need be said before
DEFAULT = "data-parallel,gpipe,pipedream,contiguous,auto"


@click.command()
@partial(problem_options, gpus=click.option("--gpus", metavar="COUNTS", help="Numbers of equal GPUs."))
@click.option(
    "--algorithms", default=DEFAULT, show_default=True, metavar="NAMES", help="auto, gpipe, or of --algorithm."
)
@EFFORT
@GAP
@SOLVER
@click.option("--csv", "csv_file", type=Output(), help="Write the rows as CSV; - is standard output.")
@time_limit("Stop after this long, such as 600s, with the cases that are done.")
@JSON
def command(
    algorithms: str,
    effort: str,
    gap: float | None,
    solver: str,
    csv_file: str | None,
    as_json: bool,
    deadline: Deadline,
    **shared: Any,
) -> None:
    """Compare algorithms on PROFILE for --gpus such as 2-8 or 2,4,8 and --mem such as 3GB,4GB.

    \b
    Example: pipeplan compare profile.json --gpus 2,4,8 --mem 8GB,16GB
    """
    from ..files.text import write_text
    from ..planner.compare import compare
    from ..planner.incumbent import GAP as GAP_OF_AUTO
    from ..planner.incumbent import Settings
    from ..report.comparison import print_rows

    refuse_two_documents(as_json, csv=csv_file)
    names = algorithms.split(",")
    for name in names:
        if name not in NAMES:
            raise BadInput(f"--algorithms: {name!r} is not one of {', '.join(NAMES)}")
    if shared["platform"] is not None:
        raise click.UsageError("compare builds its platforms from --gpus and --mem; --platform says one")
    gpus = parse_counts(shared["gpus"] or "", "--gpus")
    memories = [parse_bytes(x, "--mem") for x in (shared["mem"] or "").split(",")]
    total = len(gpus) * len(memories)
    searches = f"{len(gpus)} x {len(memories)} cases, {total * len(names)} searches"
    if total > MOST_CASES and deadline is NEVER:
        raise BadInput(f"--gpus, --mem: {searches}; more than {MOST_CASES} cases want a --time-limit")
    if total > FEW_CASES:
        click.echo(searches, err=True)
    problem, assumptions = read_problem(**{**shared, "gpus": (gpus[0],), "mem": f"{min(memories)}B"}, deadline=deadline)
    rows: list[OnePlatform] = []
    began = time.perf_counter()
    settings = Settings(solver, gap=GAP_OF_AUTO if gap is None else gap)  # type: ignore[arg-type]  # click checked it
    for row in compare(problem, gpus, memories, names, clock=time.process_time, settings=settings, effort=effort):
        if deadline.passed:  # this row may have been cut short
            break
        rows.append(row)
        elapsed = time.perf_counter() - began
        if elapsed > 1:
            left = elapsed / len(rows) * (total - len(rows))
            more = f", {left:.0f} s more at this pace" if total > FEW_CASES else ""
            click.echo(f"{len(rows)} of {total}: {row.gpus} GPUs of {row.memory_bytes / 1e9:g} GB{more}", err=True)
    if not rows:
        raise PipeplanError("the time limit ended the comparison before its first case was done")
    if len(rows) < total:
        click.echo(f"the time limit ended it after {len(rows)} of {total} cases", err=True)
    if csv_file is not None:
        write_text(csv_file, _csv(rows))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    elif csv_file != "-":
        print_rows(problem, rows, assumptions)


def _csv(rows: list[Any]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "gpus",
            "memory_bytes",
            "update_samples",
            "bound_ns",
            "algorithm",
            "period_ns",
            "claimed_ns",
            "seconds",
            "data_parallel",
        ]
    )
    for row in rows:
        for cell in row.cells:
            writer.writerow([row.gpus, row.memory_bytes, row.update_samples, row.bound_ns, *dataclasses.astuple(cell)])
    return out.getvalue()

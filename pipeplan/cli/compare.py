"""``pipeplan compare``: which algorithm finds the best plan, over GPUs and memories?"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from . import completed
from .grouped import GroupedCommand
from .options import (
    EFFORT,
    GAP,
    JOBS,
    JSON,
    SOLVER,
    Output,
    asked_of,
    problem_options,
    refuse_two_documents,
    time_limit,
)
from .progress import status

if TYPE_CHECKING:
    from ..planner.what_if.compare import OnePlatform

DEFAULT = "data-parallel,gpipe,pipedream,contiguous,auto"


@click.command(cls=GroupedCommand)
@partial(problem_options, gpus=click.option("--gpus", metavar="COUNTS", help="Numbers of equal GPUs."))
@click.option(
    "--algorithms",
    default=DEFAULT,
    show_default=True,
    metavar="NAMES",
    type=completed.ALGORITHMS_LIST,
    help="auto, gpipe, or of --algorithm.",
)
@EFFORT
@GAP
@SOLVER
@JOBS
@click.option("--csv", "csv_file", type=Output(), help="Write the rows as CSV; - is standard output.")
@time_limit("Stop after this long, such as 600s, with the cases that are done.")
@JSON
def command(
    profile: str,
    algorithms: str,
    csv_file: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare algorithms on PROFILE for --gpus such as 2-8 or 2,4,8 and --mem such as 3GB,4GB.

    \b
    Example: pipeplan compare profile.json --gpus 2,4,8 --mem 8GB,16GB
    """
    from ..api.comparing import compare
    from ..files.text import write_text

    refuse_two_documents(as_json, csv=csv_file)
    asked = asked_of(options)
    options["time_limit"] = options.pop("deadline")
    names = algorithms.split(",")
    found = compare(profile, algorithms=names, status=status(), **asked, **options)
    if len(found.rows) < found.total:
        click.echo(f"the time limit ended it after {len(found.rows)} of {found.total} cases", err=True)
    if csv_file is not None:
        write_text(csv_file, _csv(found.rows))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in found.rows], indent=1))
    elif csv_file != "-":
        found.show()


def _csv(rows: Sequence[OnePlatform]) -> str:
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

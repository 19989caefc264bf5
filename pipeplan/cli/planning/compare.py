"""``pipeplan compare``: which algorithm finds the best plan, over GPUs and memories?"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ...api.asked import Comparing
from ...units import format_bytes
from ..grouped import GroupedCommand
from ..options import JSON, PROFILE, Output, asking, refuse_two_documents, time_limit
from ..progress import status
from .bill import Bill, bill_options

COLUMNS = "gpus memory_bytes update_samples bound_ns algorithm period_ns claimed_ns seconds data_parallel tensor"

if TYPE_CHECKING:
    from ...planner.what_if.compare import OnePlatform


@click.command(
    cls=GroupedCommand,
    examples=(
        "pipeplan compare profile.json --gpus 2,4,8 --mem 8GB,16GB",
        "pipeplan compare profile.json --gpus 4 --mem 16GB --algorithms contiguous,auto --csv rows.csv",
    ),
)
@PROFILE
@asking(
    Comparing,
    without=("vertical_sync",),
    gpus={"type": click.STRING, "metavar": "COUNTS", "help": "Numbers of equal GPUs, such as 2-8 or 2,4,8."},
    mem={"help": "Usable memories of each GPU, such as 3GB,4GB."},
)
@click.option("--csv", "csv_file", type=Output(), help="Write the rows as CSV; - is standard output.")
@bill_options
@time_limit("Stop after this long, such as 600s, with the cases that are done.")
@JSON
def command(
    profile: str,
    knobs: dict[str, Any],
    csv_file: str | None,
    as_json: bool,
    samples: str | None,
    tokens: str | None,
    price: str | None,
    **asked: Any,
) -> None:
    """Compare algorithms on PROFILE for --gpus such as 2-8 or 2,4,8 and --mem such as 3GB,4GB."""
    from ...api.comparing import compare
    from ...files.text import write_text

    refuse_two_documents(as_json, csv=csv_file)
    bill = Bill.of(samples, tokens, price)
    found = compare(profile, status=status(), time_limit=asked.pop("deadline"), **asked, **knobs)
    if len(found.rows) < found.total:
        click.echo(f"the time limit ended it after {len(found.rows)} of {found.total} cases", err=True)
    if csv_file is not None:
        write_text(csv_file, _csv(found.rows))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in found.rows], indent=1))
    elif csv_file != "-":
        found.show()
        if bill is not None:
            click.echo(_bills(bill, found.rows, found.problem.chain.microbatch))


def _bills(bill: Bill, rows: Sequence[OnePlatform], each: int) -> str:
    """Return what training takes with the best plan of every platform, in a line."""
    best = [(row, row.best_ns) for row in rows]
    parts = [
        f"{row.gpus} GPU{'s' if row.gpus > 1 else ''} of {format_bytes(row.memory_bytes)} "
        + ("nothing fits" if period is None else bill.worth(each * 1e9 / period, row.gpus))
        for row, period in best
    ]
    return f"training    of {bill.samples:,} samples: {'; '.join(parts)}"


def _csv(rows: Sequence[OnePlatform]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS.split())
    for row in rows:
        for cell in row.cells:
            writer.writerow(
                [row.gpus, row.memory_bytes, row.update_samples, row.bound_ns, *dataclasses.astuple(cell), row.tensor]
            )
    return out.getvalue()

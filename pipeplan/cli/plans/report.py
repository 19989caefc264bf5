"""``pipeplan report``: what is there to see of a plan, on one HTML page?"""

from __future__ import annotations

import click

from ...names import SENTENCE, shown
from .. import completed
from ..grouped import GroupedCommand
from ..options import FILE, PLAN, Output
from ..progress import status


@click.command(
    cls=GroupedCommand,
    examples=("pipeplan report plan.json -o report.html", "pipeplan report plan.json --schedule all -o schedules.html"),
)
@PLAN
@click.option("-o", "--output", required=True, type=Output(), help="The page; - is standard output.")
@click.option(
    "--schedule",
    "names",
    multiple=True,
    metavar="NAME",
    type=completed.WRITTEN,
    help="Of the run, as in simulate; several, or all, are set side by side.  [default: the plan's own]",
)
@click.option(
    "--microbatches", type=click.IntRange(1, 10**6), help="Of the run.  [default: as in simulate, if it fits]"
)
@click.option(
    "--trace", metavar="FILE", type=FILE, help="Draw the run that pipeplan run --trace measured under the planned one."
)
def command(plan: str, output: str, names: tuple[str, ...], microbatches: int | None, trace: str | None) -> None:
    """Write PLAN as one self-contained HTML page: table, Gantt charts, memory, lower bounds."""
    from ...api.plans.reporting import report_page
    from ...files.plans import load_plan
    from ...files.text import write_text

    text, count = report_page(load_plan(plan), names, microbatches, trace, status())
    if microbatches is not None and count < microbatches:
        click.echo(f"note: the page shows {count} of {microbatches} microbatches", err=True)
    write_text(output, text)
    if output != "-":
        click.echo(f"written to {shown(output, SENTENCE)}")

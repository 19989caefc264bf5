"""``pipeplan report``: what is there to see of a plan, on one HTML page?"""

from __future__ import annotations

import click

from ..names import SENTENCE, shown
from .options import PLAN, Output


@click.command()
@PLAN
@click.option("-o", "--output", required=True, type=Output(), help="The page; - is standard output.")
@click.option("--schedule", metavar="NAME", help="Of the run, as in simulate.  [default: the plan's own]")
@click.option(
    "--microbatches", type=click.IntRange(1, 10**6), help="Of the run.  [default: as in simulate, if it fits]"
)
def command(plan: str, output: str, schedule: str | None, microbatches: int | None) -> None:
    """Write PLAN as one self-contained HTML page: table, Gantt charts, memory, lower bounds.

    \b
    Example: pipeplan report plan.json -o report.html
    """
    from ..api.simulating import refuse_unknown
    from ..files.plans import load_plan
    from ..files.text import write_text
    from ..planner.other_schedules import default_microbatches, mini_batch, own_schedule
    from ..planner.simulation import simulate_plan
    from ..report.html import microbatches_shown, report_html

    refuse_unknown([] if schedule is None else [schedule])
    loaded = load_plan(plan)
    schedule = schedule or own_schedule(loaded)
    wanted = microbatches or default_microbatches(loaded, schedule)
    count = microbatches_shown(loaded, wanted, mini_batch(loaded, schedule))
    if microbatches is not None and count < microbatches:
        click.echo(f"note: the page shows {count} of {microbatches} microbatches", err=True)
    write_text(output, report_html(simulate_plan(loaded, count, schedule)))
    if output != "-":
        click.echo(f"written to {shown(output, SENTENCE)}")

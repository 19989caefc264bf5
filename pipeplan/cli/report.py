"""``pipeplan report``: what is there to see of a plan, on one HTML page?"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

import click

from ..names import SENTENCE, shown
from .options import PLAN, Output

if TYPE_CHECKING:
    from ..plan import Plan
    from ..report.html import Measured


@click.command()
@PLAN
@click.option("-o", "--output", required=True, type=Output(), help="The page; - is standard output.")
@click.option(
    "--schedule",
    "names",
    multiple=True,
    metavar="NAME",
    help="Of the run, as in simulate; several, or all, are set side by side.  [default: the plan's own]",
)
@click.option(
    "--microbatches", type=click.IntRange(1, 10**6), help="Of the run.  [default: as in simulate, if it fits]"
)
@click.option("--trace", metavar="FILE", help="Set under the run what pipeplan run --trace measured.")
def command(plan: str, output: str, names: tuple[str, ...], microbatches: int | None, trace: str | None) -> None:
    """Write PLAN as one self-contained HTML page: table, Gantt charts, memory, lower bounds.

    \b
    Example: pipeplan report plan.json -o report.html
    Example: pipeplan report plan.json --schedule all -o schedules.html
    """
    from ..api.simulating import refuse_unknown
    from ..files.plans import load_plan
    from ..files.text import write_text
    from ..planner.other_schedules import default_microbatches, mini_batch, own_schedule
    from ..planner.simulation import compare_schedules, simulate_plan
    from ..report.html import microbatches_shown, report_html
    from ..schedule.registry import schedules

    refuse_unknown(list(names), "all")
    loaded = load_plan(plan)
    chosen = list(schedules()) if "all" in names else list(dict.fromkeys(names)) or [own_schedule(loaded)]
    main = chosen[0] if len(chosen) == 1 else own_schedule(loaded)
    if trace is not None and main != own_schedule(loaded):
        raise click.UsageError(f"--trace: the run was one of the plan's own schedule, not of {main}")
    measured = None if trace is None else _measured(loaded, trace)
    batch = lcm(*(mini_batch(loaded, name) for name in {main, *chosen}))
    wanted = microbatches or default_microbatches(loaded, main)
    several = chosen if len(chosen) > 1 else []
    count = microbatches_shown(loaded, wanted, batch, len({main, *several}))
    if microbatches is not None and count < microbatches:
        click.echo(f"note: the page shows {count} of {microbatches} microbatches", err=True)
    if several and count % batch:
        count += batch - count % batch
    page = report_html(
        simulate_plan(loaded, count, main), *compare_schedules(loaded, several, count), measured=measured
    )
    write_text(output, page)
    if output != "-":
        click.echo(f"written to {shown(output, SENTENCE)}")


def _measured(plan: Plan, trace: str) -> Measured:
    """Return the run by ``plan`` in the file ``trace``, or raise BadInput."""
    from ..errors import BadInput
    from ..files.text import read_text
    from ..report.html import Measured
    from ..runtime.measure.trace_file import MOST_BYTES, check_same_plan, read_measured, read_operations

    text = read_text(trace, MOST_BYTES)
    run = read_measured(trace, text)
    if run is None:
        raise BadInput(f"{trace}: is not the trace of a run, which `pipeplan run --trace` writes")
    check_same_plan(plan, run, trace)
    return Measured(run, read_operations(plan, trace, text))

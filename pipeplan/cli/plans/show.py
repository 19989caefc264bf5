"""``pipeplan show``: what does one period of a plan look like, in the terminal or as a picture?"""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ..grouped import GroupedCommand
from ..options import JSON, PLAN, Count, Output


@click.command(cls=GroupedCommand, examples=("pipeplan show plan.json", "pipeplan show plan.json -o pattern.svg"))
@PLAN
@click.option("--width", type=Count(40, 10**4), help="Columns.  [default: the terminal's]")
@click.option("--links/--no-links", default=True, help="Draw links too.")
@click.option("-o", "--output", type=Output(), help="Write a .svg, .png or .pdf instead.")
@JSON
def command(plan: str, width: int | None, links: bool, output: str | None, as_json: bool) -> None:
    """Draw one period of PLAN: what every GPU and link does when. Of a message-driven plan, draw its mini-batch."""
    from ...files.plans import load_plan
    from ...report.gantt import plan_window, rows_data
    from ...report.tables.simulations import print_pattern
    from ...schedule.kinds import plan_groups

    loaded = load_plan(plan)
    if output is not None:
        from ...report.figures import save_pattern

        save_pattern(loaded, output)
    if as_json:
        window = plan_window(loaded)
        rows = rows_data(window.rows, window.start_ns, window.end_ns)
        click.echo(json.dumps(rows | {"groups": [asdict(group) for group in plan_groups(loaded)]}, indent=1))
    elif output is None:
        print_pattern(loaded, width, links)

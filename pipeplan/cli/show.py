"""``pipeplan show``: one period of a plan in the terminal."""

from __future__ import annotations

import json

import click

from .options import JSON, PLAN


@click.command()
@PLAN
@click.option("--width", type=click.IntRange(40), help="Columns.  [default: the terminal's]")
@JSON
def command(plan: str, width: int | None, as_json: bool) -> None:
    """Draw one period of PLAN: what every GPU and link does when, in the steady state.

    \b
    Example: pipeplan show plan.json
    """
    from ..files import load_plan
    from ..report.gantt import pattern_rows
    from ..report.tables import print_pattern

    loaded = load_plan(plan)
    if as_json:
        click.echo(json.dumps(pattern_rows(loaded), indent=1))
    else:
        print_pattern(loaded, width)

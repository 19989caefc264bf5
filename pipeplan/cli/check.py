"""``pipeplan check``: is a plan right?"""

from __future__ import annotations

import json

import click

from ..errors import InvalidPlan
from .options import JSON, PLAN


@click.command()
@PLAN
@JSON
def command(plan: str, as_json: bool) -> None:
    """Judge PLAN by every rule and recompute every figure that it reports; exit 1 when something is wrong.

    Its order is also proved free of deadlock with blocking sends and receives.

    \b
    Example: pipeplan check plan.json
    """
    from ..files.plans import read_plan
    from ..report.tables import headline
    from ..schedule.deadlock import plan_deadlock

    loaded, found = read_plan(plan)
    if not found:
        found = [f"deadlock: {sentence}" for sentence in plan_deadlock(loaded)]
    if as_json:
        click.echo(json.dumps({"valid": not found, "violations": found}, indent=1))
        raise click.exceptions.Exit(1 if found else 0)
    if found:
        raise InvalidPlan([f"{plan}: {sentence}" for sentence in found])
    click.echo(f"valid: {headline(loaded)}")

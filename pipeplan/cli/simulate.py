"""``pipeplan simulate``: fill, steady state and drain of a plan."""

from __future__ import annotations

import json

import click

from .options import JSON, PLAN


@click.command()
@PLAN
@click.option("--microbatches", type=click.IntRange(1, 10**6), help="How many to run.  [default: enough to settle]")
@click.option("--width", type=click.IntRange(40), help="Columns.  [default: the terminal's]")
@click.option("--text", "as_text", is_flag=True, help="Print the program, one row per GPU, instead.")
@JSON
def command(plan: str, microbatches: int | None, width: int | None, as_text: bool, as_json: bool) -> None:
    """Run PLAN in simulation: every operation as soon as its order and its inputs allow.

    \b
    Example: pipeplan simulate plan.json --microbatches 64
    """
    from ..files import load_plan
    from ..report.simulation import simulate_plan

    loaded = load_plan(plan)
    simulation = simulate_plan(loaded, microbatches)
    if as_text:
        click.echo(simulation.timeline.program.text(), nl=False)
    elif as_json:
        click.echo(json.dumps(simulation.figures(), indent=1))
    else:
        from ..report.tables import print_simulation

        print_simulation(simulation, width)

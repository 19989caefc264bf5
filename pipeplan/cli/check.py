"""``pipeplan check``: is a plan right?"""

from __future__ import annotations

import json

import click

from ..deadline import Deadline, OutOfTime
from ..errors import InvalidPlan, PipeplanError
from .options import GIVE_UP, JSON, PLAN


@click.command()
@PLAN
@click.option("--bounds", is_flag=True, help="Derive claimed lower bounds anew, too, which takes as long as planning.")
@GIVE_UP
@JSON
def command(plan: str, bounds: bool, deadline: Deadline, as_json: bool) -> None:
    """Judge PLAN by every rule and recompute every figure that it reports; exit 1 when something is wrong.

    Its order is also proved free of deadlock with blocking sends, receives, sums and updates of replicas. Of its
    lower bounds, those whose proof is a search (classes contiguous and one-special) are the file's claims and called
    so, unless --bounds checks them.

    \b
    Example: pipeplan check plan.json
    """
    from ..files.plans import read_plan
    from ..planner.derived import derived
    from ..report.tables import bound_figures, headline
    from ..runtime.lowering.blocking import run_deadlock
    from ..schedule.deadlock import plan_deadlock

    with deadline.insist():
        loaded, found = read_plan(plan)
        if not found:
            found = [f"deadlock: {sentence}" for sentence in plan_deadlock(loaded) or run_deadlock(loaded)]
    if bounds and not found:
        try:
            with deadline.insist():
                loaded, found = derived(loaded, deadline)
        except OutOfTime as late:
            late_bounds = "the time limit came before its claimed bounds were derived; but for them it is valid"
            raise PipeplanError(f"{plan}: {late_bounds}") from late
    if as_json:
        figures = [] if found else bound_figures(loaded)
        click.echo(json.dumps({"valid": not found, "violations": found, "lower_bounds": figures}, indent=1))
        raise click.exceptions.Exit(1 if found else 0)
    if found:
        raise InvalidPlan([f"{plan}: {sentence}" for sentence in found])
    click.echo(f"valid: {headline(loaded)}")

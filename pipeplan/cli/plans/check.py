"""``pipeplan check``: is a plan right?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ...deadline import Deadline, OutOfTime
from ...errors import InvalidPlan, PipeplanError
from ..grouped import GroupedCommand
from ..options import FILE, GIVE_UP, JSON
from ..progress import status

if TYPE_CHECKING:
    from ...schedule.standstill import Semantics


@click.command(
    cls=GroupedCommand,
    examples=("pipeplan check plan.json", "pipeplan check --schedule schedule.csv --semantics blocking"),
)
@click.argument("plan", metavar="PLAN", type=FILE, required=False)
@click.option(
    "--schedule",
    metavar="FILE.csv",
    type=FILE,
    help="Judge a schedule that torch's pipelining reads or writes instead, for PLAN's stages if there is one.",
)
@click.option(
    "--semantics",
    type=click.Choice(["blocking", "together", "batched", "rank", "lazy", "pair", "free"]),
    help="With --schedule: what sends and receives wait for.  [default: all are tried, free decides]",
)
@click.option("--bounds", is_flag=True, help="Also derive claimed lower bounds, which takes as long as planning.")
@GIVE_UP
@JSON
def command(
    plan: str | None, schedule: str | None, semantics: Semantics | None, bounds: bool, deadline: Deadline, as_json: bool
) -> None:
    """Judge PLAN by every rule and recompute every figure that it reports; exit 1 when something is wrong.

    Its order is also proved free of deadlock with blocking sends, receives, sums and updates of replicas. Of its
    lower bounds, those whose proof is a search (of classes other than any, or under one schedule) are the file's claims
    and called so, unless --bounds checks them.
    """
    if schedule is not None:
        _check_schedule(schedule, plan, semantics, as_json)
        return
    if plan is None or semantics is not None:
        raise click.UsageError(
            "say a PLAN, or --schedule FILE.csv" if plan is None else "--semantics go with --schedule"
        )
    from ...check.delays import plan_delays
    from ...files.plans import read_plan
    from ...planner.what_if.derived import derived
    from ...report.tables.plan import headline
    from ...report.words import bound_figures
    from ...runtime.lowering.blocking import run_deadlock
    from ...schedule.deadlock import plan_deadlock
    from ...schedule.kinds import graph_of

    notes: list[str] = []
    with deadline.insist():
        loaded, found = read_plan(plan, notes)
        if not found:
            found = [f"deadlock: {sentence}" for sentence in plan_deadlock(loaded) or run_deadlock(loaded)]
    if bounds and not found:
        try:
            with deadline.insist():
                loaded, found = derived(loaded, deadline, status())
        except OutOfTime as late:
            late_bounds = "the time limit came before its claimed bounds were derived; but for them it is valid"
            raise PipeplanError(f"{plan}: {late_bounds}") from late
    if as_json:
        delays = [] if found else plan_delays(loaded, graph_of(loaded))
        figures = (
            {"lower_bounds": []}
            if found
            else {"lower_bounds": bound_figures(loaded), "delays": list(map(asdict, delays))}
        )
        click.echo(json.dumps({"valid": not found, "violations": found, **figures}, indent=1))
        raise click.exceptions.Exit(1 if found else 0)
    if found:
        raise InvalidPlan([f"{plan}: {sentence}" for sentence in found])
    click.echo(f"valid: {headline(loaded)}")
    for note in notes:
        click.echo(f"note: {note}")


def _check_schedule(path: str, plan: str | None, chosen: Semantics | None, as_json: bool) -> None:
    """Print what is wrong with a schedule, and under which semantics its ranks wait for each other; exit 1 if so."""
    from ...files.plans import load_plan
    from ...files.schedule_csv import read_schedule
    from ...planner.simulated.simulation import simulate_written
    from ...schedule.standstill import SEMANTICS
    from ...schedule.written.actions import deadlock, incomplete

    written = read_schedule(path)
    found = incomplete(written)
    stuck: dict[Semantics, list[str]] = {}
    if not found:
        tried: list[Semantics] = [chosen] if chosen else list(SEMANTICS) if written.has_transfers else ["free"]
        stuck = {name: deadlock(written, name) for name in tried}
        if plan is not None and not stuck.get("free"):
            run = simulate_written(load_plan(plan), written, path)
            if not run.fits:
                found.append("it doesn't fit the memory of the plan's GPUs")
    bad = bool(found) or bool(stuck.get(chosen or "free"))
    if as_json:
        click.echo(json.dumps({"valid": not bad, "violations": found, "deadlocks": stuck}, indent=1))
        raise click.exceptions.Exit(int(bad))
    for sentence in found:
        click.echo(f"error: {path}: {sentence}", err=True)
    for name, sentences in stuck.items():
        click.echo(f"{name:9} {'deadlock: ' + '; '.join(sentences) if sentences else 'comes through'}")
    if not bad:
        what = "with its transfers" if written.has_transfers else "passes alone"
        click.echo(
            f"valid: {written.stages} stages on {len(written.rows)} ranks, {written.microbatches} microbatches, {what}"
        )
    raise click.exceptions.Exit(int(bad))

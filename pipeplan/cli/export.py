"""``pipeplan export``: what is a plan in the terms of another runtime?"""

from __future__ import annotations

import json
from typing import Any

import click

from .options import JSON, PLAN, Count, Output, refuse_unknown


@click.command()
@PLAN
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Choice(["torch-csv", "torchtitan", "megatron", "deepspeed", "torchgpipe"]),
    help="The runtime.",
)
@click.option("--schedule", metavar="NAME", help="As in simulate.  [default: the plan's own]")
@click.option("--microbatches", type=click.IntRange(1, 10**6), help="Per mini-batch.  [default: as in simulate]")
@click.option("--chunks", type=Count(), help="interleaved: stages per GPU.  [default: 2]")
@click.option("-o", "--output", default="-", type=Output(), help="Where to write it; - is standard output.")
@JSON
def command(
    plan: str, target: str, schedule: str | None, microbatches: int | None, output: str, as_json: bool, **options: Any
) -> None:
    """Write PLAN for another runtime: torch's schedule CSV, torchtitan, Megatron-LM, DeepSpeed, torchgpipe.

    What the runtime cannot express is refused with the reason (exit 1).

    \b
    Example: pipeplan export plan.json --to torch-csv --schedule 1f1b -o schedule.csv
    """
    from ..files.export import TARGETS, notes
    from ..files.plans import load_plan
    from ..files.text import write_text
    from ..planner.other_schedules import own_schedule, schedule_stages
    from ..planner.simulation import simulate_plan

    refuse_unknown([] if schedule is None else [schedule])
    loaded = load_plan(plan)
    schedule = schedule or own_schedule(loaded)
    stages = schedule_stages(loaded, schedule, options["chunks"] or 2)
    run = simulate_plan(loaded, microbatches, schedule, options).timeline
    text = TARGETS[target].export(loaded, stages, run)
    said = notes(loaded, target, stages)
    if as_json:
        text = json.dumps({"target": target, "text": text, "notes": said}, indent=1) + "\n"
    write_text(output, text)
    for note in said:
        click.echo(f"note: {note}", err=True)

"""``pipeplan export``: what is a plan in the terms of another runtime?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click

from .. import completed
from ..grouped import GroupedCommand
from ..options import JSON, PLAN, Count, Output

WRITERS = ["megatron", "megatron-bridge", "torchtitan", "deepspeed", "torch-split", "torch-csv"]


@click.command(
    cls=GroupedCommand,
    examples=(
        "pipeplan export plan.json --to megatron",
        "pipeplan export plan.json --to torch-csv --schedule 1f1b -o schedule.csv",
    ),
)
@PLAN
@click.option("--to", "name", required=True, type=click.Choice(WRITERS), help="The runtime, and the form.")
@click.option("--schedule", metavar="NAME", type=completed.SCHEDULE, help="As in simulate.  [default: the plan's own]")
@click.option("--microbatches", type=click.IntRange(1, 10**6), help="Per mini-batch.  [default: as in simulate]")
@click.option("--chunks", type=Count(most=10**4), help="interleaved: stages per GPU.  [default: 2]")
@click.option(
    "--rename",
    multiple=True,
    metavar="PATTERN=NAME,..",
    help=r"What the target calls the profile's layers: 'block(\d+)=layers.\1,head=lm_head'; the first match counts.",
)
@click.option("-o", "--output", default="-", type=Output(), help="Where to write it; - is standard output.")
@JSON
def command(
    plan: str,
    name: str,
    schedule: str | None,
    microbatches: int | None,
    rename: tuple[str, ...],
    output: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Write PLAN for another runtime: Megatron-LM, torchtitan, DeepSpeed, or torch's own pipelining.

    What the runtime cannot express is refused with the reason (exit 1); plan --for it finds what it can. torch-csv
    with -o schedule.csv also writes the stages, schedule.py, beside it.
    """
    from ...api.plans.exporting import exported
    from ...files.plans import load_plan

    made = exported(
        load_plan(plan), name, output, schedule=schedule, microbatches=microbatches, rename=rename, **options
    )
    if as_json:
        text = json.dumps({"target": name, "text": made.text, "notes": made.notes}, indent=1) + "\n"
        made = replace(made, text=text)
    made.write()
    for note in made.notes:
        click.echo(f"note: {note}", err=True)

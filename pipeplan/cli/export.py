"""``pipeplan export``: what is a plan in the terms of another runtime?"""

from __future__ import annotations

import json
from typing import Any

import click

from .options import JSON, PLAN, Count, Output

WRITERS = ["megatron", "megatron-bridge", "torchtitan", "deepspeed", "torch-split", "torch-csv"]


@click.command()
@PLAN
@click.option("--to", "name", required=True, type=click.Choice(WRITERS), help="The runtime, and the form.")
@click.option("--schedule", metavar="NAME", help="As in simulate.  [default: the plan's own]")
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

    \b
    Example: pipeplan export plan.json --to megatron
    Example: pipeplan export plan.json --to torch-csv --schedule 1f1b -o schedule.csv
    """
    from pathlib import PurePath

    from ..api.simulating import refuse_unknown
    from ..files.export import WRITERS as writers
    from ..files.export import Asked, notes
    from ..files.export.asked import parsed_renames
    from ..files.plans import load_plan
    from ..files.text import write_text
    from ..planner.other_schedules import own_schedule, schedule_stages
    from ..planner.simulation import simulate_plan

    refuse_unknown([] if schedule is None else [schedule])
    renames = parsed_renames(rename)
    loaded = load_plan(plan)
    schedule = schedule or own_schedule(loaded)
    stages = schedule_stages(loaded, schedule, options["chunks"] or 2)
    run = simulate_plan(loaded, microbatches, schedule, options).timeline
    writer, asked = writers[name], Asked(loaded, stages, run, renames, output)
    texts = {output: writer.write(asked)}
    if writer.beside is not None and output != "-":
        ending, write = writer.beside
        texts[str(PurePath(output).with_suffix(ending))] = write(asked)
    said = notes(loaded, name, stages)
    if as_json:
        texts[output] = json.dumps({"target": name, "text": texts[output], "notes": said}, indent=1) + "\n"
    for path, text in texts.items():
        write_text(path, text)
    for note in said:
        click.echo(f"note: {note}", err=True)

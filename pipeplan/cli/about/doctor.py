"""``pipeplan doctor``: what has this machine for planning and training, and what lacks?"""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ...names import SENTENCE, shown
from ..grouped import GroupedCommand
from ..options import JSON

MARKS = {"good": "ok", "absent": "-", "broken": "!!"}


@click.command(cls=GroupedCommand, examples=("pipeplan doctor", "pipeplan doctor --json"))
@JSON
def command(as_json: bool) -> None:
    """Say what there is: Python, packages, solvers, torch, gloo, NCCL, GPUs and their links, with versions.

    Exit 1 when something that is there doesn't work (!!); what is not installed (-) is no fault.
    """
    from ...api.doctor import examined

    found = examined()
    broken = [x for x in found if x.state == "broken"]
    if as_json:
        click.echo(json.dumps({"good": not broken, "findings": [asdict(x) for x in found]}, indent=1))
    else:
        width = max(len(x.name) for x in found)
        for x in found:
            told = shown(f"{x.told}; {x.help}" if x.help else x.told, SENTENCE)
            click.echo(f"{MARKS[x.state]:2}  {x.name:{width}}  {told}")
    raise click.exceptions.Exit(1 if broken else 0)

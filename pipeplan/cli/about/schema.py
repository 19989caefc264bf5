"""``pipeplan schema``: what may a file say? Its JSON Schema."""

from __future__ import annotations

import json

import click

from ..grouped import GroupedCommand


@click.command(cls=GroupedCommand, examples=("pipeplan schema profile", "pipeplan schema plan > plan.schema.json"))
@click.argument("name", type=click.Choice(["profile", "platform", "plan", "trace", "accelerator"]))
def command(name: str) -> None:
    """Print the JSON Schema of a profile, a platform, a plan, the trace of a run, or an accelerator."""
    from ...files.schemas import SCHEMAS, schema
    from ...runtime.measure.trace_file import TraceFile

    forms = SCHEMAS | {"trace": TraceFile}
    click.echo(json.dumps(schema(forms[name]), indent=1))

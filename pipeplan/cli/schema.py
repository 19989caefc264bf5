"""``pipeplan schema``: what may a file say? Its JSON Schema."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("name", type=click.Choice(["profile", "platform", "plan"]))
def command(name: str) -> None:
    """Print the JSON Schema of a profile, a platform or a plan.

    \b
    Example: pipeplan schema profile
    """
    from ..files.schemas import schema

    click.echo(json.dumps(schema(name), indent=1))

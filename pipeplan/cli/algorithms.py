"""``pipeplan algorithms``: the old name of ``pipeplan list algorithms``."""

from __future__ import annotations

import click

from .grouped import GroupedCommand
from .listing import command as listed
from .options import JSON


@click.command(cls=GroupedCommand, hidden=True)
@JSON
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the algorithms, as pipeplan list algorithms does.

    \b
    Example: pipeplan algorithms
    """
    ctx.invoke(listed, what="algorithms", as_json=as_json)

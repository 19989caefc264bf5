"""``pipeplan algorithms``: what ``--algorithm`` offers."""

from __future__ import annotations

import json

import click

from .options import JSON


@click.command()
@JSON
def command(as_json: bool) -> None:
    """List the partitioning algorithms, what each is, and where it is published.

    \b
    Example: pipeplan algorithms
    """
    from ..partition import ALGORITHMS

    if as_json:
        rows = [
            {"name": name, "summary": a.summary, "source": a.source, "optimal": a.optimal}
            for name, a in ALGORITHMS.items()
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(map(len, ALGORITHMS))
    for name, algorithm in ALGORITHMS.items():
        click.echo(f"{name:{width}}  {algorithm.summary} [{algorithm.source}]")

"""``pipeplan algorithms``: what does ``--algorithm`` offer?"""

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

    rows = [
        {
            "name": "auto",
            "summary": "the portfolio: exact contiguous first, then MadPipe's plans, then local search over all plans",
            "source": "the default",
            "optimal": False,
        }
    ]
    rows += [
        {"name": name, "summary": a.summary, "source": a.source, "optimal": a.optimal} for name, a in ALGORITHMS.items()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    width = max(len(str(row["name"])) for row in rows)
    for row in rows:
        click.echo(f"{row['name']:{width}}  {row['summary']} [{row['source']}]")

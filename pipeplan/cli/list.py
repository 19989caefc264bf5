"""``pipeplan list``: which GPUs and models have names?"""

from __future__ import annotations

import json

import click

from .options import JSON


@click.command()
@JSON
def command(as_json: bool) -> None:
    """List the GPUs that --gpu and --estimate know, and the models of the zoo.

    \b
    Example: pipeplan list
    """
    from ..files.accelerators import accelerators
    from ..zoo import MODELS, ZOO

    gpus = [
        {"name": name, "gpu": x.name, "memory": x.memory, "bandwidth": x.bandwidth, "link": x.link, "tflops": x.tflops}
        for name, x in accelerators().items()
    ]
    models = [f"{ZOO}{name}" for name in MODELS]
    if as_json:
        click.echo(json.dumps({"gpus": gpus, "models": models}, indent=1))
        return
    width = max(len(name) for name in accelerators())
    for name, x in accelerators().items():
        click.echo(f"{name:{width}}  {x.name}: {x.memory} at {x.bandwidth}, links of {x.link or 'unknown bandwidth'}")
    click.echo()
    click.echo("\n".join(models))

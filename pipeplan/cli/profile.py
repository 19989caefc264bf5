"""``pipeplan profile``: what each layer of a torch model costs on this machine."""

from __future__ import annotations

import datetime

import click

from .model import ZOO, named_function, named_model


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Samples in a microbatch.")
@click.option("--data", metavar="MODULE:FUNCTION", help="data(index, seed) -> (input, target) to measure with.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Measured steps after warm-up.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--name", help="Name in the profile.  [default: MODEL's]")
@click.option("-o", "--output", metavar="FILE", default="-", show_default=True, help="Where to write the profile.")
def command(model: str, batch: int, data: str | None, steps: int, device: str, name: str | None, output: str) -> None:
    """Measure MODEL layer by layer: zoo:NAME, zoo:NAME,option=value or module:function.

    \b
    Example: pipeplan profile zoo:gpt-tiny --batch 8 -o profile.json
    """
    from ..files import profile_text, write_text
    from ..runtime.profiler import profile_model

    build, batches = named_model(model, batch)
    if data is not None:
        batches = named_function(data, "--data")
    chain = profile_model(
        build,
        batch,
        name=name or model.removeprefix(ZOO),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        data=batches,
        steps=steps,
        device=device,
    )
    write_text(output, profile_text(chain))
    if output != "-":
        click.echo(f"{len(chain)} layers written to {output}")

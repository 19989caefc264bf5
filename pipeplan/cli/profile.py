"""``pipeplan profile``: what does each layer of a torch model cost, on this machine or on a GPU that isn't here?"""

from __future__ import annotations

import datetime
import sys
from typing import Any

import click

from ..names import SENTENCE, shown
from ..zoo import ZOO
from .model import named_function, named_model
from .options import DEBUG, Count, Number, Output, merging

DTYPES = ("float32", "bfloat16", "float16", "float64")


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--batch", type=Count(), default=8, show_default=True, help="Samples in a microbatch.")
@click.option("--data", metavar="MODULE:FUNCTION", help="data(index, seed) -> (input, target) to measure with.")
@click.option("--steps", type=Count(), default=10, show_default=True, help="Measured steps after warm-up.")
@click.option(
    "--seconds",
    type=Number(),
    default=30,
    show_default=True,
    help="Begin no further step after that time; one is measured in any case.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to measure.  [default: cpu]")
@click.option(
    "--estimate",
    metavar="GPU",
    help="Estimate for a GPU instead (a100, h100, v100, rtx4090, .. or FILE.json): no GPU and no memory needed.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Convert the model and its input.  [default: as built]")
@click.option(
    "--optimizer", type=click.Choice(["sgd", "momentum", "adam"]), default="sgd", show_default=True, help="To time."
)
@click.option("--split-backward", is_flag=True, help="Tell the gradients of weights and of inputs apart.")
@click.option(
    "--hold",
    type=click.Choice(["auto", "all", "one"]),
    default="auto",
    show_default=True,
    help="Have all layers on the device at once, or one at a time; auto: one where all don't fit.",
)
@click.option(
    "--granularity",
    default="node",
    show_default=True,
    metavar="node|block|articulation|N%",
    help="Keep every layer, make one of each item of a list of modules, merge between cuts of one tensor, or merge "
    "neighbours up to a share of the time.",
)
@click.option(
    "--blocks",
    metavar="NAMES",
    help="The lists whose items are blocks, such as model.layers or stages.*.blocks; means --granularity block.  "
    "[default: the outermost ones]",
)
@click.option("--name", help="Name in the profile.  [default: MODEL's]")
@click.option("-o", "--output", type=Output(), default="-", show_default=True, help="Where to write the profile.")
@DEBUG
@click.option("-q", "--quiet", is_flag=True, help="No progress and no table of the layers on standard error.")
def command(
    model: str,
    batch: int,
    data: str | None,
    device: str | None,
    estimate: str | None,
    dtype: str | None,
    optimizer: str,
    granularity: str,
    blocks: str | None,
    name: str | None,
    output: str,
    quiet: bool,
    **measuring: Any,
) -> None:
    """Measure MODEL layer by layer: zoo:NAME, zoo:NAME,option=value, hf:CONFIG,option=value or module:function.

    \b
    Examples: pipeplan profile zoo:gpt-tiny --batch 8 -o profile.json
              pipeplan profile zoo:llama-7b --batch 1 --estimate h100 --dtype bfloat16 -o profile.json
    """
    merge = merging(granularity, blocks)
    if estimate is not None and (device is not None or measuring["hold"] != "auto"):
        raise click.UsageError("--estimate needs no device; leave out --device and --hold")

    from ..files.profiles import profile_text
    from ..files.text import write_text
    from ..partition.granularity import merge_zero_time
    from ..runtime.profiler.estimate import estimate_model
    from ..runtime.profiler.measure import measure_model
    from ..runtime.profiler.steps import MeasureOptions, check_device, dtype_of, optimizer_of

    build, batches = named_model(model, batch)
    if data is not None:
        batches = named_function(data, "--data")
    options = MeasureOptions(
        dtype=None if dtype is None else dtype_of(dtype),
        optimizer=optimizer_of(optimizer, foreach=None if estimate is None else True),
        device=device or "cpu",
        say=_ignore if quiet else _progress,
        **measuring,
    )
    about: dict[str, Any] = {
        "name": name or model.removeprefix(ZOO),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "data": batches,
    }
    if estimate is not None:
        from ..files.accelerators import accelerator

        gpu = accelerator(estimate)
        if not quiet:
            link = f" --bandwidth {shown(gpu.link)}" if gpu.link else ""
            limits = f"--mem {shown(gpu.memory)} --reserve auto{link}"
            click.echo(f"{shown(gpu.name)}: to plan for it, {limits} at most", err=True)
        measured = estimate_model(build, batch, gpu, options, **about)
    else:
        check_device(options.device)
        measured = measure_model(build, batch, options, **about)
    chain = measured.chain
    if chain.edges is not None:  # blocks first: what takes no time may stand between two
        chain = merge_zero_time(merge(chain)) if granularity == "block" or blocks else merge(merge_zero_time(chain))
    if not quiet:
        from ..report.measurements import print_measurements

        _progress("")
        print_measurements(measured, chain)
    for note in measured.notes:
        click.echo(f"note: {shown(note, SENTENCE)}", err=True)
    write_text(output, profile_text(chain))
    if output != "-":
        click.echo(f"{len(chain)} layers written to {shown(output, SENTENCE)}")


def _ignore(_: str) -> None:
    pass


def _progress(text: str) -> None:
    """Show one line at a time on a terminal; a log gets none but those that say what was decided."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)
    elif text.startswith("holding"):
        click.echo(text, err=True)

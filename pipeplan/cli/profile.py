"""``pipeplan profile``: what does each layer of a torch model cost, on this machine or on a GPU that isn't here?"""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ..api.asked import Common, Parts, words
from ..choices import ENGINES, USUAL_ENGINE
from ..names import SENTENCE, shown
from .grouped import GroupedCommand
from .options import DEBUG, GPU, MODEL, Count, asking, option_of, options
from .progress import status

WORDS = words(Common)
DTYPES = ("float32", "bfloat16", "float16", "float64", "autocast-bfloat16", "autocast-float16")

MEASURED = f"""
--microbatch N = 8          Samples that run together.
--data MODULE:FUNCTION      data(index, seed) -> (input, target), or a loader, to measure with.
--steps N = 10              Measured steps after warm-up.
--seconds X = 30            Begin no further step after that time; one is measured in any case.
--device auto|cpu|cuda = auto
    Where to measure; auto: on a GPU if torch sees any.
--estimate GPU
    Estimate for a GPU instead (a100, h100, v100, rtx4090, .. or FILE.json): no GPU and no memory needed.
--host-time TIME[,TIME]|NAME
    With --estimate: what an operation takes the host, such as 20us, or 60us,35us forward and backward; or what
    issues it: {", ".join(ENGINES)}.  [default: eager, or what FILE.json says]
--dtype {"|".join(DTYPES)}
    Convert the model and its input, or run it under torch.autocast.  [default: as built]
"""
ALONE = """
--split-backward            Tell the gradients of weights and of inputs apart.
--hold auto|all|one = auto
    Have all layers on the device at once, or one at a time; auto: one where all don't fit.
--beside COUNT = 1
    Measure on the CPU as one of N processes that train the model at once, as they will in a run.
"""


@click.command(
    cls=GroupedCommand,
    examples=(
        "pipeplan profile zoo:gpt-tiny --microbatch 8 -o profile.json",
        "pipeplan profile zoo:llama-7b --microbatch 1 --estimate h100 --dtype bfloat16 -o profile.json",
    ),
)
@click.argument("model", metavar="MODEL", type=MODEL)
@options(MEASURED, estimate=GPU)
@option_of(WORDS["optimizer"], help="To time.")
@options(ALONE, beside={"type": Count(), "metavar": "N"})
@option_of(WORDS["granularity"])
@option_of(WORDS["blocks"])
@asking(Parts)
@options("--name TEXT Name in the profile.  [default: MODEL's]", name={"metavar": None})
@options("-o, --output OUT = - Where to write the profile.")
@DEBUG
@options("-q, --quiet  No progress and no table of the layers on standard error.")
def command(model: str, estimate: str | None, host_time: str | None, output: str, quiet: bool, **asked: Any) -> None:
    """Measure MODEL layer by layer: zoo:NAME, zoo:NAME,option=value, hf:CONFIG,option=value or module:function."""
    from ..api.profiles import profile

    if estimate is not None and not quiet:
        from ..files.machines.accelerators import accelerator, constants_of
        from ..runtime.profiler.estimate import said_host_time

        gpu = accelerator(estimate)
        link = f" --bandwidth {shown(gpu.link)}" if gpu.link else ""
        limits = f"--mem {shown(gpu.memory)} --reserve auto{link}"
        click.echo(f"{shown(gpu.name)}: to plan for it, {limits} at most", err=True)
        named = host_time or gpu.host_time or USUAL_ENGINE
        said = said_host_time(constants_of(gpu, host_time))
        click.echo(f"{named}: {said} (--host-time)" if named in ENGINES else said, err=True)
    if quiet:
        status().say("")
    heard = {"say": _ignore, "note": _ignore} if quiet else {"say": status().say, "note": partial(click.echo, err=True)}
    found = profile(model, gpu=estimate, host_time=host_time, **heard, **asked)
    if not quiet and found.measured is not None:
        from ..report.tables.measurements import print_measurements

        print_measurements(found.measured, found.chain)
    for note in found.notes:
        click.echo(f"note: {shown(note, SENTENCE)}", err=True)
    found.save(output)
    if output != "-":
        click.echo(f"{len(found)} layers written to {shown(output, SENTENCE)}")


def _ignore(_: str) -> None:
    pass

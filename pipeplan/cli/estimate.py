"""``pipeplan estimate``: does a model fit on GPUs that nobody has measured it on, and how long does it train?"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any

import click

from ..choices import OPTIMIZERS
from ..errors import BadInput
from ..names import shown
from . import completed
from .grid import pipelines_of
from .grouped import GroupedCommand
from .options import JSON, Count, Gpus, asked_of, problem_options
from .progress import status

MOST_SAMPLES = 10**18
PER_GPU = 4  # microbatches of an update, where nobody says


@click.command(cls=GroupedCommand)
@partial(
    problem_options,
    without=("platform", "reserve", "latency", "overhead", "blocking_transfers", "granularity", "blocks", "weights",
             "accumulate", "bytes_per_parameter", "clipped", "no_replicas", "checkpointing", "no_checkpointing"),
    profile=click.argument("profile", metavar="MODEL", type=completed.MODEL),
    gpus=click.option("--gpus", type=Gpus(), required=True, help="Number of equal GPUs, or 2x8: two servers of eight."),
    batch=click.option("--batch", type=Count(), help="Samples per update.  [default: 4 microbatches per GPU]"),
    optimizer=click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adam", show_default=True),
    precision=click.option(
        "--precision", type=click.Choice(["fp32", "mixed", "autocast"]), default="mixed", show_default=True
    ),
)  # fmt: skip
@click.option("--microbatch", type=Count(), default=1, show_default=True, help="Samples that run together.")
@click.option(
    "--data-parallel",
    default="auto",
    show_default=True,
    metavar="auto|N",
    help="Equal pipelines that share every batch; auto: whatever is fastest.",
)
@click.option("--samples", metavar="N", help="Samples to train on, such as 100e6: says how many days it takes.")
@JSON
def command(
    profile: str,
    gpus: tuple[int, ...],
    microbatch: int,
    batch: int | None,
    data_parallel: str,
    samples: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Estimate memory and time of training MODEL on GPUs that are named: zoo:NAME, hf:CONFIG or module:function.

    Every layer is estimated for the GPU, the layers are planned on every grid of stages x pipelines, and the fastest
    grid is shown. Exit code 1: nothing fits.

    \b
    Examples: pipeplan estimate zoo:llama-7b --gpus 8 --gpu h100 --samples 100e6
              pipeplan estimate zoo:myelin-12b --gpus 48 --gpu v100 --microbatch 8 --batch 16384 --offload
    """
    from ..api.planning import grid

    wanted = None if samples is None else _samples(samples)
    each = batch or PER_GPU * prod(gpus) * microbatch
    found = grid(
        profile,
        pipelines=pipelines_of(data_parallel),
        microbatches=[microbatch],
        status=status(),
        **asked_of({**options, "gpus": gpus, "batch": each}),
    )
    parameters = int(found.plan.chain.sums.parameters[-1])
    seconds = each / found.samples_per_second
    training = None if wanted is None else wanted / found.samples_per_second / 86400
    if as_json:
        figures = {
            "parameters": parameters,
            "batch": each,
            "batch_seconds": seconds,
            "samples_per_second": found.samples_per_second,
            "samples": wanted,
            "days": training,
            "pipelines": len(found.stages[0].gpus),
            "stages": [{"peak_bytes": x.peak_bytes, "memory_bytes": x.memory_bytes} for x in found.stages],
        }
        click.echo(json.dumps(figures, indent=1))
        return
    found.show()
    click.echo(f"\nparameters  {parameters / 1e9:.3f}e9; weights that layers share count in each of them")
    if training is not None:
        batches = -(-wanted // each) if wanted else 0
        click.echo(f"training    {training:.1f} days for {wanted:,} samples, {batches:,} batches of {seconds:.3f} s")


def _samples(text: str) -> int:
    count = Fraction(text) if re.fullmatch(r"[0-9]{1,19}(\.[0-9]{1,18})?([eE]\+?[0-9]{1,2})?", text) else None
    if count is None or count.denominator != 1 or not 0 < count <= MOST_SAMPLES:
        raise BadInput(f"--samples: '{shown(text, 40)}' is not a positive whole number up to 1e18, such as 100e6")
    return int(count)

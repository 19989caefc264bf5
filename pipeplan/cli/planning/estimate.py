"""``pipeplan estimate``: does a model fit on GPUs that nobody has measured it on, and how long does it train?"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from math import prod
from typing import Any

import click

from ...api.asked import Grids
from ...errors import BadInput
from ...names import shown
from .. import completed
from ..grouped import GroupedCommand
from ..options import JSON, Count, asking
from ..progress import status
from .grid import PIPELINES

MOST_SAMPLES = 10**18
PER_GPU = 4  # microbatches of an update, where nobody says


@click.command(
    cls=GroupedCommand,
    examples=(
        "pipeplan estimate zoo:llama-7b --gpus 8 --gpu h100 --samples 100e6",
        "pipeplan estimate zoo:myelin-12b --gpus 48 --gpu v100 --microbatch 8 --batch 16384 --offload",
    ),
)
@click.argument("profile", metavar="MODEL", type=completed.MODEL)
@asking(
    Grids,
    without=("platform", "reserve", "latency", "overhead", "blocking_transfers", "granularity", "blocks", "clipped",
             "bytes_per_parameter", "checkpointing", "profiles", "layer_overhead", "overlap", "limit", "effort"),
    gpus={"required": True},
    batch={"type": Count(), "metavar": None, "help": "Samples per update.  [default: 4 microbatches per GPU]"},
    optimizer={"default": "adam"},
    precision={"default": "mixed", "show_default": True, "help": None},
    pipelines=PIPELINES,
    microbatches={"default": "1", "show_default": True, "help": "Samples of a microbatch: several to choose from."},
)  # fmt: skip
@click.option("--samples", metavar="N", help="Samples to train on, such as 100e6; prints the training time in days.")
@JSON
def command(
    profile: str,
    gpus: tuple[int, ...],
    microbatches: list[int],
    batch: int | None,
    samples: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Estimate memory and time of training MODEL on GPUs that are named: zoo:NAME, hf:CONFIG or module:function.

    Every layer is estimated for the GPU, the layers are planned on every grid of stages x pipelines, and the fastest
    grid is shown. Exit code 1: nothing fits.
    """
    from ...api.planning import grid

    wanted = None if samples is None else _samples(samples)
    each = batch or PER_GPU * prod(gpus) * max(microbatches)
    found = grid(profile, status=status(), gpus=gpus, microbatches=microbatches, batch=each, **asked)
    parameters, tensor = int(found.plan.chain.sums.parameters[-1]), found.plan.chain.tensor
    seconds = each / found.samples_per_second
    training = None if wanted is None else wanted / found.samples_per_second / 86400
    if as_json:
        figures = {
            "parameters": parameters,
            "tensor": tensor,
            "batch": each,
            "batch_seconds": seconds,
            "samples_per_second": found.samples_per_second,
            "samples": wanted,
            "days": training,
            "pipelines": len(found.stages[0].gpus) // tensor,
            "stages": [{"peak_bytes": x.peak_bytes, "memory_bytes": x.memory_bytes} for x in found.stages],
        }
        click.echo(json.dumps(figures, indent=1))
        return
    found.show()
    whose = f" in each of {tensor} GPUs that run a layer together" if tensor > 1 else ""
    click.echo(f"\nparameters  {parameters / 1e9:.3f}e9{whose}; weights that layers share count in each of them")
    if training is not None:
        batches = -(-wanted // each) if wanted else 0
        click.echo(f"training    {training:.1f} days for {wanted:,} samples, {batches:,} batches of {seconds:.3f} s")


def _samples(text: str) -> int:
    count = Fraction(text) if re.fullmatch(r"[0-9]{1,19}(\.[0-9]{1,18})?([eE]\+?[0-9]{1,2})?", text) else None
    if count is None or count.denominator != 1 or not 0 < count <= MOST_SAMPLES:
        raise BadInput(f"--samples: '{shown(text, 40)}' is not a positive whole number up to 1e18, such as 100e6")
    return int(count)

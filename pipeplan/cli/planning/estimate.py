"""``pipeplan estimate``: does a model fit on GPUs that nobody has measured it on, and how long does it train?"""

from __future__ import annotations

import json
from math import prod
from typing import Any

import click

from ...api.asked import Grids
from .. import completed
from ..grouped import GroupedCommand
from ..options import JSON, Count, asking
from ..progress import status
from .bill import Bill, bill_options
from .grid import PIPELINES

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
@bill_options
@JSON
def command(
    profile: str,
    gpus: tuple[int, ...],
    microbatches: list[int],
    batch: int | None,
    samples: str | None,
    tokens: str | None,
    price: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Estimate memory and time of training MODEL on GPUs that are named: zoo:NAME, hf:CONFIG or module:function.

    Every layer is estimated for the GPU, the layers are planned on every grid of stages x pipelines, and the fastest
    grid is shown. Exit code 1: nothing fits.
    """
    from ...api.planning import grid

    bill = Bill.of(samples, tokens, price)
    each = batch or PER_GPU * prod(gpus) * max(microbatches)
    found = grid(profile, status=status(), gpus=gpus, microbatches=microbatches, batch=each, **asked)
    parameters, tensor = int(found.plan.chain.sums.parameters[-1]), found.plan.chain.tensor
    rate = found.samples_per_second
    if as_json:
        figures = {
            "parameters": parameters,
            "tensor": tensor,
            "batch": each,
            "batch_seconds": each / rate,
            "samples_per_second": rate,
            "samples": None if bill is None else bill.samples,
            "days": None if bill is None else bill.days(rate),
            "dollars": None if bill is None else bill.dollars(rate, prod(gpus)),
            "pipelines": len(found.stages[0].gpus) // tensor,
            "stages": [{"peak_bytes": x.peak_bytes, "memory_bytes": x.memory_bytes} for x in found.stages],
        }
        click.echo(json.dumps(figures, indent=1))
        return
    found.show()
    whose = f" in each of {tensor} GPUs that run a layer together" if tensor > 1 else ""
    click.echo(f"\nparameters  {parameters / 1e9:.3f}e9{whose}; weights that layers share count in each of them")
    if bill is not None:
        click.echo(bill.line(rate, prod(gpus), each))

"""``pipeplan plan``: which plan is best? One question, and its answer printed or written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ...api.asked import Planning
from ..grouped import GroupedCommand
from ..options import PROFILE, asking
from .bill import Bill, bill_options
from .search import search, search_options

if TYPE_CHECKING:
    from ...api.result import PlanResult


@click.command(
    cls=GroupedCommand,
    examples=(
        "pipeplan plan profile.json --gpus 8 --mem 16GB -o plan.json",
        "pipeplan plan zoo:gpt2-xl --gpus 8 --gpu a100 --microbatch 2 --precision mixed --optimizer adam",
        "pipeplan plan profile.json --gpus 8 --mem 80GB --for megatron --batch 128",
        "pipeplan plan profile.json --gpus 8 --mem 16GB --split 4,4,4,5 --replicas 2,2,2,2 --recompute all",
    ),
)
@PROFILE
@asking(Planning)
@click.option("-v", "--verbose", is_flag=True, help="Print which condition decides the bound on all plans.")
@bill_options
@search_options
def command(
    profile: str,
    knobs: dict[str, Any],
    output: str | None,
    as_json: bool,
    verbose: bool,
    samples: str | None,
    tokens: str | None,
    price: str | None,
    **asked: Any,
) -> None:
    """Split the network in PROFILE (JSON, graph.txt, example:NAME; - is standard input) over GPUs.

    PROFILE may also name a model, as pipeplan profile takes it: each layer is then estimated for --gpu.

    Ctrl-C ends the search with the best plan so far.
    """
    if "seed" in knobs or "runs" in knobs:
        name = "seed" if "seed" in knobs else "runs"
        if asked["robust"] is None:
            raise click.UsageError(f"-O {name} goes with --robust")
    bill = Bill.of(samples, tokens, price)
    from ...api.planning import plan
    from ...files.text import write_text

    find = partial(plan, profile, time_limit=asked.pop("deadline"), **asked, **knobs)
    if asked["for_"] is not None and output not in (None, "-"):  # it is there before its price is known

        def write(found: PlanResult) -> None:
            write_text(output, found.text())

        find = partial(find, on_plan=write)
    search(find, output, as_json, verbose, bill)

"""``pipeplan grid``: how many stages x pipelines share a batch?"""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ...api.asked import Grids
from ..grouped import GroupedCommand
from ..options import PROFILE, Count, asking
from .search import search, search_options

PIPELINES = {"default": "auto", "show_default": True}


@click.command(
    cls=GroupedCommand,
    examples=(
        "pipeplan grid profile.json --gpus 8 --mem 16GB --batch 64 --microbatch 1,2,4 -o plan.json",
        "pipeplan grid zoo:gpt2-xl --gpus 2x8 --gpu a100 --batch 512 --data-parallel 4 --precision mixed",
    ),
)
@PROFILE
@asking(
    Grids,
    batch={"type": Count(), "metavar": None, "required": True, "help": "Samples per update."},
    pipelines=PIPELINES,
)
@search_options
def command(profile: str, output: str | None, as_json: bool, **asked: Any) -> None:
    """Plan a grid of GPUs for PROFILE: stages x equal pipelines that share every batch, message-driven and drained.

    Every grid of the GPUs is tried, with microbatches of the given sizes. The grid that finishes a batch first is the
    plan; the others are listed with their times, or with why they don't fit.

    Ctrl-C ends the search with the best plan so far.
    """
    from ...api.planning import grid

    search(partial(grid, profile, time_limit=asked.pop("deadline"), **asked), output, as_json)

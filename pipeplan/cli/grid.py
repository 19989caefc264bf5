"""``pipeplan grid``: how many stages x pipelines share a batch? ``plan --data-parallel`` leads here too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import click

from ..errors import BadInput
from ..names import shown
from ..units import parse_counts
from .grouped import GroupedCommand
from .options import EFFORT, Count, asked_of, problem_options
from .search import search, search_options

Command = TypeVar("Command", bound=Callable[..., Any])
DRAINED = ("weights", "accumulate", "no_replicas")  # what a grid has decided: flush, once per batch, replicas


def grid_options(command: Command, when: str = "") -> Command:
    """Add the options of grids but --data-parallel and --batch; ``when`` says where they mean anything."""
    for option in reversed(
        [
            click.option(
                "--microbatch",
                metavar="N,..",
                help="Samples of a microbatch of a model that is named; of a grid several to choose from, such as "
                "1,2,4.  [default: those profiled; of a model 8]",
            ),
            click.option(
                "--microbatch-profile",
                metavar="FILE",
                multiple=True,
                help=f"{when}A profile of the same network at another microbatch size; repeatable.",
            ),
            click.option(
                "--layer-overhead",
                metavar="TIME",
                help=f"{when}Part of each pass of a layer that doesn't shrink with the microbatch, where sizes are "
                "scaled from one profile.  [default: 0]",
            ),
            click.option(
                "--overlap/--no-overlap",
                default=False,
                show_default=True,
                help=f"{when}Sum gradients in chunks of 4 buckets of 16 million parameters, and step the optimizer on "
                "one while the next is summed.",
            ),
        ]
    ):
        command = option(command)
    return command


LIMIT = click.option(
    "--limit",
    type=click.IntRange(1, 10**6),
    help="Admitted at once at most: microbatches in each message-driven pipeline; nf1b: mini-batches; "
    "v-limit: activations of chunks on a GPU.  [default: whatever is fastest]",
)


@click.command(cls=GroupedCommand)
@partial(
    problem_options,
    without=DRAINED,
    batch=click.option("--batch", type=Count(), required=True, help="Samples per update."),
)
@click.option(
    "--data-parallel",
    default="auto",
    show_default=True,
    metavar="auto|N",
    help="Equal pipelines that share every batch; auto: whatever is fastest.",
)
@grid_options
@LIMIT
@EFFORT
@search_options
def command(**options: Any) -> None:
    """Plan a grid of GPUs for PROFILE: stages x equal pipelines that share every batch, message-driven and drained.

    Every grid of the GPUs is tried, with microbatches of the given sizes, and the one that is done first with a batch
    is the plan; the others are listed with their times, or why there is none.

    \b
    Example: pipeplan grid profile.json --gpus 8 --mem 16GB --batch 64 --microbatch 1,2,4 -o plan.json

    Ctrl-C ends the search with the best plan so far.
    """
    plan_grid(**options)


def plan_grid(
    profile: str,
    data_parallel: str,
    microbatch: str | None,
    microbatch_profile: Sequence[str],
    layer_overhead: str | None,
    output: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan, print and write the grid that the options ask for."""
    from ..api.planning import grid

    asked = asked_of(options)
    options["time_limit"] = options.pop("deadline")
    find = partial(
        grid,
        profile,
        pipelines=pipelines_of(data_parallel),
        microbatches=parse_counts(microbatch, "--microbatch") if microbatch else None,
        profiles=microbatch_profile,
        layer_overhead=layer_overhead or "0",
        **asked,
        **options,
    )
    search(find, output, as_json)


def pipelines_of(text: str) -> int | None:
    """Return the number of pipelines that --data-parallel says, None for any; BadInput for what is no number."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 7 and int(text)):
        raise BadInput(f"--data-parallel: '{shown(text, 40)}' is neither auto nor a positive number of pipelines")
    return int(text)

"""``pipeplan plan --data-parallel``: the options of hybrid grids, and the question that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import BadInput
from ..units import parse_time
from .options import merging, parse_counts

if TYPE_CHECKING:
    from ..planner.grid.problem import GridProblem
    from ..problem import Problem

Command = TypeVar("Command", bound=Callable[..., Any])
NAMES = ("data_parallel", "batch", "microbatch", "microbatch_profile", "layer_overhead", "limit", "overlap")
COARSENING = 4  # buckets per chunk: two and four are best in Myelin's Figure 8


def grid_options(command: Command) -> Command:
    """Add the options of grids of pipelines."""
    for option in reversed(
        [
            click.option(
                "--data-parallel",
                metavar="auto|N",
                help="Plan a grid: N equal pipelines (auto: whatever is fastest) share every batch, message-driven.",
            ),
            click.option("--batch", type=click.IntRange(1, 10**9), help="With --data-parallel: samples per update."),
            click.option(
                "--microbatch",
                metavar="N,..",
                help="With --data-parallel: sizes of microbatches to choose from, such as 1,2,4.  [default: those "
                "profiled]",
            ),
            click.option(
                "--microbatch-profile",
                metavar="FILE",
                multiple=True,
                help="With --data-parallel: a profile of the same network at another microbatch size; repeatable.",
            ),
            click.option(
                "--layer-overhead",
                metavar="TIME",
                help="With --data-parallel: part of each pass of a layer that doesn't shrink with the microbatch, "
                "where sizes are scaled from one profile.  [default: 0]",
            ),
            click.option(
                "--limit",
                type=click.IntRange(1, 10**6),
                help="Microbatches in each message-driven pipeline at most; nf1b: mini-batches admitted at once.  "
                "[default: whatever is fastest]",
            ),
            click.option(
                "--overlap/--no-overlap",
                default=False,
                show_default=True,
                help=f"With --data-parallel: sum gradients in chunks of {COARSENING} buckets of "
                "16 million parameters, and step the optimizer on one while the next is summed.",
            ),
        ]
    ):
        command = option(command)
    return command


def refuse_without_grid(given: dict[str, Any]) -> None:
    """Raise a usage error for options that mean nothing without --data-parallel."""
    for name in NAMES:
        if given[name] and name != "limit":
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --data-parallel")


def grid_problem(
    problem: Problem,
    profile: str,
    granularity: str,
    offload: bool | None,
    data_parallel: str,
    batch: int | None,
    microbatch: str | None,
    microbatch_profile: Sequence[str],
    layer_overhead: str | None,
    limit: int | None,
    overlap: bool,
) -> tuple[GridProblem, list[str]]:
    """Return the question that the options ask about ``problem``, and the assumptions behind it."""
    from ..files.profiles import read_profile
    from ..planner.grid.microbatches import profiles
    from ..planner.grid.problem import GridProblem

    if batch is None:
        raise click.UsageError("--data-parallel plans for a batch; say its samples with --batch")
    data = None if data_parallel == "auto" else _pipelines(data_parallel)
    fixed_ns = parse_time(layer_overhead or "0", "--layer-overhead")
    merged = merging(granularity)
    given = profiles([problem.chain, *(merged(read_profile(path)) for path in microbatch_profile)], fixed_ns)
    sizes = sorted(set(parse_counts(microbatch, "--microbatch"))) if microbatch else sorted(given.measured)
    policy = replace(problem.policy, accumulate=None, coarsening=COARSENING if overlap else None)
    has_state = policy.optimizer != "sgd" or policy.precision == "mixed"
    offloads = (False, True) if offload is None and has_state else (bool(offload),)
    assumptions = []
    said = given.assumption(sizes)
    if said is not None:
        assumptions.append(said)
    assumptions.append(
        "gradients are summed after each stage's last backward by rings, 2(r-1)/r bytes / bandwidth"
        + (", the optimizer steps meanwhile: the longer of the two and a chunk of the other" if overlap else "")
    )
    assumptions.append("the messages of all pipelines between two stages share one link")
    if True in offloads:
        assumptions.append("moving optimizer state between host and GPU takes no time of its own")
    return (
        GridProblem(problem.with_policy(policy), given, batch, tuple(sizes), offloads, limit, data),
        assumptions,
    )


def _pipelines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 7 and int(text)):
        raise BadInput(f"--data-parallel: {text[:40]!r} is neither auto nor a positive number of pipelines")
    return int(text)

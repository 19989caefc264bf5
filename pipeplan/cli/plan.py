"""``pipeplan plan``: which plan is best? One question, and its answer printed or written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from click.core import ParameterSource

from ..choices import BEST, DRAINED, PLANNED, AlgorithmName, ScheduleKind, TargetName
from ..units import parse_counts
from .grid import LIMIT, grid_options, plan_grid
from .grouped import GroupedCommand
from .options import (
    EFFORT,
    GAP,
    JOBS,
    KNOBS,
    MOST_RUNS,
    SEED,
    SOLVER,
    Count,
    Share,
    asked_of,
    knobs_of,
    problem_options,
    refuse_without,
)
from .search import search, search_options
from .stated import NAMES as STATED
from .stated import stated_options

if TYPE_CHECKING:
    from ..api.result import PlanResult

GRID = ("microbatch_profile", "layer_overhead", "overlap")  # mean nothing but for a grid


@click.command(cls=GroupedCommand)
@problem_options
@click.option(
    "--data-parallel",
    metavar="auto|N",
    help="Plan a grid, as pipeplan grid does: N equal pipelines (auto: whatever is fastest) share every batch.  With "
    "--split: N of these stages.",
)
@partial(grid_options, when="With --data-parallel: ")
@LIMIT
@click.option(
    "--algorithm",
    type=click.Choice(["auto", *get_args(AlgorithmName)]),
    default="auto",
    show_default=True,
    help="auto is the portfolio: exact contiguous first, then what might beat it.",
)
@KNOBS
@click.option("--straight", is_flag=True, hidden=True)
@click.option("--algorithm-mode", "mode", hidden=True)
@click.option("--charge", hidden=True)
@EFFORT
@GAP
@click.option(
    "--schedule",
    type=click.Choice([*PLANNED, BEST]),
    help="One schedule: of those that drain with flush, nf1b or pattern with latest, else pattern. best: with flush, "
    "the best order of passes that is found on the stages of the plan, or on others on its GPUs.  [default: best of "
    "all with flush, else the first]",
)
@click.option(
    "--vertical-sync",
    is_flag=True,
    help="stash, latest: one version of the weights for a microbatch in all stages, which costs versions.",
)
@click.option(
    "--for",
    "target",
    type=click.Choice(get_args(TargetName)),
    help="The best plan that this framework can express and run, and what the restriction costs; weights are flush.",
)
@click.option(
    "--order",
    type=click.Choice(["best", "given"]),
    default="best",
    show_default=True,
    help="Of the layers of a graph: the best for stages that is found, or the profile's.",
)
@SOLVER
@JOBS
@click.option(
    "--robust",
    type=Share(),
    help="The plan of the least 95th percentile where durations are drawn around the planned ones, by so much as 5%; "
    "and what the plan of least period loses then.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of --robust.")
@click.option("--runs", type=Count(most=MOST_RUNS), default=20, show_default=True, help="Of --robust.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Say what binds: the condition that the bound on all plans follows from."
)
@stated_options
@search_options
def command(
    profile: str,
    algorithm: str,
    knobs: tuple[str, ...],
    straight: bool,
    mode: str | None,
    charge: str | None,
    schedule: ScheduleKind | Literal["best"] | None,
    vertical_sync: bool,
    data_parallel: str | None,
    limit: int | None,
    target: str | None,
    effort: Any,
    gap: float | None,
    microbatch: str | None,
    output: str | None,
    as_json: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Split the network in PROFILE (JSON, graph.txt, example:NAME; - is standard input) over GPUs.

    PROFILE may also name a model, as pipeplan profile takes it: it is estimated for --gpu on the way.

    \b
    Example: pipeplan plan profile.json --gpus 8 --mem 16GB -o plan.json
    pipeplan plan profile.json --gpus 8 --mem 16GB --data-parallel auto --batch 64 --microbatch 1,2,4
    pipeplan plan profile.json --gpus 8 --mem 80GB --for megatron --batch 128
    pipeplan plan zoo:gpt2-xl --gpus 8 --gpu a100 --microbatch 2 --precision mixed --optimizer adam
    pipeplan plan profile.json --gpus 8 --mem 16GB --split 4,4,4,5 --replicas 2,2,2,2 --recompute all
    pipeplan plan profile.json --gpus 8 --mem 16GB --split 4,4,4,5 --data-parallel 2 --schedule 1f1b --batch 128

    Ctrl-C ends the search with the best plan so far.
    """
    refuse_without("robust", "seed", "runs")
    given = knobs_of(knobs, straight=straight or None, mode=mode, charge=charge)
    if data_parallel is not None and options["split"] is not None:
        options = _stated_grid(data_parallel, options)
    elif data_parallel is not None:
        _refuse_with_grid(algorithm, schedule, {**options, "for": target, "gap": gap, "O": given or None})
        for name in (*STATED, "order", "solver", "jobs", "robust", "seed", "runs"):
            options.pop(name)
        plan_grid(
            profile=profile,
            data_parallel=data_parallel,
            microbatch=microbatch,
            limit=limit,
            effort=effort,
            output=output,
            as_json=as_json,
            vertical_sync=vertical_sync,
            **options,
        )
        return
    for name in GRID:
        if options.pop(name):
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --data-parallel")
    sizes: list[int] = parse_counts(microbatch, "--microbatch") if microbatch else []
    if len(sizes) > 1:
        raise click.UsageError("--microbatch: several sizes are for --data-parallel to choose from; name one")
    from ..api.planning import plan
    from ..files.text import write_text

    options["time_limit"] = options.pop("deadline")
    asked = asked_of(options)
    find = partial(
        plan,
        profile,
        algorithm=algorithm,
        options=given,
        for_=target,
        schedule=schedule,
        limit=limit,
        effort=effort,
        gap=gap,
        microbatch=sizes[0] if sizes else None,
        vertical_sync=vertical_sync,
        **asked,
        **options,
    )
    if target is not None and output not in (None, "-"):  # it is there before its price is known

        def write(found: PlanResult) -> None:
            write_text(output, found.text())

        find = partial(find, on_plan=write)
    search(find, output, as_json, verbose)


def _stated_grid(data_parallel: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of stages that are stated with so many equal pipelines, which drain after every batch."""
    from ..planner.periodic.stated import replicated

    if options["replicas"] is not None or options["on"] is not None:
        raise click.UsageError("--data-parallel says how many GPUs each stage has; leave out --replicas and --on")
    if not (
        data_parallel.isascii() and data_parallel.isdecimal() and 0 < len(data_parallel) < 7 and int(data_parallel)
    ):
        raise click.UsageError("--split searches nothing: say how many pipelines --data-parallel has")
    source = click.get_current_context().get_parameter_source("weights")
    if source is not ParameterSource.DEFAULT and options["weights"] != DRAINED:
        raise click.UsageError(f"--data-parallel drains, which is --weights flush, not {options['weights']}")
    return options | {"replicas": replicated(options["split"], int(data_parallel)), "weights": DRAINED}


def _refuse_with_grid(algorithm: str, schedule: ScheduleKind | Literal["best"] | None, others: dict[str, Any]) -> None:
    """Raise a usage error for what contradicts --data-parallel; what it drains refuses for itself."""
    if schedule not in (None, "message-driven"):
        raise click.UsageError(
            f"--data-parallel plans message-driven pipelines that drain; leave out --schedule {schedule}"
        )
    if algorithm != "auto":
        raise click.UsageError(f"--data-parallel has a search of its own; leave out --algorithm {algorithm}")
    for name in STATED:
        if others[name] is not None:
            raise click.UsageError(f"--{name} goes with --split, which says the stages")
    for name, said in {"for": "--for", "gap": "--gap", "O": "-O", "robust": "--robust"}.items():
        if others[name] is not None:
            raise click.UsageError(f"--data-parallel has a search of its own; leave out {said}")

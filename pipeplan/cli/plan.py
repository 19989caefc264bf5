"""``pipeplan plan``: partition, schedule, bound, judge, and print or write the plan."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from ..partition import ALGORITHMS
from ..plan import ScheduleKind
from ..schedule.kinds import KINDS
from ..units import parse_time
from .grid import NAMES, grid_options, grid_problem, refuse_without_grid
from .options import JSON, problem_options, read_problem

QUIET_S = 1.0  # what takes less needs no progress


@click.command()
@problem_options
@grid_options
@click.option(
    "--algorithm",
    type=click.Choice(["auto", *ALGORITHMS]),
    default="auto",
    show_default=True,
    help="auto is the portfolio: exact contiguous first, then what might beat it.",
)
@click.option("--straight", is_flag=True, help="pipedream: no replicated stages.")
@click.option(
    "--algorithm-mode",
    "mode",
    type=click.Choice(["paper", "released"]),
    help="pipedream: as in the paper, or as the published optimizer computes it.",
)
@click.option(
    "--charge",
    type=click.Choice(["full", "tight", "paper"]),
    help="madpipe: how the special device's memory is counted; full nearly always schedules.",
)
@click.option(
    "--effort",
    type=click.Choice(["quick", "normal", "high"]),
    default="normal",
    show_default=True,
    help="auto: how many candidates to try beyond the exact contiguous plan.",
)
@click.option(
    "--schedule",
    type=click.Choice(list(KINDS)),
    help="latest: nf1b or pattern; flush: flush (drained in a pattern's order) or message-driven; else pattern.  "
    "[default: the first]",
)
@click.option(
    "--vertical-sync",
    is_flag=True,
    help="stash, latest: one version of the weights for a microbatch in all stages, which costs versions.",
)
@click.option("--time-limit", metavar="TIME", help="Stop searching after this long, such as 30s, with the best so far.")
@click.option(
    "--solver",
    type=click.Choice(["cbc", "highs"]),
    default="cbc",
    show_default=True,
    help="Of the integer program that schedules non-contiguous stages; highs needs highspy.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the plan as JSON; - is standard output.")
@JSON
def command(
    algorithm: str,
    straight: bool,
    mode: str | None,
    charge: str | None,
    effort: str,
    schedule: ScheduleKind | None,
    vertical_sync: bool,
    time_limit: str | None,
    solver: str,
    output: str | None,
    as_json: bool,
    **shared: Any,
) -> None:
    """Split the network in PROFILE (JSON or graph.txt; - is standard input) over GPUs.

    \b
    Example: pipeplan plan profile.json --gpus 8 --mem 16GB -o plan.json
    pipeplan plan profile.json --gpus 8 --mem 16GB --data-parallel auto --batch 64 --microbatch 1,2,4

    Ctrl-C ends the search with the best plan so far.
    """
    from ..files.documents import plan_text, write_text
    from ..planner.incumbent import Settings

    wanted = {name: shared.pop(name) for name in NAMES}
    options = {name: value for name, value in {"straight": straight, "mode": mode, "charge": charge}.items() if value}
    known = () if algorithm == "auto" else ALGORITHMS[algorithm].options
    unknown = sorted(set(options) - set(known))
    if unknown:
        flags = {"straight": "--straight", "mode": "--algorithm-mode", "charge": "--charge"}
        raise click.UsageError(f"{', '.join(flags[x] for x in unknown)} is not an option of --algorithm {algorithm}")
    if wanted["data_parallel"] is None:
        refuse_without_grid(wanted)
        problem, assumptions = read_problem(**shared, segments=algorithm == "auto")
    else:
        _refuse_with_grid(algorithm, shared, schedule, vertical_sync)
        problem, assumptions = read_problem(**{**shared, "weights": "flush"}, segments=True)
        asked, more = grid_problem(problem, shared["profile"], shared["granularity"], shared["offload"], **wanted)
        assumptions += more
    if vertical_sync:
        if problem.policy.weights not in ("stash", "latest"):
            raise click.UsageError("--vertical-sync goes with --weights stash and --weights latest")
        problem = problem.with_policy(replace(problem.policy, vertical_sync=True))
    limit_ns = None if time_limit is None else parse_time(time_limit, "--time-limit")
    began = time.perf_counter()

    def remaining_s() -> float:
        return float("inf") if limit_ns is None else limit_ns / 1e9 - (time.perf_counter() - began)

    def progress(line: str) -> None:
        elapsed = time.perf_counter() - began
        if elapsed > QUIET_S:
            click.echo(f"{elapsed:6.1f} s  {line}", err=True)

    settings = Settings(solver, remaining_s=remaining_s, progress=progress)  # type: ignore[arg-type]  # click checked it
    if wanted["data_parallel"] is None:
        from ..planner.plan import make_plan

        plan = make_plan(problem, algorithm, options, settings, effort, schedule, wanted["limit"])
    else:
        from ..planner.grid.plan import make_grid_plan

        plan = make_grid_plan(asked, settings, effort)
    plan = replace(plan, provenance=replace(plan.provenance, seconds=round(time.perf_counter() - began, 3)))
    if output is not None:
        write_text(output, plan_text(plan))
    if as_json and output != "-":
        write_text("-", plan_text(plan))
    elif output != "-":
        if wanted["data_parallel"] is None:
            from ..report.tables import print_plan

            print_plan(plan, assumptions)
        else:
            from ..report.grids import print_grids

            print_grids(plan, assumptions)
        if output is not None:
            click.echo(f"written to {output}")


def _refuse_with_grid(
    algorithm: str, shared: dict[str, Any], schedule: ScheduleKind | None, vertical_sync: bool
) -> None:
    """Raise a usage error for what contradicts --data-parallel."""
    if schedule not in (None, "message-driven") or vertical_sync:
        said = "--vertical-sync" if vertical_sync else f"--schedule {schedule}"
        raise click.UsageError(f"--data-parallel plans message-driven pipelines that drain; leave out {said}")
    context = click.get_current_context()
    if context.get_parameter_source("weights") is not ParameterSource.DEFAULT and shared["weights"] != "flush":
        raise click.UsageError(
            f"--data-parallel drains the pipelines after every batch, which is --weights flush, not {shared['weights']}"
        )
    if shared["accumulate"] is not None:
        raise click.UsageError("--data-parallel updates weights once per --batch; leave out --accumulate")
    if shared["no_replicas"]:
        raise click.UsageError("--data-parallel and --no-replicas contradict each other; --data-parallel 1 has none")
    if algorithm != "auto":
        raise click.UsageError(f"--data-parallel has a search of its own; leave out --algorithm {algorithm}")

"""``pipeplan plan``: which plan is best? Partition, schedule, bound, judge, and print or write it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..check.targets import TARGETS
from ..partition import ALGORITHMS
from ..plan import ScheduleKind
from ..schedule.kinds import KINDS
from .grid import DRAINED, LIMIT, grid_options, plan_grid
from .options import EFFORT, GAP, SOLVER, problem_options, read_problem
from .search import search, search_options
from .stated import stated_of, stated_options

if TYPE_CHECKING:
    from ..planner.incumbent import Settings

GRID = ("microbatch", "microbatch_profile", "layer_overhead", "overlap")  # mean nothing but for a grid


@click.command()
@problem_options
@click.option(
    "--data-parallel",
    metavar="auto|N",
    help="Plan a grid, as pipeplan grid does: N equal pipelines (auto: whatever is fastest) share every batch.",
)
@partial(grid_options, when="With --data-parallel: ")
@LIMIT
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
@EFFORT
@GAP
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
@click.option(
    "--for",
    "target",
    type=click.Choice(list(TARGETS)),
    help="The best plan that this framework can express and run, and what the restriction costs; weights are flush.",
)
@SOLVER
@stated_options
@search_options
def command(
    algorithm: str,
    straight: bool,
    mode: str | None,
    charge: str | None,
    schedule: ScheduleKind | None,
    vertical_sync: bool,
    data_parallel: str | None,
    limit: int | None,
    target: str | None,
    effort: str,
    gap: float | None,
    solver: str,
    output: str | None,
    as_json: bool,
    **shared: Any,
) -> None:
    """Split the network in PROFILE (JSON or graph.txt; - is standard input) over GPUs.

    \b
    Example: pipeplan plan profile.json --gpus 8 --mem 16GB -o plan.json
    pipeplan plan profile.json --gpus 8 --mem 16GB --data-parallel auto --batch 64 --microbatch 1,2,4
    pipeplan plan profile.json --gpus 8 --mem 80GB --for megatron --batch 128
    pipeplan plan profile.json --gpus 8 --mem 16GB --split 4,4,4,5 --replicas 2,2,2,2 --recompute all

    Ctrl-C ends the search with the best plan so far.
    """
    if gap is not None and (algorithm != "auto" or data_parallel is not None):
        raise click.UsageError("--gap says when --algorithm auto may stop; leave it out")
    configuration = stated_of(shared)
    options = _algorithm_options(algorithm, straight=straight, mode=mode, charge=charge)
    if data_parallel is not None and target is not None:
        raise click.UsageError("--for plans equal pipelines by itself; leave out --data-parallel")
    if data_parallel is not None:
        _refuse_with_grid(algorithm, shared, schedule, vertical_sync)
        drained = {name: value for name, value in shared.items() if name not in DRAINED}
        plan_grid(data_parallel, limit=limit, effort=effort, output=output, as_json=as_json, **drained)
        return
    for name in GRID:
        if shared.pop(name):
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --data-parallel")

    from ..planner.alternatives import with_alternatives
    from ..planner.plan import Planned, make_plan
    from ..planner.restricted import make_target_plan, with_price
    from ..planner.stated import STATED
    from ..report.tables import print_plan

    if target is not None:
        _refuse_with_target(target, algorithm, configuration, schedule, limit, vertical_sync, shared)
        shared["weights"] = "flush"
    problem, assumptions = read_problem(**shared, vertical_sync=vertical_sync, segments=algorithm == "auto")
    if configuration is not None:
        algorithm, options = STATED, configuration

    def find(settings: Settings) -> Planned:
        if target is not None:
            found = make_target_plan(problem, target, settings, effort, () if schedule is None else (schedule,))
            return with_price(found, problem, settings, effort)
        found = make_plan(problem, algorithm, options, settings, effort, schedule, limit)
        if configuration is not None:  # other stages than the stated ones are no alternatives
            return found
        return with_alternatives(found, problem)

    search(
        find,
        lambda found: print_plan(found.plan, assumptions, result=found.evaluation),
        output,
        as_json,
        solver,
        gap,
    )


def _algorithm_options(algorithm: str, **given: Any) -> dict[str, Any]:
    """Return the options of an algorithm that were given; a usage error for those that it doesn't have."""
    options = {name: value for name, value in given.items() if value}
    flags = {"straight": "--straight", "mode": "--algorithm-mode", "charge": "--charge"}
    unknown = sorted(set(options) - set(() if algorithm == "auto" else ALGORITHMS[algorithm].options))
    if unknown:
        raise click.UsageError(f"{', '.join(flags[x] for x in unknown)} is not an option of --algorithm {algorithm}")
    return options


def _refuse_with_target(
    target: str,
    algorithm: str,
    configuration: dict[str, str] | None,
    schedule: ScheduleKind | None,
    limit: int | None,
    vertical_sync: bool,
    shared: dict[str, Any],
) -> None:
    """Raise a usage error for what contradicts --for."""
    if algorithm != "auto" or configuration is not None:
        said = "--split" if configuration is not None else f"--algorithm {algorithm}"
        raise click.UsageError(f"--for has a search of its own; leave out {said}")
    if schedule is not None and schedule not in TARGETS[target].kinds:
        raise click.UsageError(f"--for {target} plans {' or '.join(TARGETS[target].kinds)}, not --schedule {schedule}")
    if vertical_sync or limit is not None:
        raise click.UsageError(f"--for {target} drains; leave out {'--vertical-sync' if vertical_sync else '--limit'}")
    if shared["checkpointing"] not in (None, "none"):
        raise click.UsageError(f"--for {target} recomputes as that can; leave out --checkpointing, or say none")
    _refuse_other_weights("--for", shared["weights"], "drains the pipelines after every mini-batch")


def _refuse_other_weights(option: str, weights: str, why: str) -> None:
    source = click.get_current_context().get_parameter_source("weights")
    if source is not ParameterSource.DEFAULT and weights != "flush":
        raise click.UsageError(f"{option} {why}, which is --weights flush, not {weights}")


def _refuse_with_grid(
    algorithm: str, shared: dict[str, Any], schedule: ScheduleKind | None, vertical_sync: bool
) -> None:
    """Raise a usage error for what contradicts --data-parallel."""
    if schedule not in (None, "message-driven") or vertical_sync:
        said = "--vertical-sync" if vertical_sync else f"--schedule {schedule}"
        raise click.UsageError(f"--data-parallel plans message-driven pipelines that drain; leave out {said}")
    _refuse_other_weights("--data-parallel", shared["weights"], "drains the pipelines after every batch")
    if shared["accumulate"] is not None:
        raise click.UsageError("--data-parallel updates weights once per --batch; leave out --accumulate")
    if shared["no_replicas"]:
        raise click.UsageError("--data-parallel and --no-replicas contradict each other; --data-parallel 1 has none")
    if algorithm != "auto":
        raise click.UsageError(f"--data-parallel has a search of its own; leave out --algorithm {algorithm}")
    if shared["batch"] is None:
        raise click.UsageError("--data-parallel plans for a batch; say its samples with --batch")

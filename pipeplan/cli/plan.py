"""``pipeplan plan``: partition, schedule, bound, judge, and print or write the plan."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import click

from ..partition import ALGORITHMS
from .options import JSON, problem_options, read_problem


@click.command()
@problem_options
@click.option("--algorithm", type=click.Choice(list(ALGORITHMS)), default="contiguous", show_default=True)
@click.option("--straight", is_flag=True, help="pipedream: no replicated stages.")
@click.option(
    "--algorithm-mode",
    "mode",
    type=click.Choice(["paper", "released"]),
    help="pipedream: as in the paper, or as the published optimizer computes it.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the plan as JSON; - is standard output.")
@JSON
def command(algorithm: str, straight: bool, mode: str | None, output: str | None, as_json: bool, **shared: Any) -> None:
    """Split the network in PROFILE (JSON or graph.txt; - is standard input) over GPUs.

    \b
    Example: pipeplan plan profile.json --gpus 8 --mem 16GB -o plan.json
    """
    from ..files import plan_text, write_text
    from ..planner import make_plan

    options = {name: value for name, value in {"straight": straight, "mode": mode}.items() if value}
    unknown = sorted(set(options) - set(ALGORITHMS[algorithm].options))
    if unknown:
        flags = {"straight": "--straight", "mode": "--algorithm-mode"}
        raise click.UsageError(f"{', '.join(flags[x] for x in unknown)} is not an option of --algorithm {algorithm}")
    problem, assumptions = read_problem(**shared)
    began = time.perf_counter()
    plan = make_plan(problem, algorithm, options)
    plan = replace(plan, provenance=replace(plan.provenance, seconds=round(time.perf_counter() - began, 3)))
    if output is not None:
        write_text(output, plan_text(plan))
    if as_json and output != "-":
        write_text("-", plan_text(plan))
    elif output != "-":
        from ..report.tables import print_plan

        print_plan(plan, assumptions)
        if output is not None:
            click.echo(f"written to {output}")

"""``python -m scripts.studies.timeprest``: what does TiMePReSt's schedule do to weights and memory, in unit time?"""

from __future__ import annotations

import json
import sys

import click

from pipeplan.cli.options import JSON, OUTPUT, Count
from pipeplan.errors import BadInput, PipeplanError
from pipeplan.names import SENTENCE, shown
from pipeplan.units import parse_counts

from .analysis import analyse, parse_backward, table
from .report import analysis_figures, print_analysis, print_table, threshold_figures

MOST_SCHEDULES = 1000  # of a table
DEFAULT_RANGE = "2-8"


@click.command()
@click.option("--workers", metavar="W", help="Workers, one stage each; with --table a range.  [with --table: 2-8]")
@click.option("--microbatches", metavar="N", help="Per mini-batch; with --table a range.  [with --table: 2-8]")
@click.option(
    "--backward-time",
    metavar="TIME",
    default="1",
    show_default=True,
    help="Of a mini-batch on one worker, in time points (forwards of a microbatch): 1, 1.5, 7/3, or 2N.",
)
@click.option(
    "--vertical-sync/--no-vertical-sync",
    default=True,
    show_default=True,
    help="A pass uses one version on all workers, as in the paper, or each worker its own newest.",
)
@click.option("--limit", type=Count(most=10**6), help="Mini-batches admitted at once at most.  [default: any]")
@click.option("--table", "as_table", is_flag=True, help="The version difference over workers and microbatches.")
@click.option("-o", "--output", type=OUTPUT, help="Draw the schedule as .png, .svg or .pdf.")
@click.option("--time-points", type=click.IntRange(1, 400), default=30, show_default=True, help="Drawn by -o.")
@JSON
def command(
    workers: str | None,
    microbatches: str | None,
    backward_time: str,
    vertical_sync: bool,
    limit: int | None,
    as_table: bool,
    output: str | None,
    time_points: int,
    as_json: bool,
) -> None:
    """Show TiMePReSt's schedule in unit time: version difference, sequences of mini-batches, versions, activations.

    Everything is read off the simulated schedule; the paper's formula stands beside it where it says something else.

    \b
    Example: python -m scripts.studies.timeprest --workers 4 --microbatches 4 --backward-time 2N
    """
    backward = parse_backward(backward_time, "--backward-time")
    if as_table:
        if output is not None:
            raise click.UsageError("-o draws one schedule; --table has many")
        over = parse_counts(workers or DEFAULT_RANGE, "--workers")
        by = parse_counts(microbatches or DEFAULT_RANGE, "--microbatches")
        if len(over) * len(by) > MOST_SCHEDULES:
            raise BadInput(f"--table: {len(over)} x {len(by)} schedules; at most {MOST_SCHEDULES} are simulated")
        rows = table(over, by, backward, vertical_sync=vertical_sync, limit=limit)
        if as_json:
            click.echo(json.dumps([analysis_figures(analysis) for row in rows for analysis in row], indent=1))
        else:
            print_table(rows, backward)
        return
    if workers is None or microbatches is None:
        raise click.UsageError("say --workers and --microbatches, or --table")
    count = _one(microbatches, "--microbatches")
    analysis = analyse(_one(workers, "--workers"), count, backward.of(count), vertical_sync=vertical_sync, limit=limit)
    if output is not None:
        from .staircase import save_staircase

        save_staircase(analysis, output, time_points)
    if as_json:
        click.echo(json.dumps(analysis_figures(analysis) | threshold_figures(analysis, backward), indent=1))
    else:
        print_analysis(analysis, backward)
        if output is not None:
            click.echo(f"written to {shown(output, SENTENCE)}")


def _one(text: str, where: str) -> int:
    counts = parse_counts(text, where)
    if len(counts) > 1:
        raise BadInput(f"{where}: {text!r} is more than one count; say --table")
    return counts[0]


if __name__ == "__main__":
    try:
        command()
    except PipeplanError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)

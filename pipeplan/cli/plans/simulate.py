"""``pipeplan simulate``: how does a plan fill, run and drain, under its own schedule or any other?"""

from __future__ import annotations

import json
from typing import Any

import click

from ...api.asked import MOST_RUNS
from ...deadline import Deadline
from .. import completed
from ..grouped import GroupedCommand
from ..options import GIVE_UP, JSON, PLAN, SEED, Count, Output, Share, refuse_two_documents, refuse_without
from ..progress import status


@click.command(
    cls=GroupedCommand,
    examples=(
        "pipeplan simulate plan.json --microbatches 64",
        "pipeplan simulate plan.json --schedule all --jitter 5%",
    ),
)
@PLAN
@click.option(
    "--microbatches", type=click.IntRange(1, 10**6), help="Number of microbatches to run.  [default: enough to settle]"
)
@click.option(
    "--schedule",
    "names",
    multiple=True,
    metavar="NAME|FILE.csv",
    type=completed.WRITTEN,
    help="One that `pipeplan list schedules` names, all of these, or best, the best order that is found, in some "
    "seconds; several are compared.  One that is written as torch reads it, instead.  [default: the plan's own]",
)
@click.option("--depth", type=Count(most=10**6), help="pipedream: microbatches in flight.  [default: NOAM]")
@click.option(
    "--chunks", type=Count(most=10**4), help="interleaved, interleaved-zb, breadth-first: stages per GPU.  [default: 2]"
)
@click.option(
    "--batch",
    type=Count(),
    help="Samples per update, a multiple of the profile's microbatch, of nf1b and of schedules that drain.  [default: "
    "the plan's; else nf1b 4 microbatches, drained all that run]",
)
@click.option(
    "--limit",
    type=Count(most=10**6),
    help="Maximum in flight (message-driven: microbatches per pipeline; nf1b: mini-batches; v-limit: chunk "
    "activations per GPU).  [default: the plan's; v-limit: 1F1B's memory]",
)
@click.option(
    "--weight-keeps",
    type=Share(),
    help="Where the backward is split: activations that weight gradients need.  [default: as profiled, or 100%]",
)
@click.option(
    "--pass-overlap",
    "overlap",
    type=Share(),
    help="dualpipev: of a forward and a backward that run together, how much of the shorter is hidden.  [default: 0%]",
)
@click.option(
    "--barrier/--no-barrier",
    default=True,
    show_default=True,
    help="Drained schedules: all GPUs wait for each other between updates, and a batch takes the makespan; or none "
    "does, and it takes the longest span of a GPU.",
)
@click.option("--jitter", type=Share(), help="Also run with durations drawn around the planned ones, such as 5%.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Used by --jitter.")
@click.option("--runs", type=Count(most=MOST_RUNS), default=20, show_default=True, help="Used by --jitter.")
@click.option("--width", type=Count(40, 10**4), help="Columns.  [default: the terminal's]")
@click.option("--links/--no-links", default=False, help="Draw links too.")
@click.option("--text", "as_text", is_flag=True, help="Print the program, one row per GPU, instead.")
@click.option("-o", "--output", type=Output(), help="Also draw the run: .svg, .png or .pdf.")
@click.option("--trace", type=Output(), help="Also write a Chrome trace, which ui.perfetto.dev opens.")
@GIVE_UP
@JSON
def command(
    plan: str,
    microbatches: int | None,
    names: tuple[str, ...],
    width: int | None,
    links: bool,
    as_text: bool,
    output: str | None,
    trace: str | None,
    deadline: Deadline,
    as_json: bool,
    **options: Any,
) -> None:
    """Run PLAN in simulation: every operation as soon as its order and its inputs allow.

    With several schedules, or all, print them side by side, the best for this plan first.
    """
    from ...api.plans.simulating import ALL, simulations
    from ...files.plans import load_plan
    from ...files.text import write_text

    refuse_without("jitter", "seed", "runs")
    refuse_two_documents(as_json, trace=trace)
    if as_text and as_json:
        raise click.UsageError("say either --text or --json")
    several = len(set(names)) > 1 or ALL in names
    if several and (as_text or output or trace):
        raise click.UsageError("--text, --output and --trace show one schedule; name only one")
    with deadline.insist():
        loaded = load_plan(plan)
        found, refused = simulations(loaded, names, microbatches, deadline=deadline, status=status(), **options)
    if output is not None:
        from ...report.figures import save_timeline

        save_timeline(found[0], output)
    if trace is not None:
        from ...report.traces.runs import simulated_trace

        write_text(trace, simulated_trace(found[0].timeline, loaded.platform).text())
    if trace == "-":
        return
    if as_text:
        click.echo(found[0].timeline.program.text(), nl=False)
    elif as_json:
        figures: Any = [simulation.figures() for simulation in found]
        if several:
            figures = {"schedules": figures, "refused": [{"schedule": x.schedule, "reason": x.reason} for x in refused]}
        else:
            figures = figures[0]
        click.echo(json.dumps(figures, indent=1))
    elif several:
        from ...report.tables.simulations import print_schedules

        print_schedules(found, refused, loaded, width)
    else:
        from ...report.tables.simulations import print_simulation

        print_simulation(found[0], width, links)

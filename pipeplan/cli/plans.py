"""``pipeplan check, show, simulate, report, export``: what is there to see of a plan, and to hand on?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from ..choices import FORMS
from ..deadline import Deadline, OutOfTime
from ..errors import InvalidPlan, PipeplanError
from ..registry import Late
from .options import FILE, GIVE_UP, JSON, PLAN, SCHEDULE, WRITTEN, options, refuse_without
from .showing import new_command, print_json, refuse_two_documents, say_written, status

if TYPE_CHECKING:
    from ..plan import Plan
    from ..schedule.deadlock import Semantics

load_plan: Callable[[str], Plan] = Late("files.plans:load_plan")
write_text = Late("files.text:write_text")
CHECK = """
--schedule FILE.csv
    Judge a schedule that torch's pipelining reads or writes instead, for PLAN's stages if there is one.
--semantics blocking|together|batched|rank|lazy|pair|free
    With --schedule: what sends and receives wait for.  [default: all are tried, free decides]
--bounds    Also derive claimed lower bounds, which takes as long as planning.
"""


@new_command("pipeplan check plan.json", "pipeplan check --schedule schedule.csv --semantics blocking")
@click.argument("plan", metavar="PLAN", type=FILE, required=False)
@options(CHECK, schedule=FILE)
@GIVE_UP
@JSON
def check(
    plan: str | None, schedule: str | None, semantics: Semantics | None, bounds: bool, deadline: Deadline, as_json: bool
) -> None:
    """Judge PLAN by every rule and recompute every figure that it reports; exit 1 when something is wrong.

    Its order is also proved free of deadlock with blocking sends, receives, sums and updates of replicas. Of its
    lower bounds, those whose proof is a search (of classes other than any, or under one schedule) are
    printed as claims of the file, unless --bounds checks them.
    """
    if schedule is not None:
        _check_schedule(schedule, plan, semantics, as_json)
        return
    if plan is None or semantics is not None:
        raise click.UsageError(
            "say a PLAN, or --schedule FILE.csv" if plan is None else "--semantics go with --schedule"
        )
    from ..check.lateness import plan_delays
    from ..files.plans import read_plan
    from ..planner.claims import derived
    from ..report.tables.plan import headline
    from ..report.words import bound_figures
    from ..schedule.deadlock import plan_deadlock
    from ..schedule.kinds import graph_of

    with deadline.insist():
        loaded, found = read_plan(plan)
        if not found:
            found = [f"deadlock: {sentence}" for sentence in plan_deadlock(loaded)]
    if bounds and not found:
        try:
            with deadline.insist():
                loaded, found = derived(loaded, deadline, status())
        except OutOfTime as late:
            late_bounds = "the time limit came before its claimed bounds were derived; but for them it is valid"
            raise PipeplanError(f"{plan}: {late_bounds}") from late
    if as_json:
        figures: dict[str, Any] = {"lower_bounds": []}
        if not found:
            delays = [asdict(delay) for delay in plan_delays(loaded, graph_of(loaded))]
            figures = {"lower_bounds": bound_figures(loaded), "delays": delays}
        print_json({"valid": not found, "violations": found, **figures})
        raise click.exceptions.Exit(1 if found else 0)
    if found:
        raise InvalidPlan([f"{plan}: {sentence}" for sentence in found])
    click.echo(f"valid: {headline(loaded)}")


def _check_schedule(path: str, plan: str | None, chosen: Semantics | None, as_json: bool) -> None:
    """Print what is wrong with a schedule, and under which semantics its ranks wait for each other; exit 1 if so."""
    from ..files.schedule_csv import read_schedule
    from ..planner.simulated.simulation import simulate_written
    from ..schedule.deadlock import SEMANTICS
    from ..schedule.written import deadlock, incomplete

    written = read_schedule(path)
    found = incomplete(written)
    stuck: dict[Semantics, list[str]] = {}
    if not found:
        tried: list[Semantics] = [chosen] if chosen else list(SEMANTICS) if written.has_transfers else ["free"]
        stuck = {name: deadlock(written, name) for name in tried}
        if plan is not None and not stuck.get("free") and not simulate_written(load_plan(plan), written, path).fits:
            found.append("it doesn't fit the memory of the plan's GPUs")
    bad = bool(found) or bool(stuck.get(chosen or "free"))
    if as_json:
        print_json({"valid": not bad, "violations": found, "deadlocks": stuck})
        raise click.exceptions.Exit(int(bad))
    for sentence in found:
        click.echo(f"error: {path}: {sentence}", err=True)
    for name, sentences in stuck.items():
        click.echo(f"{name:9} {'deadlock: ' + '; '.join(sentences) if sentences else 'comes through'}")
    if not bad:
        what = "with its transfers" if written.has_transfers else "passes alone"
        click.echo(
            f"valid: {written.stages} stages on {len(written.rows)} ranks, {written.microbatches} microbatches, {what}"
        )
    raise click.exceptions.Exit(int(bad))


SHOW = """
--width COLUMNS             Columns.  [default: the terminal's]
--links/--no-links = yes      Draw links too.
-o, --output OUT            Write a .svg, .png or .pdf instead.
"""


@new_command("pipeplan show plan.json", "pipeplan show plan.json -o pattern.svg")
@PLAN
@options(SHOW)
@JSON
def show(plan: str, width: int | None, links: bool, output: str | None, as_json: bool) -> None:
    """Draw one period of PLAN: what every GPU and link does when. Of a message-driven plan, draw its mini-batch."""
    from ..report.gantt import plan_window, rows_data, save_pattern
    from ..report.tables.simulations import print_pattern
    from ..schedule.kinds import plan_groups

    loaded = load_plan(plan)
    if output is not None:
        save_pattern(loaded, output)
    if as_json:
        window = plan_window(loaded)
        rows = rows_data(window.rows, window.start_ns, window.end_ns)
        print_json(rows | {"groups": [asdict(group) for group in plan_groups(loaded)]})
    elif output is None:
        print_pattern(loaded, width, links)


SIMULATE = """
--microbatches N {1..1000000}
    Number of microbatches to run.  [default: enough to settle]
--schedule NAME|FILE.csv (names)
    One that `pipeplan list schedules` names, all of these, or best, the best order that is found, in some seconds;
    several are compared.  One that is written as torch reads it, instead.  [default: the plan's own]
--depth N {1..1000000}      pipedream: microbatches in flight.  [default: NOAM]
--chunks N {1..10000}       interleaved, interleaved-zb, breadth-first: stages per GPU.  [default: 2]
--batch N
    Samples per update, a multiple of the profile's microbatch, of nf1b and of schedules that drain.  [default: the
    plan's; else nf1b 4 microbatches, drained all that run]
--limit N {1..1000000}
    Maximum in flight (message-driven: microbatches per pipeline; nf1b: mini-batches).  [default: the plan's]
--weight-keeps PERCENT
    Where the backward is split: activations that weight gradients need.  [default: as profiled, or 100%]
--pass-overlap PERCENT (overlap)
    dualpipev: of a forward and a backward that run together, how much of the shorter is hidden.  [default: 0%]
--barrier/--no-barrier = yes
    Drained schedules: all GPUs wait for each other between updates, and a batch takes the makespan; or none does, and
    it takes the longest span of a GPU.
--jitter PERCENT            Also run with durations drawn around the planned ones, such as 5%.
--seed SEED = 0               Seed of --jitter.
--runs N = 20 {1..10000}      Runs of --jitter.
--width COLUMNS             Columns.  [default: the terminal's]
--links/--no-links = no     Draw links too.
--text (as_text)            Print the program, one row per GPU, instead.
-o, --output OUT            Also draw the run: .svg, .png or .pdf.
--trace OUT                 Also write a Chrome trace, which ui.perfetto.dev opens.
"""


@new_command("pipeplan simulate plan.json --microbatches 64", "pipeplan simulate plan.json --schedule all --jitter 5%")
@PLAN
@options(SIMULATE, names={"multiple": True, "type": WRITTEN})
@GIVE_UP
@JSON
def simulate(
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
    from ..api.plans import ALL, simulations
    from ..report.tables.simulations import print_schedules, print_simulation

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
        from ..report.gantt import save_timeline

        save_timeline(found[0], output)
    if trace is not None:
        from ..report.traces import simulated_trace

        write_text(trace, simulated_trace(found[0].timeline, loaded.platform).text())
    if trace == "-":
        return
    if as_text:
        click.echo(found[0].timeline.program.text(), nl=False)
    elif as_json:
        figures: Any = [simulation.figures() for simulation in found]
        unable = [{"schedule": x.schedule, "reason": x.reason} for x in refused]
        print_json({"schedules": figures, "refused": unable} if several else figures[0])
    elif several:
        print_schedules(found, refused, loaded, width)
    else:
        print_simulation(found[0], width, links)


REPORT = """
-o, --output OUT        The page; - is standard output.
--schedule NAME (names)
    Schedule of the run, as in simulate; several, or all, are compared side by side.  [default: the plan's own]
--microbatches N {1..1000000}
    Of the run.  [default: as in simulate, if it fits]
--trace FILE            Draw the run that pipeplan run --trace measured under the planned one.
"""


@new_command("pipeplan report plan.json -o report.html", "pipeplan report plan.json --schedule all -o schedules.html")
@PLAN
@options(REPORT, output={"required": True}, names={"multiple": True, "type": WRITTEN})
def report(plan: str, output: str, names: tuple[str, ...], microbatches: int | None, trace: str | None) -> None:
    """Write PLAN as one self-contained HTML page: table, Gantt charts, memory, lower bounds."""
    from ..api.plans import report_page

    text, count = report_page(load_plan(plan), names, microbatches, trace, status())
    if microbatches is not None and count < microbatches:
        click.echo(f"note: the page shows {count} of {microbatches} microbatches", err=True)
    write_text(output, text)
    say_written(output)


EXPORT = r"""
--schedule NAME             As in simulate.  [default: the plan's own]
--microbatches N {1..1000000}
    Per mini-batch.  [default: as in simulate]
--chunks N {1..10000}       interleaved: stages per GPU.  [default: 2]
--rename PATTERN=NAME,..
    What the target calls the profile's layers: 'block(\d+)=layers.\1,head=lm_head'; the first match counts.
-o, --output OUT = -          Where to write it; - is standard output.
"""


@new_command(
    "pipeplan export plan.json --to megatron",
    "pipeplan export plan.json --to torch-csv --schedule 1f1b -o schedule.csv",
)
@PLAN
@click.option("--to", "name", required=True, type=click.Choice(FORMS), help="The runtime, and the form.")
@options(EXPORT, schedule=SCHEDULE, rename={"multiple": True})
@JSON
def export(plan: str, name: str, output: str, as_json: bool, **asked: Any) -> None:
    """Write PLAN for another runtime: Megatron-LM, torchtitan, DeepSpeed, or torch's own pipelining.

    What the runtime cannot express is refused with the reason (exit 1); plan --for it finds what it can. torch-csv
    with -o schedule.csv also writes the stages, schedule.py, beside it.
    """
    from ..api.plans import exported

    made = exported(load_plan(plan), name, output, **asked)
    if as_json:
        made = replace(made, text=json.dumps({"target": name, "text": made.text, "notes": made.notes}, indent=1) + "\n")
    made.write()
    for note in made.notes:
        click.echo(f"note: {note}", err=True)

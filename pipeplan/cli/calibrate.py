"""``pipeplan calibrate``: which constants of an estimate do a few measured iterations bear?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ..choices import DRAINED, OPTIMIZERS
from ..errors import BadInput
from ..names import SENTENCE, shown
from ..units import MOST_COUNT
from . import completed
from .grouped import GroupedCommand
from .options import DEBUG, JSON, Output

if TYPE_CHECKING:
    from ..files.measured_runs import MeasuredRow
    from ..planner.calibrate.critical_path import Passes, Run
    from ..problem import Chain


@click.command(cls=GroupedCommand)
@click.argument("profiles", metavar="PROFILE...", nargs=-1, required=True)
@click.option("--measured", metavar="FILE.csv", help="Measured iterations, one in a row.")
@click.option("--trace", "traces", nargs=2, multiple=True, metavar="PLAN TRACE", help="A run's own times; repeatable.")
@click.option(
    "--gpu", required=True, metavar="NAME", type=completed.GPU, help="The GPU estimated for (a100, .. or FILE.json)."
)
@click.option("--bandwidth", metavar="RATE", help="Between two GPUs.  [default: the GPU's links, or 12GB/s]")
@click.option("--network", metavar="RATE", help="Between servers of --per-server GPUs.")
@click.option("--per-server", type=click.IntRange(1, 4096), help="GPUs in a server, where there are several.")
@click.option(
    "--optimizer",
    type=click.Choice(list(OPTIMIZERS)),
    default="adam",
    show_default=True,
    help="Of the runs.",
)
@click.option("--precision", type=click.Choice(["fp32", "mixed", "autocast"]), default="mixed", show_default=True)
@click.option("--blocking-transfers", is_flag=True, help="Transfers keep the GPUs at both ends from computing.")
@click.option("-o", "--output", type=Output(), help="Write the GPU with the constants fitted, for --estimate FILE.")
@JSON
@DEBUG
def command(
    profiles: tuple[str, ...],
    measured: str | None,
    traces: tuple[tuple[str, str], ...],
    gpu: str,
    bandwidth: str | None,
    network: str | None,
    per_server: int | None,
    optimizer: str,
    precision: str,
    blocking_transfers: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Fit the constants behind estimated PROFILEs to measured iterations, and say what error they leave.

    A row of the CSV file says what ran, and its ms; columns are called like options of plan --split: split,
    data_parallel, on, recompute, schedule (1f1b), batch; barrier (no: none between updates), profile (which of
    several), gb (memory, set beside what is predicted).

    \b
    Example: pipeplan calibrate gpt-mb1.json gpt-mb4.json --gpu a100 --measured runs.csv -o mine.json
             pipeplan profile zoo:gpt2-xl --batch 2 --estimate mine.json -o profile.json
    """
    if measured is None and not traces:
        raise click.UsageError("say what was measured: --measured FILE.csv, or --trace PLAN TRACE")

    from dataclasses import replace

    from ..files.accelerators import accelerator, with_constants
    from ..files.forms import json_text
    from ..files.machines import platform_of_gpus
    from ..files.measured_runs import read_rows
    from ..files.profiles import read_profile
    from ..files.text import write_text
    from ..planner.calibrate.calibration import calibrate
    from ..planner.calibrate.critical_path import Run
    from ..planner.periodic.stated import gpus_needed
    from ..problem import Platform, Policy
    from ..report.calibrations import calibration_figures, print_calibration

    device = accelerator(gpu)
    chains = {path: read_profile(path) for path in profiles}
    policy = Policy(weights=DRAINED, optimizer=optimizer, precision=precision)  # type: ignore[arg-type]  # as chosen

    def platform(count: int, chain: Chain) -> Platform:
        counts: tuple[int, ...] = (count,)
        if per_server is not None and count > per_server:
            if count % per_server:
                raise BadInput(f"--per-server: {count} GPUs are no whole number of servers of {per_server}")
            counts = (per_server, count // per_server)
        net = network if len(counts) > 1 else None
        found, _ = platform_of_gpus(counts, None, gpu, bandwidth, net, None, chain)
        return replace(found, blocking=blocking_transfers)

    runs: list[Run] = []
    rows = [] if measured is None else read_rows(measured)
    for row in rows:
        chain = _chain_of(row, chains)
        asked = _configuration(row)
        try:
            count = gpus_needed(asked.split, asked.on, asked.pipelines)
        except BadInput as wrong:
            raise BadInput(f"{row.place}: {wrong}") from wrong
        if count > MOST_COUNT:
            raise BadInput(f"{row.place}: has {count} GPUs; there may be {MOST_COUNT}")
        runs.append(Run(row.place.split(": ")[-1], chain, platform(count, chain), policy, asked, row.ms * 1e6))
    passes = [x for plan, trace in traces for x in _traced(plan, trace)]
    found = calibrate(runs, device.constants(), passes)
    constants = found.chosen.constants
    memory = [(row, run.costed(constants).peak_bytes) for row, run in zip(rows, runs, strict=True) if row.gb]
    beside = [(row.place.split(": ")[-1], peak / 1e9, row.gb or 0.0) for row, peak in memory]
    if output is not None:
        error = found.chosen.error if found.chosen.left_out is None else found.chosen.left_out
        source = (
            f"{', '.join(found.chosen.freedom.names)} fitted to {len(runs) + len(passes)} measured times, "
            f"{error:.1%} off on average"
        )
        write_text(output, json_text(with_constants(device, constants, source)))
    if as_json:
        click.echo(json.dumps(calibration_figures(found, beside), indent=1))
    elif output != "-":
        print_calibration(found, beside)
        if output is not None:
            click.echo(f"written to {shown(output, SENTENCE)}; pipeplan profile --estimate takes it")


def _chain_of(row: MeasuredRow, chains: dict[str, Chain]) -> Chain:
    """Return the profile that a row is of: the only one, or that of its file, or of its name."""
    name = row.said.get("profile")
    if name is None and len(chains) == 1:
        return next(iter(chains.values()))
    found = [chain for path, chain in chains.items() if name in (path, chain.name)]
    if len(found) != 1:
        said = "does not say which" if name is None else f"'{shown(name)}' is {'none' if not found else 'several'}"
        raise BadInput(f"{row.place}: profile: {said} of {shown(', '.join(chains))}")
    return found[0]


def _configuration(row: MeasuredRow):  # type: ignore[no-untyped-def]  # imported when used
    from ..planner.calibrate.costed import Configuration

    said = {name: row.said[name] for name in ("split", "on", "recompute", "schedule") if name in row.said}
    barrier = row.said.get("barrier", "yes")
    if barrier not in ("yes", "no"):
        raise BadInput(f"{row.place}: barrier: '{shown(barrier)}' is neither yes nor no")
    pipelines = row.count("data_parallel") or 1
    return Configuration(**said, pipelines=pipelines, batch=row.count("batch"), barrier=barrier == "yes")  # type: ignore[arg-type]


def _traced(plan: str, trace: str) -> list[Passes]:
    """Return what a run measured of each stage of its plan."""
    from ..files.plans import load_plan
    from ..planner.calibrate.critical_path import stage_passes
    from ..runtime.measure.trace_file import read_run_of

    loaded = load_plan(plan)
    run, _ = read_run_of(loaded, trace)
    times = [(x.forward_ns, x.backward_ns, x.update_ns) for x in run.stages]
    return stage_passes(loaded.chain, loaded.allocation.stages, times)

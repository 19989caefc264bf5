"""``pipeplan calibrate``: which constants of an estimate do a few measured iterations bear?"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click

from ..api.asked import Common, words
from ..choices import DRAINED
from ..errors import BadInput
from ..names import SENTENCE, shown
from ..units import MOST_COUNT
from .grouped import GroupedCommand
from .options import DEBUG, FILE, JSON, option_of, options

if TYPE_CHECKING:
    from ..files.measured_runs import MeasuredRow
    from ..planner.calibrate.costed import Passes, Run
    from ..problem import Chain, Platform, Policy

WORDS = words(Common)


@click.command(
    cls=GroupedCommand,
    examples=(
        "pipeplan calibrate gpt-mb1.json gpt-mb4.json --gpu a100 --measured runs.csv -o mine.json",
        "pipeplan profile zoo:gpt2-xl --microbatch 2 --estimate mine.json -o profile.json",
    ),
)
@click.argument("profiles", metavar="PROFILE...", type=FILE, nargs=-1, required=True)
@options("--measured FILE.csv Measured iterations, one in a row.", measured=FILE)
@click.option(
    "--trace", "traces", nargs=2, multiple=True, type=FILE, metavar="PLAN TRACE", help="A run's own times; repeatable."
)
@option_of(WORDS["gpu"], required=True, help="The GPU estimated for (a100, .. or FILE.json).")
@option_of(WORDS["bandwidth"])
@option_of(WORDS["network"], help="Between servers of --per-server GPUs.")
@options("--per-server N {1..4096}  GPUs in a server, where there are several.")
@option_of(WORDS["optimizer"], default="adam", help="Of the runs.")
@option_of(WORDS["precision"], default="mixed", show_default=True, help=None)
@option_of(WORDS["blocking_transfers"])
@options("-o, --output OUT Write the GPU with the constants fitted, for --estimate FILE.")
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
    """
    if measured is None and not traces:
        raise click.UsageError("say what was measured: --measured FILE.csv, or --trace PLAN TRACE")

    from ..files.forms import json_text
    from ..files.machines.accelerators import accelerator, with_constants
    from ..files.measured_runs import read_rows
    from ..files.profiles import read_profile
    from ..files.text import write_text
    from ..planner.calibrate.calibration import calibrate
    from ..problem import Policy
    from ..report.tables.calibrations import calibration_figures, print_calibration

    device = accelerator(gpu)
    chains = {path: read_profile(path) for path in profiles}
    policy = Policy(weights=DRAINED, optimizer=optimizer, precision=precision)  # type: ignore[arg-type]  # as chosen
    rows = [] if measured is None else read_rows(measured)
    platform = partial(_platform, gpu, bandwidth, network, per_server, blocking_transfers)
    runs = [_run(row, _chain_of(row, chains), platform, policy) for row in rows]
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


def _platform(
    gpu: str,
    bandwidth: str | None,
    network: str | None,
    per_server: int | None,
    blocking: bool,
    count: int,
    chain: Chain,
) -> Platform:
    """Return the platform of ``count`` GPUs, in servers of ``per_server`` where it has more."""
    from dataclasses import replace

    from ..files.machines.platforms import platform_of_gpus

    counts: tuple[int, ...] = (count,)
    if per_server is not None and count > per_server:
        if count % per_server:
            raise BadInput(f"--per-server: {count} GPUs are no whole number of servers of {per_server}")
        counts = (per_server, count // per_server)
    net = network if len(counts) > 1 else None
    found, _ = platform_of_gpus(counts, None, gpu, bandwidth, net, None, chain)
    return replace(found, blocking=blocking)


def _run(row: MeasuredRow, chain: Chain, platform: Callable[[int, Chain], Platform], policy: Policy) -> Run:
    """Return what was run in a row, on the GPUs that its configuration needs."""
    from ..planner.calibrate.costed import Run
    from ..planner.periodic.stated import gpus_needed

    asked = _configuration(row)
    try:
        count = gpus_needed(asked.split, asked.on, asked.pipelines)
    except BadInput as wrong:
        raise BadInput(f"{row.place}: {wrong}") from wrong
    if count > MOST_COUNT:
        raise BadInput(f"{row.place}: has {count} GPUs; there may be {MOST_COUNT}")
    return Run(row.place.split(": ")[-1], chain, platform(count, chain), policy, asked, row.ms * 1e6)


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
    from ..planner.calibrate.costed import stage_passes
    from ..runtime.measure.trace_file import read_run_of

    loaded = load_plan(plan)
    run, _ = read_run_of(loaded, trace)
    times = [(x.forward_ns, x.backward_ns, x.update_ns) for x in run.stages]
    return stage_passes(loaded.chain, loaded.allocation.stages, times)

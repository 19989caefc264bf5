"""Which constants of an estimate do a few measured iterations bear?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..choices import DRAINED, Optimizer, Precision
from ..errors import BadInput
from ..files.forms import json_text
from ..files.machines.accelerators import Accelerator, accelerator, with_constants
from ..files.machines.platforms import platform_of_gpus
from ..files.measured_runs import MeasuredRow, read_rows
from ..files.plans import load_plan
from ..files.profiles import read_profile
from ..files.text import write_text
from ..names import shown
from ..plan import Stage
from ..planner.calibrate.calibration import Calibration
from ..planner.calibrate.calibration import calibrate as calibrated
from ..planner.calibrate.costed import Configuration, Passes, Run, stage_passes
from ..planner.periodic.stated import gpus_needed
from ..problem import Chain, Platform, Policy
from ..report.tables.calibrations import Memory, calibration_figures
from ..runtime.measure.trace_file import read_run_of
from ..units import MOST_COUNT

LEAST_SHARE = 0.005  # of a measured profile, that a pass takes which says anything


@dataclass(frozen=True)
class Calibrated:
    """A GPU, what was fitted to its measured iterations, and the GB of runs beside those predicted."""

    gpu: Accelerator
    fit: Calibration
    memory: tuple[Memory, ...]

    def figures(self) -> dict[str, Any]:
        """Return every figure under a name with its unit."""
        return calibration_figures(self.fit, self.memory)

    def save(self, path: str | Path) -> None:
        """Write the GPU with the constants fitted, which estimates take by the file's name."""
        chosen = self.fit.chosen
        error = chosen.error if chosen.left_out is None else chosen.left_out
        how = "fitted" if self.fit.enough else "adjusted"
        source = (
            f"{', '.join(chosen.freedom.names)} {how} to {len(self.fit.names)} measured times, {error:.1%} off on "
            "average"
        )
        within = self.fit.within if self.fit.enough else None
        write_text(str(path), json_text(with_constants(self.gpu, chosen.constants, source, within)))


def calibrate(
    profiles: Sequence[str | Path],
    *,
    gpu: str,
    measured: str | Path | None = None,
    traces: Sequence[Sequence[str | Path]] = (),
    bandwidth: str | None = None,
    network: str | None = None,
    per_server: int | None = None,
    optimizer: Optimizer = "adam",
    precision: Precision = "mixed",
    blocking_transfers: bool = False,
    hosts_alone: bool = False,
) -> Calibrated:
    """Return the constants of ``gpu`` behind the estimated ``profiles``, files, that fit measured iterations.

    ``measured`` is a CSV file with a row for each: see :data:`..files.measured_runs.COLUMNS`; ``traces`` are pairs of
    a plan's file and that of its run's trace. Several GPUs are in servers of ``per_server``. Of ``profiles`` that were
    measured, the layers of an estimate count one by one. With ``hosts_alone`` kernels stay as they are.
    """
    if per_server is not None and not 1 <= per_server <= MOST_COUNT:
        raise BadInput(f"--per-server: {per_server} is not between 1 and {MOST_COUNT}")
    device = accelerator(gpu)
    given = {str(path): read_profile(str(path)) for path in profiles}
    chains = {path: x for path, x in given.items() if any(layer.work is not None for layer in x.layers)} or given
    layers = [x for path, timed in given.items() if path not in chains for x in _measured_layers(timed, chains)]
    if measured is None and not traces and not layers:
        raise BadInput(
            "say what was measured: --measured FILE.csv, --trace PLAN TRACE, or a measured PROFILE beside its estimate"
        )
    policy = Policy(weights=DRAINED, optimizer=optimizer, precision=precision)
    rows = [] if measured is None else read_rows(str(measured))

    def platform(count: int, chain: Chain) -> Platform:
        counts: tuple[int, ...] = (count,)
        if per_server is not None and count > per_server:
            if count % per_server:
                raise BadInput(f"--per-server: {count} GPUs are no whole number of servers of {per_server}")
            counts = (per_server, count // per_server)
        net = network if len(counts) > 1 else None
        return replace(platform_of_gpus(counts, None, gpu, bandwidth, net, None, chain)[0], blocking=blocking_transfers)

    runs = [_run(row, _chain_of(row, chains), platform, policy) for row in rows]
    passes = [x for plan, trace in traces for x in _traced(str(plan), str(trace))] + layers
    found = calibrated(runs, device.constants(), passes, hosts_alone)
    constants = found.chosen.constants
    memory = [(row, run.costed(constants).peak_bytes) for row, run in zip(rows, runs, strict=True) if row.gb]
    beside = ((row.place.split(": ")[-1], peak / 1e9, row.gb or 0.0) for row, peak in memory)
    return Calibrated(device, found, tuple(beside))


def _run(row: MeasuredRow, chain: Chain, platform: Callable[[int, Chain], Platform], policy: Policy) -> Run:
    """Return what was run in a row, on the GPUs that its configuration needs."""
    said = {name: row.said[name] for name in ("split", "on", "recompute", "schedule") if name in row.said}
    barrier = row.said.get("barrier", "yes")
    if barrier not in ("yes", "no"):
        raise BadInput(f"{row.place}: barrier: '{shown(barrier)}' is neither yes nor no")
    pipelines, batch = row.count("data_parallel") or 1, row.count("batch")
    asked = Configuration(**said, pipelines=pipelines, batch=batch, barrier=barrier == "yes")  # type: ignore[arg-type]
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


def _measured_layers(timed: Chain, chains: dict[str, Chain]) -> list[Passes]:
    """Return what the layers of a measured profile took, beside their estimate; BadInput where there is none."""
    names = [x.name for x in timed.layers]
    like = [x for x in chains.values() if [y.name for y in x.layers] == names and x.microbatch == timed.microbatch]
    if len(like) != 1:
        raise BadInput(
            f"profile {shown(timed.name)} was measured: give one estimate of the same layers in microbatches of "
            f"{timed.microbatch} beside it"
        )
    whole, stages = timed.sums.passes_ns[-1], [Stage(i, i + 1, (0,)) for i in range(len(timed))]
    times = np.array([(x.forward_ns, x.backward_ns, x.optimizer_ns) for x in timed.layers])
    found = stage_passes(like[0], stages, (times * (times >= LEAST_SHARE * whole)).tolist())
    return [replace(x, name=f"{timed.name}, {x.name.replace('stage', 'layer')}") for x in found]


def _traced(plan: str, trace: str) -> list[Passes]:
    """Return what a run measured of each stage of its plan."""
    loaded = load_plan(plan)
    run, _ = read_run_of(loaded, trace)
    times = [(x.forward_ns, x.backward_ns, x.update_ns) for x in run.stages]
    return stage_passes(loaded.chain, loaded.allocation.stages, times)

"""What did a training run on torch measure, beside what the plan predicted?"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from rich.text import Text

from ...check.evaluate import evaluate
from ...names import shown
from ...plan import Plan
from ...problem import Chain
from ...schedule.kinds import kind_of
from ...units import format_bytes, format_ns, gpu_name
from ..looks import console, make_table, print_fitted

WAITS = 0.02  # of a period; what is waited for less is noise
SETTLED = 0.6  # of a run, after which the loss that it stays below is compared
QUICK_NS = 10**9  # a line of progress at most so often
KEPT_OFF = 0.02  # of the time; below it is what any machine does beside
_VERDICTS = {
    "as planned": "as planned",
    "times moved": "as layers' times, which have moved, let it be",
    "other load": "the run is further off, and others had its cores",
    "the run itself": "the run itself is further off",
    None: "",
}
_EXCHANGES = {  # of messages, and of sums
    ("nccl", "nccl"): "tensors travelled over NCCL",
    ("staged", "nccl"): "threads received, so messages travelled through host memory, and sums over NCCL",
    ("staged", "staged"): "ranks shared GPUs, so tensors travelled through host memory",
}

if TYPE_CHECKING:
    from ...runtime.lowering.lowered_run import LoweredRun
    from ...runtime.measure.progress import StepProgress
    from ...runtime.measure.report import DeviceActivations, DeviceState, RunReport


def print_dry_run(lowered: LoweredRun, torchrun: str, slurm: str, programs: Sequence[str], as_json: bool) -> None:
    """Print what a run would do: the lines that start it, and what every rank would."""
    if as_json:
        print(json.dumps({"torchrun": torchrun, "slurm": slurm, "programs": programs}, indent=1))
        return
    print(f"{len(lowered.processes)} processes; {lowered.steps} updates of {lowered.interval} microbatches")
    if lowered.limit is not None:
        print(f"at most {lowered.limit} microbatches in each pipeline; arrivals decide the order, as here simulated")
    several = "FIRST_NODE" in torchrun
    where = ", on every node, with the first one's name for FIRST_NODE and a port that is free there" if several else ""
    number = ", and 0, 1, .. for NODE in the platform's order" if "NODE " in torchrun else ""
    print(f"torchrun{where}{number}:\n  {torchrun}\nSlurm:\n  {slurm}\nprograms:")
    for line in programs:
        print(f"  {line}")


def elsewhere(chain: Chain, kind: Literal["cpu", "cuda"]) -> bool:
    """Whether the profile is of another kind of device than the run, whose times it then says nothing of."""
    return bool(chain.device) and chain.of_cpu == (kind == "cuda")


def announced(plan: Plan, steps: int, away: bool) -> str:
    """Return in words what ``steps`` updates are, and what they take by the profile unless it is of another device."""
    count, period = plan.interval, evaluate(plan).period_ns
    text = f"{steps} updates of {count} microbatches = {count * plan.chain.microbatch} samples each: "
    if away:
        return f"{text}planned for {shown(plan.chain.device)}, which this run isn't on, so its time isn't known"
    return f"{text}{count * period / 1e9:.3g} s an update, {steps * count * period / 1e9:.3g} s in all by the profile"


def progress_printer(plan: Plan, as_json: bool, away: bool) -> Callable[[StepProgress], None]:
    """Return what writes progress to standard error: every update as JSON, or a line every second or so.

    Where the run is ``away`` from the device of the profile, nothing is said of that.
    """
    if as_json:
        return lambda step: print(json.dumps(asdict(step)), file=sys.stderr, flush=True)
    silent_ns = float(QUICK_NS)  # the first update is told of
    planned = "" if away else f" ({format_ns(evaluate(plan).period_ns)} planned)"

    def tell(step: StepProgress) -> None:
        nonlocal silent_ns
        if step.evaluation is not None:
            found = ", ".join(f"{name} {value:.4f}" for name, value in step.evaluation.items())
            best = ", the best so far" if step.best else ""
            print(f"update {step.step} of {step.steps}: on held-out data {found}{best}", file=sys.stderr, flush=True)
            return
        silent_ns += (step.period_ns or 0.0) * plan.interval
        if silent_ns < QUICK_NS and step.step < step.steps:
            return
        silent_ns = 0.0
        line = f"update {step.step} of {step.steps}: loss {step.loss:.4f}"
        if step.gradient_norm is not None:
            line += f", gradient norm {step.gradient_norm:.4g}"
        if step.period_ns is not None:
            line += f", {format_ns(step.period_ns)} per microbatch{planned}"
        print(line, file=sys.stderr, flush=True)

    return tell


def print_report(
    plan: Plan, report: RunReport, evaluates: bool, as_json: bool, beside: tuple[Plan, RunReport] | None = None
) -> None:
    """Print what came of a run, and of the same one from another plan, all figures as JSON or what they say."""
    if as_json:
        figures = asdict(report)
        del figures["times"]  # for every operation of every rank: thousands
        mean = {"mean_loss": fmean(report.losses)} if evaluates else {}
        other = {} if beside is None else {"beside": [asdict(x) for x in learnt((plan, report), beside)]}
        derived = {"samples_per_s": report.samples_per_s, "verdict": report.verdict}
        print(json.dumps({**figures, **derived, **mean, **other}, indent=1))
    elif evaluates:
        console().print(
            f"loss {fmean(report.losses):.4f}, mean of {report.microbatches} microbatches in {report.seconds:.1f} s; "
            "nothing was updated"
        )
    else:
        print_run(plan, report)
        if beside is not None:
            print_beside(*learnt((plan, report), beside))


@dataclass(frozen=True)
class Learnt:
    """What became of the loss under one of two plans: its ``curve``, smoothed; its level is the ``updates`` and the
    ``seconds`` after which it stays at most where the second plan's is from :data:`SETTLED` of the run on, if it does.
    """

    plan: str
    curve: list[float]
    level: float
    updates: int | None
    seconds: float | None


def learnt(*runs: tuple[Plan, RunReport]) -> list[Learnt]:
    """Compare runs of as many updates by the last one's loss."""
    curves = [smoothed(report.step_losses, max(1, report.steps // 10)) for _, report in runs]
    level = max(curves[-1][int(SETTLED * len(curves[-1])) :])
    found = []
    for (plan, report), curve in zip(runs, curves, strict=True):
        updates, period = stays_below(curve, level), report.measured_period_ns
        seconds = None if updates is None or period is None else updates * plan.interval * period / 1e9
        found.append(Learnt(plan.policy.weights, curve, level, updates, seconds))
    return found


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Return the mean of each loss and up to ``window`` - 1 before it."""
    return [fmean(losses[max(0, t + 1 - window) : t + 1]) for t in range(len(losses))]


def stays_below(curve: Sequence[float], level: float) -> int | None:
    """Return the number of updates after which ``curve`` is at most ``level`` to its end, None where it never is."""
    above = next((t for t in reversed(range(len(curve))) if not curve[t] <= level), -1)
    return above + 2 if above + 2 <= len(curve) else None


def print_beside(one: Learnt, other: Learnt) -> None:
    """Print two curves beside each other, and when each has come to the same level."""
    print(f"\n{'loss after':>12}  {one.plan:29}{other.plan}")
    most, count = max(*one.curve, *other.curve), len(one.curve)
    for update in dict.fromkeys(max(1, count * tenth // 10) for tenth in range(11)):
        cells = (f"{x.curve[update - 1]:7.4f} {'#' * round(20 * x.curve[update - 1] / most)}" for x in (one, other))
        print(f"{update:12}  {next(cells):29}{next(cells)}".rstrip())
    print(f"loss {other.level:.4f}, below which {other.plan} stays from {SETTLED:.0%} of the run on")
    for x in (one, other):
        took = "" if x.seconds is None else f", {x.seconds:.3g} s by the measured period"
        print(f"  {x.plan}: " + ("not in this run" if x.updates is None else f"after update {x.updates}{took}"))


def print_run(plan: Plan, report: RunReport, width: int | None = None) -> None:
    """Print losses, periods, and one row per stage: planned and measured times and activation peaks."""
    out = console(width)
    losses = report.step_losses
    out.print(
        f"{report.steps} updates of {report.microbatches // report.steps} microbatches in {report.seconds:.1f} s, "
        f"{report.samples_per_s:.1f} samples/s; loss {losses[0]:.4f} -> {losses[-1]:.4f}\n"
    )
    for text in _periods(plan, report):
        out.print(text)
    out.print()
    table = make_table("stage", "forward", "planned", "backward", "planned")
    for stage in report.stages:
        times = stage.forward_ns, stage.planned_forward_ns, stage.backward_ns, stage.planned_backward_ns
        table.add_row(str(stage.stage), *map(format_ns, times))
    print_fitted(out, table)
    for line in (*_stages(report), *_reading(report), *_devices(report), *_training(report)):
        out.print(line)


def _periods(plan: Plan, report: RunReport) -> Iterator[str | Text]:
    measured, calibrated = report.measured_period_ns, report.calibrated_period_ns
    if measured is None:
        yield "period      too few microbatches for a steady state; more --steps show one"
        return
    yield Text.assemble(
        "period      ", (format_ns(measured), "bold"), " measured, median over the updates of the middle"
    )
    if calibrated is not None:
        yield (
            f"            {format_ns(calibrated)} predicted with this run's own operation times: "
            f"measured is {measured / calibrated - 1:+.1%}"
        )
    if elsewhere(plan.chain, "cpu" if report.exchange == "gloo" else "cuda"):
        name, here = shown(plan.chain.device), ", ".join(map(shown, sorted(set(report.hardware))))
        said = f"for {name}; this run was on {here}, so planned times aren't its own"
    else:
        said = f"from the profile: measured is {measured / report.planned_period_ns - 1:+.1%}"
    yield f"            {format_ns(report.planned_period_ns)} planned {said}"
    if report.bracket is not None:
        before, after = (format_ns(report.planned_period_ns * x) for x in report.bracket)
        yield f"            {before} by a profile right before, {after} right after: {_VERDICTS[report.verdict]}"
    if report.kept_off > KEPT_OFF:
        yield f"            others computed: a rank waited {report.kept_off:.0%} of the time for a core"
    if kind_of(plan).by_arrival and calibrated is not None:
        count = report.microbatches // report.steps
        yield f"makespan    {format_ns(measured * count)} of a mini-batch, by messages, limit {plan.schedule.limit}"
        yield f"            {format_ns(calibrated * count)} simulated with this run's own operation times"


def _stages(report: RunReport) -> Iterator[str]:
    """Yield what else is known of stages, and of messages between them."""
    if report.forgotten:
        yield f"times are of the run's begin and end; {report.forgotten} operations between them weren't kept"
    kept, planned = (", ".join(str(getattr(x, n)) for x in report.stages) for n in ("versions", "planned_versions"))
    yield f"weight versions kept, by stage: {kept} measured, {planned} predicted"
    for stage in report.stages:
        if stage.sum_ns:
            hidden = 1 - stage.sum_wait_ns / stage.sum_ns
            yield f"sums of stage {stage.stage} take {format_ns(stage.sum_ns)} an update, {hidden:.0%} of it hidden"
    if report.transfers:
        measured, foreseen = ([getattr(x, f"{how}_ns") for x in report.transfers] for how in ("measured", "planned"))
        yield f"hand-overs take {_span(measured)} one way, {_span(foreseen)} planned"
    if report.exchange == "gloo" and report.activations and len(report.stages) > 1:  # hosts of GPUs do it beside passes
        worked, foreseen = ([getattr(x, f"{of}exchange_ns") for x in report.stages] for of in ("", "planned_"))
        yield f"stages work {_span(worked)} of each microbatch for messages, {_span(foreseen)} planned"


def _devices(report: RunReport) -> Iterator[str]:
    """Yield what the run was on, and what memory it took there."""
    if report.exchange != "gloo":
        hardware = ", ".join(map(shown, sorted(set(report.hardware))))
        yield f"ran on {hardware}; {_EXCHANGES[report.exchange, report.sums]}"
    for memory in report.memory:
        short = f"; memory was short {memory.retries} times" if memory.retries else ""
        yield (
            f"{gpu_name(memory.device, report.width)}: {format_bytes(memory.measured_bytes)} allocated at most, "
            f"{format_bytes(memory.planned_bytes)} predicted; torch held {format_bytes(memory.reserved_bytes)}, in use "
            f"with CUDA's context and exchanges were {format_bytes(memory.used_bytes)}{short}"
        )
    for held in report.activations:
        more = held.allowed_bytes > held.planned_bytes
        otherwise = f", {format_bytes(held.allowed_bytes)} if messages came otherwise" if more else ""
        yield (
            f"{gpu_name(held.device, report.width)}: activations at most {format_bytes(held.measured_bytes)} measured, "
            f"{format_bytes(held.planned_bytes)} predicted{otherwise}{_at_home(held)}"
        )
    for state in report.states:
        yield (
            f"{gpu_name(state.device, report.width)}: weights, gradients and optimizer at most "
            f"{format_bytes(state.measured_bytes)} measured, {format_bytes(state.planned_bytes)} predicted"
            f"{_at_home(state)}"
        )


def _at_home(held: DeviceActivations | DeviceState) -> str:
    """Return in words what a rank had in host memory, if anything."""
    figures = held.measured_host_bytes, held.planned_host_bytes
    return "; in host memory {} measured, {} predicted".format(*map(format_bytes, figures)) if any(figures) else ""


def _training(report: RunReport) -> Iterator[str]:
    if report.evaluations:
        early = "; it got no better, so the run ended" if report.ended_early else ""
        yield f"evaluations: {len(report.evaluations)}, the best after update {report.best_step}{early}"
    norms = [norm for norm in report.gradient_norms if norm is not None]
    if norms:
        yield (
            f"gradient norms {min(norms):.4g} to {max(norms):.4g}, {statistics.median(norms):.4g} in the median, "
            "before they were clipped"
        )
    if report.loss_scale is not None:
        yield f"loss scale {report.loss_scale:g} at the end; updates skipped for overflow: {len(report.skipped)}"


def _reading(report: RunReport) -> Iterator[str]:
    """Yield how long reading takes, and what of that stages wait for: then it is in the prediction, too."""
    for read in (read for read in report.reading if read.workers):
        several = f"each of {read.workers} workers" if read.workers > 1 else "a worker"
        yield f"{gpu_name(read.device, report.width)}: {several} reads a microbatch in {format_ns(read.read_ns)}"
    period = report.measured_period_ns or 0
    for stage in report.stages:
        if stage.data_ns:
            planned = f", {format_ns(stage.planned_data_ns)} planned" if stage.planned_data_ns else ""
            yield f"stage {stage.stage} spends {format_ns(stage.data_ns)} of each microbatch on reading it{planned}"
        if stage.data_wait_ns > WAITS * period:
            wait = format_ns(stage.data_wait_ns)
            yield f"stage {stage.stage} waits {wait} for each microbatch to be read; more workers may help"


def _span(times_ns: Sequence[int]) -> str:
    return " to ".join(map(format_ns, dict.fromkeys((min(times_ns), max(times_ns)))))

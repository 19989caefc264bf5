"""``pipeplan run``: how does training go under a plan? On torch processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ..choices import DRAINED
from ..errors import BadInput, PipeplanError, RunStopped
from ..registry import Late
from .options import DEBUG, JSON, MODEL, PLAN, RUN_SCHEDULE, TIME, TIME_ABOVE_0, CountOr, Named, Number, options
from .run_asked import model_of, options_of, plan_against, plan_to_run, refuse_together
from .showing import GroupedCommand, new_command, note, refuse_two_documents, status

if TYPE_CHECKING:
    from ..plan import Plan
    from ..runtime.engine.job import RunOptions
    from ..runtime.measure.progress import StepProgress
    from ..runtime.measure.report import RunReport
    from ..runtime.model.build.spec import ModelSpec

period_now = Late("api.bracket:period_now")
PATH = click.Path(path_type=Path)
WORDS = 40  # of each rank's program that a dry run prints


def _words(_: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    words = () if text is None else tuple(text.split(","))
    if not all(word.strip() == word and word for word in words):
        raise click.BadParameter("expected words with commas between them", param=option)
    return words


RUN = """
--model MODEL               zoo:NAME, hf:CONFIG or module:function.  [default: the zoo model of the plan's name]
--data MODULE:FUNCTION
    data(index, seed) -> (input, target), or what is or returns a DataLoader or a Dataset.  [default: the zoo's]
--tensor-plan MODULE:FUNCTION
    Where GPUs run layers together: {name: "colwise" or "rowwise"} of --model's matrices, such as {"*.up": "colwise"}.
--steps N                   Weight updates, those of a resumed run included.  [default: 50]
--epochs N                  Instead of --steps: passes over the data, of whole updates.
--epoch-length N            Microbatches of an epoch.  [default: those that the data have]
--evaluate (evaluates)      Run forward alone; options for updates do nothing.
--lr X                      Learning rate.  [default: 0.1 with SGD, torch's own with others]
--optimizer NAME[,OPTION=VALUE...]
    Of torch.optim, such as AdamW,weight_decay=0.01, or module:function.  [default: the plan's]
--no-decay WORD,..
    No weight decay if a weight's name, or its module's class, contains a word, such as norm,bias.
--groups MODULE:FUNCTION    groups(named_parameters) -> the optimizer's parameter groups, as torch takes them.
--scheduler NAME[,OPTION=VALUE...]
    Of torch.optim.lr_scheduler, such as StepLR,step_size=10 or CosineAnnealingLR, which ends with the run if nothing
    else is said, or module:function; steps after each update.
--warmup N = 0 {0..1000000000}
    First updates, in which the learning rate rises.
--clip-norm X               Clip gradients to this total norm over all stages; with weights flush and 2bw.
--eval-data MODULE:FUNCTION Evaluate on these, as --data, while training.
--eval-every N              Updates between two evaluations, also after the last.  [default: an epoch's]
--eval-batches N            Microbatches of an evaluation.  [default: those that the data have]
--metrics MODULE:FUNCTION   metrics(output, target) -> a number, or a dict of them: their means.
--monitor NAME|max:NAME = loss
    What makes an evaluation the best: its checkpoint goes to best/ among --checkpoint's.
--patience N                End after N evaluations without a new best.
--ema X                     Keep a running average of the weights with this decay, such as 0.999.
--delay-correction none|sc|predict|both
    What to do about late gradients: compensate in the optimizer (sc), predict weights, both, or none.  [default: both,
    and sc where the copy of fp32 weights doesn't fit or gradients are late by more than an update]
--averaged                  Save and evaluate that average.
--callback MODULE:FUNCTION  callback(step, metrics) after every update and every evaluation.
--vertical-sync             With weights stash or latest: the same version on all stages.
--schedule NAME|FILE.csv
    Run the plan's stages under this schedule instead. A file gives the order as torch reads it; best searches for some
    seconds.
--limit N {1..1000000}
    Maximum in flight: microbatches in each message-driven pipeline, or under pipedream; nf1b: mini-batches.
--half bf16|fp16            With mixed precision and autocast.  [default: the profile's]
--loss-scale X              First scale of the loss; fp16: 65536, bf16: 1.
--loss-scale-window N {0..1000000000}
    Double the scale after N updates without overflow; 0: never.  [default: 2000]
--bucket-size N             Parameters stepped, and summed, at a time.  [default: the plan's]
--coarsening K|all
    Buckets in one sum over replicas; the next is under way while they are stepped.  [default: the plan's, or 2]
--seed SEED = 0
--timeout TIME              Longest wait for another rank, such as 60s.  [default: from the plan]
--link-delay TIME           Delay every message by this time, to imitate a slow network.
--threads N = 1 {1..1024}   CPU threads of each process.
--device auto|cpu|cuda = auto
    auto: GPUs, unless the plan's profile is of a CPU.
--save FILE                 Write the trained state_dict: .safetensors, or torch.save.
--load PATH
    Start from a state_dict, unless a checkpoint is found: a file of torch's or safetensors, or a folder.
--checkpoint DIR            Write checkpoints here, at the end and on SIGTERM too.
--checkpoint-every N (every)
    After every N updates as well.  [default with --epochs: after every epoch]
--keep-checkpoints N (keep) Keep the newest N good ones, remove older ones.  [default: keep all]
--resume                    Resume from the newest good checkpoint, if one exists.
--max-restarts N = 0 {0..1000000000}
    Restarts after failures.
--log-dir DIR               Write loss, time per microbatch and memory here, for TensorBoard.
--trace OUT                 Write every operation's times for ui.perfetto.dev and pipeplan diff.
--no-compare (compares)     Don't compare the first microbatch of a traced model with plain training before it trains.
--bracket                   Profile right before and after, and print why the run differs from the plan.
--against flush|PLAN
    Then train the same from a plan that drains, or from this plan, and compare losses and times.
--dry-run                   Print the torchrun and Slurm lines and every rank's program, and end.
"""


class RankCommand(GroupedCommand):
    """A command that under torchrun is one of several: what ends it before all have met, the others hear at once."""

    def make_context(self, *arguments: Any, **more: Any) -> click.Context:
        """Read the command line."""
        if "--json" in arguments[1]:  # whose lines are all there is on standard error
            status().say("")
        with _heard_by_others():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: click.Context) -> Any:
        """Run."""
        with _heard_by_others():
            return super().invoke(ctx)


@contextmanager
def _heard_by_others() -> Iterator[None]:
    from ..runtime.processes.watchdog import TORCHRUN, watching

    if any(name not in os.environ for name in TORCHRUN):
        yield
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that has gone is no reason for a page of C++
    with watching() as watch:
        watch.tell_signal = Late("runtime.processes.launch:told_of_signal")
        try:
            yield
        except (RunStopped, click.exceptions.Exit):
            raise
        except Exception as error:
            told = BadInput(error.format_message()) if isinstance(error, click.ClickException) else error
            with suppress(ImportError):  # without torch there are no others
                Late("runtime.processes.launch:tell_others")(told, watch)
            raise


@new_command(
    "pipeplan run plan.json --model zoo:gpt-tiny --steps 50",
    "pipeplan run plan.json --model mymodel:build --data mymodel:data --epochs 3 --checkpoint run --resume",
    cls=RankCommand,
)
@PLAN
@options(
    RUN,
    model=MODEL,
    no_decay={"callback": _words},
    clip_norm=Number(above=True),
    schedule=RUN_SCHEDULE,
    loss_scale=Number(above=True),
    ema={"metavar": "DECAY"},
    coarsening=CountOr("K|all", "all", 0),
    timeout=TIME_ABOVE_0,
    link_delay=TIME,
    save=PATH,
    load=PATH,
    every={"metavar": "N"},
    keep={"metavar": "N"},
    compares={"flag_value": False, "default": True},
    against=Named(lambda: (DRAINED,), files=True),
)
@JSON
@DEBUG
def command(
    plan: str,
    model: str | None,
    data: str | None,
    tensor_plan: str | None,
    log_dir: Path | None,
    trace: str | None,
    bracket: bool,
    against: str | None,
    dry_run: bool,
    as_json: bool,
    callback: str | None,
    **given: Any,
) -> None:
    """Train from PLAN with one process per GPU over torch.distributed, and print measured beside predicted.

    Starts its processes itself; under torchrun it is the rank that the environment names. With --json a line for each
    update goes to standard error.
    """
    refuse_together(trace, log_dir, against, bracket, given)
    refuse_two_documents(as_json, trace=trace)
    other = None if against is None else plan_against(against, plan, given)
    loaded = plan_to_run(plan, given)
    if tensor_plan is not None:
        model = f"{model or loaded.chain.name},tensor_plan={tensor_plan}"
    spec = model_of(model, data, plan, loaded.chain.name)
    asked = replace(options_of(loaded, spec, given), traced=trace is not None)
    if dry_run:
        _print_dry_run(loaded, asked, as_json)
        return
    away = _announce(loaded, spec, asked, as_json)
    from ..files.text import write_text
    from ..report.tables.run import print_report, progress_printer
    from ..report.traces import measured_trace
    from ..runtime.processes.launch import run_plan

    listeners = [progress_printer(loaded, as_json, away), *([] if callback is None else [_calling(callback)])]

    def write_trace(report: RunReport) -> None:
        if trace is not None:
            write_text(trace, measured_trace(loaded, report))

    heard = {} if as_json else {"say": status().say}
    measure = partial(period_now, loaded, spec, asked.threads, **heard) if bracket else None
    before = 0.0 if measure is None else measure()
    with ExitStack() as held:
        scalars = None if log_dir is None else held.enter_context(closing(Late("runtime.scalars:Scalars")(log_dir)))
        if scalars is not None:
            listeners.append(scalars.hear)

        def hear(step: StepProgress) -> None:
            for listener in listeners:
                listener(step)

        try:
            report = run_plan(loaded, spec, asked, hear, note, None if as_json else status())
        except RunStopped as stopped:
            if stopped.report is not None:
                write_trace(cast("RunReport", stopped.report))
            raise
        if report is not None and scalars is not None:
            scalars.finish(report, asked.steps)
    if report is None:  # another rank under torchrun reports
        return
    if measure is not None:
        try:
            report = replace(report, bracket=(before, measure()))
        except PipeplanError as error:  # what was trained counts more
            note(f"no profile after the run: {error}")
    for words in () if as_json else (*report.notes, *filter(None, [report.compared])):
        note(words)
    write_trace(report)
    second = None
    if other is not None:
        alone = replace(asked, save=None, checkpoint=None, every=None, keep=None, traced=False)
        again = run_plan(other, spec, alone, None, note, None if as_json else status())
        assert again is not None, "no other rank reports"
        second = other, again
    if trace != "-":
        print_report(loaded, report, asked.evaluates, as_json, second)


def _calling(callback: str) -> Callable[[StepProgress], None]:
    """Return what calls a user's function after updates and evaluations."""
    from ..runtime.measure.progress import metrics_of
    from ..runtime.model.build.spec import find
    from ..runtime.model.user_code import user_code

    function = find(callback)

    def call(step: StepProgress) -> None:
        with user_code(f"--callback {callback}"):
            function(step.step, metrics_of(step))

    return call


def _print_dry_run(plan: Plan, options: RunOptions, as_json: bool) -> None:
    from ..report.tables.run import print_dry_run
    from ..runtime.lowering.dry_run import program_lines, slurm_line, torchrun_line
    from ..runtime.lowering.lowered_run import lower_run

    lowered = lower_run(plan, options.steps, every=options.every, evaluates=options.evaluates)
    arguments = [argument for argument in sys.argv[1:] if argument != "--dry-run"]
    on_gpus = options.device == "cuda" or (options.device == "auto" and not plan.chain.of_cpu)
    lines = torchrun_line(lowered, arguments), slurm_line(lowered, arguments, on_gpus)
    print_dry_run(lowered, *lines, program_lines(lowered, None if as_json else WORDS), as_json)


def _announce(plan: Plan, spec: ModelSpec, options: RunOptions, as_json: bool) -> bool:
    """Say what begins, and what is unusual about it; return whether it is away from the device of the profile."""
    from ..report.tables.run import announced, elsewhere
    from ..runtime.device import kind_of, sharing
    from ..runtime.lowering.lowered_run import processes_of
    from ..runtime.processes.rendezvous import number_in_environment
    from ..runtime.surroundings import untried
    from ..schedule.kinds import KINDS

    ranks = processes_of(plan)
    by_threads = KINDS[plan.schedule.kind].by_arrival or options.link_delay_s > 0
    kind = kind_of(options.device, plan.chain)
    notes = sharing(kind, number_in_environment("LOCAL_WORLD_SIZE", ranks), by_threads), untried(version("torch"))
    for words in () if as_json or number_in_environment("LOCAL_RANK") else filter(None, notes):
        note(words)
    away = elsewhere(plan.chain, kind)
    spec.check()  # what is wrong with its names is said alone
    if not (as_json or options.evaluates or number_in_environment("RANK")):
        click.echo(announced(plan, options.steps, away), err=True)
    return away

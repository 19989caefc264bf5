"""How is a plan run? By one process for each device, or as one of those that torchrun started; a report comes back.

Whatever goes wrong on any rank ends the run on all of them, with one sentence about the rank that failed first.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch.distributed as dist

from ...errors import RunFailed
from ...plan import Plan
from ...scratch import scratch_folder
from ...status import Status
from ..device import kind_of
from ..engine.failure import GRACE_S, Failure, failure_of, root_cause
from ..engine.job import Job, job_of
from ..engine.launcher import Launcher
from ..engine.options import RunOptions
from ..engine.phases import run_rank
from ..lowering.instructions import sentence
from ..lowering.lowered_run import LoweredRun
from ..measure.progress import Progress, StepDone, StepProgress, place, teller
from ..measure.report import RunReport
from ..model.build.spec import ModelSpec
from ..training.state.checkpoint import Alone
from .inbox import Gone, Inbox
from .own_processes import (
    ENDING,
    LOOK_S,
    QuietWatch,
    StopWatch,
    context_of,
    follow_parent,
    is_stopped,
    leave,
    our_imports_alone,
    settle_in,
    uninterrupted,
)
from .peers import writing_to
from .resuming import resume_point
from .stopping import SharedStop, asked, stopped_after
from .torchrun import is_under_torchrun, run_under_torchrun

END_S: Final = 2.0  # for which a rank that is told to end may take
TELL_NS: Final = 10**8  # updates that follow each other faster are told together


def run_plan(
    plan: Plan,
    model: ModelSpec,
    options: RunOptions,
    listener: Callable[[StepProgress], None] | None = None,
    note: Callable[[str], None] | None = None,
    status: Status | None = None,
) -> RunReport | None:
    """Train ``model`` as ``plan`` and ``options`` say; return what happened.

    ``listener`` hears of every update, ``note`` of every damaged checkpoint that is passed over and, on several nodes,
    where rank 0 is; ``status`` says at which microbatch the last stage is.

    The plan's policy gives weights, optimizer and microbatches per update. One process runs for each used device:
    processes of its own on this machine, or under torchrun the calling process as the rank that its environment names
    (then only rank 0 gets a report, the others None).

    BadInput when the model isn't what the plan was made for, or the plan cannot be run; RunFailed when a rank fails,
    with the rank and the operation; RunStopped after a signal.
    """
    if is_under_torchrun():
        return run_under_torchrun(plan, model, options, listener, note, status)
    options.check()
    model.check()
    job = job_of(plan, model, options)
    kind_of(options.device, plan.chain)  # whether there is a GPU shows before any process starts
    with writing_to(job.folder, Alone()):
        for attempt in range(options.max_restarts + 1):
            if options.resume or attempt:
                job = replace(job, resume=resume_point(job, note, Alone()))
            lowered = job.lowered()
            try:
                return _run_here(job, lowered, listener, status or Status())
            except RunFailed:
                if attempt == options.max_restarts:
                    raise
    raise AssertionError("the last attempt returns or raises")


# --- processes of our own -------------------------------------------------------------------------------------------


def _run_here(
    job: Job, lowered: LoweredRun, listener: Callable[[StepProgress], None] | None, status: Status
) -> RunReport:
    """Start all ranks on this machine, wait for them, and leave none behind, whatever happens."""
    kind = kind_of(job.options.device, job.plan.chain)
    context = context_of()
    progress = context.RawArray("q", [-1] * len(lowered.devices))  # the instruction that each rank is at
    begun, last = SharedStop(context), teller(lowered)
    status.say(lambda: place(lowered, progress[last]) if progress[last] >= 0 else f"starting {len(progress)} processes")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    signals = asked(lambda: begun.stop(lowered.first.step), job.stops)
    ends, end = context.Pipe(duplex=False)
    with scratch_folder() as folder, signals:
        try:
            with uninterrupted(), our_imports_alone():
                for rank in range(len(lowered.devices)):
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_rank_main,
                        args=(job, rank, len(lowered.devices), f"{folder}/store", progress, begun, theirs, ends),
                        name=f"pipeplan rank {rank}",
                    )
                    process.start()
                    theirs.close()
                    processes.append(process)
                    pipes.append(ours)
            timeout_s = job.timeout_s(lowered)
            hear = _hearing(lowered, listener)
            report = _outcome(lowered, processes, pipes, progress, timeout_s, kind == "cuda", hear)
        finally:
            _stop(processes, end)
            status.say("report")
    if report.steps < lowered.steps and not report.ended_early:
        raise stopped_after(lowered.first.step + report.steps, job.folder, report)
    return report


def _hearing(lowered: LoweredRun, listener: Callable[[StepProgress], None] | None) -> Callable[[StepDone], None]:
    if listener is None:
        return lambda _: None
    replicas = lowered.plan.allocation.stages[-1].replicas
    return Progress(listener, replicas, lowered.last.step, lowered.interval, lowered.plan.chain.microbatch).hear


def _outcome(
    lowered: LoweredRun,
    processes: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    progress: Sequence[int],
    timeout_s: float,
    on_gpus: bool,
    hear: Callable[[StepDone], None],
) -> RunReport:
    """Wait for all ranks' messages: return rank 0's report, or raise the root cause soon after the first failure.

    A rank that is stopped for ``timeout_s`` has failed, whether others wait for it or not. So have all when, once they
    are at work, none has gone on for somewhat longer than that.
    """

    def place(rank: int) -> str:
        index = progress[rank]
        return f" in {sentence(lowered.instructions[rank][index])}" if index >= 0 else " before its first operation"

    failures: list[Failure] = []
    by_itself: list[Failure] = []  # unless another one turns out to have failed
    report: RunReport | None = None
    inbox, silent = Inbox(pipes), set(range(len(pipes)))
    deadline: float | None = None
    stopped, quiet, heard = StopWatch(), QuietWatch(), 0
    while silent and (deadline is None or time.monotonic() < deadline):
        news = inbox.next(LOOK_S if deadline is None else max(0.0, deadline - time.monotonic()))
        failures += [
            Failure(rank, "died", f"rank {rank} has been stopped for {seconds:g} s{place(rank)}")
            for rank, seconds in stopped.look({rank: processes[rank].pid for rank in silent}).items()
            if seconds >= timeout_s
        ]
        quiet_s = quiet.look((heard, *progress))
        heard += news is not None
        if quiet_s >= timeout_s + GRACE_S and max(progress) >= 0:
            failures.append(Failure(min(silent), "lost", f"nothing has happened for {timeout_s + GRACE_S:g} s"))
        if news is not None and news[0] in silent:
            rank, message = news
            if isinstance(message, list):
                for step in message:
                    hear(step)
                continue
            silent.discard(rank)
            if isinstance(message, Gone):
                processes[rank].join()
                how = _how(processes[rank].exitcode)
                # torch's watchdog aborts a process that waits for another one, and one whose GPU has failed
                lost = on_gpus and processes[rank].exitcode == -signal.SIGABRT
                message = Failure(rank, "lost" if lost else "died", f"rank {rank} died{place(rank)}: {how}")
                if lost and quiet_s < timeout_s:
                    by_itself.append(message)
            if isinstance(message, Failure):
                failures.append(message)
            elif message is not None:
                report = message
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if any(failure.kind != "lost" for failure in failures):
            break
    if failures:
        root = root_cause(failures)
        if root.kind == "lost" and silent:
            still = [rank for rank in sorted(silent) if is_stopped(processes[rank].pid)]
            what = "is stopped" if still else "doesn't answer"
            hung = "; ".join(f"rank {rank} {what}{place(rank)}" for rank in still or sorted(silent))
            words = f"{hung}: {root.message}"
            if root in by_itself and not still:
                words = f"{root.message}; torch ends a process so whose GPU has failed, and says above how"
            root = Failure(root.rank, "lost", words, root.trace)
        raise root.error()
    assert report is not None, "rank 0 reports when no rank has failed"
    return report


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exit code {exitcode}"


def _stop(processes: Sequence[BaseProcess], end: Connection) -> None:
    """Let what still runs give back what it has, and end; kill what doesn't."""
    end.close()
    until = time.monotonic() + END_S
    for process in processes:
        process.join(0.0 if is_stopped(process.pid) else max(0.0, until - time.monotonic()))
        process.kill()
    for process in processes:
        process.join()
        process.close()


def _rank_main(
    job: Job,
    rank: int,
    world: int,
    store_path: str,
    progress: Any,
    begun: SharedStop,
    pipe: Connection,
    ends: Connection,
) -> None:
    """Be one rank: send the report or the failure, and go."""
    for signum in ENDING:  # they may reach all of our processes; the parent ends us
        signal.signal(signum, signal.SIG_IGN)
    settle_in()
    threading.Thread(target=follow_parent, args=(ends,), daemon=True).start()
    code = 0

    def open_store() -> Any:
        return dist.FileStore(store_path, world)  # type: ignore[attr-defined]  # not exported for type checkers

    def at(index: int) -> None:
        progress[rank] = index

    untold: list[StepDone] = []
    told_ns = 0

    def done(step: StepDone) -> None:
        nonlocal told_ns
        untold.append(step)
        if step.at_ns - told_ns >= TELL_NS:
            pipe.send(untold)
            untold.clear()
            told_ns = step.at_ns

    try:
        message: Any = run_rank(job, rank, Launcher(open_store, at, done, begun.may_begin, rank))
    except BaseException as error:
        message = failure_of(rank, error)
        code = 1
    pipe.send(untold)
    pipe.send(message)
    pipe.close()
    leave(code)

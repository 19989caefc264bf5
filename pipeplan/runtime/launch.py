"""Run a plan: start one process for each device, or be one of those that torchrun started, and return the report.

Whatever goes wrong on any rank ends the run on all of them, with one sentence about the rank that failed first.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import BadInput, RunFailed, RunStopped
from ..plan import Plan
from .device import Choice as DeviceChoice
from .device import kind_of
from .failure import Failure, failure_of, root_cause, told
from .launcher import Launcher
from .lowering.instructions import sentence
from .lowering.lowered_run import Script
from .measure.progress import Progress, StepDone, StepProgress
from .measure.report import RunReport
from .model.spec import ModelSpec
from .options import Engine, Job
from .rank import run_rank
from .stopping import SharedStop, StoreStop
from .training.checkpoint import Checkpoint, newest, usable_folder
from .training.half import AS_PROFILED, HalfOptions
from .training.optimizers import Choice, optimizer_maker, planned_as, schedule_maker

LEAST_TIMEOUT_S: Final = 60.0
PATIENCE: Final = 20  # times what one microbatch takes through the whole pipeline
GRACE_S: Final = 2.0  # in which the root cause of a failure is waited for when only its symptoms are known
TELL_NS: Final = 10**8  # updates that follow each other faster are told together
TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_plan(
    plan: Plan,
    model: ModelSpec,
    *,
    steps: int,
    lr: float,
    seed: int = 0,
    timeout_s: float | None = None,
    threads: int = 1,
    save: Path | None = None,
    load: Path | None = None,
    optimizer: Choice | None = None,
    scheduler: Choice | None = None,
    evaluates: bool = False,
    epoch: int | None = None,
    checkpoint: Path | None = None,
    every: int | None = None,
    keep: int | None = None,
    resume: bool = False,
    max_restarts: int = 0,
    engine: Engine = "own",
    device: DeviceChoice = "auto",
    link_delay_s: float = 0.0,
    half: HalfOptions = AS_PROFILED,
    bucket_size: int | None = None,
    coarsening: int | None = None,
    listener: Callable[[StepProgress], None] | None = None,
) -> RunReport | None:
    """Train ``model`` as ``plan`` says until ``steps`` weight updates are made at rate ``lr``; return what happened.

    The plan's policy gives weights, optimizer and microbatches per update; ``optimizer`` overrides its optimizer,
    ``scheduler`` changes the learning rate after each update. With ``evaluates`` the model is run forward alone on as
    many microbatches. One process runs for each used device, with ``threads`` CPU threads: processes of its own on this
    machine, or under torchrun the calling process as the rank that its environment names (then only rank 0 gets a
    report, the others None). ``device`` says on what: CPUs over gloo; GPUs over NCCL, or through the host where ranks
    share one; ``auto`` takes GPUs if torch sees any and the plan's profile isn't of a CPU. ``timeout_s`` limits every
    wait for another rank; the default comes from the plan. ``save`` is a file for the trained model's ``state_dict``,
    ``load`` one to start from. Data repeats after ``epoch`` microbatches, with the next seed. ``link_delay_s`` makes
    every message between ranks come so much later, to see what a slow network would do. ``listener`` hears of every
    update.

    A checkpoint is written to the folder ``checkpoint`` at the end, after each update whose number ``every`` divides,
    and when SIGTERM or SIGINT comes; the pipeline drains before it, so with weights that outlive an update the next
    ones see fresher weights than without. The newest ``keep`` stay, all by default. With ``resume`` the run goes on
    from the folder's newest complete checkpoint, if there is one. A run that fails for other reasons than its input
    begins again up to ``max_restarts`` times, from the newest checkpoint. ``engine`` "torch" runs a drained schedule on
    torch's own pipeline runtime, which measures updates alone.

    A plan of mixed precision runs in its profile's 16 bits, or those that ``half`` says. With offloading
    ``bucket_size`` parameters are stepped at a time (None: as the plan says). Replicas sum ``coarsening`` buckets of
    the gradient at once and step them while the next ones are under way (None: as serves; 0: all).

    BadInput when the model isn't what the plan was made for, or the plan cannot be run; RunFailed when a rank fails,
    with the rank and the operation; RunStopped after a signal.
    """
    if save is not None and not save.parent.is_dir():
        raise BadInput(f"save: there is no folder {save.parent}")
    if keep is not None and keep < 1:
        raise BadInput(f"keep: {keep} is not a positive number of checkpoints")
    if checkpoint is None and (resume or every is not None or keep is not None):
        raise BadInput("checkpoint: no folder is named to resume from or to write to")
    if engine == "torch" and checkpoint is not None:
        raise BadInput("checkpoint: torch's engine writes none")
    if checkpoint is not None and evaluates and (not resume or every is not None or keep is not None):
        raise BadInput("checkpoint: an evaluation changes nothing; it can only resume from one")
    if optimizer is not None:
        optimizer_maker(optimizer, lr)  # what is wrong with it shows before any process starts
    if scheduler is not None:
        schedule_maker(scheduler)
    if optimizer is not None and (planned := planned_as(optimizer)) is not None:
        plan = replace(plan, policy=replace(plan.policy, optimizer=planned))
    if bucket_size is not None:
        plan = replace(plan, policy=replace(plan.policy, bucket_parameters=bucket_size))
    job = Job(
        plan=plan,
        model=model,
        steps=steps,
        lr=lr,
        seed=seed,
        timeout_s=timeout_s or 0.0,
        threads=threads,
        save=_absolute(save),
        load=_absolute(load),
        optimizer=optimizer,
        scheduler=scheduler,
        evaluates=evaluates,
        epoch=epoch,
        checkpoint=_absolute(checkpoint),
        every=every,
        keep=keep,
        engine=engine,
        device=device,
        link_delay_ns=round(link_delay_s * 1e9),
        half=half,
        coarsening=coarsening,
    )
    if bucket_size is not None and not job.has_buckets:
        raise BadInput("bucket size: the plan neither offloads optimizer state nor are sums cut into chunks")
    kind_of(device, plan.chain.device)  # whether there is a GPU shows before any process starts
    if job.checkpoint is not None:
        usable_folder(job.checkpoint)
    attempt = 0
    while True:
        if resume and job.checkpoint is not None:
            job = replace(job, resume=_found(job, job.checkpoint))
        if evaluates:
            begun = 0 if job.resume is None else job.resume.position.step
            job = replace(job, checkpoint=None, every=None, steps=begun + steps)
        script = job.script()
        if timeout_s is None:
            job = replace(job, timeout_s=max(LEAST_TIMEOUT_S, PATIENCE * script.graph.path_ns / 1e9))
        try:
            if all(name in os.environ for name in TORCHRUN):
                return _run_under_torchrun(job, script, listener)
            return _run_here(job, script, listener)
        except RunFailed:
            if attempt == max_restarts:
                raise
            attempt += 1
            resume = resume or checkpoint is not None


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _found(job: Job, folder: str) -> Checkpoint | None:
    found = newest(folder)
    if found is not None and found.model != job.plan.chain.name:
        raise BadInput(f"{found.path}: is of model {found.model}; the plan is for {job.plan.chain.name}")
    if found is not None and found.seed != job.seed:
        raise BadInput(f"{found.path}: was made with seed {found.seed}, which gave its data; this run has {job.seed}")
    return found


# --- processes of our own -------------------------------------------------------------------------------------------


def _run_here(job: Job, script: Script, listener: Callable[[StepProgress], None] | None) -> RunReport:
    """Start all ranks on this machine, wait for them, and leave none behind, whatever happens."""
    context: Any
    if kind_of(job.device, job.plan.chain.device) == "cuda":
        context = multiprocessing.get_context("spawn")  # CUDA doesn't survive a fork
    else:
        # what takes seconds to import is imported once, in a server from which the ranks are forked
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo", "torch.distributed.checkpoint"])
    progress = context.RawArray("q", [-1] * len(script.devices))  # the instruction that each rank is at
    begun = SharedStop(context)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    asked = _asked(job, lambda: begun.stop(script.first.step))
    with tempfile.TemporaryDirectory(prefix="pipeplan-run-") as folder, asked:
        try:
            with _uninterrupted():
                for rank in range(len(script.devices)):
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_rank_main,
                        args=(job, rank, len(script.devices), f"{folder}/store", progress, begun, theirs),
                        name=f"pipeplan rank {rank}",
                    )
                    process.start()
                    theirs.close()
                    processes.append(process)
                    pipes.append(ours)
            report = _outcome(script, processes, pipes, progress, _hearing(script, listener))
        finally:
            _stop(processes)
    if report.steps < script.steps:
        raise _stopped(job, script.first.step + report.steps)
    return report


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back, from this thread and for ever from what is started meanwhile: none is lost half-started.

    It reaches all processes of a terminal, and those that import torch would tell of it. The mask is what they inherit;
    another thread of this process may still take the signal, whose handler then only notes it.
    """
    noted: list[int] = []
    handled = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: noted.append(number)) if handled else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if handled:
            signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if noted:
            signal.raise_signal(signal.SIGINT)


def _stopped(job: Job, step: int) -> RunStopped:
    return RunStopped(f"stopped after update {step}; its checkpoint is in {job.checkpoint}")


@contextmanager
def _asked(job: Job, stop: Callable[..., None], once: bool = True) -> Iterator[None]:
    """Let SIGTERM or SIGINT ``stop`` the run, if it has a folder for a checkpoint.

    The first one alone with ``once``; then the second acts as it would have.
    """
    if job.checkpoint is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}

    def act(*_: Any) -> None:
        stop()
        for number, handler in before.items() if once else ():
            signal.signal(number, handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, act)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hearing(script: Script, listener: Callable[[StepProgress], None] | None) -> Callable[[StepDone], None]:
    if listener is None:
        return lambda _: None
    replicas = script.plan.allocation.stages[-1].replicas
    return Progress(listener, replicas, script.last.step, script.interval, script.plan.chain.microbatch).hear


def _outcome(
    script: Script,
    processes: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    progress: Sequence[int],
    hear: Callable[[StepDone], None],
) -> RunReport:
    """Wait for all ranks' messages: return rank 0's report, or raise the root cause soon after the first failure."""

    def place(rank: int) -> str:
        index = progress[rank]
        return f" in {sentence(script.instructions[rank][index])}" if index >= 0 else " before its first operation"

    failures: list[Failure] = []
    report: RunReport | None = None
    silent = dict(enumerate(pipes))
    deadline: float | None = None
    while silent and (deadline is None or time.monotonic() < deadline):
        ready = wait(list(silent.values()), None if deadline is None else max(0.0, deadline - time.monotonic()))
        for rank, pipe in list(silent.items()):
            if pipe not in ready:
                continue
            try:
                message: Failure | RunReport | list[StepDone] | None = pipe.recv()
                if isinstance(message, list):
                    for step in message:
                        hear(step)
                    continue
                del silent[rank]
            except EOFError:
                del silent[rank]
                processes[rank].join()
                how = _how(processes[rank].exitcode)
                message = Failure(rank, "died", f"rank {rank} died{place(rank)}: {how}")
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
            hung = "; ".join(f"rank {rank} doesn't answer{place(rank)}" for rank in silent)
            root = Failure(root.rank, "lost", f"{hung}: {root.message}", root.trace)
        raise root.error()
    assert report is not None, "rank 0 reports when no rank has failed"
    return report


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exit code {exitcode}"


def _stop(processes: Sequence[BaseProcess]) -> None:
    """End what still runs; ranks that have reported end by themselves."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()


def _rank_main(
    job: Job, rank: int, world: int, store_path: str, progress: Any, begun: SharedStop, pipe: Connection
) -> None:
    """Be one rank: send the report or the failure, and go."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # they may reach all of our processes; the parent ends us
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
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
    # exchanges that never ended would hold up an orderly exit for ever
    os._exit(code)


def _follow_parent() -> None:
    """End this process when the one that started it has gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by a parent"
    parent.join()
    os._exit(1)


# --- torchrun -------------------------------------------------------------------------------------------------------


def _run_under_torchrun(job: Job, script: Script, listener: Callable[[StepProgress], None] | None) -> RunReport | None:
    """Be the rank that the environment names. The first failure is told to all through the store.

    The last stage's first replica tells of the progress, as far as it sees it itself.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != len(script.devices):
        raise BadInput(f"the plan uses {len(script.devices)} devices; torchrun started {world} processes")
    stores: list[Any] = []
    stops: list[StoreStop] = []

    def open_store() -> Any:
        store, _, _ = next(rendezvous("env://"))  # torchrun's own store outlives any rank
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        stores.append(dist.PrefixStore(f"pipeplan/{restart}", store))  # type: ignore[attr-defined]  # as above
        if job.checkpoint is not None:
            stops.append(StoreStop(stores[0], rank, world, script.first.step, job.timeout_s))
        return stores[0]

    def ask() -> None:
        if not stops:
            raise RunStopped("stopped before the first update; there is no new checkpoint")
        stops[0].ask()

    def may_begin(minibatch: int) -> bool:
        return all(stop.may_begin(minibatch) for stop in stops)

    done = Launcher(open_store).done
    if listener is not None and rank == script.ranks_of(len(script.plan.allocation.stages) - 1)[0]:
        done = Progress(listener, 1, script.last.step, script.interval, script.plan.chain.microbatch).hear
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    launcher = Launcher(open_store, done=done, may_begin=may_begin, local_rank=local_rank)
    try:
        # on Ctrl-C a rank hears of it twice, from the terminal and from torchrun, which kills it if it takes too long
        with _asked(job, ask, once=False):
            report = run_rank(job, rank, launcher)
    except RunStopped:
        raise
    except Exception as error:
        failure = failure_of(rank, error)
        for store in stores:
            failure = told(failure, store, GRACE_S)
        raise failure.error() from error
    finally:
        for stop in stops:
            stop.close()
    for stop in stops:
        if stop.limit < script.last.step:
            raise _stopped(job, stop.limit)
    return report

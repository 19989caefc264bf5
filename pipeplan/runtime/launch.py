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
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import BadInput
from ..plan import Plan
from .failure import Failure, failure_of, root_cause, told
from .instructions import sentence
from .measure import RunReport
from .model import ModelSpec
from .prepare import Script, prepare
from .worker import Job, run_rank

LEAST_TIMEOUT_S: Final = 60.0
PATIENCE: Final = 20  # times what one microbatch takes through the whole pipeline
GRACE_S: Final = 2.0  # in which the root cause of a failure is waited for when only its symptoms are known
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
) -> RunReport | None:
    """Train ``model`` as ``plan`` says, over ``steps`` weight updates at learning rate ``lr``; return what happened.

    The plan's policy gives weights, optimizer and microbatches per update. One process runs for each used device, on
    ``threads`` CPU threads, over gloo: processes of its own on this machine, or under torchrun the calling process as
    the rank that its environment names (then only rank 0 gets a report, the others None). ``timeout_s`` limits every
    wait for another rank; the default comes from the plan. ``save`` is a file for the trained model's ``state_dict``.

    BadInput when the model isn't what the plan was made for, or the plan cannot be run; RunFailed when a rank fails,
    with the rank and the operation.
    """
    script = prepare(plan, steps)
    if save is not None and not save.parent.is_dir():
        raise BadInput(f"save: there is no folder {save.parent}")
    job = Job(
        plan=plan,
        model=model,
        steps=steps,
        lr=lr,
        seed=seed,
        timeout_s=timeout_s if timeout_s is not None else max(LEAST_TIMEOUT_S, PATIENCE * script.graph.path_ns / 1e9),
        threads=threads,
        save=None if save is None else str(save.absolute()),
    )
    if all(name in os.environ for name in TORCHRUN):
        return _run_under_torchrun(job, script)
    return _run_here(job, script)


# --- processes of our own -------------------------------------------------------------------------------------------


def _run_here(job: Job, script: Script) -> RunReport:
    """Start all ranks on this machine, wait for them, and leave none behind, whatever happens."""
    # what takes seconds to import is imported once, in a server from which the ranks are forked
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # optimizers import the latter
    progress = context.RawArray("q", [-1] * len(script.devices))  # the instruction that each rank is at
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="pipeplan-run-") as folder:
        try:
            for rank in range(len(script.devices)):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(job, rank, len(script.devices), f"{folder}/store", progress, theirs),
                    name=f"pipeplan rank {rank}",
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _outcome(script, processes, pipes, progress)
        finally:
            _stop(processes)


def _outcome(
    script: Script, processes: Sequence[BaseProcess], pipes: Sequence[Connection], progress: Sequence[int]
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
            del silent[rank]
            try:
                message: Failure | RunReport | None = pipe.recv()
            except EOFError:
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
            process.terminate()
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _rank_main(job: Job, rank: int, world: int, store_path: str, progress: Any, pipe: Connection) -> None:
    """Be one rank: send the report or the failure, and go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes; the parent ends us
    threading.Thread(target=_follow_parent, daemon=True).start()
    code = 0

    def open_store() -> Any:
        return dist.FileStore(store_path, world)  # type: ignore[attr-defined]  # not exported for type checkers

    def at(index: int) -> None:
        progress[rank] = index

    try:
        message: Any = run_rank(job, rank, open_store, at)
    except BaseException as error:
        message = failure_of(rank, error)
        code = 1
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


def _run_under_torchrun(job: Job, script: Script) -> RunReport | None:
    """Be the rank that the environment names. The first failure is told to all through the store."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != len(script.devices):
        raise BadInput(f"the plan uses {len(script.devices)} devices; torchrun started {world} processes")
    stores: list[Any] = []

    def open_store() -> Any:
        store, _, _ = next(rendezvous("env://"))  # torchrun's own store outlives any rank
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        stores.append(dist.PrefixStore(f"pipeplan/{restart}", store))  # type: ignore[attr-defined]  # as above
        return stores[0]

    try:
        return run_rank(job, rank, open_store)
    except Exception as error:
        failure = failure_of(rank, error)
        for store in stores:
            failure = told(failure, store, GRACE_S)
        raise failure.error() from error

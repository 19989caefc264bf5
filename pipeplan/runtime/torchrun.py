"""How is a plan run by processes that torchrun started? Each is the rank that its environment names.

They agree on what they run before they meet, and whatever fails first is told to all.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import BadInput, RunStopped
from ..plan import Plan
from .agreement import checkpoint_items, compare, run_items
from .device import kind_of
from .failure import GRACE_S, failure_of, told
from .job import LEAST_TIMEOUT_S, Job, job_of
from .launcher import Launcher
from .measure.progress import Progress, StepProgress
from .measure.report import RunReport
from .model.spec import ModelSpec
from .model.user_code import RAISED
from .options import RunOptions
from .own_processes import is_here, listen_here
from .peers import StorePeers, writing_to
from .phases import run_rank
from .resuming import resume_point
from .stopping import StoreStop, asked, stopped_after
from .training.checkpoint import Alone, Peers

START_S: Final = 600.0  # by which nodes may start one after the other
AGENTS_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"  # that torchrun serves it, so that no rank need be there for it
TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COUNTS: Final = {  # where others that start processes say how many
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
}
_runs = itertools.count()  # of this process; each has keys of its own in the store


def is_under_torchrun() -> bool:
    """Whether the environment names a rank and where it meets the others.

    BadInput when it has a part of that, or when something else has started several of us: each would train alone.
    """
    missing = [name for name in TORCHRUN if name not in os.environ]
    if not missing:
        return True
    advice = "torchrun on every node starts the processes of a run; pipeplan run --dry-run prints its line"
    if len(missing) < len(TORCHRUN) and _number("WORLD_SIZE") > 1:
        raise BadInput(f"the environment has WORLD_SIZE {os.environ['WORLD_SIZE']} but no {missing[0]}: {advice}")
    for name, what in COUNTS.items():
        if _number(name) > 1:
            raise BadInput(f"{what} started {_number(name)} processes, each of which would train by itself: {advice}")
    return False


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


@dataclass(frozen=True)
class _Place:
    """The rank that this process is, of ``world``, and the number of this run among those of the process."""

    rank: int
    world: int
    run: int

    def open_store(self, seconds: float) -> Any:
        """Return torchrun's own store, which outlives any rank; what is in it is of this start of the ranks."""
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # not exported for type checkers
        return dist.PrefixStore(f"pipeplan/{restart}/{self.run}", store)  # type: ignore[attr-defined]


def run_under_torchrun(
    plan: Plan,
    model: ModelSpec,
    options: RunOptions,
    listener: Callable[[StepProgress], None] | None,
    note: Callable[[str], None] | None,
) -> RunReport | None:
    """Be the rank that the environment names; return the report on rank 0. The first failure is told to all.

    The last stage's first replica tells of the progress, as far as it sees it itself.
    """
    place = _Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), next(_runs))
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):  # a handler would wait for whatever this rank waits for
            signal.signal(number, signal.SIG_DFL)
    if _all_are_here(place.world):
        listen_here()
    stores: list[Any] = []
    try:
        return _run(place, plan, model, options, listener, note, stores)
    except RunStopped:
        raise
    except RAISED as error:
        failure = own = failure_of(place.rank, error)
        with _undisturbed():
            if not stores and os.environ.get(AGENTS_STORE) == "True":  # the ranks hadn't met, and others may wait
                stores.append(place.open_store(LEAST_TIMEOUT_S))
            for store in stores:
                failure = told(failure, store, place.world, GRACE_S)
        if failure.kind == "input" and failure.message != own.message:
            failure = replace(failure, message=f"rank {failure.rank}: {failure.message}")
        raise failure.error() from error


def _all_are_here(world: int) -> bool:
    """Whether nothing comes from outside. A host's own name may stand for the loopback there, and not elsewhere."""
    return is_here(os.environ["MASTER_ADDR"]) and _number("LOCAL_WORLD_SIZE") in (0, world)


def _run(
    place: _Place,
    plan: Plan,
    model: ModelSpec,
    options: RunOptions,
    listener: Callable[[StepProgress], None] | None,
    note: Callable[[str], None] | None,
    stores: list[Any],
) -> RunReport | None:
    rank, world = place.rank, place.world
    devices = len({device for stage in plan.allocation.stages for device in stage.devices})
    if world != devices:
        raise BadInput(f"the plan uses {devices} devices; torchrun started {world} processes")
    options.check()
    model.check()
    if options.max_restarts:
        raise BadInput("--max-restarts: it is torchrun that starts ranks again: torchrun --max-restarts, with --resume")
    job = job_of(plan, model, options)
    kind_of(options.device, plan.chain.device)
    peers: Peers = Alone()
    if world > 1:
        stores.append(place.open_store(START_S))
        peers = StorePeers(stores[0], rank, world, max(LEAST_TIMEOUT_S, options.timeout_s or 0.0))
        compare(run_items(plan, model, options), peers, START_S)
    with writing_to(job.folder, peers):
        if options.resume:
            job = replace(job, resume=resume_point(job, note, peers))
            compare(checkpoint_items(job.resume), peers)
        return _run_job(place, job, peers, listener, stores)


def _run_job(
    place: _Place, job: Job, peers: Peers, listener: Callable[[StepProgress], None] | None, stores: list[Any]
) -> RunReport | None:
    lowered = job.lowered()
    rank, world = place.rank, place.world
    stops: list[StoreStop] = []

    def open_store() -> Any:
        if not stores:
            stores.append(place.open_store(START_S))
        if job.folder is not None:
            stops.append(StoreStop(stores[0], rank, world, lowered.first.step, job.timeout_s(lowered)))
        return stores[0]

    def ask() -> None:
        if not stops:
            raise RunStopped("stopped before the first update; there is no new checkpoint")
        stops[0].ask()

    def may_begin(minibatch: int) -> bool:
        return all(stop.may_begin(minibatch) for stop in stops)

    launcher = Launcher(
        open_store,
        may_begin=may_begin,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        compare=lambda items: compare(items(), peers, START_S),
    )
    if listener is not None and rank == lowered.ranks_of(len(lowered.plan.allocation.stages) - 1)[0]:
        progress = Progress(listener, 1, lowered.last.step, lowered.interval, lowered.plan.chain.microbatch)
        launcher = replace(launcher, done=progress.hear)
    try:
        # on Ctrl-C a rank hears of it twice, from the terminal and from torchrun, which kills it if it takes too long
        with asked(ask, job.folder, once=False):
            report = run_rank(job, rank, launcher)
    finally:
        for stop in stops:
            stop.close()
    for stop in stops:
        if stop.limit < lowered.last.step:
            raise stopped_after(stop.limit, job.folder)
    return report


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Tell why this rank failed before torchrun, which has heard of another that died, ends it; it kills those that
    take too long."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)

"""How is a plan run? By one process for each device, or as one of those that torchrun started; a report comes back.

The latter meet in torchrun's store before they do anything else, agree on what they run, and whatever fails first is
told to all.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ...errors import BadInput, PipeplanError, RunFailed, RunStopped
from ...plan import Plan
from ...status import Status
from ..device import kind_of
from ..engine.asked import job_of
from ..engine.job import LEAST_TIMEOUT_S, Job, Launcher, RunOptions
from ..engine.phases import run_rank
from ..lowering.lowered_run import processes_of
from ..measure.progress import Audience, StepDone, StepProgress, place, teller
from ..measure.report import RunReport
from ..model.build.spec import ModelSpec
from ..model.loaded import LoadedModel
from ..model.user_code import RAISED
from ..training.state.checkpoint import Peers
from .agreement import UNKNOWN, Statement, checkpoint_items, compare, model_items, resume_point, run_items, writing_to
from .messages import GRACE_S, Failure, StorePeers, StoreStop, failure_of, failure_told, stopped_after, told
from .own import OwnLaunch
from .own_processes import is_here, listen_here
from .rendezvous import START_S, Start, number_in_environment
from .watchdog import TORCHRUN, Watch, watching

SIGNAL_S: Final = 15.0  # for which a process that a signal ends looks for the store
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
    if len(missing) < len(TORCHRUN) and number_in_environment("WORLD_SIZE") > 1:
        raise BadInput(f"the environment has WORLD_SIZE {os.environ['WORLD_SIZE']} but no {missing[0]}: {advice}")
    for name, what in COUNTS.items():
        count = number_in_environment(name)
        if count > 1:
            raise BadInput(f"{what} started {count} processes, each of which would train by itself: {advice}")
    return False


@contextmanager
def under_torchrun() -> Iterator[TorchrunLaunch]:
    """Be the rank that the environment names; rank 0 gets the report. The first failure is told to all.

    The last stage's first replica tells of the progress, as far as it sees it itself. A signal ends the process at
    once, unless it trains and leaves a checkpoint; so does a failure elsewhere if it still waits some seconds later.
    """
    start = Start.of_environment(next(_runs))
    if is_here(os.environ["MASTER_ADDR"]) and not start.host:  # a host's own name may be the loopback's there alone
        listen_here()
    with watching() as watch:
        watch.tell_signal = lambda number: _ended(start, number)
        try:
            yield TorchrunLaunch(start, watch)
        except RunStopped:
            raise
        except RAISED as error:
            raise _told(start, watch, error) from error
        finally:
            watch.ask = None
            watch.over.set()


def tell_others(error: BaseException, watch: Watch) -> None:
    """Tell the others of an ``error`` of a command that has no run yet, unless they know, or don't wait any more."""
    if not (watch.told or watch.over.is_set()):
        _told(Start.of_environment(), watch, error)


def told_of_signal(number: int) -> PipeplanError | None:
    """Tell the others that a signal ends this process, which has no run yet."""
    return _ended(Start.of_environment(), number)


def _told(start: Start, watch: Watch, error: BaseException) -> PipeplanError:
    """Tell the others why this rank fails, if they don't know better, and return what to raise."""
    failure = failure_of(start.rank, error)
    watch.telling = True
    try:
        root = start.tell(failure)
    finally:
        watch.told, watch.telling = True, False
    return root.error(elsewhere=root.message != failure.message)


def _ended(start: Start, number: int) -> PipeplanError | None:
    """Tell the others that a signal ends this rank; return what had gone wrong before, if anything had.

    torchrun ends all ranks of a node when one of them dies, which that one cannot tell.
    """
    if start.world == 1 or (start.met is None and start.starts_again):
        return None
    store = start.connected(SIGNAL_S)
    words = f"rank {start.rank} was ended by {signal.Signals(number).name}"
    failure = Failure(start.rank, "ended", words, signal=number, host=start.host)
    if start.met is not None:
        store = start.of_met(store)
        dead = start.dead_neighbour(store)
        if dead is not None and failure_told(store, start.rank) is None:
            failure = start.died(dead)
    root = told(failure, store, start.world, GRACE_S, start.rank)
    start.stay(store, GRACE_S)
    return None if root == failure and root.kind == "ended" else root.error(elsewhere=True)


def _elsewhere(start: Start, store: Any) -> PipeplanError | None:
    """Return what has gone wrong for this rank since all met, None while nothing has; ``store`` is a connection."""
    try:
        failure = failure_told(start.of_met(store), start.rank)
        if failure is not None:
            return failure.error(elsewhere=True)
        return RunFailed("torchrun has started a rank again") if start.is_over(store) else None
    except RuntimeError:
        return RunFailed(f"torchrun's store on {os.environ['MASTER_ADDR']} has gone: its first node has ended")


class TorchrunLaunch(Launcher):
    """One process of those that torchrun started, which knows nothing of them; what they have is the store.

    ``hear`` hears of updates, ``index`` is that of the instruction that is carried out.
    """

    def __init__(self, start: Start, watch: Watch) -> None:
        self.local_rank = number_in_environment("LOCAL_RANK", start.rank)
        self.hear: Callable[[StepDone], None] = lambda _: None
        self.index = -1
        self._start, self._watch, self._peers = start, watch, Peers()
        self._job: Job | None = None
        self._stop: StoreStop | None = None

    def begin(self, plan: Plan, options: RunOptions, note: Callable[[str], None] | None) -> tuple[Peers, bool]:
        """Meet all others in the store; return them, and whether ranks had met before."""
        start, devices = self._start, processes_of(plan)
        if start.world != devices:
            raise BadInput(f"the plan uses {devices} devices; torchrun started {start.world} processes")
        if start.world > 1:
            met, timeout_s = start.meet(note=note), max(LEAST_TIMEOUT_S, options.timeout_s or 0.0)
            self._peers = StorePeers(met, start.rank, start.world, timeout_s)
            self._watch.look(partial(_elsewhere, start, start.connected(LEAST_TIMEOUT_S)))
        if options.max_restarts:
            again = "it is torchrun that starts ranks again: torchrun --max-restarts, with --resume"
            raise BadInput(f"--max-restarts: {again}")
        return self._peers, start.again

    def run(self, job: Job, hears: Audience) -> RunReport | None:
        """Be one rank."""
        lowered, self._job = job.lowered(), job
        if lowered.processes[self._start.rank] == (teller(lowered), 0):
            hears.status.say(lambda: place(lowered, self.index) if self.index >= 0 else "")
            self.hear = hears.hear(lowered, 1)
        try:
            report = run_rank(job, self._start.rank, self)
        finally:
            if self._stop is not None:
                self._stop.close()  # keeps nobody waiting who asks where to stop
        if self._stop is not None and self._stop.limit < lowered.last.step:
            raise stopped_after(self._stop.limit, job.folder, report)
        return report

    def meet(self) -> Any:
        """Return the store at which all have met."""
        start, job = self._start, self._job
        assert job is not None, "it is the ranks of a run that meet there"
        store = start.met or start.open(START_S)
        if job.stops:
            own, lowered = start.connected(LEAST_TIMEOUT_S), job.lowered()
            own = own if start.met is None else start.of_met(own)
            self._stop = StoreStop(own, start.rank, start.world, lowered.first.step, job.timeout_s(lowered))
        return store

    def compare(self, spec: ModelSpec, model: LoadedModel) -> None:
        """Compare it with all others'."""
        compare(model_items(spec, model), self._peers, START_S)

    def at(self, index: int) -> None:
        """Note it for who asks how far the run is."""
        self.index = index

    def done(self, step: StepDone) -> None:
        """Tell who listens here."""
        self.hear(step)

    def may_begin(self, minibatch: int) -> bool:
        """Whether all have agreed that it may."""
        if self._stop is None:
            return True
        self._watch.ask = self._stop.ask  # all train, so all can agree on where to stop
        return self._stop.may_begin(minibatch)


Launch = OwnLaunch | TorchrunLaunch  # they begin, and run a job


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
    hears = Audience(listener, note, status or Status())
    with under_torchrun() if is_under_torchrun() else nullcontext(OwnLaunch()) as launch:
        return _run(launch, plan, model, options, hears)


def _run(launch: Launch, plan: Plan, model: ModelSpec, options: RunOptions, hears: Audience) -> RunReport | None:
    peers, again = launch.begin(plan, options, hears.note)
    options.check()
    model.check()
    job = job_of(plan, model, options)
    kind_of(options.device, plan.chain)  # whether there is a GPU shows before any process starts
    if peers.world > 1:
        everybodys = compare(run_items(plan, model, options), peers, START_S)
        _say_where(everybodys, hears.note)
    with writing_to(job.folder, peers):
        for attempt in range(options.max_restarts + 1):
            if options.resume or again or attempt:
                job = replace(job, resume=resume_point(job, hears.note, peers))
                if peers.world > 1:
                    compare(checkpoint_items(job.resume), peers)
            try:
                return launch.run(job, hears)
            except RunFailed:
                if attempt == options.max_restarts:
                    raise
    raise AssertionError("the last attempt returns or raises")


def _say_where(everybodys: Sequence[Statement], note: Callable[[str], None] | None) -> None:
    """Tell on every node where rank 0 is, for torchrun numbers nodes as it likes."""
    first = everybodys[0]
    if note is not None and not number_in_environment("LOCAL_RANK") and len({said.host for said in everybodys}) > 1:
        address = f" ({first.address})" if first.address not in ("", UNKNOWN) else ""
        note(f"rank 0 of {len(everybodys)} is on {first.host}{address}; it writes the report, --save and --trace")

"""How is a plan run by processes of our own, one for each device of this machine?

Whatever goes wrong on any rank ends the run on all of them, with one sentence about the rank that failed first.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch.distributed as dist

from ...plan import Plan
from ...scratch import scratch_folder
from ..device import kind_of
from ..engine.job import Job, Launcher, RunOptions
from ..engine.phases import run_rank
from ..lowering.instructions import sentence
from ..lowering.lowered_run import LoweredRun
from ..measure.progress import Audience, StepDone, place, teller
from ..measure.report import RunReport
from ..training.state.checkpoint import Peers
from .messages import GRACE_S, NEVER, Failure, failure_of, root_cause, stopped_after
from .own_processes import (
    ENDING,
    LOOK_S,
    context_of,
    follow_parent,
    is_stopped,
    leave,
    our_imports_alone,
    settle_in,
    uninterrupted,
)

END_S: Final = 2.0  # for which a rank that is told to end may take


class OwnLaunch:
    """Processes of our own, which nobody but this one has to agree with."""

    def begin(self, plan: Plan, options: RunOptions, note: Callable[[str], None] | None) -> tuple[Peers, bool]:
        """Return this process, which hasn't failed before."""
        return Peers(), False

    def run(self, job: Job, hears: Audience) -> RunReport:
        """Start all ranks on this machine, wait for them, and leave none behind, whatever happens."""
        lowered = job.lowered()
        kind = kind_of(job.options.device, job.plan.chain)
        context = context_of()
        progress = context.RawArray("q", [-1] * len(lowered.processes))  # the instruction that each rank is at
        hear = hears.hear(lowered, lowered.plan.allocation.stages[-1].replicas)
        begun, last = SharedStop(context), lowered.processes.index((teller(lowered), 0))
        hears.status.say(
            lambda: place(lowered, progress[last]) if progress[last] >= 0 else f"starting {len(progress)} processes"
        )
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        signals = asked(lambda: begun.stop(lowered.first.step), job.stops)
        ends, end = context.Pipe(duplex=False)
        with scratch_folder() as folder, signals:
            try:
                with uninterrupted(), our_imports_alone():
                    for rank in range(len(lowered.processes)):
                        ours, theirs = context.Pipe(duplex=False)
                        own = OwnRank(rank, len(lowered.processes), f"{folder}/store", progress, begun, theirs)
                        process = context.Process(
                            target=_rank_main, args=(job, own, ends), name=f"pipeplan rank {rank}"
                        )
                        process.start()
                        theirs.close()
                        processes.append(process)
                        pipes.append(ours)
                timeout_s = job.timeout_s(lowered)
                report = Ranks(lowered, processes, pipes, progress, timeout_s, kind == "cuda", hear).outcome()
            finally:
                hears.status.say(f"ending {len(processes)} processes")
                _stop(processes, end)
                hears.status.say("report")
        if report.steps < lowered.steps and not report.ended_early:
            raise stopped_after(lowered.first.step + report.steps, job.folder, report)
        return report


@contextmanager
def asked(stop: Callable[..., None], stops: bool) -> Iterator[None]:
    """Let SIGTERM, SIGHUP or SIGINT ``stop`` the run, unless it is ignored, if it ``stops`` in order.

    The first one alone; the second acts as it would have.
    """
    if not stops or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}

    def act(*_: Any) -> None:
        stop()
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, act)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


# --- a rank -----------------------------------------------------------------------------------------------------------


class SharedStop:
    """The agreement between ranks and the process that started them; one lock guards both numbers.

    ``limit`` is the first mini-batch that may not be begun, ``begun`` the last that any rank has.
    """

    def __init__(self, context: Any) -> None:
        self._lock = context.Lock()
        self._limit, self._begun = context.RawValue("q", NEVER), context.RawValue("q", -1)

    def may_begin(self, minibatch: int) -> bool:
        """Whether ``minibatch`` may be begun; if so, it counts as begun."""
        with self._lock:
            if minibatch >= self._limit.value:
                return False
            self._begun.value = max(self._begun.value, minibatch)
            return True

    def stop(self, first: int) -> None:
        """Let no mini-batch begin after those that have, or after the run's ``first``, which is before a checkpoint."""
        with self._lock:
            self._limit.value = min(self._limit.value, max(self._begun.value, first) + 1)


class OwnRank(Launcher):
    """What ``rank`` of ``world`` has of the process that started it: a file to meet at, shared memory, and a pipe."""

    def __init__(
        self, rank: int, world: int, store_path: str, progress: Any, begun: SharedStop, pipe: Connection
    ) -> None:
        self.local_rank = rank
        self._world, self._path, self._progress, self._begun, self._pipe = world, store_path, progress, begun, pipe

    def meet(self) -> Any:
        """Open a store of a file."""
        return dist.FileStore(self._path, self._world)  # type: ignore[attr-defined]  # not exported for type checkers

    def at(self, index: int) -> None:
        """Note it where the parent looks."""
        self._progress[self.local_rank] = index

    def may_begin(self, minibatch: int) -> bool:
        """Whether the parent has let it."""
        return self._begun.may_begin(minibatch)

    def done(self, step: StepDone) -> None:
        """Tell the parent."""
        self._pipe.send(step)

    def over(self, message: RunReport | Failure | None) -> None:
        """Tell the parent what it is waiting for."""
        self._pipe.send(message)
        self._pipe.close()


def _rank_main(job: Job, launcher: OwnRank, ends: Connection) -> None:
    """Be one rank: send the report or the failure, and go."""
    for signum in ENDING:  # they may reach all of our processes; the parent ends us
        signal.signal(signum, signal.SIG_IGN)
    settle_in()
    threading.Thread(target=follow_parent, args=(ends,), daemon=True).start()
    try:
        found = run_rank(job, launcher.local_rank, launcher)
    except BaseException as error:  # which keeps its tensors: torch aborts who frees one of a GPU that has failed
        launcher.over(failure_of(launcher.local_rank, error))
        leave(1)
    launcher.over(found)
    leave(0)


# --- who started them -------------------------------------------------------------------------------------------------


class Gone:
    """In place of a message: the process has closed its pipe, as it does when it ends."""


def inbox(pipes: Sequence[Connection]) -> SimpleQueue[tuple[int, Any]]:
    """Return messages from ``pipes``, with the numbers of these, in the order in which they are complete.

    A process may be stopped while it writes one: so a thread hears each.
    """
    found: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def hear(number: int, pipe: Connection) -> None:
        message: Any = None
        while not isinstance(message, Gone):
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                message = Gone()
            found.put((number, message))

    for each in enumerate(pipes):
        threading.Thread(target=hear, args=each, daemon=True).start()
    return found


class Ranks:
    """The ``processes`` of a run as who started them sees them: by their ``pipes`` and the instructions they are at.

    All have failed when, once they are at work, none has gone on for somewhat longer than ``timeout_s``.
    """

    def __init__(
        self,
        lowered: LoweredRun,
        processes: Sequence[BaseProcess],
        pipes: Sequence[Connection],
        progress: Sequence[int],
        timeout_s: float,
        on_gpus: bool,
        hear: Callable[[StepDone], None],
    ) -> None:
        self._lowered, self._processes, self._progress = lowered, processes, progress
        self._timeout_s, self._on_gpus, self._hear = timeout_s, on_gpus, hear
        self._inbox, self._silent, self._heard = inbox(pipes), set(range(len(pipes))), 0
        self._failures: list[Failure] = []
        self._by_itself: list[Failure] = []  # unless another one turns out to have failed
        self._looked, self._quiet_s, self._state = time.monotonic(), 0.0, list[int]()
        self._report: RunReport | None = None

    def outcome(self) -> RunReport:
        """Wait for all: return rank 0's report, or raise the root cause soon after the first failure."""
        deadline: float | None = None
        while self._silent and (deadline is None or time.monotonic() < deadline):
            news = None
            with suppress(Empty):
                news = self._inbox.get(timeout=LOOK_S if deadline is None else max(0.0, deadline - time.monotonic()))
            self._heard += news is not None
            self._look()
            if news is not None and news[0] in self._silent:
                self._take(*news)
            if self._failures and deadline is None:
                deadline = time.monotonic() + GRACE_S
            if any(failure.kind != "lost" for failure in self._failures):
                break
        if self._failures:
            raise self._root().error()
        assert self._report is not None, "rank 0 reports when no rank has failed"
        return self._report

    def _place(self, rank: int) -> str:
        index = self._progress[rank]
        if index < 0:
            return " before its first operation"
        return f" in {sentence(self._lowered.instructions[self._lowered.processes[rank][0]][index])}"

    def _look(self) -> None:
        """Find whether nobody goes on, as far as we weren't stopped ourselves: what counts is how often we looked."""
        if time.monotonic() < self._looked + LOOK_S:
            return
        self._looked, before, self._state = time.monotonic(), self._state, [self._heard, *self._progress]
        self._quiet_s = self._quiet_s + LOOK_S if self._state == before else 0.0
        limit_s = self._timeout_s + GRACE_S
        if self._quiet_s >= limit_s and max(self._progress) >= 0:
            self._failures.append(Failure(min(self._silent), "lost", f"nothing has happened for {limit_s:g} s"))

    def _take(self, rank: int, message: Any) -> None:
        """Take in what ``rank`` has said, or that it has gone."""
        if isinstance(message, StepDone):
            self._hear(message)
            return
        self._silent.discard(rank)
        if isinstance(message, Gone):
            process = self._processes[rank]
            process.join()
            # torch's watchdog aborts a process that waits for another one, and one whose GPU has failed
            lost = self._on_gpus and process.exitcode == -signal.SIGABRT
            words = f"rank {rank} died{self._place(rank)}: {_how(process.exitcode)}"
            message = Failure(rank, "lost" if lost else "died", words)
            if lost and self._quiet_s < self._timeout_s:
                self._by_itself.append(message)
        if isinstance(message, Failure):
            self._failures.append(message)
        elif message is not None:
            self._report = message

    def _root(self) -> Failure:
        root = root_cause(self._failures)
        if root.kind == "lost" and self._by_itself:
            root = self._by_itself[0]
        still = [rank for rank in sorted(self._silent) if is_stopped(self._processes[rank].pid)]
        if root in self._by_itself and not still:
            words = f"{root.message}; torch ends a process so whose GPU has failed, and says above how"
            return replace(root, message=words)
        if root.kind != "lost" or not self._silent:
            return root
        what = "is stopped" if still else "doesn't answer"
        hung = "; ".join(f"rank {rank} {what}{self._place(rank)}" for rank in still or sorted(self._silent))
        return replace(root, message=f"{hung}: {root.message}")

"""What do the processes of a run tell each other? Why one has failed; under torchrun through the store that it gives
them, which also has what they run, and where all stop."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from ...errors import BY_SIGNAL, BadInput, InvalidPlan, PipeplanError, RunFailed, RunStopped
from ..device import DeviceWaits
from ..engine.executor import OperationFailed
from ..exchange.transport import PeerLost, exchanging
from ..lowering.instructions import sentence
from ..model.user_code import said
from ..training.state.checkpoint import Peers

WHERE: Final = "the agreement of the ranks before they meet"
LOOKS_S: Final = (0.001, 0.1)  # pauses between two looks, growing from the first to the second
MOST_SHOWN: Final = 8  # ranks in a sentence
FAILURE: Final = "failure"  # where a store has the root cause
has_heard: Final = "heard/{}".format  # the key under which it has that a rank knows of that
NEVER: Final = 2**62  # the first mini-batch that may not be begun, where all may
POLL_S: Final = 0.5  # how often a rank looks whether another one has been asked to stop
GO_S: Final = 5.0  # how long a rank that has finished waits for its own thread


class StorePeers(Peers):
    """The ``world`` processes that share ``store``; each waits ``timeout_s`` for the others' answers."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world = rank, world
        self._store, self._timeout_s, self._rounds = store, timeout_s, 0

    def gathered(self, mine: str | None, timeout_s: float = 0.0) -> Sequence[str | None]:
        """Return what each gave; wait ``timeout_s`` longer for them than for an answer.

        Rank 0 reads what all gave and writes it in one piece, equal words once, so that what goes through the store
        grows with the ranks and not with their square. PeerLost when some don't come, or when any rank has failed.
        """
        keys, every = [f"told/{self._rounds}/{rank}" for rank in range(self.world)], f"told/{self._rounds}"
        self._rounds += 1
        with exchanging(WHERE):
            self._store.set(keys[self.rank], json.dumps(mine))
            self._await(keys, [every] if self.rank else keys, self._timeout_s + timeout_s)
            if not self.rank:
                given = [words.decode() for words in self._store.multi_get(keys)]
                places = {words: place for place, words in enumerate(dict.fromkeys(given))}
                self._store.set(every, json.dumps([list(places), [places[words] for words in given]]))
            told, whose = json.loads(self._store.get(every))
            return [json.loads(told[place]) for place in whose]

    def _await(self, keys: Sequence[str], awaited: list[str], timeout_s: float) -> None:
        for _ in looks(timeout_s):
            if self._store.check(awaited):
                return
            if self._store.check([FAILURE]) and not self._store.check(awaited):  # it may have failed by these
                raise PeerLost(f"{WHERE}: another rank has failed")
        missing = (rank for rank, key in enumerate(keys) if not self._store.check([key]))
        raise PeerLost(f"{WHERE}: timed out after {timeout_s:g} s", *missing)


def looks(seconds: float) -> Iterator[None]:
    """Yield now, and with growing pauses until ``seconds`` have passed, and once more then."""
    until, pause = time.monotonic() + seconds, LOOKS_S[0]
    while (left := until - time.monotonic()) > 0:
        yield
        time.sleep(min(pause, left))
        pause = min(2 * pause, LOOKS_S[1])
    yield


def listed(ranks: Sequence[int]) -> str:
    """Return what to call ``ranks`` in a sentence."""
    shown = ", ".join(map(str, ranks[:MOST_SHOWN])) + (", ..." if len(ranks) > MOST_SHOWN else "")
    return f"rank{'s'[: len(ranks) > 1]} {shown}"


# --- why one has failed -----------------------------------------------------------------------------------------------


def told(failure: Failure, store: Any, world: int, grace_s: float, teller: int | None = None) -> Failure:
    """Tell the other ranks of ``failure`` through ``store``, which keeps the first root cause, and return that.

    ``teller`` is the rank that tells, if it isn't its own failure. A rank that merely lost another one waits
    ``grace_s`` for the other's reason. If no rank of the ``world`` has one, those that were not heard of at all are
    named: those of them that somebody has lost, if there are any, as others may only wait for ranks that wait, too.
    """
    try:
        store.set(f"failed/{failure.rank}", json.dumps(failure.peers))
        if failure.kind != "lost":
            store.compare_set(FAILURE, "", json.dumps(asdict(failure)))
        elif not any(store.check([FAILURE]) for _ in looks(grace_s)):
            heard = [rank for rank in range(world) if store.check([f"failed/{rank}"])]
            missed = {peer for rank in heard for peer in json.loads(store.get(f"failed/{rank}"))}
            silent = [rank for rank in range(world) if rank not in heard]
            silent = [rank for rank in silent if rank in missed] or silent
            if silent:
                message = "; ".join(f"rank {rank} doesn't answer" for rank in silent) + f": {failure.message}"
                store.compare_set(FAILURE, "", json.dumps(asdict(replace(failure, message=message))))
        return failure_told(store, failure.rank if teller is None else teller) or failure
    except RuntimeError:  # the store has gone too
        return failure


def failure_told(store: Any, rank: int) -> Failure | None:
    """Return the root cause that ``store`` keeps, if there is one; ``rank`` has then heard of it."""
    if not store.check([FAILURE]):
        return None
    store.set(has_heard(rank), "")
    root = Failure(**json.loads(store.get(FAILURE)))
    return replace(root, peers=tuple(root.peers))


# --- where all stop ---------------------------------------------------------------------------------------------------


class StoreStop:
    """The agreement of ``rank`` with ``world - 1`` others through ``store``, whichever of them is asked to stop.

    Nothing is asked of the store while a mini-batch begins. A thread looks for the word to stop; then every rank lets
    none begin until all have told how far they are. This waits for threads alone, not for the pipeline, so it ends;
    at most ``timeout_s`` long if a rank has gone. ``first`` is the run's first mini-batch, which is always done;
    ``limit`` is the first one that may not be begun.
    """

    def __init__(self, store: Any, rank: int, world: int, first: int, timeout_s: float) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._timeout = timedelta(seconds=timeout_s)
        self._changed = threading.Condition()
        self._begun, self.limit = first, NEVER
        self._deciding = self._asked = False
        self._failed: str | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def may_begin(self, minibatch: int) -> bool:
        """Whether ``minibatch`` may be begun; if so, it counts as begun. PeerLost when the ranks cannot agree."""
        with self._changed:
            self._changed.wait_for(lambda: not self._deciding)
            if self._failed is not None:
                raise PeerLost(f"the agreement on where to stop: {self._failed}")
            if minibatch >= self.limit:
                return False
            self._begun = max(self._begun, minibatch)
            return True

    def ask(self, *_: Any) -> None:
        """Stop; for a signal handler, which may interrupt anything and so waits for no lock."""
        self._asked = True

    def close(self) -> None:
        """Tell the others that this rank begins nothing more."""
        self._finished.set()
        with suppress(RuntimeError):  # the store has gone, and with it whoever would ask
            self._tell()
        self._thread.join(GO_S)

    def _watch(self) -> None:
        try:
            while not self._finished.wait(POLL_S):
                if self._asked:
                    self._store.set("stop", "asked")
                if self._asked or self._store.check(["stop"]):
                    self._agree()
                    return
        except RuntimeError as error:  # no answer, or the store has gone
            with self._changed:
                self._failed = str(error).partition("\n")[0]
                self._deciding = False
                self._changed.notify_all()

    def _agree(self) -> None:
        with self._changed:
            self._deciding = True
        self._tell()
        keys = [f"begun/{rank}" for rank in range(self._world)]
        self._store.wait(keys, self._timeout)
        limit = max(map(int, self._store.multi_get(keys))) + 1
        with self._changed:
            self.limit = limit
            self._deciding = False
            self._changed.notify_all()

    def _tell(self) -> None:
        self._store.set(f"begun/{self._rank}", str(self._begun))


if TYPE_CHECKING:
    from ..measure.report import RunReport

Kind = Literal["input", "failed", "ended", "died", "lost"]
GRACE_S: Final = 2.0  # in which the root cause of a failure is waited for when only its symptoms are known
ROOT_FIRST: tuple[Kind, ...] = ("input", "failed", "ended", "died", "lost")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended early: the user's input, its own failure, a ``signal`` that it was sent, its death, or the loss
    of another rank, of which ``peers`` are those that it might be, as far as that is known. ``host`` is its node, where
    there are several."""

    rank: int
    kind: Kind
    message: str
    trace: str = ""
    peers: tuple[int, ...] = ()
    signal: int = 0
    host: str = ""

    def error(self, elsewhere: bool = False) -> PipeplanError:
        """Return the exception for the user; the rank's own traceback is a note on it.

        ``elsewhere`` its message says whose input was bad, too.
        """
        error: PipeplanError = RunFailed(self.message)
        if self.kind == "input":
            where = f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"
            error = BadInput(f"{where}: {self.message}" if elsewhere else self.message)
        elif self.kind == "ended":
            error = RunStopped(self.message, BY_SIGNAL + self.signal)
        if self.trace:
            error.add_note(self.trace)
        return error


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return what to tell others about ``error``: one sentence with the rank and the operation."""
    trace = f"On rank {rank}:\n" + "".join(traceback.format_exception(error))
    place = ""
    if isinstance(error, OperationFailed) and error.__cause__ is not None:
        place, error = f" in {sentence(error.instruction)}", error.__cause__
    if isinstance(error, BadInput | InvalidPlan):
        return Failure(rank, "input", str(error), trace)
    if isinstance(error, PeerLost | DeviceWaits):
        peers = error.peers if isinstance(error, PeerLost) else ()
        return Failure(rank, "lost", f"rank {rank} lost another rank{place}: {error}", trace, peers)
    if isinstance(error, torch.AcceleratorError):  # from wherever the device was first asked again
        place, words = place.replace(" in ", " in or before ", 1), str(error).partition("\n")[0]
        words = f"{words}; a GPU reports its errors late, CUDA_LAUNCH_BLOCKING=1 shows where they are made"
        return Failure(rank, "failed", f"rank {rank} failed{place}: {words}", trace)
    what = str(error) if isinstance(error, PipeplanError) else said(error)
    if isinstance(error, torch.OutOfMemoryError):
        what += "; CUDA, NCCL and fragments take memory beside a plan's, which --reserve leaves to them"
    return Failure(rank, "failed", f"rank {rank} failed{place}: {what}", trace)


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others: a rank that merely lost another one is never it, if there is a choice.

    Among equals, the first one reported.
    """
    return min(failures, key=lambda failure: ROOT_FIRST.index(failure.kind))


def stopped_after(step: int, folder: Path | None, report: RunReport | None) -> RunStopped:
    """Return what to raise when a run was asked to stop, which has a ``report`` on rank 0.

    It has left a checkpoint in ``folder``, if there is one.
    """
    left = "" if folder is None else f"; its checkpoint is in {folder}"
    return RunStopped(f"stopped after update {step}{left}", report=report)

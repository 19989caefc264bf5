"""Why did a rank end, and which of several ranks' reasons is the root cause?"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import torch

from ...errors import BY_SIGNAL, BadInput, InvalidPlan, PipeplanError, RunFailed, RunStopped
from ..device import DeviceWaits
from ..engine.executor import OperationFailed
from ..exchange.transport import PeerLost
from ..lowering.instructions import sentence
from ..model.user_code import said

Kind = Literal["input", "failed", "ended", "died", "lost"]
LOOK_S: Final = 0.05
GRACE_S: Final = 2.0  # in which the root cause of a failure is waited for when only its symptoms are known
FAILURE: Final = "failure"  # where a store has the root cause
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


def told(failure: Failure, store: Any, world: int, grace_s: float, teller: int | None = None) -> Failure:
    """Tell the other ranks of ``failure`` through ``store``, which keeps the first root cause, and return that.

    ``teller`` is the rank that tells, if it isn't its own failure. A rank that merely lost another one waits
    ``grace_s`` for the other's reason. If no rank of the ``world`` has one, those that were not heard of at all are
    named: those of them that somebody has lost, if there are any, as others may only wait for ranks that wait, too.
    """
    try:
        store.set(_lost(failure.rank), json.dumps(failure.peers))
        if failure.kind != "lost":
            store.compare_set(FAILURE, "", json.dumps(asdict(failure)))
        elif not _comes(store, FAILURE, grace_s):
            heard = [rank for rank in range(world) if store.check([_lost(rank)])]
            missed = {peer for rank in heard for peer in json.loads(store.get(_lost(rank)))}
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


def has_heard(rank: int) -> str:
    """Return the key under which a store has that ``rank`` knows of the failure."""
    return f"heard/{rank}"


def _lost(rank: int) -> str:
    return f"failed/{rank}"


def _comes(store: Any, key: str, seconds: float) -> bool:
    """Wait for ``key``; asked again and again, as a wait of the store's prints a warning when it was in vain."""
    until = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
    return True

"""Why did a rank end, and which of several ranks' reasons is the root cause?"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import torch

from ...errors import BY_SIGNAL, BadInput, InvalidPlan, PipeplanError, RunFailed, RunStopped
from ..device import DeviceWaits
from ..engine.executor import OperationFailed
from ..exchange.transport import PeerLost
from ..lowering.instructions import sentence
from ..model.user_code import said

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

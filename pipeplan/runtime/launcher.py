"""What a rank has of the process that started it, and tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .lowering.instructions import Instruction
from .lowering.lowered_run import LoweredRun
from .measure.progress import StepDone


def _ignore(_: Any) -> None:
    pass


def _always(_: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Launcher:
    """What a rank has of the process that started it.

    ``open_store`` opens the store at which the ranks meet. It is called when the model is built, so that what is wrong
    with a model shows before anybody waits. ``at`` hears the index of each instruction, ``done`` of each update of the
    last stage; ``may_begin`` says whether a mini-batch is to be begun, the same to all ranks. ``local_rank`` counts the
    processes of this machine.
    """

    open_store: Callable[[], Any]
    at: Callable[[int], None] = _ignore
    done: Callable[[StepDone], None] = _ignore
    may_begin: Callable[[int], bool] = _always
    local_rank: int = 0


class MiniBatchGate:
    """Lets instructions through until the launcher refuses a mini-batch."""

    def __init__(self, lowered: LoweredRun, may_begin: Callable[[int], bool]) -> None:
        self._lowered, self._may_begin = lowered, may_begin
        self._begun = lowered.first.step - 1
        self.refused: int | None = None

    def allows(self, instruction: Instruction) -> bool:
        """Whether the instruction's mini-batch may be begun, or has been."""
        minibatch = self._lowered.minibatch(instruction)
        if minibatch <= self._begun:
            return True
        if self.refused is not None:
            return False
        if not self._may_begin(minibatch):
            self.refused = minibatch
            return False
        self._begun = minibatch
        return True

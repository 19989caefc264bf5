"""What has a rank of the process that started it, and what does it tell it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..measure.progress import StepDone
from ..model.build.spec import ModelSpec
from ..model.loaded import LoadedModel


def _ignore(_: Any) -> None:
    pass


def _alone(spec: ModelSpec, model: LoadedModel) -> None:
    pass


def _always(_: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Launcher:
    """What a rank has of the process that started it.

    ``open_store`` opens the store at which the ranks meet. It is called when the model is built, so that what is wrong
    with a model shows before anybody waits. ``at`` hears the index of each instruction, ``done`` of each update of the
    last stage; ``may_begin`` says whether a mini-batch is to be begun, the same to all ranks. ``local_rank`` counts the
    processes of this machine. ``compare`` raises BadInput on all ranks if a model isn't the same on
    them.
    """

    open_store: Callable[[], Any]
    at: Callable[[int], None] = _ignore
    done: Callable[[StepDone], None] = _ignore
    may_begin: Callable[[int], bool] = _always
    local_rank: int = 0
    compare: Callable[[ModelSpec, LoadedModel], Any] = _alone

"""What the ranks of the checks of this folder import: a model to be traced, and data, some of it with a fault.

Which zoo model's data it is stands in the environment, as ranks are processes of their own.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeplan import zoo

SAMPLES = 8  # microbatches that are made; more of them repeat these, so that making data isn't what is measured
FAULTY = 9  # the microbatch at which something goes wrong
WARM = 16  # microbatches after which nothing is the first of its kind
MODEL, BATCH = os.environ.get("CHECKED_MODEL", "gpt-tiny"), int(os.environ.get("CHECKED_BATCH", "4"))
FOLDER = Path(os.environ.get("CHECKED_FOLDER", "."))

# differences from plain training are then those of the order of sums
torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.deterministic = True


@cache
def sample(model: str, batch: int, index: int) -> tuple[Tensor, Tensor]:
    """Return a microbatch of a zoo model, made once."""
    return zoo.load(model).data(batch)(index, 0)


def data(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return microbatch ``index`` of endless repetitions of the first ones."""
    return sample(MODEL, BATCH, index % SAMPLES)


# --- a model to be traced --------------------------------------------------------------------------------------------


class Whole(nn.Module):
    """Makes a tensor and moves it to the device and type of another, and reads one buffer in two layers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, 64))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many values as come in."""
        weights = torch.linspace(0.5, 1.5, 64).to(x.device, x.dtype)
        x = torch.relu(self.norm(self.first(x) * weights)) * self.scale
        return self.last(self.second(x) * self.scale)  # type: ignore[no-any-return]  # modules return Any


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of :class:`Whole`."""
    return nn.functional.mse_loss(output, target)


def whole(batch: int) -> tuple[nn.Module, Tensor, Any]:
    """Return a module that is no list of layers, an example and its loss."""
    torch.manual_seed(3)
    return Whole(), torch.zeros(batch, 64), mean_square


def vectors(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return data for it."""
    generator = torch.Generator().manual_seed(index % SAMPLES)
    return torch.randn(BATCH, 64, generator=generator), torch.randn(BATCH, 64, generator=generator)


# --- what may go wrong -----------------------------------------------------------------------------------------------


def dying(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """End the process as the system does that lacks memory."""
    if index == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    return data(index, seed)


def stalling(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Take longer than anybody waits."""
    if index == FAULTY:
        time.sleep(3600)
    return data(index, seed)


def raising(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Lack something."""
    if index == FAULTY:
        raise FileNotFoundError("shard-0009 is missing")
    return data(index, seed)


def infinite(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Let the loss be no number."""
    x, target = data(index, seed)
    return (x * float("nan") if index == FAULTY and x.is_floating_point() else x), target


def hungry(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ask for more than a GPU has."""
    if index == FAULTY:
        torch.empty(10**13, dtype=torch.uint8, device="cuda")
    return data(index, seed)


def telling(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Say that the run is under way."""
    if index == FAULTY:
        (FOLDER / "under-way").touch()
    return data(index, seed)


# --- hidden waits ----------------------------------------------------------------------------------------------------

TO_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}


class Waits(TorchDispatchMode):
    """Writes a line to a file wherever the host waits for a value of a device of ``kind``."""

    def __init__(self, kind: str, file: Path) -> None:
        super().__init__()
        self._kind, self._file = kind, file

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        source = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = any(x.device.type == self._kind for x in source)
        comes = name in TO_HOST or (
            name in ("aten::_to_copy", "aten::copy_")
            and isinstance(result, Tensor)
            and result.device.type == "cpu" != self._kind
            and not result.is_pinned()
        )
        if there and comes:
            with self._file.open("a") as file:
                file.write(f"{name} {' < '.join(_ours())}\n")
        return result


def _ours() -> Iterator[str]:
    for frame in reversed(traceback.extract_stack()):
        if "/pipeplan/" in frame.filename:
            yield f"{frame.filename.rpartition('/pipeplan/')[2]}:{frame.lineno}"


_watching: list[Waits] = []


def watched(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Watch what this rank waits for from microbatch WARM on until CHECKED_UNTIL."""
    if index == WARM and not _watching:
        kind = os.environ.get("CHECKED_DEVICE", "cuda")
        _watching.append(Waits(kind, FOLDER / f"waits-{os.getpid()}"))
        _watching[0].__enter__()
        (FOLDER / f"waits-{os.getpid()}").touch()
        if kind == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            warnings.simplefilter("always")
    if index >= int(os.environ.get("CHECKED_UNTIL", "0")) and _watching:
        _watching.pop().__exit__(None, None, None)
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
    return data(index, seed)

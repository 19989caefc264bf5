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
KIND = os.environ.get("CHECKED_DEVICE", "cuda")
LARGE = {"cnn": ("resnet50", 32), "gpt": ("gpt2-small,tied=false", 4), "tied": ("gpt2-small,tied=true", 4)}
LARGE["tiny"] = ("gpt-tiny,blocks=4", 4)  # which a CPU can train, too
SMALL = {
    "cnn": ("small-cnn", 4),
    "gpt": ("gpt-tiny,blocks=3", 4),
    "tied": ("gpt-tiny,tied=true", 4),
    "tiny": LARGE["tiny"],
}
MODELS = LARGE if KIND == "cuda" and "CHECKED_SMALL" not in os.environ else SMALL  # of the zoo, with their microbatches
BATCH = 4  # of the model that is traced
FOLDER = Path(os.environ.get("CHECKED_FOLDER", "."))

# differences from plain training are then those of the order of sums
torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.deterministic = True


@cache
def sample(model: str, batch: int, index: int) -> tuple[Tensor, Tensor]:
    """Return a microbatch of a zoo model, made once."""
    return zoo.load(model).data(batch)(index, 0)


def gpt(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return microbatch ``index`` of endless repetitions of the first ones."""
    return sample(*MODELS["gpt"], index % SAMPLES)


def cnn(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures likewise."""
    return sample(*MODELS["cnn"], index % SAMPLES)


def tied(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return text for the model whose embedding is its head."""
    return sample(*MODELS["tied"], index % SAMPLES)


def tiny(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return text for the model that a CPU can train."""
    return sample(*MODELS["tiny"], index % SAMPLES)


class Texts(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The samples of the first microbatches, one at a time, as workers of a loader read them."""

    def __len__(self) -> int:
        return SAMPLES * MODELS["gpt"][1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = sample(*MODELS["gpt"], index // MODELS["gpt"][1])
        return x[index % MODELS["gpt"][1]], y[index % MODELS["gpt"][1]]


def loader(batch: int) -> torch.utils.data.DataLoader[tuple[Tensor, Tensor]]:
    """Return what reads them in order by two workers."""
    return torch.utils.data.DataLoader(Texts(), batch, num_workers=2)


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
    """Return a module that isn't a list of layers, an example and its loss."""
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
    return gpt(index, seed)


def stalling(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Take longer than anybody waits."""
    if index == FAULTY:
        time.sleep(3600)
    return gpt(index, seed)


def raising(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Lack something."""
    if index == FAULTY:
        raise FileNotFoundError("shard-0009 is missing")
    return gpt(index, seed)


def infinite(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Let the loss be no number."""
    x, target = cnn(index, seed)
    return x * float("nan") if index == FAULTY else x, target


def out_of_range(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Have a label that no class has, the commonest fault that a GPU tells late."""
    x, target = gpt(index, seed)
    return x, target + 10**6 if index == FAULTY else target


def hungry(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ask for more than a GPU has."""
    if index == FAULTY:
        torch.empty(10**13, dtype=torch.uint8, device="cuda")
    return gpt(index, seed)


def telling(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Say that the run is under way."""
    if index == FAULTY:
        (FOLDER / "under-way").touch()
    return gpt(index, seed)


# --- hidden waits ----------------------------------------------------------------------------------------------------

TO_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
COPIES = {"aten::_to_copy", "aten::copy_"}
UNTIL = 40  # the microbatch before which waits are counted


class Waits(TorchDispatchMode):
    """Writes a line to a file wherever the host waits for a device of ``kind``.

    That is for a value of it, for a copy from or to memory that isn't pinned, for a stream or an event, or where CUDA
    itself says that the host does.
    """

    def __init__(self, kind: str, file: Path) -> None:
        super().__init__()
        self._kind, self._file = kind, file
        if kind == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, **__: (
                self.note("warned") if "synchroniz" in str(message) else None
            )
            for owner in (torch.cuda.Stream, torch.cuda.Event, torch.cuda):
                owner.synchronize = self._noting(owner.synchronize)  # type: ignore[method-assign, attr-defined]

    def note(self, what: str) -> None:
        """Write down that the host waits."""
        with self._file.open("a") as file:
            file.write(f"{what} {' < '.join(_ours())}\n")

    def _noting(self, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note("synchronize")
            return call(*args, **kwargs)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        sources = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        reads = name in TO_HOST and any(x.device.type == self._kind for x in sources)
        copies = name in COPIES and self._pageable([*sources, result])
        if reads or copies:
            self.note(name)
        return result

    def _pageable(self, tensors: list[Tensor]) -> bool:
        """Whether something goes between the device and host memory that isn't pinned."""
        hosts = [x for x in tensors if x.device.type == "cpu"]
        return (
            self._kind != "cpu"
            and any(x.device.type == self._kind for x in tensors)
            and any(x.numel() > 0 and not x.is_pinned() for x in hosts)
        )


def _ours() -> Iterator[str]:
    for frame in reversed(traceback.extract_stack()):
        if "/pipeplan/" in frame.filename:
            yield f"{frame.filename.rpartition('/pipeplan/')[2]}:{frame.lineno}"


_watching: list[Waits] = []


def watched(index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Watch what this rank waits for from microbatch WARM on until UNTIL."""
    if index == WARM and not _watching:
        file = FOLDER / f"waits-{os.getpid()}"
        file.touch()
        _watching.append(Waits(KIND, file))
        _watching[0].__enter__()
    if index >= UNTIL and _watching:
        _watching.pop().__exit__(None, None, None)
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
    return gpt(index, seed)

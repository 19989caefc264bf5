"""How is what a rank keeps written to its one file of a checkpoint, and read again?

By torch.save and its safe loader, which makes tensors, numbers, text and containers of them, and calls nothing that a
file names.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ....errors import BadInput, RunFailed
from ....units import format_bytes
from ...exchange.transport import everybodys, exchanging
from ...lowering.lowered_run import Position
from ...model.build.state_file import loaders_words
from .checkpoint import Checkpoint, FileSum, begin, crc_of, file_of, finish, folder_of, remove_older

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a rank has: weights and buffers, the optimizer's state of each weight, and its random state.

    ``rates`` are the optimizer's options and the state of its schedule, ``scale`` is the loss scale and its count of
    updates without overflow; they are the same on all ranks, and one writes them. ``shares`` is that of the data's
    loader (:attr:`...model.contract.Batches.shares`), ``trial`` the best evaluation, as its fields.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]
    random: Tensor | None
    rates: tuple[Any, Any] | None = None
    scale: tuple[float, int] | None = None
    shares: int | None = None
    trial: tuple[float | None, int, int] | None = None


def write(
    folder: Path,
    position: Position,
    model: str,
    seed: int,
    state: TrainingState,
    keep: int | None,
    good: set[int],
    plan: str | None = None,
) -> None:
    """Write every rank's ``state`` to one checkpoint, all ranks together; RunFailed on all when a rank cannot.

    What several ranks have must be equal on all of them. It has the text of the ``plan``. Once it is complete, its
    number of updates is added to ``good``, and those older than the newest ``keep`` of the good go (None: none).
    """
    rank, final = dist.get_rank(), folder / folder_of(position.step)

    def end() -> None:
        finish(partial, position, model, seed, files, plan)
        good.add(position.step)
        if keep is not None:
            remove_older(folder, position.step, keep, good)

    partial = Path(_on_all(final, lambda: str(begin(folder, position.step)) if rank == 0 else "")[0])
    files = [FileSum(*file) for file in _on_all(final, lambda: _write_file(partial / file_of(rank), state))]
    _on_all(final, lambda: end() if rank == 0 else None)


def _on_all(final: Path, work: Callable[[], T]) -> list[T]:
    """Return what ``work`` gives each rank, in their order; RunFailed on all of them if it fails on one."""
    found: tuple[T | None, str | None] = None, None
    try:
        found = work(), None
    except (OSError, RunFailed) as error:
        found = None, str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error.strerror}"
    with exchanging("the writing of the checkpoint"):
        all_found: list[Any] = everybodys(found)
    for rank, (_, wrong) in enumerate(all_found):
        if wrong is not None:
            free = format_bytes(shutil.disk_usage(final.parent).free)
            raise RunFailed(f"{final} cannot be written by rank {rank} ({free} are free there): {wrong}")
    return [value for value, _ in all_found]


def _write_file(path: Path, state: TrainingState) -> tuple[int, int]:
    """Write ``state`` to ``path`` and return its size and CRC-32, once it is sure to survive a power cut."""
    fields = {name: getattr(state, name) for name in TrainingState.__slots__}
    with path.open("wb") as file:
        try:
            _save(fields, file)
        except RuntimeError as error:  # what torch says of a full disk is about its own bookkeeping
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.flush()
        os.fsync(file.fileno())
    try:
        _load(path)
    except Exception as error:
        raise RunFailed(_unloadable(error)) from error
    return path.stat().st_size, crc_of(path)


def _save(value: Any, file: Any) -> None:
    """Write ``value`` as the safe loader will take it: tensors without what else is in their memory, and numbers."""

    def plain(x: Any) -> Any:
        if isinstance(x, Tensor):
            return _alone(x.detach()) if x.untyped_storage().nbytes() > x.nbytes else x.detach()
        return x.item() if isinstance(x, np.generic) else x

    try:
        torch.save(pytree.tree_map(plain, value), file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunFailed(_unloadable(error)) from error


def _alone(part: Tensor) -> Tensor:
    """Return ``part`` of some memory as if that were all of it; one in a row in host memory without a copy."""
    if part.device.type != "cpu" or not part.numel():
        return part.to("cpu", copy=True)
    found = torch.from_numpy(part.contiguous().view(-1).view(torch.uint8).numpy())
    return found.view(part.dtype).view(part.shape)


def _load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))


def _unloadable(error: Exception) -> str:
    return (
        "the optimizer's or the schedule's state has more than tensors, numbers, text, lists and dictionaries, which "
        f"alone are safe to load: {loaders_words(error)}"
    )


def check_rates(groups: Any, schedule: Any) -> None:
    """Raise BadInput unless the optimizer's options and the schedule's state could be loaded from a checkpoint."""
    written = io.BytesIO()
    try:
        _save((groups, schedule), written)
        written.seek(0)
        _load(written)
    except RunFailed as error:
        raise BadInput(f"checkpoint: {error}") from error
    except pickle.UnpicklingError as error:
        raise BadInput(f"checkpoint: {_unloadable(error)}") from error


def unreadable(path: Path) -> str | None:
    """Return why a rank's file of a checkpoint cannot be read; None if it can."""
    try:
        TrainingState(**_load(path))
    except Exception as error:  # whatever the loader raises for bytes that it doesn't know
        return f"{path}: cannot be read: {loaders_words(error)}"
    return None


def read(
    checkpoint: Checkpoint,
    model: Mapping[str, Tensor],
    trained: Set[str],
    part: Callable[[str, Any], Any] = lambda _, value: value,
) -> TrainingState:
    """Fill the tensors of ``model`` in place from ``checkpoint``; return the rest of what this rank takes up.

    That is the optimizer's state of the weights ``trained``, rates, loss scale, and the random state if the ranks are
    as many as they were; ``part(name, value)`` is what it has of a value. BadInput when a tensor is missing or has
    another shape.
    """
    missing = dict(model)
    optimizer: dict[str, dict[str, Any]] = {}
    shapes: dict[str, torch.Size] = {}
    random, rates, scale, shares, trial = None, None, None, None, None
    own = file_of(dist.get_rank()) if len(checkpoint.files) == dist.get_world_size() else None
    for name in checkpoint.files:
        path = Path(checkpoint.path, name)
        try:
            there = TrainingState(**_load(path))
            for key in missing.keys() & there.model.keys():
                found = part(key, there.model[key])
                shapes[key] = found.shape
                if shapes[key] == missing[key].shape:
                    missing.pop(key).copy_(found)
            for key in (trained & there.optimizer.keys()) - optimizer.keys():
                optimizer[key] = _own({entry: part(key, x) for entry, x in there.optimizer[key].items()})
            rates, scale = rates or _own(there.rates), scale or there.scale
            shares, trial = there.shares if shares is None else shares, trial or there.trial
            random = _own(there.random) if name == own else random
        except Exception as error:  # whatever the loader raises for bytes that it doesn't know
            raise BadInput(f"{path}: cannot be read: {loaders_words(error)}") from error
    for key, tensor in missing.items():
        said = f"has shape {tuple(shapes[key])}" if key in shapes else "is not there"
        raise BadInput(f"{checkpoint.path}: {key} {said}; the model's has shape {tuple(tensor.shape)}")
    return TrainingState({}, optimizer, random, rates, scale, shares, trial)


def _own(value: Any) -> Any:
    """Return ``value`` with tensors of its own, that don't lie in a file."""
    return pytree.tree_map_only(Tensor, Tensor.clone, value)

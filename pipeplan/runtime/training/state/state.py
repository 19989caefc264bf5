"""What has training come to on one rank, how is it written to a checkpoint, and what is taken from one?

Each rank writes one file. Tensors go by their names in the whole model, whoever holds them, so that a run on any other
plan finds them; microbatches are functions of their index, so the data's position is a number. Files are written by
torch.save and read by its safe loader, which makes tensors, numbers, text and containers of them, and calls nothing
that a file names.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ....errors import BadInput, RunFailed
from ....units import format_bytes
from ...device import random_state, set_random_state
from ...exchange.collective import share_from
from ...exchange.transport import Group, everybodys, exchanging
from ...lowering.lowered_run import Position
from ...measure.progress import Trial
from ...model.build.state_file import loaders_words
from ...model.contract import Batches
from ..rank import Rank
from ..update.factors import Scaling
from ..update.optimizers import AVERAGE
from ..update.stepper import Rates
from ..update.update import StageUpdate
from ..weights.buckets import is_large
from .checkpoint import Checkpoint, FileSum, begin, crc_of, file_of, finish, folder_of, remove_older

if TYPE_CHECKING:
    from ...exchange.layer_group import LayerGroup

# --- files ------------------------------------------------------------------------------------------------------------


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
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # what torch says then is about its own bookkeeping
                raise error.__context__ from None
            raise
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
    """Return ``part`` of some memory as if that were all of it; one in host memory without a copy."""
    if part.device.type != "cpu" or not part.is_contiguous() or not part.numel():
        return part.to("cpu", copy=True)
    found = torch.from_numpy(part.reshape(-1).view(torch.uint8).numpy())
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


# --- a rank's state ---------------------------------------------------------------------------------------------------


def trained_state(rank: Rank, stages: Sequence[int], updates: Mapping[int, StageUpdate]) -> dict[str, Tensor]:
    """Return the state of the layers of ``stages``, whose first has the rest, with the newest weights, in full
    precision, named as in the whole model.

    What replicas share must have been assembled, or have room, before.
    """
    for update in updates.values():
        update.versions.install_newest()
    state = dict(rank.model.unused) if 0 in stages else {}
    for s in stages:
        for layer in rank.layers(s):
            state |= {layer.names[key]: x for key, x in layer.module.state_dict().items() if key in layer.names}
        for layer in rank.layers(s):
            for name, parameter in layer.module.named_parameters(remove_duplicate=False):
                for update in (updates[s], *updates.values()):  # who borrows it, and who has it
                    index = update.versions.place_of(parameter)
                    if index is not None and name in layer.names:
                        state[layer.names[name]] = update.stepper.master(index)
                        break
    return state


def wholes(parts: Mapping[str, Tensor], shards: Mapping[str, Any], together: LayerGroup) -> dict[str, Tensor]:
    """Return tensors by name, of those in ``shards`` the whole that all have parts of who run layers ``together``."""
    return {name: together.whole(x, shards[name].whole) if name in shards else x for name, x in parts.items()}


@contextmanager
def assembled(updates: Mapping[int, StageUpdate]) -> Iterator[None]:
    """Within the context, the first replicas have all that theirs share, and modules the newest weights; all ranks
    enter together."""
    for update in updates.values():
        update.versions.install_newest()
        update.stepper.show_true()
        update.stepper.assemble()
    yield
    for update in updates.values():
        update.stepper.part()


def averaged(rank: Rank, updates: Mapping[int, StageUpdate]) -> dict[str, Tensor]:
    """Return the running averages of the weights that ``rank`` answers for, by their names; none before an update.

    What replicas share must have been assembled before.
    """
    return {
        name: found
        for s in rank.first_of
        for name, index in _weights(rank, s, updates[s])
        if (found := updates[s].stepper.state_of(index).get(AVERAGE)) is not None
    }


def take_averages(rank: Rank, updates: Mapping[int, StageUpdate], groups: Mapping[int, Group]) -> None:
    """Let the weights be their running averages, of an evaluation that updates nothing; BadInput if there are none."""
    with assembled(updates):
        found = averaged(rank, updates)
        for s, update in updates.items():
            for name, index in _weights(rank, s, update):
                if s in rank.first_of and name not in found:
                    raise BadInput(f"--averaged: there is no running average of {name}; --ema keeps one while training")
                weight = update.versions.installed[index]
                if s in rank.first_of:
                    weight.data.copy_(found[name])
                if s in groups:
                    share_from(rank.lowered.ranks_of(s)[0], groups[s], [weight.data])


def training_state(
    rank: Rank,
    updates: Mapping[int, StageUpdate],
    scaling: Scaling | None,
    trial: Trial | None = None,
) -> TrainingState:
    """Return what ``rank`` writes to a checkpoint, with whole tensors of what those who run
    its layers have parts of; all ranks together."""
    with assembled(updates):
        model = trained_state(rank, rank.first_of, updates)
        optimizer = {
            name: dict(updates[s].stepper.state_of(index))
            for s in rank.first_of
            for name, index in _weights(rank, s, updates[s])
            if name in model  # of copies in several stages the first one's; the others' are equal
        }
        if rank.together is not None:
            shards, together = rank.model.shards, rank.together
            model = wholes(model, shards, together)
            for name in filter(shards.__contains__, optimizer):
                large = {key: x for key, x in optimizer[name].items() if is_large(x)}
                optimizer[name] |= wholes(large, dict.fromkeys(large, shards[name]), together)
    state = TrainingState(model, optimizer, random_state(rank.device), shares=_shares(rank))
    if trial is not None and rank.number == 0:
        state = replace(state, trial=(trial.value, trial.step, trial.since))
    rates = _own_rates(rank, updates)
    if rates is None:
        return state
    scale = None if scaling is None else (scaling.current.scale, scaling.current.good)
    return replace(state, rates=(rates.groups, rates.schedule), scale=scale)


def _shares(rank: Rank) -> int | None:
    """Return how many workers share the data of the first stage's rank, where that decides what they give."""
    loader = rank.model.data.source
    return loader.shares if isinstance(loader, Batches) and 0 in rank.first_of else None


def check_savable(rank: Rank, updates: Mapping[int, StageUpdate]) -> None:
    """Raise BadInput when the optimizer or its schedule has a state that no checkpoint can keep."""
    rates = _own_rates(rank, updates)
    if rates is not None:
        check_rates(rates.groups, rates.schedule)


def _own_rates(rank: Rank, updates: Mapping[int, StageUpdate]) -> Rates | None:
    """Return the optimizer's rates if it is ``rank`` that writes them: they are the same on all stages."""
    training = (
        s
        for s in range(len(rank.lowered.plan.allocation.stages))
        if any(p.requires_grad for module in rank.modules(s) for p in module.parameters())
    )
    first = next(training, None)
    return updates[first].stepper.rates if first in rank.first_of else None


def restore(checkpoint: Checkpoint, rank: Rank, updates: Mapping[int, StageUpdate], scaling: Scaling | None) -> Trial:
    """Take up training where ``checkpoint`` left it, whichever plan wrote it, and return the best evaluation so far;
    BadInput when it doesn't fit."""
    trained = {name for s, update in updates.items() for name, _ in _weights(rank, s, update)}
    for update in updates.values():
        update.stepper.make_room()
    state = trained_state(rank, rank.stages, updates)
    shards = rank.model.shards

    def part(name: str, value: Any) -> Any:
        return shards[name].own_of(value) if name in shards and isinstance(value, Tensor) else value

    loaded = read(checkpoint, state, trained, part)
    shares = _shares(rank)
    if not (rank.lowered.evaluates or shares in (None, loaded.shares) or loaded.shares is None):
        raise BadInput(
            f"data: the checkpoint {checkpoint.path} was written with {loaded.shares} loader workers, this run has "
            f"{shares}, and what these share can only be read in order, so other samples would follow: set "
            f"num_workers={loaded.shares}"
        )
    for s in updates:
        for name, tensor in trained_state(rank, [s], updates).items():
            if tensor.data_ptr() != state[name].data_ptr():  # of copies of one name the last alone has been filled
                tensor.copy_(state[name])
    try:
        _take_up(loaded, rank, updates, scaling)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = "has another optimizer's or schedule's state than this run's, or none"
        raise BadInput(f"{checkpoint.path}: {what}: {type(error).__name__}: {error}") from error
    return Trial(*(loaded.trial or ()))


def _take_up(loaded: TrainingState, rank: Rank, updates: Mapping[int, StageUpdate], scaling: Scaling | None) -> None:
    given: set[str] = set()
    for s, update in updates.items():
        for name, index in _weights(rank, s, update):
            entries = loaded.optimizer.get(name, {})
            update.stepper.restore_state(index, deepcopy(entries) if name in given else entries)
            given.add(name)
        if loaded.rates is not None:
            update.stepper.rates.restore(*loaded.rates)
        update.stepper.take_masters()
    if scaling is not None and loaded.scale is not None:
        scale, good = loaded.scale
        scaling.resume(float(scale), int(good))
    if loaded.random is not None:
        set_random_state(loaded.random, rank.device)


def _weights(rank: Rank, s: int, update: StageUpdate) -> Iterator[tuple[str, int]]:
    """Yield name and index of each trainable weight of a stage, tied ones under their first name in the model."""
    for parameter, name in rank.names(s).items():
        index = update.versions.place_of(parameter)
        if index is not None:
            yield name, index

"""How does a run survive its end? Checkpoints with torch.distributed.checkpoint: complete, or ignored.

One folder for each, ``step-00000040``, which appears under its name only when everything is in it; ``run.json`` lists
the files with their sizes, so one that was truncated later is passed over too. Tensors go by their names in the whole
model, whoever holds them, so that a run on any other plan finds them. Microbatches are functions of their index, so
the data's position is a number.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...errors import BadInput, RunFailed
from ...units import format_bytes
from ..device import random_state, set_random_state
from ..exchange.transport import exchanging
from ..lowering.lowered_run import Position

FORMAT = "pipeplan-checkpoint/1"
ABOUT = "run.json"
OPTIMIZER, RATES, RANDOM, SCALE = "optimizer", "rates", "random", "loss_scale"

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its folder, where training stood, and the run that wrote it."""

    path: str
    position: Position
    model: str
    seed: int
    ranks: int


def newest(folder: str | Path) -> Checkpoint | None:
    """Return the complete checkpoint in ``folder`` with the most updates; None if there is none."""
    found = [checkpoint for path in Path(folder).glob("step-*") if (checkpoint := _read(path)) is not None]
    return max(found, key=lambda checkpoint: checkpoint.position.step, default=None)


def _read(path: Path) -> Checkpoint | None:
    try:
        about = json.loads((path / ABOUT).read_text())
        if about["format"] != FORMAT or any((path / name).stat().st_size != n for name, n in about["files"].items()):
            return None
        return Checkpoint(str(path), Position(**about["position"]), about["model"], about["seed"], about["ranks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def usable_folder(folder: Path) -> None:
    """Make the folder for checkpoints; BadInput when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"checkpoint: {folder} cannot be made: {error.strerror}") from error


def write(folder: Path, position: Position, model: str, seed: int, state: State, keep: int | None = None) -> None:
    """Write every rank's ``state`` to one checkpoint, all ranks together; RunFailed when a rank cannot.

    An entry that several ranks have must be equal on all of them. Once it is complete, older ones go, except for the
    newest ``keep`` with it.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    final = folder / f"step-{position.step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        with exchanging("the writing of the checkpoint"):
            dist.barrier()
            save(state, checkpoint_id=partial)
        if rank == 0:
            files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            about = Checkpoint(str(final), position, model, seed, ranks)
            fields = {key: value for key, value in asdict(about).items() if key != "path"}
            (partial / ABOUT).write_text(json.dumps({"format": FORMAT, **fields, "files": files}, indent=1) + "\n")
            shutil.rmtree(final, ignore_errors=True)  # an older one that was found incomplete, or repeats this one
            os.replace(partial, final)
            if keep is not None:
                _remove_older(folder, position.step, keep)
        with exchanging("the end of the checkpoint"):
            dist.barrier()
    except (OSError, CheckpointException) as error:
        free = format_bytes(shutil.disk_usage(folder).free)
        raise RunFailed(f"{final} cannot be written ({free} are free there): {reason_of(error)}") from error


def _remove_older(folder: Path, step: int, keep: int) -> None:
    """Remove the complete checkpoints in ``folder`` up to ``step``, except for the newest ``keep``.

    Those of more updates are of another run and stay. Each is renamed first, so that none is ever half there.
    """
    found = [x for path in Path(folder).glob("step-*") if (x := _read(path)) is not None and x.position.step <= step]
    found.sort(key=lambda x: x.position.step, reverse=True)
    for old in found[keep:]:
        path = Path(old.path)
        os.replace(path, path.with_name(f".{path.name}.removed"))
    for path in Path(folder).glob(".step-*.removed"):  # those that a killed run left too
        shutil.rmtree(path, ignore_errors=True)


def reason_of(error: BaseException) -> str:
    """Return the first rank's own words of a checkpoint error, in one line."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        error = causes[0] if causes else error
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def read(checkpoint: Checkpoint, state: State, trained: Collection[str]) -> State:
    """Fill the tensors of ``state`` in place from ``checkpoint`` and return the other entries; all ranks together.

    Beside its keys, the optimizer's entries for the weights ``trained`` are read, and what every rank needs. BadInput
    when a tensor is missing or has another shape.
    """
    try:
        entries = FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a damaged file raises
        raise BadInput(f"{checkpoint.path}: cannot be read: {error}") from error
    for name, tensor in state.items():
        stored = entries.get(name)
        if not isinstance(stored, TensorStorageMetadata) or stored.size != tensor.shape:
            there = f"has shape {tuple(stored.size)}" if isinstance(stored, TensorStorageMetadata) else "is not there"
            raise BadInput(f"{checkpoint.path}: {name} {there}; the model's has shape {tuple(tensor.shape)}")
    wanted: State = {}
    mine = f"{RANDOM}.{dist.get_rank()}"
    same = checkpoint.ranks == dist.get_world_size()
    for name, stored in entries.items():
        kind, _, rest = name.partition("/")
        belongs = kind == OPTIMIZER and rest.rpartition("/")[0] in trained
        if belongs or name in (RATES, SCALE) or (same and name == mine):
            tensor = isinstance(stored, TensorStorageMetadata)
            wanted[name] = torch.empty(stored.size, dtype=stored.properties.dtype) if tensor else None  # type: ignore[union-attr]  # just asked
    together = {**state, **wanted}
    try:
        with exchanging("the reading of the checkpoint"):
            load(together, checkpoint_id=checkpoint.path)
    except CheckpointException as error:
        raise BadInput(f"{checkpoint.path}: cannot be read: {reason_of(error)}") from error
    return {name: together[name] for name in wanted}


def optimizer_key(weight: str, entry: str) -> str:
    """Return the name of one entry of the optimizer's state for ``weight``."""
    return f"{OPTIMIZER}/{weight}/{entry}"


def optimizer_entries(loaded: State, weight: str) -> dict[str, Any]:
    """Return the optimizer's state for ``weight`` among what :func:`read` returned."""
    start = optimizer_key(weight, "")
    return {name.removeprefix(start): value for name, value in loaded.items() if name.startswith(start)}


def rates_entry(groups: Any, schedule: Any) -> dict[str, Tensor]:
    """Return the entry for the optimizer's options and the schedule's state, as they are now."""
    written = io.BytesIO()
    torch.save((groups, schedule), written)
    return {RATES: torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)}


def rates_of(loaded: State) -> tuple[Any, Any]:
    """Return what :func:`rates_entry` was given, from what :func:`read` returned; Nones without it."""
    if RATES not in loaded:
        return None, None
    # a schedule's state can be anything; as all of torch's checkpoints, this one is to be trusted like code
    pair: tuple[Any, Any] = torch.load(io.BytesIO(loaded[RATES].numpy().tobytes()), weights_only=False)
    return pair


def random_entry(device: torch.device) -> dict[str, Tensor]:
    """Return the entry for this rank's random state."""
    return {f"{RANDOM}.{dist.get_rank()}": random_state(device)}


def restore_random(loaded: State, device: torch.device) -> None:
    """Take this rank's random state from what :func:`read` returned, if the ranks are as many as they were."""
    state = loaded.get(f"{RANDOM}.{dist.get_rank()}")
    if state is not None:
        set_random_state(state, device)

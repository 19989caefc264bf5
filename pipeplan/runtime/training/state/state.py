"""What has training come to on one rank, to be :mod:`.written`, and what of a checkpoint does a rank take up?

Tensors go by their names in the whole model, whoever holds them, so that a run on any other plan finds them;
microbatches are functions of their index, so the data's position is a number. The trained model's state is written
under these names by rank 0, from what all ranks have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....errors import BadInput
from ....files.text import replaced
from ...device import random_state, set_random_state
from ...exchange.collective import Specs, Take, handed_over, share_from
from ...exchange.layer_group import LayerGroup
from ...exchange.transport import Group
from ...measure.progress import Trial
from ...model.build.spec import ModelSpec, builder_of
from ...model.build.state_file import SAFETENSORS, SafetensorsWriter
from ...model.contract import Batches
from ...model.loaded import LoadedModel
from ..rank import Rank
from ..update.factors import Scaling
from ..update.optimizers import AVERAGE
from ..update.stepper import Rates
from ..update.update import StageUpdate
from ..weights.buckets import is_large
from .checkpoint import Checkpoint
from .written import TrainingState, check_rates, read


def trained_state(rank: Rank, stages: Sequence[int], updates: Mapping[int, StageUpdate]) -> dict[str, Tensor]:
    """Return the state of the layers of ``stages``, whose first has the rest, with the weights that are installed, in
    full precision, named as in the whole model.

    What replicas share must have been assembled, or have room, before.
    """
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
    rank: Rank, updates: Mapping[int, StageUpdate], scaling: Scaling | None, trial: Trial | None = None
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
    best = None if trial is None else (trial.value, trial.step, trial.since)
    state = TrainingState(model, optimizer, random_state(rank.device), shares=_shares(rank), trial=best)
    rates = _own_rates(rank, updates)
    if rates is None:
        return state
    scale = None if scaling is None else (scaling.current.scale, scaling.current.good)
    return replace(state, rates=(rates.groups, rates.schedule), scale=scale)


def _shares(rank: Rank) -> int | None:
    """Return how many workers share the data, where that decides what they give."""
    loader = rank.model.data.source
    return loader.shares if isinstance(loader, Batches) else None


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
    if not rank.lowered.evaluates and len({shares, loaded.shares} - {None}) > 1:
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


# --- the trained model ------------------------------------------------------------------------------------------------


def save_config(path: Path, spec: ModelSpec) -> None:
    """Write the config of a transformers model beside a state with the name by which its library looks for one."""
    build = builder_of(spec) if path.name == f"model{SAFETENSORS}" else None
    beside = getattr(type(build), "beside", None)
    if beside is not None:
        name, text = beside(build)
        with replaced(str(path.with_name(name))) as file:
            file.write(text)


def save_model(number: int, trained: Mapping[str, Tensor], model: LoadedModel, path: Path, patient: Group) -> None:
    """Write everybody's ``trained`` to ``path``, all ranks of ``patient`` together; what stands in ``model`` more than
    once is there by all of its names.

    To a safetensors file each tensor is written when it comes, so that rank ``number`` 0 never has the whole model;
    for one of torch's all of them are there at once.
    """
    names: dict[str, list[str]] = {}
    for other, first in model.first_names.items():
        names.setdefault(first, [first]).append(other)
    whole: dict[str, Tensor] = {}

    def keeping(_: Specs) -> Take:
        return whole.__setitem__

    def writing(specs: Specs) -> Take:
        every = {name: spec for first, spec in specs.items() for name in names.get(first, [first])}
        writer = SafetensorsWriter(stack.enter_context(replaced(str(path))), every)
        return lambda name, tensor: writer.put(names.get(name, [name]), tensor)

    with ExitStack() as stack:
        handed_over(number, trained, writing if path.suffix == SAFETENSORS else keeping, patient)
    if number == 0 and path.suffix != SAFETENSORS:
        again = {name: whole[first] for name, first in model.first_names.items()}
        state = OrderedDict(again | whole)
        state._metadata = model.versions  # type: ignore[attr-defined]  # as torch keeps it
        with replaced(str(path)) as file:
            torch.save(state, file)

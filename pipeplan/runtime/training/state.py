"""All that training has come to on one rank, by names in the whole model: written to checkpoints and read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy

import torch
from torch import Tensor

from ..lowering.lowered_run import Script
from ..model.spec import LoadedModel
from .checkpoint import (
    SCALE,
    Checkpoint,
    State,
    optimizer_entries,
    optimizer_key,
    random_entry,
    rates_entry,
    rates_of,
    read,
    restore_random,
)
from .loss_scale import Scaling
from .stage import StageModule


def own_layers(script: Script, s: int, model: LoadedModel) -> range:
    """Return the indices of the model's layers in stage ``s``; the profile's last layer, the loss, is none of them."""
    stage = script.plan.allocation.stages[s]
    return range(stage.start, min(stage.stop, len(model.layers)))


def model_state(script: Script, stages: list[int], model: LoadedModel) -> dict[str, Tensor]:
    """Return the state of the layers of ``stages``, named as in the whole model, whose first stage has the rest."""
    state: dict[str, Tensor] = {}
    for s in stages:
        for i in own_layers(script, s, model):
            for key, value in model.layers[i][1].state_dict().items():
                name = model.full_name(i, key)
                if name is not None:
                    state[name] = value
    if model.traced is not None and 0 in stages:
        state |= model.traced.unused
    return state


def first_replicas(script: Script, rank: int) -> list[int]:
    """Return the stages whose first replica ``rank`` is: those that it answers for."""
    return [s for s in script.stages_of(rank) if script.ranks_of(s)[0] == rank]


def trained_state(
    script: Script, stages: list[int], model: LoadedModel, runners: Mapping[int, StageModule]
) -> dict[str, Tensor]:
    """Return the state of the layers of ``stages`` with the newest weights, in full precision."""
    for s in stages:
        runners[s].versions.install_newest()
    state = model_state(script, stages, model)
    for s in stages:
        for i in own_layers(script, s, model):
            for name, parameter in model.layers[i][1].named_parameters(remove_duplicate=False):
                index = runners[s].versions.place_of(parameter)
                full = model.full_name(i, name)
                if index is not None and full is not None:
                    state[full] = runners[s].versions.master(index)
    return state


def training_state(
    script: Script,
    rank: int,
    model: LoadedModel,
    runners: Mapping[int, StageModule],
    device: torch.device,
    scaling: Scaling | None,
) -> State:
    """Return what ``rank`` writes to a checkpoint: weights, buffers, optimizer, rates, loss scale, random state."""
    for runner in runners.values():
        runner.versions.install_newest()
    own = first_replicas(script, rank)
    state: State = {**trained_state(script, own, model, runners), **random_entry(device)}
    for s in own:
        versions = runners[s].versions
        for name, index in _weights(script, s, model, runners[s]):
            if name in state:  # of copies in several stages the first one's; the others' are equal
                for key, value in versions.optimizer.state_of(index).items():
                    state[optimizer_key(name, key)] = value
    training = (
        s
        for s in range(len(script.plan.allocation.stages))
        if any(p.requires_grad for i in own_layers(script, s, model) for p in model.layers[i][1].parameters())
    )
    first = next(training, None)  # rates are the same on all stages
    if first in own:
        state |= rates_entry(runners[first].versions.optimizer.groups, runners[first].versions.optimizer.schedule)
        if scaling is not None:
            state[SCALE] = torch.tensor([scaling.current.scale, scaling.current.good], dtype=torch.float64)
    return state


def restore(
    checkpoint: Checkpoint,
    script: Script,
    rank: int,
    model: LoadedModel,
    runners: Mapping[int, StageModule],
    device: torch.device,
    scaling: Scaling | None,
) -> None:
    """Take up training where ``checkpoint`` left it, whichever plan wrote it."""
    trained = {name for s, runner in runners.items() for name, _ in _weights(script, s, model, runner)}
    state = trained_state(script, script.stages_of(rank), model, runners)
    loaded = read(checkpoint, dict(state), trained)
    for s in runners:
        for name, tensor in trained_state(script, [s], model, runners).items():
            if (
                tensor.data_ptr() != state[name].data_ptr()
            ):  # of copies under one name only the last one has been filled
                tensor.copy_(state[name])
    given: set[str] = set()
    for s, runner in runners.items():
        for name, index in _weights(script, s, model, runner):
            entries = optimizer_entries(loaded, name)
            runner.versions.optimizer.restore_state(index, deepcopy(entries) if name in given else entries)
            given.add(name)
        runner.versions.optimizer.restore_rates(*rates_of(loaded))
        runner.versions.take_masters()
    if scaling is not None and SCALE in loaded:
        scale, good = loaded[SCALE].tolist()
        scaling.resume(scale, int(good))
    restore_random(loaded, device)


def _weights(script: Script, s: int, model: LoadedModel, runner: StageModule) -> Iterator[tuple[str, int]]:
    """Yield name and index of each trainable weight of a stage, tied ones under their first name in the model."""
    seen: set[int] = set()
    for i in own_layers(script, s, model):
        for name, parameter in model.layers[i][1].named_parameters():
            index = runner.versions.place_of(parameter)
            full = model.full_name(i, name)
            if index is not None and index not in seen and full is not None:
                seen.add(index)
                yield model.first_names.get(full, full), index

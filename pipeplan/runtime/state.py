"""All that training has come to on one rank, by names in the whole model: written to checkpoints and read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .checkpoint import (
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
from .model import LoadedModel
from .prepare import Script
from .stage import StageModule


def own_layers(script: Script, s: int, model: LoadedModel) -> range:
    """Return the indices of the model's layers in stage ``s``; the profile's last layer, the loss, is none of them."""
    stage = script.plan.allocation.stages[s]
    return range(stage.start, min(stage.stop, len(model.layers)))


def model_state(script: Script, stages: list[int], model: LoadedModel) -> dict[str, Tensor]:
    """Return the state of the layers of ``stages``, named as in the whole ``nn.Sequential``."""
    state: dict[str, Tensor] = {}
    for s in stages:
        for i in own_layers(script, s, model):
            module = model.layers[i][1]
            state |= {f"{model.keys[i]}.{key}": value for key, value in module.state_dict().items()}
    return state


def first_replicas(script: Script, rank: int) -> list[int]:
    """Return the stages whose first replica ``rank`` is: those that it answers for."""
    return [s for s in script.stages_of(rank) if script.ranks_of(s)[0] == rank]


def training_state(
    script: Script, rank: int, model: LoadedModel, runners: Mapping[int, StageModule], device: torch.device
) -> State:
    """Return what ``rank`` writes to a checkpoint: weights, buffers, optimizer, learning rates, random state."""
    for runner in runners.values():
        runner.versions.install_newest()
    own = first_replicas(script, rank)
    state: State = {**model_state(script, own, model), **random_entry(device)}
    for s in own:
        versions = runners[s].versions
        for name, index in _weights(script, s, model, runners[s]):
            for key, value in versions.optimizer_state(index).items():
                state[optimizer_key(name, key)] = value
    training = (
        s
        for s in range(len(script.plan.allocation.stages))
        if any(p.requires_grad for i in own_layers(script, s, model) for p in model.layers[i][1].parameters())
    )
    first = next(training, None)  # rates are the same on all stages
    if first in own:
        state |= rates_entry(runners[first].versions.groups, runners[first].versions.schedule)
    return state


def restore(
    checkpoint: Checkpoint,
    script: Script,
    rank: int,
    model: LoadedModel,
    runners: Mapping[int, StageModule],
    device: torch.device,
) -> None:
    """Take up training where ``checkpoint`` left it, whichever plan wrote it."""
    loaded = read(checkpoint, dict(model_state(script, script.stages_of(rank), model)))
    for s, runner in runners.items():
        for name, index in _weights(script, s, model, runner):
            runner.versions.restore_optimizer(index, optimizer_entries(loaded, name))
        runner.versions.restore_rates(*rates_of(loaded))
    restore_random(loaded, device)


def _weights(script: Script, s: int, model: LoadedModel, runner: StageModule) -> Iterator[tuple[str, int]]:
    """Yield name and index of each trainable weight of a stage, tied ones under their first name."""
    seen: set[int] = set()
    for i in own_layers(script, s, model):
        for name, parameter in model.layers[i][1].named_parameters():
            index = runner.versions.place_of(parameter)
            if index is not None and index not in seen:
                seen.add(index)
                yield f"{model.keys[i]}.{name}", index

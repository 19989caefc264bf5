"""What has training come to on one rank? By names in the whole model: written to checkpoints and read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy

import torch
from torch import Tensor

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
from .rank import Rank
from .stage import StageModule


def model_state(rank: Rank, stages: Iterable[int]) -> dict[str, Tensor]:
    """Return the state of the layers of ``stages``, named as in the whole model, whose first stage has the rest."""
    state: dict[str, Tensor] = {}
    for s in stages:
        for layer in rank.layers(s):
            state |= {layer.names[key]: x for key, x in layer.module.state_dict().items() if key in layer.names}
        if s == 0:
            state |= rank.model.unused
    return state


def trained_state(rank: Rank, stages: Iterable[int], runners: Mapping[int, StageModule]) -> dict[str, Tensor]:
    """Return the state of the layers of ``stages`` with the newest weights, in full precision."""
    for s in stages:
        runners[s].versions.install_newest()
    state = model_state(rank, stages)
    for s in stages:
        for layer in rank.layers(s):
            for name, parameter in layer.module.named_parameters(remove_duplicate=False):
                index = runners[s].versions.place_of(parameter)
                if index is not None and name in layer.names:
                    state[layer.names[name]] = runners[s].versions.master(index)
    return state


def training_state(rank: Rank, runners: Mapping[int, StageModule], scaling: Scaling | None) -> State:
    """Return what ``rank`` writes to a checkpoint: weights, buffers, optimizer, rates, loss scale, random state."""
    for runner in runners.values():
        runner.versions.install_newest()
    state: State = {**trained_state(rank, rank.first_of, runners), **random_entry(rank.device)}
    for s in rank.first_of:
        versions = runners[s].versions
        for name, index in _weights(rank, s, runners[s]):
            if name in state:  # of copies in several stages the first one's; the others' are equal
                for key, value in versions.optimizer.state_of(index).items():
                    state[optimizer_key(name, key)] = value
    training = (
        s
        for s in range(len(rank.lowered.plan.allocation.stages))
        if any(p.requires_grad for module in rank.modules(s) for p in module.parameters())
    )
    first = next(training, None)  # rates are the same on all stages
    if first in rank.first_of:
        rates = runners[first].versions.optimizer.rates
        state |= rates_entry(rates.groups, rates.schedule)
        if scaling is not None:
            state[SCALE] = torch.tensor([scaling.current.scale, scaling.current.good], dtype=torch.float64)
    return state


def restore(checkpoint: Checkpoint, rank: Rank, runners: Mapping[int, StageModule], scaling: Scaling | None) -> None:
    """Take up training where ``checkpoint`` left it, whichever plan wrote it."""
    trained = {name for s, runner in runners.items() for name, _ in _weights(rank, s, runner)}
    state = trained_state(rank, rank.stages, runners)
    loaded = read(checkpoint, dict(state), trained)
    for s in runners:
        for name, tensor in trained_state(rank, [s], runners).items():
            if (
                tensor.data_ptr() != state[name].data_ptr()
            ):  # of copies under one name only the last one has been filled
                tensor.copy_(state[name])
    given: set[str] = set()
    for s, runner in runners.items():
        for name, index in _weights(rank, s, runner):
            entries = optimizer_entries(loaded, name)
            runner.versions.optimizer.restore_state(index, deepcopy(entries) if name in given else entries)
            given.add(name)
        runner.versions.optimizer.rates.restore(*rates_of(loaded))
        runner.versions.take_masters()
    if scaling is not None and SCALE in loaded:
        scale, good = loaded[SCALE].tolist()
        scaling.resume(scale, int(good))
    restore_random(loaded, rank.device)


def _weights(rank: Rank, s: int, runner: StageModule) -> Iterator[tuple[str, int]]:
    """Yield name and index of each trainable weight of a stage, tied ones under their first name in the model."""
    seen: set[int] = set()
    for layer in rank.layers(s):
        for name, parameter in layer.module.named_parameters():
            index = runner.versions.place_of(parameter)
            full = layer.names.get(name)
            if index is not None and index not in seen and full is not None:
                seen.add(index)
                yield rank.model.first_names.get(full, full), index

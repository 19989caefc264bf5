"""What has training come to on one rank? By names in the whole model: written to checkpoints and read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

from torch import Tensor

from ....errors import BadInput
from ...data.loader import Loader
from ...device import random_state, set_random_state
from ...exchange.collective import share_from
from ...exchange.transport import Group
from ..rank import Rank
from ..stage import StageModule
from ..update.loss_scale import Scaling
from ..update.optimizers import AVERAGE
from ..update.stage_optimizer import Rates
from .checkpoint import Checkpoint
from .saved_state import TrainingState, Trial, check_rates, read


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
    """Return the state of the layers of ``stages`` with the newest weights, in full precision.

    What replicas share must have been assembled, or have room, before.
    """
    for s in stages:
        runners[s].versions.install_newest()
    state = model_state(rank, stages)
    for s in stages:
        for layer in rank.layers(s):
            for name, parameter in layer.module.named_parameters(remove_duplicate=False):
                found = runners[s].versions.whole(parameter)
                if found is not None and name in layer.names:
                    state[layer.names[name]] = found
    return state


def averaged(rank: Rank, runners: Mapping[int, StageModule]) -> dict[str, Tensor]:
    """Return the running averages of the weights that ``rank`` answers for, by their names; none before an update.

    What replicas share must have been assembled before.
    """
    return {
        name: found
        for s in rank.first_of
        for name, index in _weights(rank, s, runners[s])
        if (found := runners[s].versions.state_of(index).get(AVERAGE)) is not None
    }


def take_averages(rank: Rank, runners: Mapping[int, StageModule], groups: Mapping[int, Group]) -> None:
    """Let the weights be their running averages, of an evaluation that updates nothing; BadInput if there are none."""
    for runner in runners.values():
        runner.versions.install_newest()
        runner.versions.assemble()
    found = averaged(rank, runners)
    for s, runner in runners.items():
        for name, index in _weights(rank, s, runner):
            if s in rank.first_of and name not in found:
                raise BadInput(f"--averaged: there is no running average of {name}; --ema keeps one while training")
            weight = runner.versions.installed[index]
            if s in rank.first_of:
                weight.data.copy_(found[name])
            if s in groups:
                share_from(rank.lowered.ranks_of(s)[0], groups[s], [weight.data])
        runner.versions.part()


def training_state(
    rank: Rank, runners: Mapping[int, StageModule], scaling: Scaling | None, trial: Trial | None = None
) -> TrainingState:
    """Return what ``rank`` writes to a checkpoint; all ranks together."""
    for runner in runners.values():
        runner.versions.install_newest()
        runner.versions.assemble()
    model = trained_state(rank, rank.first_of, runners)
    optimizer = {
        name: dict(runners[s].versions.state_of(index))
        for s in rank.first_of
        for name, index in _weights(rank, s, runners[s])
        if name in model  # of copies in several stages the first one's; the others' are equal
    }
    for runner in runners.values():
        runner.versions.part()
    state = TrainingState(model, optimizer, random_state(rank.device), shares=_shares(rank))
    if trial is not None and rank.number == 0:
        state = replace(state, trial=(trial.value, trial.step, trial.since))
    rates = _own_rates(rank, runners)
    if rates is None:
        return state
    scale = None if scaling is None else (scaling.current.scale, scaling.current.good)
    return replace(state, rates=(rates.groups, rates.schedule), scale=scale)


def _shares(rank: Rank) -> int | None:
    """Return how many workers share the data of the first stage's rank, where that decides what they give."""
    loader = rank.model.data.source
    return loader.shares if isinstance(loader, Loader) and 0 in rank.first_of else None


def check_savable(rank: Rank, runners: Mapping[int, StageModule]) -> None:
    """Raise BadInput when the optimizer or its schedule has a state that no checkpoint can keep."""
    rates = _own_rates(rank, runners)
    if rates is not None:
        check_rates(rates.groups, rates.schedule)


def _own_rates(rank: Rank, runners: Mapping[int, StageModule]) -> Rates | None:
    """Return the optimizer's rates if it is ``rank`` that writes them: they are the same on all stages."""
    training = (
        s
        for s in range(len(rank.lowered.plan.allocation.stages))
        if any(p.requires_grad for module in rank.modules(s) for p in module.parameters())
    )
    first = next(training, None)
    return runners[first].versions.optimizer.rates if first in rank.first_of else None


def restore(checkpoint: Checkpoint, rank: Rank, runners: Mapping[int, StageModule], scaling: Scaling | None) -> Trial:
    """Take up training where ``checkpoint`` left it, whichever plan wrote it, and return the best evaluation so far;
    BadInput when it doesn't fit."""
    trained = {name for s, runner in runners.items() for name, _ in _weights(rank, s, runner)}
    for runner in runners.values():
        runner.versions.make_room()
    state = trained_state(rank, rank.stages, runners)
    loaded = read(checkpoint, state, trained)
    shares = _shares(rank)
    if not (rank.lowered.evaluates or shares in (None, loaded.shares) or loaded.shares is None):
        raise BadInput(
            f"data: the checkpoint {checkpoint.path} was written with {loaded.shares} loader workers, this run has "
            f"{shares}, and what these share can only be read in order, so other samples would follow: set "
            f"num_workers={loaded.shares}"
        )
    for s in runners:
        for name, tensor in trained_state(rank, [s], runners).items():
            if (
                tensor.data_ptr() != state[name].data_ptr()
            ):  # of copies under one name only the last one has been filled
                tensor.copy_(state[name])
    try:
        _take_up(loaded, rank, runners, scaling)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = "has another optimizer's or schedule's state than this run's, or none"
        raise BadInput(f"{checkpoint.path}: {what}: {type(error).__name__}: {error}") from error
    return Trial(*(loaded.trial or ()))


def _take_up(loaded: TrainingState, rank: Rank, runners: Mapping[int, StageModule], scaling: Scaling | None) -> None:
    given: set[str] = set()
    for s, runner in runners.items():
        for name, index in _weights(rank, s, runner):
            entries = loaded.optimizer.get(name, {})
            runner.versions.optimizer.restore_state(index, deepcopy(entries) if name in given else entries)
            given.add(name)
        if loaded.rates is not None:
            runner.versions.optimizer.rates.restore(*loaded.rates)
        runner.versions.take_masters()
    if scaling is not None and loaded.scale is not None:
        scale, good = loaded.scale
        scaling.resume(float(scale), int(good))
    if loaded.random is not None:
        set_random_state(loaded.random, rank.device)


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

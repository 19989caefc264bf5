"""Building the model of a run, on every rank alike: a chain of layers, or a module that is traced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import BadInput
from ...zoo.model import Model
from ..device import CPU
from .contract import boundaries_of, checked_model, contract, is_whole
from .spec import LoadedModel, ModelSpec, builder_of, data_of


def load_model(spec: ModelSpec, batch: int, seed: int, device: torch.device = CPU) -> LoadedModel:
    """Find and build the model of ``spec`` for microbatches of ``batch`` samples; BadInput says what is wrong with it.

    ``seed`` is given to a zoo model, and set before any other is built, so that all ranks build the same one. The
    layers stay where they are built; the pass that sizes what lies between them visits ``device``, layer by layer.
    """
    build = builder_of(spec)
    data = data_of(spec, batch)
    torch.manual_seed(seed)
    result = build(batch, seed=seed) if isinstance(build, Model) else build(batch)
    whole, example, loss = contract(result)
    if is_whole(whole):
        from .traced import load_traced

        return load_traced(whole, example, loss, data, device)
    layers, example_input, loss = checked_model(result)
    for _, module in layers:
        module.train()
    keys = _keys(result[0])
    return LoadedModel(
        layers=layers,
        keys=keys,
        loss=loss,
        data=data,
        boundaries=boundaries_of([module for _, module in layers], example_input.to(device)),
        first_names=_first_names(keys, [module for _, module in layers]),
    )


def _keys(layers: Any) -> list[str]:
    if isinstance(layers, nn.Sequential):
        return list(layers._modules)
    return [str(index) for index in range(len(layers))]


def _first_names(keys: Sequence[str], layers: Sequence[nn.Module]) -> dict[str, str]:
    first: dict[nn.Parameter, str] = {}
    for key, module in zip(keys, layers, strict=True):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first.setdefault(parameter, f"{key}.{name}")
    return {
        f"{key}.{name}": first[parameter]
        for key, module in zip(keys, layers, strict=True)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first[parameter] != f"{key}.{name}"
    }


def load_weights(model: LoadedModel, path: str | Path) -> None:
    """Give ``model`` the state in a file that ``run --save`` or ``torch.save(model.state_dict())`` wrote."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        left = dict(state)
        parts = [(f"{key}.", module) for key, (_, module) in zip(model.keys, model.layers, strict=True)]
        for prefix, module in parts if model.traced is None else [("", model.traced.module)]:
            own = {name: left.pop(f"{prefix}{name}") for name in module.state_dict()}
            module.load_state_dict(own)
    except KeyError as error:
        raise BadInput(f"{path}: has no {error.args[0]!r}, which the model has") from error
    except Exception as error:  # whatever unpickling another file raises
        raise BadInput(f"{path}: cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    if left:
        raise BadInput(f"{path}: has {next(iter(left))!r}, which the model has not")
    for name, first in model.first_names.items():
        if not torch.equal(state[name], state[first]):
            raise BadInput(f"{path}: {first!r} and {name!r} differ, and are one weight in the model")

"""The model that a run trains: what it is, where its parts are found, and whether it is what the plan is for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from ...errors import BadInput
from ...zoo import load
from ...zoo.model import Model
from .network import LayerCode, Loss, Network, TensorSpec

Data = Callable[[int, int], tuple[Tensor, Tensor]]  # (microbatch index, seed) -> (input, target)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model to train and on what, as the user typed it; every rank finds both for itself.

    ``build`` is a name of the zoo (with options: ``gpt-tiny,blocks=8``) or ``module:function`` of the model contract,
    ``data`` is ``module:function`` of the data contract; None stands for the data that belongs to a zoo model.
    """

    build: str
    data: str | None = None


@dataclass(frozen=True)
class Traced:
    """The ``module`` that was traced, and its network in ``groups``: one for each of the plan's layers, loss included.

    ``specs`` are the values', ``trained`` those that gradients come back for. ``names[i]`` are the names in the state
    of ``module`` of what is in the state of layer i, of names of one tensor the first. ``unused`` is what no layer has.
    """

    module: nn.Module
    network: Network
    groups: tuple[tuple[LayerCode, ...], ...]
    specs: Mapping[int, TensorSpec]
    trained: frozenset[int]
    names: tuple[Mapping[str, str], ...] = ()
    unused: Mapping[str, Tensor] = field(default_factory=dict)

    def with_modules(self, modules: Sequence[nn.Module]) -> Traced:
        """Return the same with copies for modules: one for each of the groups, but for the loss alone."""
        groups = list(self.groups)
        for index, module in enumerate(modules):
            parts = [module] if len(groups[index]) == 1 else list(module.children())
            groups[index] = tuple(
                replace(code, module=part, run=part if code.run is code.module else code.run)
                for code, part in zip(groups[index], parts, strict=True)
            )
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True)
class LoadedModel:
    """A built model: its layers with names, what goes into it, its loss and its data.

    ``boundaries[i]`` is the tensor before layer i; the last one is the output. ``keys[i]`` is the prefix of layer i's
    entries in the whole model's state, as ``nn.Sequential`` names them. Of a weight that stands in the model more than
    once ``first_names`` has the first name there for each of the others. What is no chain of layers is ``traced``.
    """

    layers: list[tuple[str, nn.Module]]
    keys: list[str]
    loss: Loss
    data: Data
    boundaries: list[TensorSpec]
    first_names: Mapping[str, str] = field(default_factory=dict)
    traced: Traced | None = None

    def full_name(self, layer: int, name: str) -> str | None:
        """Return what an entry of a layer's state is called in the whole model's, None if it isn't part of that."""
        if self.traced is not None:
            return self.traced.names[layer].get(name)
        return f"{self.keys[layer]}.{name}"


def builder_of(spec: ModelSpec) -> Any:
    """Return the zoo model, or the user's function, that builds the model of ``spec``."""
    return find(spec.build) if ":" in spec.build else load(spec.build)


def data_of(spec: ModelSpec, batch: int) -> Data:
    """Return the data of ``spec`` in microbatches of ``batch`` samples; BadInput when nothing names any."""
    if spec.data is not None:
        return find(spec.data)  # type: ignore[no-any-return]  # callable, as find checks
    build = builder_of(spec)
    if isinstance(build, Model):
        return build.data(batch)
    raise BadInput(f"model {spec.build}: needs data to train on; name a data(index, seed) as module:function")


def find(text: str) -> Any:
    """Import what ``module:function`` names, also from the working directory; BadInput if there is no such function."""
    module_name, _, attribute = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise BadInput(f"{text}: {error}") from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadInput(f"{text}: module {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise BadInput(f"{text}: is a {type(found).__name__}, which cannot be called")
    return found

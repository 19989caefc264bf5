"""The model that a run trains: what it is, where its parts are found, and whether it is what the plan is for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInput
from ..problem import Chain
from ..zoo import load
from ..zoo.model import Model
from .network import LayerCode, Network, resident
from .profiler import LOSS_NAME, Loss

Data = Callable[[int, int], tuple[Tensor, Tensor]]  # (microbatch index, seed) -> (input, target)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model to train and on what, as the user typed it; every rank finds both for itself.

    ``build`` is a name of the zoo (with options: ``gpt-tiny,blocks=8``) or ``module:function`` of the model contract,
    ``data`` is ``module:function`` of the data contract; None stands for the data that belongs to a zoo model.
    """

    build: str
    data: str | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of the tensor that crosses a cut; both ends must agree before anything is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one such tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


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


def load_weights(model: LoadedModel, path: str) -> None:
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


def boundaries_of(layers: Sequence[nn.Module], example_input: Tensor) -> list[TensorSpec]:
    """Return the tensors between layers, from one pass in evaluation mode, which leaves no trace in the modules.

    It runs where the example is; a layer that isn't there comes for its part alone.
    """
    x = example_input
    specs = [TensorSpec(tuple(x.shape), x.dtype)]
    training = [(part, part.training) for module in layers for part in module.modules()]
    for module in layers:
        module.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for index, module in enumerate(layers):
            try:
                with resident(module, str(x.device), release=True):
                    x = module(x)
            except Exception as error:
                raise BadInput(f"layers[{index}]: failed on {specs[-1]}: {error}") from error
            if not isinstance(x, Tensor):
                raise BadInput(f"layers[{index}]: returned a {type(x).__name__}; a layer takes and returns one tensor")
            specs.append(TensorSpec(tuple(x.shape), x.dtype))
    for part, mode in training:
        part.training = mode
    return specs


def check_model(model: LoadedModel, chain: Chain, cuts: Sequence[int]) -> None:
    """Raise BadInput, naming the first difference, unless ``model`` is what ``chain`` is the profile of.

    Compared are the number of layers, their parameters, and the sizes of the tensors between them. ``cuts`` are the
    layers at which stages begin; what crosses there must carry gradients.
    """
    if chain.edges is not None:
        raise BadInput(
            f"model: is a chain of {len(model.layers)} layers; the plan's profile {chain.name} is a graph with skip "
            "connections, of a model that isn't a list of layers"
        )
    count = len(model.layers)
    if len(chain) != count + 1 or chain.layers[-1].weight_bytes:
        raise BadInput(
            f"model: has {count} layers; the plan's profile {chain.name} has {len(chain)}, and should have "
            f"{count + 1}, of which the last is the {LOSS_NAME}"
        )
    if model.boundaries[0].nbytes != chain.input_bytes:
        raise BadInput(
            f"model: its example input has {model.boundaries[0].nbytes} bytes; the plan's profile says "
            f"{chain.input_bytes} for microbatches of {chain.microbatch}"
        )
    for index, ((name, module), layer) in enumerate(zip(model.layers, chain.layers, strict=False)):
        weights = sum(parameter.nbytes for parameter in module.parameters())
        if weights != layer.weight_bytes:
            raise BadInput(
                f"model: layer {index} ({name}) has {weights} bytes of parameters; the plan's profile says "
                f"{layer.weight_bytes} ({layer.name})"
            )
        output = model.boundaries[index + 1]
        if output.nbytes != layer.output_bytes:
            raise BadInput(
                f"model: layer {index} ({name}) puts out {output.nbytes} bytes, {output}; the plan's profile says "
                f"{layer.output_bytes} ({layer.name})"
            )
    for cut in cuts:
        if not model.boundaries[cut].dtype.is_floating_point:
            raise BadInput(f"model: {model.boundaries[cut]} crosses the cut before layer {cut} and carries no gradient")

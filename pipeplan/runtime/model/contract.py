"""The model contract: what a build function returns, and whether that is what the plan's profile is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from ...problem import Chain
from .network import (
    LOSS_NAME,
    Loss,
    Named,
    TensorSpec,
    kind_of,
    named_layers,
    resident,
)
from .spec import LoadedModel


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


def checked_model(result: Any) -> tuple[Named, Tensor, Loss]:
    """Return named layers, example input and loss of what a build function returned; BadInput if it is malformed."""
    layers, example_input, loss = contract(result)
    if not isinstance(example_input, Tensor):
        raise BadInput(f"build: example_input is {kind_of(example_input)}, not one tensor")
    return named_layers(layers), example_input, loss


def is_whole(layers: Any) -> bool:
    """Whether ``layers`` is a model as one module, which has to be traced, and not its layers."""
    return isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential)


def contract(result: Any) -> tuple[Any, Any, Loss]:
    """Return the three things that a build function is to return; BadInput if it doesn't."""
    if not (isinstance(result, tuple) and len(result) == 3):
        raise BadInput(f"build: expected (layers, example_input, loss), got {kind_of(result)}")
    layers, example_input, loss = result
    if not callable(loss):
        raise BadInput(f"build: loss is {kind_of(loss)}, which cannot be called")
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        raise BadInput("build: the loss has parameters; make that part the last layer")
    return layers, example_input, loss

"""The model contract: is what a build function returned well formed, and what lies between its layers?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from .network import Loss, TensorSpec, kind_of, resident
from .user_code import user_code


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
            with user_code(f"layers[{index}]: failed on {specs[-1]}"), resident(module, str(x.device), release=True):
                x = module(x)
            if not isinstance(x, Tensor):
                raise BadInput(f"layers[{index}]: returned a {type(x).__name__}; a layer takes and returns one tensor")
            specs.append(TensorSpec(tuple(x.shape), x.dtype))
    for part, mode in training:
        part.training = mode
    return specs


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

"""How is a module profiled that somebody holds in their hands? As a copy, so that it stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from ..model.structure import mapped, modules_in, tensors_in


def builder_of_live(model: Any, inputs: Any, loss: Any, fake: bool) -> Callable[[int], Any]:
    """Return a build function of the model contract for a live module, or a list of them, and its example inputs.

    What it builds is a copy; with ``fake``, under fake tensors, one whose parameters and buffers have no numbers and
    take no memory.
    """
    tensors = {id(x): x for module in modules_in((model, loss)) for x in (*module.parameters(), *module.buffers())}

    def build(batch: int) -> Any:
        known: dict[int, Any] = {key: _without_numbers(x) for key, x in tensors.items()} if fake else {}
        copied, own = copy.deepcopy((model, loss), known)
        return (copied, mapped(lambda x: x.detach().to("cpu"), inputs) if fake else inputs, own)

    return build


def samples_in(inputs: Any) -> int:
    """Return how many samples example inputs have: the length of the first dimension of their first tensor."""
    found = tensors_in(inputs)
    if not found:
        raise BadInput("inputs: have no tensor; pass an example input to profile a live module")
    return found[0].shape[0] if found[0].dim() else 1


def _without_numbers(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty

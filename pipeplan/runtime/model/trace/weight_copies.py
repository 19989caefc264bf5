"""Which layers keep copies of their weights for the backward? Found by following what tensors are made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ....errors import BadInput
from ..network import TensorSpec
from ..operations import aten, tensors_among
from ..places import buffers_kept
from ..user_code import user_code


def refuse_copies(
    place: str, name: str, layer: nn.Module, *specs: TensorSpec, run: Callable[..., Any] = nn.Module.__call__
) -> None:
    """Raise BadInput if ``layer`` keeps copies of its weights for its backward, which would stay old; or CodeFailed.

    ``run(layer, *inputs)`` runs it forward in training mode on zeros of ``specs``, and every tensor is followed: what
    comes from weights and constants alone is a copy, what comes from the input as well is an activation. Only what
    autograd saves is seen, not what a ``torch.autograd.Function`` puts aside in attributes.
    """
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if not weights:
        return
    inputs = [torch.zeros(spec.shape, dtype=spec.dtype, device=weights[0].device) for spec in specs]
    origins = _Origins(weights)
    copies: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        if origins.is_copy(tensor):
            copies.append(f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}")
        return tensor.detach()

    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        buffers_kept([layer]),
        origins,
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        for x in inputs:
            origins.enters(x.requires_grad_(x.dtype.is_floating_point))
        with user_code(f"model: {place} ({name}): failed on {' and '.join(map(str, specs))}"):
            run(layer, *inputs)
    if copies:
        raise BadInput(
            f"model: {place} ({name}) keeps a copy of its weights, {copies[0]}, for its backward, which "
            "weights latest differentiates with newer ones; let the plan recompute the layer, or choose weights stash"
        )


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own has no types
    """Follows what tensors are made from, by storage; all are kept alive, so that none is taken for another."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._alive = [weight.untyped_storage() for weight in weights]
        self._weights = {storage._cdata: weight.dtype for storage, weight in zip(self._alive, weights, strict=True)}
        self._activations: set[int] = set()
        self._copies: set[int] = set()

    def enters(self, x: Tensor) -> None:
        """Tell that ``x`` is what the layer gets."""
        self._alive.append(x.untyped_storage())
        self._activations.add(x.untyped_storage()._cdata)

    def is_copy(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was made from weights, but not from the input, and is no plain view of a weight."""
        key = tensor.untyped_storage()._cdata
        if key in self._weights:
            return tensor.dtype != self._weights[key] or tensor.is_conj() or tensor.is_neg()
        return key in self._copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and mark what it returns."""
        found = func(*args, **(kwargs or {}))
        read = {x.untyped_storage()._cdata for x in tensors_among((args, kwargs))}
        made = [x.untyped_storage() for x in tensors_among(found)]
        self._alive += made
        keys = {storage._cdata for storage in made} - set(self._weights)
        if func is aten._cudnn_rnn.default:  # its fifth result is the weights in one piece
            packed = made[4]._cdata
            keys -= {packed}
            self._copies |= {packed} - set(self._weights)
        if read & self._activations:
            self._activations |= keys
            self._copies -= keys
        elif read & (self._copies | set(self._weights)):
            name: str = func._schema.name.partition("::")[2]
            if not (name.startswith("new_") or name.endswith("_like")):  # which look at shape and type alone
                self._copies |= keys - self._activations
        return found

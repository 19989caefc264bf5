"""How can a backward use newer weights than its forward did? On the activations that the forward stored (TiMePReSt).

Autograd keeps the tensors that a backward reads. While a forward runs here, it keeps of each weight only which one it
is; the backward reads that weight anew, in the version that is installed by then. Everything else is kept as it was,
so gradients are those of old activations and new weights. That has a meaning where the backward reads weights
themselves, as in linear, convolution, normalisation, attention and recurrent layers; a layer that keeps something made
from its weights alone, such as a normalised or a converted copy, would go on with the old ones; such layers are refused
(:mod:`..model.weight_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ....errors import RunFailed
from .versions import Versions


class _Weight(NamedTuple):
    """A weight that the stage uses, or a view of one, in whichever version."""

    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Stored(NamedTuple):
    """An activation, and how often it had been changed in place when it was stored."""

    tensor: Tensor
    changes: int


@contextmanager
def reading_newest(versions: Versions, hold: Callable[[Tensor], None]) -> Iterator[None]:
    """Within the context, let autograd keep which weights it needs, not the weights; ``hold`` hears of all the rest.

    With hooks autograd doesn't check that what it has kept is unchanged; so this does.
    """
    parameters, places = versions.readable, versions.places

    def pack(tensor: Tensor) -> _Weight | _Stored:
        index = places.get(tensor.untyped_storage()._cdata)
        if index is None:
            hold(tensor)
            return _Stored(tensor.detach(), tensor._version)
        offset = int(tensor.storage_offset()) - int(parameters[index].storage_offset())
        return _Weight(index, tensor.size(), tensor.stride(), offset)

    def unpack(kept: _Weight | _Stored) -> Tensor:
        if isinstance(kept, _Weight):
            weight = parameters[kept.place].data
            return weight.as_strided(kept.size, kept.stride, int(weight.storage_offset()) + kept.offset)
        tensor, changes = kept
        if tensor._version != changes:
            raise RunFailed(
                f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place after it was "
                "stored"
            )
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield


def read_weights_themselves(modules: Iterable[nn.Module]) -> None:
    """Let recurrent layers among ``modules`` run without cuDNN, which packs their weights into a copy for both passes.

    Torch's own kernels read the weights; on CPUs oneDNN's do.
    """
    for module in modules:
        for part in module.modules():
            if isinstance(part, nn.RNNBase):
                before: list[bool] = []
                part.register_forward_pre_hook(partial(_cudnn_off, before))
                part.register_forward_hook(partial(_cudnn_back, before), always_call=True)


def _cudnn_off(before: list[bool], *_: Any) -> None:
    before.append(torch.backends.cudnn.enabled)
    torch.backends.cudnn.enabled = False


def _cudnn_back(before: list[bool], *_: Any) -> None:
    torch.backends.cudnn.enabled = before.pop()

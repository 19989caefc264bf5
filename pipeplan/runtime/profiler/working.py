"""What does a pass of each layer take beside what its forward keeps? Memory is counted while it runs forward and back.

That is the gradients of what it made and read, and what its operations need meanwhile: the gradient of logits is often
more than all that the rest of a stage works with. On a GPU its allocator counts, kernels' own workspaces too; elsewhere
storages are counted as operations make them and nobody holds them any more, without what is inside an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..model.network import LayerCode, Network, drop, leaf, resident
from ..model.structure import tensors_in
from ..model.user_code import RAISED, code_failed
from .steps import begin_sums


class _Allocated(AbstractContextManager["_Allocated"]):
    """What a GPU's allocator gave."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> _Allocated:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base untyped
    """The storages that operations made, as long as something has them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held = self._most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._made:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
                self._held += storage.nbytes()
        if self._held > self._most:
            self._most = max(self._most, self.held())
        return out

    def held(self) -> int:
        self._made = {key: row for key, row in self._made.items() if not row[0].expired()}  # type: ignore[no-untyped-call]
        self._held = sum(size for _, size in self._made.values())
        return self._held

    def most(self) -> int:
        return self._most


def working_bytes(network: Network, device: str, release: bool = False) -> list[int]:
    """Run each layer of ``network`` forward and backward; return the bytes that it takes beside what it keeps.

    Backwards add to sums of gradients that are there, and start from ones. With ``release`` no more than one layer's
    module stands on the device.
    """
    values = dict(enumerate(map(leaf, network.inputs)))
    found = []
    for index, layer in enumerate(network.layers):
        with resident(layer.module, device, release):
            size, outputs = _working(layer, [leaf(values[v]) for v in layer.reads], torch.device(device))
        found.append(size)
        values.update((v, leaf(out)) for v, out in zip(layer.makes, outputs, strict=True))
        del outputs
        drop(values, network, index)
    return found


def _working(layer: LayerCode, inputs: Sequence[Tensor], device: torch.device) -> tuple[int, Sequence[Tensor]]:
    begin_sums(layer.module)
    with _Allocated(device) if device.type == "cuda" else _Made() as counted:
        outputs = layer.forward(inputs)
        kept = counted.held()
        ends = [x for x in outputs if x.requires_grad]
        try:
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
        except RAISED as error:
            raise code_failed(f"the backward of {layer.place}", error) from error
        size = max(counted.most() - kept, 0)
    layer.module.zero_grad(set_to_none=True)
    return size, [x.detach().requires_grad_(x.requires_grad) for x in outputs]

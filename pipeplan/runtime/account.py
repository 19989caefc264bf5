"""The account of activation bytes that a device holds between forwards and backwards, measured and not modelled.

Autograd's saved tensors are seen by hooks. A storage counts once and in full while any microbatch holds it; weights and
buffers don't count. The same convention as the profiler's, so that measured and planned bytes can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

Holding = dict[int, UntypedStorage]  # by identity; holding the storage keeps its identity from being used again


class Account:
    """Bytes held now and at most, by one rank."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}
        self.held_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def saving(self, holding: Holding, permanent: set[int]) -> Iterator[None]:
        """Within the context, add what autograd saves to ``holding``, except storages in ``permanent``.

        The hooks hand tensors through unchanged, but with any hooks autograd skips its check for tensors that were
        changed in place; so only the first microbatches of a run are accounted.
        """

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in permanent:
                self.hold(holding, tensor)
            return tensor

        with saved_tensors_hooks(pack, _same):
            yield

    def hold(self, holding: Holding, tensor: Tensor) -> None:
        """Add ``tensor`` to ``holding``."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in holding:
            return
        holding[key] = storage
        if not self._holders[key]:
            self._bytes[key] = storage.nbytes()
            self.held_bytes += self._bytes[key]
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._holders[key] += 1

    def release(self, holding: Holding) -> None:
        """Remove all that ``holding`` holds."""
        for key in holding:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.held_bytes -= self._bytes.pop(key)
        holding.clear()


def _same(tensor: Tensor) -> Tensor:
    return tensor

"""How many bytes do a rank's activations, and its weights, gradients and optimizer state, take at most?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch import Tensor, UntypedStorage

Holding = dict[int, UntypedStorage]  # by identity; holding the storage keeps its identity from being used again


class HeldBytes:
    """Bytes held now and at most, by one rank."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}
        self.held_bytes = 0
        self.peak_bytes = 0

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


Kept = Callable[[], Iterator[tuple[Tensor, bool]]]  # tensors, and whether they are in host memory for want of room


class StateBytes:
    """Most bytes of what stages train, on the device and, offloaded, in host memory; noted while updates are made.

    A storage counts once and in full. ``open`` until everything has been at its largest, because counting takes time.
    """

    def __init__(self) -> None:
        self._watched: list[Kept] = []
        self.device_bytes = 0
        self.host_bytes = 0
        self.open = True

    def watch(self, kept: Kept) -> None:
        """Count what ``kept`` yields as well."""
        self._watched.append(kept)

    def note(self) -> None:
        """Count what is there now."""
        if not self.open:
            return
        sizes: dict[int, tuple[int, bool]] = {}
        for kept in self._watched:
            for tensor, on_host in kept():
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes(), on_host
        self.device_bytes = max(self.device_bytes, sum(n for n, on_host in sizes.values() if not on_host))
        self.host_bytes = max(self.host_bytes, sum(n for n, on_host in sizes.values() if on_host))

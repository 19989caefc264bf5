"""The account of weights, gradients and optimizer state of one rank: bytes of their real storages, at their peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

Kept = Callable[[], Iterator[tuple[Tensor, bool]]]  # tensors, and whether they are in host memory for want of room


class StateAccount:
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

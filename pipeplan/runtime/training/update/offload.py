"""How do weights and optimizer state travel between host and device? In pieces of buckets, beside what computes.

While one piece is stepped, the next ones are fetched and those before are brought home, each way in a stream of its
own; so the link is used both ways at once, and what is still on its way home holds up no pass. Host memory is locked,
as only then a GPU reads it by itself, and is exactly as large as what it is for.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from ....errors import RunFailed
from ....integers import ceil_div
from ...device import new_stream
from ..weights.buckets import Bucket, Slice, in_buckets

PIECES: Final = 3  # of a bucket: one to step, one to fetch, one to bring home


# --- host memory -----------------------------------------------------------------------------------------------------


def host_rooms(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    """Return room in host memory for tensors of ``device``, in one block for each type."""
    rooms: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(dtypes):
        own = [i for i, its in enumerate(dtypes) if its == dtype]
        sizes = [torch.Size(shapes[i]).numel() for i in own]
        block = host_block(sum(sizes) * dtype.itemsize, device).view(dtype)
        for i, part in zip(own, torch.split(block, sizes), strict=True):
            rooms[i] = part.view(shapes[i])
    return [rooms[i] for i in range(len(shapes))]


def host_block(size: int, device: torch.device) -> Tensor:
    """Return ``size`` bytes; torch's own allocator of locked memory would take the next power of two."""
    if device.type != "cuda" or not size:
        return torch.empty(size, dtype=torch.uint8)
    pages = mmap.mmap(-1, size)
    block = torch.frombuffer(pages, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types there
    error = runtime.cudaHostRegister(block.data_ptr(), size, 0)
    if int(error):
        raise RunFailed(f"{size} bytes of host memory for what is offloaded cannot be locked (CUDA error {int(error)})")
    weakref.finalize(pages, runtime.cudaHostUnregister, block.data_ptr())
    return block


# --- device memory ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Slices of a bucket that travel together, to ``region`` of the buffers; the ``number``-th of all."""

    number: int
    region: int
    slices: tuple[Slice, ...]


def in_pieces(buckets: Sequence[Bucket], travels: bool) -> list[list[Piece]]:
    """Return the pieces of each of ``buckets``; one where nothing ``travels``."""
    room = max((bucket.size for bucket in buckets), default=0)
    size = region_size(room) if travels else room
    numbers = count()
    cut = [in_buckets(bucket.dtype, bucket.slices, 0, max(size, 1)) for bucket in buckets]
    return [[Piece(next(numbers), region, x.slices) for region, x in enumerate(pieces)] for pieces in cut]


def region_size(room: int) -> int:
    """Return the elements of a region of buffers of ``room`` elements; the last region may have fewer."""
    return ceil_div(room, PIECES)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Of each slice of a piece weights and state on the device, which are there at ``event`` (None: now)."""

    weights: list[Tensor]
    states: list[dict[str, Any]]
    event: Any


class Ways:
    """The ways between a device and its host: copies each way are made one after the other, in a stream of its own."""

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream | None] = {}

    @contextmanager
    def on(self, which: str, device: torch.device, events: Sequence[Any]) -> Iterator[torch.cuda.Stream | None]:
        """Within the context be on the way ``which``, behind ``events``; None where there are no streams."""
        if which not in self._streams:
            self._streams[which] = new_stream(device)
        stream = self._streams[which]
        if stream is None:
            yield None
            return
        for event in events:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield stream


class BucketBuffers:
    """Device memory for one bucket at a time, used again and again by all stages of a rank, and the ways to and fro.

    It has ``room`` for the largest of all stages' buckets, in :data:`PIECES` regions. A region is filled again when
    what was in it has been brought home.
    """

    def __init__(self) -> None:
        self.room = 0
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._ahead: dict[int, tuple[object, Piece, Fetched]] = {}  # by region
        self._free: dict[int, list[Any]] = {}  # events by region
        self._ways = Ways()
        self._returned: Any = None

    def take(self, name: str, dtype: torch.dtype, device: torch.device, offset: int, size: int) -> Tensor:
        """Return ``size`` elements from ``offset`` on of the buffer ``name``."""
        key = name, dtype, device
        if key not in self._tensors:
            self._tensors[key] = torch.empty(self.room, dtype=dtype, device=device)
            made = event_on(device)
            for region in range(PIECES if made is not None else 0):  # its memory may have been something else's
                self._free.setdefault(region, []).append(made)
        return self._tensors[key][offset : offset + size]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the buffers."""
        yield from self._tensors.values()

    def keep_ahead(self, owner: object, piece: Piece, fetched: Fetched) -> None:
        """Have ``fetched`` for when ``owner`` comes to ``piece``."""
        self._ahead[piece.region] = owner, piece, fetched

    def has_ahead(self, owner: object, piece: Piece) -> bool:
        """Whether ``piece`` is there or on its way."""
        return piece.region in self._ahead and self._ahead[piece.region][:2] == (owner, piece)

    def taken(self, owner: object, piece: Piece) -> Fetched | None:
        """Return what is there or on its way for ``owner``, once; None if it has to be fetched."""
        return self._ahead.pop(piece.region)[2] if self.has_ahead(owner, piece) else None

    def forget(self, owner: object) -> None:
        """Forget what was fetched for ``owner`` in vain."""
        self._ahead = {region: x for region, x in self._ahead.items() if x[0] is not owner}

    def fetched(self, device: torch.device, region: int, copies: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Let ``copies`` (to, from) be made, on the way to the device; return the event at which they are there."""
        self._ahead.pop(region, None)
        with self._ways.on("there", device, self._free.pop(region, [])):
            for there, home in copies:
                there.copy_(home, non_blocking=True)
            event = event_on(device)
        if event is not None:
            self._free[region] = [event]
        return event

    def bring_home(self, device: torch.device, region: int, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let ``copies`` (to, from) be made, on the way home, behind what the device has been given so far."""
        stepped = event_on(device)
        with self._ways.on("home", device, [] if stepped is None else [stepped]) as stream:
            for home, there in copies:
                home.copy_(there, non_blocking=True)
                if stream is not None:
                    there.record_stream(stream)
            self._returned = event_on(device)
        if self._returned is not None:
            self._free[region] = [self._returned]

    def settle(self) -> None:
        """Wait until all is home."""
        if self._returned is not None:
            self._returned.synchronize()


def event_on(device: torch.device) -> Any:
    """Return an event in the current stream; None where there are no streams."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event

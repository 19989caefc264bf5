"""Which elements of the weights are stepped and summed together? Buckets of slices of flattened weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``[start, stop)`` of the flattened weight ``index``."""

    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements of the slice."""
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slice of a contiguous ``tensor`` of the weight's shape, as a view."""
        return tensor.view(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces of weights of one type, which lie at elements ``[start, stop)`` of all weights of that type in a row."""

    dtype: torch.dtype
    slices: tuple[Slice, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements of the bucket."""
        return self.stop - self.start


def cut_into_buckets(weights: Sequence[Tensor], size: int | None, apart: int = 0) -> tuple[Bucket, ...]:
    """Return ``weights`` in buckets of ``size`` elements, the last of each type smaller; None: one for each type.

    The last ``apart`` weights have buckets of their own, the last ones. Linear in weights plus buckets. A weight that
    doesn't fit into what is left of a bucket goes on in the next.
    """
    first = len(weights) - apart
    begun: dict[torch.dtype, int] = {}
    buckets: list[Bucket] = []
    for dtype, is_apart in dict.fromkeys((weight.dtype, i >= first) for i, weight in enumerate(weights)):
        own = [(i, x.numel()) for i, x in enumerate(weights) if x.dtype == dtype and (i >= first) == is_apart]
        start = begun.get(dtype, 0)
        total = begun[dtype] = start + sum(count for _, count in own)
        limit = total - start if size is None else size
        slices: list[Slice] = []
        room = limit
        for index, count in own:
            position = 0
            while position < count:
                taken = min(room, count - position)
                slices.append(Slice(index, position, position + taken))
                position += taken
                room -= taken
                if not room:
                    buckets.append(Bucket(dtype, tuple(slices), start, start + limit))
                    start, slices, room = start + limit, [], limit
        if slices:
            buckets.append(Bucket(dtype, tuple(slices), start, total))
    return tuple(buckets)


class FlatGradient:
    """One gradient of all weights, flat for each type, so that a chunk of it is summed over replicas without copies.

    ``views`` has the shapes of the weights; backward passes add to them in place.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self.flats: dict[torch.dtype, Tensor] = {}
        views: dict[int, Tensor] = {}
        for bucket in cut_into_buckets(weights, None):
            device = weights[bucket.slices[0].index].device
            flat = self.flats[bucket.dtype] = torch.zeros(bucket.size, dtype=bucket.dtype, device=device)
            parts = torch.split(flat, [span.size for span in bucket.slices])
            for span, part in zip(bucket.slices, parts, strict=True):
                views[span.index] = part.view(weights[span.index].shape)
        for index, weight in enumerate(weights):
            views.setdefault(index, torch.zeros_like(weight))  # without elements
        self.views = [views[index] for index in range(len(weights))]

    def clear(self) -> None:
        """Begin a new sum."""
        for flat in self.flats.values():
            flat.zero_()

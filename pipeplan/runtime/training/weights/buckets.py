"""Which elements of the weights are stepped and summed together? Buckets of slices of flattened weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
        own = [Slice(i, 0, x.numel()) for i, x in enumerate(weights) if x.dtype == dtype and (i >= first) == is_apart]
        start = begun.get(dtype, 0)
        begun[dtype] = start + sum(span.size for span in own)
        buckets += in_buckets(dtype, own, start, size)
    return tuple(buckets)


def in_buckets(dtype: torch.dtype, pieces: Iterable[Slice], start: int, size: int | None) -> Iterator[Bucket]:
    """Yield buckets of ``size`` elements (None: one of all) of ``pieces``, which lie in a row from ``start`` on."""
    slices: list[Slice] = []
    filled = 0
    for piece in pieces:
        position = piece.start
        while position < piece.stop:
            taken = piece.stop - position if size is None else min(size - filled, piece.stop - position)
            slices.append(Slice(piece.index, position, position + taken))
            position += taken
            filled += taken
            if filled == size:
                yield Bucket(dtype, tuple(slices), start, start + filled)
                start, slices, filled = start + filled, [], 0
    if slices:
        yield Bucket(dtype, tuple(slices), start, start + filled)


def in_runs(buckets: Sequence[Bucket], most: int | None) -> list[list[int]]:
    """Return the indices of ``buckets`` in runs of one type, up to ``most`` (None: any number) in each."""
    runs: list[list[int]] = []
    for index, bucket in enumerate(buckets):
        if runs and buckets[runs[-1][0]].dtype == bucket.dtype and (most is None or len(runs[-1]) < most):
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs

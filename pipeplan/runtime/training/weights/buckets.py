"""Which elements of the weights are stepped and summed together, and by which replica? Buckets of flattened weights.

Replicas may share the optimizer's state (ZeRO-1; Rajbhandari et al., ZeRO, section 5.1): gradients are summed into
shares, each replica steps its own, and the new weights are gathered. Every chunk of the gradient is shared by all, so
that each has as much to exchange and to step at any time; in all no replica has more than ceil(1/r) of the elements of
a type. Elementwise optimizers give the same bits.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ...exchange.collective import shares
from ...exchange.transport import Group, exchanging, received_words, send_words


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


# --- shares -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sharing:
    """Replica ``rank`` of ``ranks`` that share a stage's state, and exchange ``coarsening`` buckets at once.

    What only a checkpoint needs goes through ``hosts``, a group of gloo's (None: that of all ranks).
    """

    rank: int
    ranks: int
    coarsening: int | None = None
    group: Group = None
    hosts: Group = None


@dataclass(frozen=True, slots=True)
class SharedChunk:
    """Elements ``[start, stop)`` of all weights of a type in a row: ``slices``, of which ``own`` are stepped here.

    ``first`` is as for :func:`shares`. Gradients that aren't ``summed`` here have been before.
    """

    dtype: torch.dtype
    start: int
    stop: int
    slices: tuple[Slice, ...]
    own: tuple[Bucket, ...]
    first: int
    summed: bool

    def give(self, weights: Sequence[Tensor], row: Tensor) -> None:
        """Write the own share of ``weights`` to its place in the ``row`` of all elements."""
        for bucket in self.own:
            position = bucket.start - self.start
            for span in bucket.slices:
                row[position : position + span.size].copy_(span.of(weights[span.index]))
                position += span.size

    def take(self, row: Tensor, weights: Sequence[Tensor]) -> None:
        """Write the ``row`` of all elements to ``weights``."""
        for span, part in zip(self.slices, torch.split(row, [span.size for span in self.slices]), strict=True):
            span.of(weights[span.index]).copy_(part)


def shared_chunks(buckets: Sequence[Bucket], apart: int, sharing: Sharing, size: int | None) -> tuple[SharedChunk, ...]:
    """Return the chunks of ``buckets``, of which the last ``apart`` are summed elsewhere; the own part of each is in
    buckets of ``size`` elements."""
    found: list[SharedChunk] = []
    first = 0
    summed, others = buckets[: len(buckets) - apart], buckets[len(buckets) - apart :]
    for some in (summed, others):
        for run in in_runs(some, sharing.coarsening):
            chunk = [some[i] for i in run]
            start, stop = chunk[0].start, chunk[-1].stop
            slices = tuple(span for bucket in chunk for span in bucket.slices)
            sizes = shares(stop - start, sharing.ranks, first)
            begin = sum(sizes[: sharing.rank])
            own = _between(slices, begin, begin + sizes[sharing.rank])
            parts = tuple(in_buckets(chunk[0].dtype, own, start + begin, size))
            found.append(SharedChunk(chunk[0].dtype, start, stop, slices, parts, first, some is summed))
            first = (first + stop - start) % sharing.ranks
    return tuple(found)


def _between(slices: Iterable[Slice], start: int, stop: int) -> list[Slice]:
    """Return the elements ``[start, stop)`` of ``slices`` in a row."""
    found = []
    position = 0
    for span in slices:
        low, high = max(start, position) - position, min(stop, position + span.size) - position
        if low < high:
            found.append(Slice(span.index, span.start + low, span.start + high))
        position += span.size
    return found


class Rows:
    """Where a replica keeps what it has for its own ``slices`` alone: in one row for each weight."""

    def __init__(self, chunks: Iterable[SharedChunk]) -> None:
        self._own: dict[int, list[tuple[Slice, int]]] = {}  # of each weight, in order, and where they begin in its row
        self.sizes: Counter[int] = Counter()  # by weight
        for span in (span for chunk in chunks for bucket in chunk.own for span in bucket.slices):
            self._own.setdefault(span.index, []).append((span, self.sizes[span.index]))
            self.sizes[span.index] += span.size

    def place(self, part: Slice) -> Slice:
        """Return where a slice of a weight, or a part of one, lies in the weight's row."""
        own = self._own[part.index]
        span, begin = own[bisect_right(own, part.start, key=lambda other: other[0].start) - 1]
        begin += part.start - span.start
        return Slice(part.index, begin, begin + part.size)

    def taken(self, index: int, whole: Tensor) -> Tensor:
        """Return the row of the weight at ``index`` from what there is for all of it."""
        flat = whole.contiguous()
        row = flat.new_empty(self.sizes[index])
        for span, begin in self._own.get(index, ()):
            row[begin : begin + span.size].copy_(span.of(flat))
        return row

    def put(self, index: int, row: Tensor, whole: Tensor) -> None:
        """Write a row to its places in ``whole``."""
        for span, begin in self._own.get(index, ()):
            span.of(whole).copy_(row[begin : begin + span.size])


MASTER: Final = ""  # the key of the value in full precision among those of the optimizer's state


@dataclass(frozen=True, slots=True)
class Kept:
    """What there is for one weight: its value in full precision, if it is kept apart, and the optimizer's state."""

    master: Tensor | None
    state: Mapping[str, Any]


def gathered(
    kept: Sequence[Kept], shapes: Sequence[torch.Size], rows: Sequence[Rows], sharing: Sharing
) -> list[Kept] | None:
    """Return on the group's first rank what all replicas have ``kept`` of each weight as wholes on the host, elsewhere
    None; all call it together. ``rows`` are theirs.

    Rows come one after the other between hosts: GPUs have no room for them, and a host but for one beside the wholes.
    """
    assert sharing.group is not None, "they have each other"
    first, *others = dist.get_process_group_ranks(sharing.group)
    mine = [{key: x for key, x in ((MASTER, entry.master), *entry.state.items()) if x is not None} for entry in kept]
    specs = [{key: x.dtype if is_large(x) else _on_host(x) for key, x in entries.items()} for entries in mine]
    with exchanging("the gathering of what replicas share"):
        if sharing.rank:
            written = io.BytesIO()
            torch.save(specs, written)
            send_words(written.getvalue(), first, sharing.hosts)
            for row in (x for entries in mine for x in entries.values() if is_large(x) and x.numel()):
                dist.send(_on_host(row).contiguous(), first, group=sharing.hosts)
            return None
        wholes: list[dict[str, Any]] = [{} for _ in shapes]
        for rank, other in enumerate([first, *others]):
            theirs = specs
            if rank:
                theirs = torch.load(io.BytesIO(received_words(other, sharing.hosts)), weights_only=True)
            for index, entries in enumerate(theirs):
                for key, value in entries.items():
                    if not isinstance(value, torch.dtype):
                        wholes[index].setdefault(key, value)
                        continue
                    row = _on_host(mine[index][key]) if not rank else torch.empty(rows[rank].sizes[index], dtype=value)
                    if rank and row.numel():
                        dist.recv(row, other, group=sharing.hosts)
                    if key not in wholes[index]:
                        wholes[index][key] = row.new_empty(shapes[index])
                    rows[rank].put(index, row, wholes[index][key])
    return [Kept(entries.pop(MASTER, None), entries) for entries in wholes]


def is_large(value: Any) -> bool:
    """Whether an entry of an optimizer's state has an element for each of the weight's, and isn't a count."""
    return isinstance(value, Tensor) and value.dim() > 0


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value

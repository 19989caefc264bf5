"""Which storages do ranges of layers keep? A chain takes no table to answer; :mod:`.dag_storages` has those of DAGs.

What the words mean :mod:`.saved` says, which everybody else asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..integers import IntLike, Ints


@dataclass(frozen=True)
class TensorFacts:
    """What a profile says about memory, one entry for each tensor or for each layer.

    Of tensors (0 the network's input, i + 1 the output of layer i): ``sizes`` in bytes, ``storages`` the bytes of the
    memory of its own that one has, ``parents`` the tensor that it is a view of, -1 for none. Of layers: the tensors
    that it ``reads``; those of them, and of its own output, that are ``kept`` for its backward; ``private``, the bytes
    that it keeps beside those and shares with no other layer; and ``undeclared_bytes``, of which the profile doesn't
    say what tensor they are: they count as private, and a recomputed segment takes them for its input.
    """

    sizes: tuple[int, ...]
    storages: tuple[int, ...]
    parents: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    private: tuple[int, ...]
    undeclared_bytes: tuple[int, ...]

    @staticmethod
    def of(layers: Sequence[Any], sizes: Sequence[int], reads: Sequence[tuple[int, ...]]) -> TensorFacts:
        """Return the facts of ``layers`` (:class:`..problem.Layer`), whose tensors have ``sizes``."""
        storages, parents = [sizes[0]], [-1]
        kept, private, undeclared_bytes = [], [], []
        for i, layer in enumerate(layers):
            parent = -1 if layer.view_of is None else layer.view_of + 1
            parents.append(parent)
            storages.append(sizes[i + 1] if layer.storage_bytes is None else layer.storage_bytes)
            mine = reads[i] if layer.saved_bytes is None else tuple(sorted({x + 1 for x in layer.saves or ()}))
            kept.append(mine)
            roots = {parent if t == i + 1 and parent >= 0 else t for t in mine}
            alone = sum(storages[t] if t == i + 1 else sizes[t] for t in roots)
            private.append(0 if layer.saved_bytes is None else layer.saved_bytes - alone)
            undeclared_bytes.append(layer.saved_bytes if layer.saved_bytes is not None and layer.saves is None else 0)
        return TensorFacts(
            tuple(sizes),
            tuple(storages),
            tuple(parents),
            tuple(reads),
            tuple(kept),
            tuple(private),
            tuple(undeclared_bytes),
        )

    def roots(self, start: int, tensors: Iterable[int] | None = None) -> dict[int, int]:
        """Return the tensor in whose storage each of ``tensors`` (None: all) lies in a range that starts at ``start``.

        What was made before enters by itself. The tensors are in order, each behind what it is a view of.
        """
        root: dict[int, int] = {}
        for t in range(len(self.parents)) if tensors is None else tensors:
            root[t] = t if t <= start or self.parents[t] < 0 else root[self.parents[t]]
        return root


@dataclass(frozen=True)
class ChainStorages:
    """What ranges of layers keep where each layer reads its predecessor: arrays over L + 1 positions, O(1) a question.

    Tensor v enters the range that starts at v, and views make runs of tensors in one storage, so only one storage
    reaches across a position.
    """

    facts: TensorFacts

    @cached_property
    def root(self) -> Ints:
        """The tensor in whose storage each tensor lies, the network whole."""
        return np.array([*self.facts.roots(0).values()], dtype=np.int64)

    @cached_property
    def storage(self) -> Ints:
        """Bytes of the storage in which each tensor lies when it was made in the range."""
        return np.array(self.facts.storages, dtype=np.int64)[self.root]

    @cached_property
    def keepers(self) -> tuple[Ints, Ints]:
        """For each tensor the first layer behind it that keeps its storage (L: none), and the last before (-1)."""
        root, count = self.root, len(self.facts.kept)
        after, before = np.full(count + 1, count, dtype=np.int64), np.full(count + 1, -1, dtype=np.int64)
        keeps = [{int(root[t]) for t in tensors} for tensors in self.facts.kept]
        for v in range(count - 1, -1, -1):
            if root[v] in keeps[v]:
                after[v] = v
            elif root[v + 1] == root[v]:
                after[v] = after[v + 1]
        for v in range(1, count + 1):
            if root[v] in keeps[v - 1]:
                before[v] = v - 1
            elif root[v] == root[v - 1]:
                before[v] = before[v - 1]
        return after, before

    @cached_property
    def first(self) -> tuple[tuple[int, int], ...]:
        """For each storage that is kept its tensor and the first layer that keeps it."""
        after, _ = self.keepers
        root, kept = self.root, self.facts.kept
        found = []
        for t in range(len(root)):
            if root[t] == t:
                layer = t - 1 if t and t in kept[t - 1] else int(after[t])
                if layer < len(kept):
                    found.append((t, layer))
        return tuple(found)

    @cached_property
    def totals(self) -> Ints:
        """Bytes that ``layers[:i]`` keep, shape (L + 1,)."""
        new = np.array(self.facts.private, dtype=np.int64)
        for tensor, layer in self.first:
            new[layer] += self.facts.storages[tensor]
        return np.concatenate([[0], np.cumsum(new)]).astype(np.int64)

    @cached_property
    def _counted(self) -> Ints:
        """Bytes of :attr:`totals` from each position on that are the storage of the tensor that enters there."""
        counted = np.zeros(len(self.root), dtype=np.int64)
        first = dict(self.first)
        for t, root in enumerate(self.root.tolist()):
            if first.get(root, -1) >= t:
                counted[t] = self.facts.storages[root]
        return counted

    @cached_property
    def _sizes(self) -> Ints:
        return np.array(self.facts.sizes, dtype=np.int64)

    def inner(self, start: IntLike, stop: IntLike) -> IntLike:
        """Bytes that the range keeps beside the tensor that enters it."""
        return self.totals[stop] - self.totals[start] - self._counted[start] * self.keeps_input(start, stop)

    def of_input(self, start: IntLike, stop: IntLike) -> IntLike:
        """Bytes of the tensor that enters, where the range keeps it."""
        return self._sizes[start] * self.keeps_input(start, stop)

    def undeclared(self, start: IntLike, stop: IntLike) -> IntLike:
        """Bytes of :meth:`inner` that are taken for the input, as the first layer doesn't say what it keeps."""
        return self._undeclared[start] * (np.asarray(stop) > start)

    @cached_property
    def _undeclared(self) -> Ints:
        return np.minimum(np.array((*self.facts.undeclared_bytes, 0), dtype=np.int64), self._sizes)

    def keeps_input(self, start: IntLike, stop: IntLike) -> IntLike:
        """Whether the range keeps the storage of the tensor that enters it."""
        return self.keepers[0][start] < stop

    def keeps_output(self, start: IntLike, stop: IntLike) -> IntLike:
        """Whether the range keeps the storage of the tensor that leaves it."""
        return self.keepers[1][stop] >= start

    def passes(self, start: IntLike, stop: IntLike) -> IntLike:
        """Whether the tensor that leaves the range is a view of the one that enters it."""
        return self.root[stop] == self.root[start]

    @cached_property
    def beyond(self) -> Ints:
        """Bytes by which the storage of each tensor is larger than the tensor, shape (L + 1,)."""
        return self.storage - self._sizes

    def stored(self, start: IntLike, stop: IntLike, held: bool, inside: bool) -> IntLike:
        """Bytes that a stored run adds to what its stage keeps before it, the tensor that enters it once.

        ``held`` says that the storage of what enters is kept already, ``inside`` that the stage begins before the run:
        then a view that enters takes the whole storage in which it was made.
        """
        if held:
            return self.inner(start, stop)
        more = self.beyond[start] * self.keeps_input(start, stop) if inside else 0
        return self.inner(start, stop) + self.of_input(start, stop) + more

    def segment_input(self, entering: IntLike, start: IntLike, held: bool, inside: bool) -> IntLike:
        """Bytes that a recomputed segment adds for its input of ``entering`` bytes; the rest as in :meth:`stored`."""
        return 0 * entering if held else entering + (self.beyond[start] if inside else 0)

    def keeps_behind(self, start: IntLike, stop: IntLike, held: IntLike, recomputed: bool) -> IntLike:
        """Whether the storage of what leaves a stored run, or a recomputed segment, is kept behind it."""
        if recomputed:
            return self.passes(start, stop)
        return self.keeps_output(start, stop) | (held & self.passes(start, stop))

    @cached_property
    def least_first(self) -> tuple[int, ...]:
        """Bytes that each layer is the first to keep, at least, wherever stages begin."""
        least = list(self.facts.private)
        for tensor, layer in self.first:
            least[layer] += min(self.facts.storages[tensor], *self.facts.sizes[tensor : layer + 1], 2**62)
        return tuple(least)

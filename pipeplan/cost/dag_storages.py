"""Which storages do ranges of layers keep in a DAG? Tables of all ranges answer.

What the words mean :mod:`.saved` says, which everybody else asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..integers import IntLike, Ints
from .storages import TensorFacts


class Ranges:
    """A table ``[start, stop]`` of all ranges of ``count`` layers, summed up from what each layer adds to which."""

    def __init__(self, count: int) -> None:
        self._steps = np.zeros((count + 2, count + 1), dtype=np.int64)

    def add(self, starts: range, layer: int, size: int) -> None:
        """Let ``layer`` add ``size`` to the ranges that begin in ``starts`` and hold it."""
        if starts:
            self._steps[starts.start, layer + 1] += size
            self._steps[starts.stop, layer + 1] -= size

    def sums(self, most: Sequence[int] | None = None) -> Ints:
        """Return the table; ``most`` bounds what each layer adds to one range."""
        table = self._steps[:-1]
        for start in range(1, len(table)):
            table[start] += table[start - 1]  # far quicker than np.cumsum along the columns
        if most is not None:
            np.minimum(table, np.array((0, *most), dtype=np.int64), out=table)
        return np.cumsum(table, axis=1, out=table)


@dataclass(frozen=True)
class DagStorages:
    """What ranges of layers keep in a DAG: tables ``[start, stop]``, O(1) a question."""

    facts: TensorFacts

    @cached_property
    def _trees(self) -> list[list[int]]:
        """Tensors that lie in one storage, the network whole, in order."""
        home: dict[int, list[int]] = {}
        for t, root in self.facts.roots(0).items():
            home.setdefault(root, []).append(t)
        return list(home.values())

    @cached_property
    def _keepers(self) -> list[list[int]]:
        keepers: list[list[int]] = [[] for _ in self.facts.sizes]
        for layer, tensors in enumerate(self.facts.kept):
            for t in tensors:
                keepers[t].append(layer)
        return keepers

    @cached_property
    def _tables(self) -> tuple[Ints, Ints]:
        """What ranges keep of tensors that enter, and of tensors made in them."""
        count = len(self.facts.kept)
        entering, made = Ranges(count), Ranges(count)
        for tree in self._trees:
            if not any(self._keepers[t] for t in tree):
                continue
            bounds = sorted({0, *(t for t in tree if t), count})  # tensor t, made by layer t - 1, enters from t on
            for low, high in pairwise(bounds):
                root = self.facts.roots(low, tree)
                groups: dict[int, set[int]] = {}
                for t in tree:
                    groups.setdefault(root[t], set()).update(k for k in self._keepers[t] if k >= low)
                for t, keepers in groups.items():
                    enters = t <= low
                    table, size = (entering, self.facts.sizes[t]) if enters else (made, self.facts.storages[t])
                    begin = low
                    for keeper in sorted(keepers):  # the first keeper behind the start counts
                        table.add(range(begin, min(keeper + 1, high)), keeper, size)
                        begin = max(begin, keeper + 1)
        return entering.sums(), made.sums()

    @cached_property
    def _private(self) -> Ints:
        return np.concatenate([[0], np.cumsum(np.array(self.facts.private, dtype=np.int64))]).astype(np.int64)

    @cached_property
    def totals(self) -> Ints:
        """Bytes that ``layers[:i]`` keep, shape (L + 1,)."""
        entering, made = self._tables
        kept: Ints = self._private + entering[0] + made[0]
        return kept

    def inner(self, start: IntLike, stop: IntLike) -> IntLike:
        """Bytes that the range keeps beside the tensors that enter it."""
        return self._private[stop] - self._private[start] + self._tables[1][start, stop]

    def of_input(self, start: IntLike, stop: IntLike) -> IntLike:
        """Bytes of the tensors that enter, of those that the range keeps."""
        return self._tables[0][start, stop]

    @cached_property
    def _undeclared(self) -> Ints:
        if not any(self.facts.undeclared_bytes):
            return np.broadcast_to(np.int64(0), (len(self.facts.sizes),) * 2)
        table = Ranges(len(self.facts.kept))
        last: dict[int, int] = {}  # layer that reads a tensor which no layer says that it keeps
        for layer, unsaid in enumerate(self.facts.undeclared_bytes):
            for t in self.facts.reads[layer] if unsaid else ():
                if not self._keepers[t]:  # taken for the input of the first one behind the start
                    table.add(range(max(t, last.get(t, -1) + 1), layer + 1), layer, self.facts.sizes[t])
                    last[t] = layer
        return table.sums(self.facts.undeclared_bytes)

    def undeclared(self, start: IntLike, stop: IntLike) -> IntLike:
        """Bytes of :meth:`inner` that are taken for the input, as layers don't say what they keep."""
        return self._undeclared[start, stop]

    @cached_property
    def beyond(self) -> Ints:
        """Bytes by which a run stored from each position on and another before it may keep more as one, shape (L + 1,):
        at most those by which the storages of tensors that enter are larger than these."""
        facts, count = self.facts, len(self.facts.kept)
        most, last = list[int](), [max(keepers, default=-1) for keepers in self._keepers]
        for t, parent in enumerate(facts.parents):
            most.append(max(facts.sizes[t], facts.storages[t], 0 if parent < 0 else most[parent]))
        for t in reversed(range(len(last))):
            if facts.parents[t] >= 0:
                last[facts.parents[t]] = max(last[facts.parents[t]], last[t])
        steps = np.zeros(count + 2, dtype=np.int64)
        for t, keeper in enumerate(last):
            if keeper >= t:
                steps[t] += most[t] - facts.sizes[t]
                steps[keeper + 1] -= most[t] - facts.sizes[t]
        return np.cumsum(steps)[:-1].astype(np.int64)

    def stored(self, start: IntLike, stop: IntLike, held: bool, inside: bool) -> IntLike:
        """Bytes that a stored run keeps, all of them counted."""
        return self.inner(start, stop) + self.of_input(start, stop)

    def segment_input(self, entering: IntLike, start: IntLike, held: bool, inside: bool) -> IntLike:
        """Bytes that a recomputed segment keeps of what enters it: all."""
        return entering

    def keeps_behind(self, start: IntLike, stop: IntLike, held: IntLike, recomputed: bool) -> IntLike:
        """Nothing is said of a DAG, where several tensors may leave."""
        return np.zeros(np.broadcast(start, stop).shape, dtype=np.bool_)

    @cached_property
    def least_first(self) -> tuple[int, ...]:
        """Bytes that each layer is the first to keep, at least, wherever stages begin."""
        least = list(self.facts.private)
        for tree in self._trees:
            keepers = [layer for t in tree for layer in self._keepers[t]]
            if keepers:
                entering = [self.facts.sizes[t] for t in tree if t <= min(keepers)]
                least[min(keepers)] += min([self.facts.storages[tree[0]], *entering])
        return tuple(least)

"""What do stages of a DAG cost whose layers may stand in any order? A chain whose positions are ideals.

The layers between two nested ideals, in whatever order, are a stage: their times and weights add up, what crosses a cut
and what a stage keeps depend on the sets alone. So everything that is asked of a chain by positions can be asked of
this one by the numbers of ideals, and searches over stages between cuts find the best over all orders. Two ideals of
which neither holds the other are the ends of no stage; what such a pair would keep is more than any memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cost.layer_orders import layers_in, members
from ...cost.saved import DagStorages, TensorFacts, foretell, storages
from ...integers import IntLike, Ints
from ...problem import Chain, SharedSums, Sums

ENDLESS = 2**59  # bytes; more than any memory, and sums of several still fit into an int64

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class IdealChain(Chain):
    """``whole`` with :func:`.layer_orders.ideals` as its positions, the empty one and that of all layers among them.

    Its own layers and edges mean nothing. A stage ``layers[start:stop]`` has what ideal ``stop`` has beyond ``start``.
    Weights that layers share are counted where it is known what they share, but nobody asks here who sums them: ideals
    that part them are to be left out where that matters.
    """

    whole: Chain = field(kw_only=True)
    ideals: tuple[int, ...] = field(kw_only=True)

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @staticmethod
    def of(chain: Chain, ideals: Sequence[int]) -> IdealChain:
        """Return the chain of some ``ideals`` of ``chain``, in an order in which each comes behind those inside it."""
        found = IdealChain(chain.name, (), chain.input_bytes, edges=(), whole=chain, ideals=tuple(ideals))
        sets, facts = _Sets(found.inside), storages(chain).facts
        found.__dict__["_nested"] = _Table(lambda: sets.nested)
        foretell(found, IdealStorages(facts, sets), _Table(lambda: sets.entering(facts)))
        return found

    def __len__(self) -> int:
        return len(self.ideals) - 1

    @cached_property
    def inside(self) -> Flags:
        """Which layers each ideal has, shape (ideals, layers)."""
        return layers_in(self.ideals, len(self.whole))

    def is_range(self, start: IntLike, stop: IntLike) -> Any:
        """Whether ideal ``stop`` holds ideal ``start`` and more."""
        return self.__dict__["_nested"][start, stop]

    @cached_property
    def cut_bytes(self) -> tuple[int, ...]:
        """Bytes that cross the cut behind each ideal: each distinct tensor made in it and read by others."""
        chain, inside = self.whole, self.inside
        crossing = np.zeros(len(self.ideals), dtype=np.int64)
        computing = np.ones(len(chain), dtype=np.bool_)
        computing[list(chain.inputs or ())] = False
        idle = ~inside[:, computing].any(axis=1)
        for tensor, (size, readers) in enumerate(zip(chain.tensor_bytes, chain.readers, strict=True)):
            if readers and size:
                made = inside[:, tensor - 1] if tensor else np.ones(len(inside), dtype=np.bool_)
                made = made & idle if chain.from_data(tensor) else made
                crossing += size * (made & ~inside[:, list(readers)].all(axis=1))
        return tuple(crossing.tolist())

    @cached_property
    def sums(self) -> Sums:
        """Sums over the layers of each ideal."""
        whole = self.whole.sums

        def total(sums: Ints) -> Ints:
            found: Ints = np.matmul(self.inside, np.diff(sums), dtype=np.int64)
            return found

        def shared(one: SharedSums) -> SharedSums:
            return replace(one, holders=total(one.holders))

        return Sums(
            total(whole.forward_ns),
            total(whole.backward_ns),
            total(whole.backward_weight_ns),
            total(whole.optimizer_ns),
            total(whole.weight_bytes),
            total(whole.parameters),
            tuple(map(shared, whole.shared)),
        )

    def order_through(self, ends: Iterable[int]) -> tuple[int, ...]:
        """Return an order of the layers that passes through the ideals ``ends``, each inside the next.

        Layers between two of them keep the order that they have.
        """
        order: list[int] = []
        before = 0
        for position in sorted(set(ends)):
            order += members(self.ideals[position] & ~before)
            before = self.ideals[position]
        return tuple(order)

    def through(self, ends: Iterable[int]) -> tuple[Chain, Mapping[int, int]]:
        """Return the layers in an order that passes through the ideals ``ends``, and where it does."""
        some = set(ends)
        return self.whole.reordered(self.order_through(some)), {end: self.ideals[end].bit_count() for end in some}


@dataclass
class _Table:
    """A table ``[start, stop]`` of ideals, made when it is first asked."""

    make: Callable[[], Any]

    @cached_property
    def _found(self) -> Any:
        return self.make()

    def __getitem__(self, key: tuple[IntLike, IntLike]) -> Any:
        return self._found[key]


@dataclass(frozen=True)
class _Sets:
    """Tables of pairs of ideals: sums over what the layers between them have to do with."""

    inside: Flags

    @cached_property
    def nested(self) -> Flags:
        """Which ideals are inside which others, and not the same."""
        inside = self.inside.astype(np.float32)
        sizes = inside.sum(axis=1)
        nested: Flags = (inside @ inside.T == sizes[:, None]) & (sizes[:, None] < sizes[None, :])
        return nested

    def made(self, tensor: int) -> Flags:
        """Whether each ideal at a stage's start has a tensor: 0 the network's input, i + 1 the output of layer i."""
        return self.inside[:, tensor - 1] if tensor else np.ones(len(self.inside), dtype=np.bool_)

    def any_of(self, terms: Sequence[tuple[Ints, Sequence[int]]]) -> Ints:
        """Return the sum of ``size[start]``, over the (size, layers) of which any layer is between start and stop.

        None is where as many of the layers are in one as in the other: one minus a product of rows, by that number.
        """
        left, right, whole = [], [], np.zeros(len(self.inside), dtype=np.int64)
        for size, layers in terms:
            some = size != 0
            if not some.any():
                continue
            own = self.inside[:, list(layers)].sum(axis=1)
            if int(own.max()) == int(own[some].min()):  # none of them is between any two
                continue
            whole += size
            for number in np.unique(own[some]):
                same = own == number
                if same.any():
                    left.append(np.where(own == number, size, 0))
                    right.append(same)
        found = np.broadcast_to(whole[:, None], self.nested.shape).copy()
        if left:  # exact in floats, which are multiplied far quicker
            found -= (np.array(left, dtype=np.float64).T @ np.array(right, dtype=np.float64)).astype(np.int64)
        found[~self.nested] = ENDLESS
        return found

    def entering(self, facts: TensorFacts) -> Ints:
        """Return the distinct bytes that the layers between two ideals read from before."""
        readers: list[list[int]] = [[] for _ in facts.sizes]
        for layer, tensors in enumerate(facts.reads):
            for tensor in tensors:
                readers[tensor].append(layer)
        return self.any_of(
            [(size * self.made(t), readers[t]) for t, size in enumerate(facts.sizes) if readers[t] and size]
        )


@dataclass(frozen=True)
class IdealStorages(DagStorages):
    """What the layers between two ideals keep: tables ``[start, stop]``."""

    sets: _Sets

    @cached_property
    def _tables(self) -> tuple[_Table, _Table]:  # type: ignore[override]
        """What they keep of tensors that enter, and of tensors made among them."""
        entering: list[tuple[Ints, Sequence[int]]] = []
        made: list[tuple[Ints, Sequence[int]]] = []
        facts, sets = self.facts, self.sets
        for tree in self._trees:
            if not any(self._keepers[t] for t in tree):
                continue
            there = np.stack([sets.made(t) for t in tree])  # what of the tree each ideal has
            kinds, kind = np.unique(there, axis=1, return_inverse=True)
            for number in range(kinds.shape[1]):
                before = dict(zip(tree, kinds[:, number].tolist(), strict=True))
                root: dict[int, int] = {}
                for t in tree:
                    root[t] = t if before[t] or facts.parents[t] < 0 else root[facts.parents[t]]
                rows = (kind.reshape(-1) == number).astype(np.int64)
                for home in dict.fromkeys(root.values()):
                    keepers = sorted({k for t in tree if root[t] == home for k in self._keepers[t]})
                    size = facts.sizes[home] if before[home] else facts.storages[home]
                    if keepers and size:
                        (entering if before[home] else made).append((size * rows, keepers))

        def table(terms: Sequence[tuple[Ints, Sequence[int]]]) -> _Table:
            return _Table(lambda: sets.any_of(terms))

        return table(entering), table(made)

    @cached_property
    def totals(self) -> Ints:
        """Bytes that the layers of each ideal keep."""
        entering, made = self._tables
        kept, every = self._private.copy(), np.arange(1, len(self.sets.inside))
        kept[every] += entering[0, every] + made[0, every]
        return kept

    @cached_property
    def _private(self) -> Ints:
        found: Ints = np.matmul(self.sets.inside, np.array(self.facts.private), dtype=np.int64)
        return found

    def undeclared(self, start: IntLike, stop: IntLike) -> IntLike:
        """As in a DAG, of layers that stand between two ideals in the order that they have."""
        return _Table(lambda: self._undeclared)[start, stop]

    @cached_property
    def _undeclared(self) -> Ints:
        unsaid, shape = self.facts.undeclared_bytes, self.sets.nested.shape
        if not any(unsaid):
            return np.broadcast_to(np.int64(0), shape)
        found = np.zeros(shape, dtype=np.int64)
        for layer, most in enumerate(unsaid):
            free = [t for t in self.facts.reads[layer] if not self._keepers[t]] if most else []
            if not free:
                continue
            taken = np.zeros_like(found)
            for t in free:
                others = [i for i in range(layer) if unsaid[i] and t in self.facts.reads[i]]
                first = ~self._any(others) if others else np.ones_like(self.sets.nested)
                taken += self.facts.sizes[t] * (self.sets.made(t)[:, None] & first)
            found += np.minimum(taken, most) * self._any([layer])
        return found

    def _any(self, layers: Sequence[int]) -> Flags:
        """Whether any of ``layers`` is between two ideals."""
        own = self.sets.inside[:, list(layers)].sum(axis=1)
        more: Flags = own[None, :] > own[:, None]
        return more

"""Which bytes does ``layers[start:stop]`` keep from its forward for its backward? Each piece of memory once.

A *tensor* is numbered: 0 for the network's input, i + 1 for the output of layer i. It lies in a storage, of its own
or, being a view, in that of an earlier tensor. Autograd keeps storages, in full. So ``layers[start:stop]``, run as one
stage or stored without a gap, keep the union of what their layers keep, each storage once:

- a layer's *private* bytes, which no other layer can keep too;
- the storage of each tensor that a layer of the range keeps, its own output included. A tensor that enters from before
  ``start`` arrives by itself and takes its own bytes, also where it was a view of something larger; one made in the
  range takes its whole storage, which its views share.

The output of a ReLU is the input of the layer behind: inside a stage it counts once though both may keep it, and where
the stage ends between them it still counts, once on each side. Everything is answered for integers and for arrays. The
rule is the project's own (ALGORITHMS sections 1 and 11.1); MadPipe takes each layer to keep its input (its section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..integers import IntLike, Ints, plain
from ..problem import Chain, Layer
from ..registry import Late
from .storages import ChainStorages, TensorFacts

if TYPE_CHECKING:
    from .dag_storages import DagStorages, Ranges

dag_storages, ranges = (Late(f"cost.dag_storages:{name}") for name in ("DagStorages", "Ranges"))

Answer = TypeVar("Answer")


def _once(question: Callable[[Chain], Answer]) -> Callable[[Chain], Answer]:
    """Answer a question about a chain once and keep the answer with it, as ``cached_property`` does.

    A cache that is keyed by the chain would hash thousands of layers every time.
    """
    name = f"_{question.__name__}"

    @wraps(question)
    def answered(chain: Chain) -> Answer:
        known = chain.__dict__
        if name not in known:
            known[name] = question(chain)
        answer: Answer = known[name]
        return answer

    return answered


@_once
def storages(chain: Chain) -> ChainStorages | DagStorages:
    """Return which storages ranges of layers keep: what all counts of saved bytes come from."""
    reads: list[list[int]] = [[] for _ in chain.layers]
    for tensor, readers in enumerate(chain.readers):
        for reader in readers:
            reads[reader].append(tensor)
    facts = TensorFacts.of(chain.layers, chain.tensor_bytes, [tuple(x) for x in reads])
    if chain.edges is None:
        return ChainStorages(facts)
    found: DagStorages = dag_storages(facts)
    return found


def first_saved(chain: Chain) -> tuple[int, ...]:
    """Return the bytes that each layer is the first to save, at least, wherever stages begin; each storage once."""
    return storages(chain).least_first


def saved_bytes(chain: Chain, start: IntLike, stop: IntLike) -> IntLike:
    """Return the bytes that ``layers[start:stop]`` as one stage keep per microbatch, each storage once."""
    found = storages(chain)
    return plain(found.inner(start, stop) + found.of_input(start, stop))


def inner_bytes(chain: Chain, start: IntLike, stop: IntLike) -> IntLike:
    """Return what :func:`saved_bytes` counts beside the tensors that enter the range from before ``start``.

    Layers that don't say what they save are taken to save what enters, as far as their bytes reach.
    """
    found = storages(chain)
    return plain(found.inner(start, stop) - found.undeclared(start, stop))


@_once
def _entering(chain: Chain) -> Ints:
    """Return the table ``[start, stop]`` of distinct bytes read in ``layers[start:stop]`` from before it; of a chain
    ``[start]``."""
    if chain.edges is None:
        return np.array(chain.cut_bytes, dtype=np.int64)
    table: Ranges = ranges(len(chain.layers))
    for tensor, (size, readers) in enumerate(zip(chain.tensor_bytes, chain.readers, strict=True)):
        previous = tensor - 1  # its producer, then each earlier reader: the first reader inside pays
        for reader in readers:
            table.add(range(previous + 1, reader + 1), reader, size)
            previous = reader
    return table.sums()


def entering_bytes(chain: Chain, start: IntLike, stop: IntLike) -> IntLike:
    """Return the bytes of the distinct tensors that ``layers[start:stop]`` read from before ``start``.

    What a recomputed segment keeps. In a DAG it is less than the cut by the tensors that only pass through.
    """
    table = _entering(chain)
    return plain(table[start] if chain.edges is None else table[start, stop])


@_once
def for_weights(chain: Chain) -> Chain | None:
    """Return ``chain`` whose layers save what the gradients of their weights need; None where that isn't known."""
    layers: list[Layer] = []
    for layer in chain.layers:
        needs = layer.weight_needs
        if needs is None:
            return None
        layers.append(replace(layer, saved_bytes=needs.saved_bytes, saves=needs.saves))
    return replace(chain, layers=tuple(layers))


def for_weights_bytes(chain: Chain, start: int, stop: int) -> tuple[int, int] | None:
    """Return (bytes of a microbatch that ``layers[start:stop]`` hold between the parts of its backward, those of
    gradients among them); None where that isn't known."""
    needs = for_weights(chain)
    if needs is None:
        return None
    gradients = sum(x.weight_needs.gradient_bytes for x in chain.layers[start:stop] if x.weight_needs is not None)
    return int(saved_bytes(needs, start, stop)) + gradients, gradients

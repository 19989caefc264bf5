"""Coarser chains: neighbouring layers merged where a cut is not wanted, with every cost of the merged layers kept."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Literal

import numpy as np

from .problem import Chain, Layer

SavedRule = Literal["distinct", "input"]


def articulation_cuts(chain: Chain) -> tuple[int, ...]:
    """Return the cuts of ``chain``, 0 and L included, that at most one tensor crosses and that no saved tensor spans.

    Tensors of zero bytes do not count. A tensor that layers on both sides of a cut save is counted once while they
    share a stage; a plain chain cannot say so, hence such a cut is left out.
    """
    count = len(chain)
    crossing, shared = np.zeros(count + 2, dtype=np.int64), np.zeros(count + 2, dtype=np.int64)
    for tensor, (size, readers) in enumerate(zip(chain.tensor_bytes, chain.readers, strict=True)):
        if size and readers:
            _mark(crossing, tensor, readers[-1])
            keepers = [i for i in readers if chain.layers[i].saved_bytes is None]
            if len(keepers) > 1:
                _mark(shared, keepers[0] + 1, keepers[-1])
    free = (np.cumsum(crossing) <= 1) & (np.cumsum(shared) == 0)
    return (0, *(i for i in range(1, count) if free[i]), count)


def merge_articulation(chain: Chain, saved: SavedRule = "distinct") -> Chain:
    """Return ``chain`` as a plain chain, its layers merged between neighbouring :func:`articulation_cuts`.

    Layer sums, cut bytes at the remaining cuts and the bytes saved by any run of merged layers are those of ``chain``.
    ``saved="input"`` counts the input of each merged layer as all that it saves: MadPipe's accounting (section 3).
    A chain without edges comes back with nothing merged. Source: ALGORITHMS section 1, granularity ``articulation``.
    """
    cuts = articulation_cuts(chain) if chain.edges is not None else tuple(range(len(chain) + 1))
    layers = []
    for start, stop in pairwise(cuts):
        outgoing = chain.cut_bytes[stop] if stop < len(chain) else chain.layers[-1].output_bytes
        kept = None if saved == "input" else int(chain.saved_bytes(start, stop))
        layers.append(_merged_layer(chain, start, stop, outgoing, None if kept == chain.cut_bytes[start] else kept))
    return _replaced(chain, cuts, layers, edges=None)


def merge_zero_time(chain: Chain) -> Chain:
    """Return ``chain`` with each layer whose forward and backward take no time merged into a neighbour.

    Of the cuts between two layers that take time the one of least bytes stays. In a DAG a group is merged only where
    one merged layer can stand for it exactly, that is, keeps every cut and every saved byte; other groups stay apart.
    Patterns cannot order operations that take no time (ALGORITHMS section 2).
    """
    busy = [i for i, layer in enumerate(chain.layers) if layer.forward_ns + layer.backward_ns > 0]
    kept = [min(range(i + 1, j + 1), key=lambda cut: chain.cut_bytes[cut]) for i, j in pairwise(busy)]
    cuts = [0]
    for start, stop in pairwise([0, *kept, len(chain)]):
        cuts += [stop] if _mergeable(chain, start, stop) else range(start + 1, stop + 1)
    return _cut(chain, cuts)


def merge_share(chain: Chain, share: Fraction) -> Chain:
    """Return ``chain`` with neighbours merged until a layer takes ``share`` of the total time, as far as it is exact.

    From the first layer on, a merged layer ends as soon as its forward and backward take the share. In a DAG it ends
    only where one layer can stand for it exactly (every cut and every saved byte kept), and layers for which that is
    nowhere before twice the share stay apart: a skip connection keeps its ends. Greedy, in one pass.
    """
    total = int(chain.sums.forward_ns[-1] + chain.sums.backward_ns[-1])
    count = len(chain)
    cuts = [0]
    while cuts[-1] < count:
        start = cuts[-1]
        best, time = start + 1, 0
        for stop in range(start + 1, count + 1):
            layer = chain.layers[stop - 1]
            time += layer.forward_ns + layer.backward_ns
            if stop > start + 1 and time > 2 * share * total:
                break
            if _mergeable(chain, start, stop):
                best = stop
                if time >= share * total:
                    break
        cuts.append(best)
    return _cut(chain, cuts)


def _cut(chain: Chain, cuts: Sequence[int]) -> Chain:
    """Return ``chain`` with the layers between ``cuts`` merged; each group must be :func:`_mergeable`."""
    layers = []
    for start, stop in pairwise(cuts):
        if stop - start == 1:
            layers.append(chain.layers[start])
            continue
        read_later = [i for i in range(start, stop) if any(r >= stop for r in chain.readers[i + 1])]
        outgoing = sum(chain.layers[i].output_bytes for i in read_later or [stop - 1])
        layers.append(_merged_layer(chain, start, stop, outgoing, int(chain.saved_bytes(start, stop))))
    group = _groups(cuts)
    edges = chain.edges and tuple(sorted({(group[i], group[j]) for i, j in chain.edges if group[i] != group[j]}))
    return _replaced(chain, cuts, layers, edges)


def _mark(change: np.ndarray[tuple[int], np.dtype[np.int64]], first: int, last: int) -> None:
    """Count one more at each cut ``first..last`` once ``change`` is summed up."""
    change[first] += 1
    change[last + 1] -= 1


def _groups(cuts: Sequence[int]) -> list[int]:
    """Return for each layer the group between ``cuts`` that holds it."""
    return [group for group, (start, stop) in enumerate(pairwise(cuts)) for _ in range(start, stop)]


def _mergeable(chain: Chain, start: int, stop: int) -> bool:
    """Whether one layer can stand for ``layers[start:stop]`` exactly: one set of readers, no saved tensor shared."""
    if chain.edges is None or stop - start == 1:
        return True
    outside = []
    for tensor, (size, readers) in enumerate(zip(chain.tensor_bytes, chain.readers, strict=True)):
        later = [r for r in readers if r >= stop]
        if start <= tensor - 1 < stop and later:
            outside.append(later)
        keepers = [i for i in readers if chain.layers[i].saved_bytes is None]
        if size and 0 < sum(start <= i < stop for i in keepers) < len(keepers):
            return False
    reads_input = chain.input_bytes and any(start <= r < stop for r in chain.readers[0])
    if reads_input and any(i < start <= j < stop for i, j in chain.edges):
        return False  # a layer that an edge enters no longer reads the network's input
    return all(later == outside[0] for later in outside)


def _merged_layer(chain: Chain, start: int, stop: int, output_bytes: int, saved_bytes: int | None) -> Layer:
    """Return ``layers[start:stop]`` as one layer: everything that adds up is summed."""
    part = chain.layers[start:stop]
    weight_part = [x.backward_weight_ns for x in part if x.backward_weight_ns is not None]
    return Layer(
        name=part[0].name if len(part) == 1 else f"{part[0].name}..{part[-1].name}",
        forward_ns=sum(x.forward_ns for x in part),
        backward_ns=sum(x.backward_ns for x in part),
        weight_bytes=sum(x.weight_bytes for x in part),
        output_bytes=output_bytes,
        saved_bytes=saved_bytes,
        backward_weight_ns=sum(weight_part) if len(weight_part) == len(part) else None,
        optimizer_ns=sum(x.optimizer_ns for x in part),
        parameters=part[0].parameters if len(part) == 1 else sum(x.parameter_count for x in part),
    )


def _replaced(
    chain: Chain, cuts: Sequence[int], layers: Sequence[Layer], edges: tuple[tuple[int, int], ...] | None
) -> Chain:
    """Return ``chain`` with ``layers`` in the place of the groups between ``cuts``; tied pairs follow their groups."""
    group = _groups(cuts)
    tied = {(min(group[i], group[j]), max(group[i], group[j])) for i, j in chain.tied if group[i] != group[j]}
    return Chain(
        name=chain.name,
        layers=tuple(layers),
        input_bytes=chain.input_bytes,
        edges=edges,
        tied=tuple(sorted(tied)),
        microbatch=chain.microbatch,
        dtype=chain.dtype,
        device=chain.device,
        source=chain.source,
    )

"""In which orders may the layers of a DAG stand, and which sets of layers may come first?

A set that holds with each layer all that the layer needs is an *ideal*: what may be done before a cut, in some order of
the layers. An order is a way through the ideals, one layer more at a time; stages are the differences of nested ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..problem import Chain


def needed(chain: Chain) -> list[int]:
    """Return for each layer those that must stand before it, as a bit set.

    They are the ones whose outputs it reads, with all that these need. The last layer, the loss, stays last. Without
    edges each layer needs the one before it.
    """
    count = len(chain)
    direct = [0] * count
    for i, j in chain.edges if chain.edges is not None else pairwise(range(count)):
        direct[j] |= 1 << i
    direct[-1] = (1 << (count - 1)) - 1
    for j in range(count):
        for i in members(direct[j]):
            direct[j] |= direct[i]
    return direct


def several_orders(chain: Chain) -> bool:
    """Whether the layers may stand in another order than they do: some two neighbours may change places."""
    if chain.edges is None:
        return False
    before = needed(chain)
    return any(not before[i + 1] >> i & 1 for i in range(len(chain) - 1))


def ideals(chain: Chain, most: int) -> list[int] | None:
    """Return all ideals as bit sets, from the empty one on, each behind those inside it; None if more than ``most``."""
    before, count = needed(chain), len(chain)
    after = [0] * count
    for j, needs in enumerate(before):
        for i in members(needs):
            after[i] |= 1 << j
    found = {0}
    layer = {0: sum(1 << j for j in range(count) if not before[j])}  # ideals of one size, with what may come next
    while layer:
        bigger: dict[int, int] = {}
        for ideal, free in layer.items():
            for j in members(free):
                one = ideal | 1 << j
                if one in bigger:
                    continue
                more = free ^ 1 << j
                for k in members(after[j] & ~more):
                    if not before[k] & ~one:
                        more |= 1 << k
                bigger[one] = more
            if len(found) + len(bigger) > most:
                return None
        found |= bigger.keys()
        layer = bigger
    work = [x.forward_ns + x.backward_ns for x in chain.layers]
    return sorted(found, key=lambda ideal: (sum(work[i] for i in members(ideal)), ideal.bit_count(), ideal))


def members(bits: int) -> list[int]:
    """Return the members of a bit set in order."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def reordered(chain: Chain, order: Sequence[int]) -> Chain:
    """Return ``chain`` with its layers in another order that they may stand in: ``order[i]`` becomes layer i."""
    if list(order) == list(range(len(chain))):
        return chain
    place = {old: new for new, old in enumerate(order)} | {-1: -1}

    def moved(layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(place[i] for i in layers))

    layers = []
    for layer in (chain.layers[i] for i in order):
        needs = layer.weight_needs
        layers.append(
            replace(
                layer,
                saves=None if layer.saves is None else moved(layer.saves),
                view_of=None if layer.view_of is None else place[layer.view_of],
                weight_needs=None if needs is None else replace(needs, saves=moved(needs.saves)),
            )
        )
    own = order if chain.order is None else [chain.order[i] for i in order]
    return replace(
        chain,
        layers=tuple(layers),
        edges=None if chain.edges is None else tuple(sorted((place[i], place[j]) for i, j in chain.edges)),
        tied=tuple(sorted((min(x), max(x)) for x in (moved(pair) for pair in chain.tied))),
        shared=None if chain.shared is None else tuple(replace(x, layers=moved(x.layers)) for x in chain.shared),
        order=None if list(own) == list(range(len(chain))) else tuple(own),
    )


def in_own_order(chain: Chain) -> Chain:
    """Return ``chain`` with its layers in the model's own order."""
    if chain.order is None:
        return chain
    return reordered(chain, sorted(range(len(chain)), key=chain.order.__getitem__))

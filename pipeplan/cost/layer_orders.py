"""In which orders may the layers of a DAG stand, and which sets of layers may come first?

A set that holds with each layer all that the layer needs is an *ideal*: what may be done before a cut, in some order of
the layers. An order is a way through the ideals, one layer more at a time; stages are the differences of nested ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..problem import Chain


def needed(chain: Chain) -> list[int]:
    """Return for each layer those that must stand before it, as a bit set.

    They are the ones whose outputs it reads, with all that these need. The last layer, the loss, stays last, and the
    first, where reading data is part of its time. Without edges each layer needs the one before it.
    """
    count = len(chain)
    direct = [0] * count
    for i, j in chain.edges if chain.edges is not None else pairwise(range(count)):
        direct[j] |= 1 << i
    direct[-1] = (1 << (count - 1)) - 1
    if chain.reading_ns:
        direct = [x | (i > 0) for i, x in enumerate(direct)]
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


def ideals(
    chain: Chain, most: int, early: Sequence[int] = (), beside: Mapping[int, int] | None = None
) -> list[int] | None:
    """Return all ideals as bit sets, from the empty one on, each behind those inside it; None if more than ``most``.

    With :mod:`.idle_layers` only those that have all layers of ``early``, in order, of which they have what these need,
    and layers together with those that they stand ``beside``.
    """
    before, count = needed(chain), len(chain)
    alone = sum(1 << i for i in range(count)) & ~sum(1 << i for i in (*early, *(beside or ())))
    group = [1 << i for i in range(count)]
    for i, j in (beside or {}).items():
        group[j] |= 1 << i
    needs = [needs & ~bits for needs, bits in zip(before, group, strict=True)]
    after = [0] * count
    for j in members(alone):
        for i in members(needs[j]):
            after[i] |= 1 << j
    found = {0}
    layer = {0: sum(1 << j for j in members(alone) if not needs[j])}  # ideals, with what may come next
    while layer:
        bigger: dict[int, int] = {}
        for ideal, free in layer.items():
            for j in members(free):
                one = ideal | group[j]
                for i in early:
                    if not before[i] & ~one:
                        one |= 1 << i
                if one in bigger:
                    continue
                more, next_ones = free ^ 1 << j, 0
                for i in members(one & ~ideal):
                    next_ones |= after[i]
                for k in members(next_ones & ~more):
                    if not needs[k] & ~one:
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

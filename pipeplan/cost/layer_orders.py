"""In which orders may the layers of a DAG stand, and which sets of layers may come first?

A set that holds with each layer all that the layer needs is an *ideal*: what may be done before a cut, in some order of
the layers. An order is a way through the ideals, one layer more at a time; stages are the differences of nested ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..problem import Chain


def needed(chain: Chain) -> list[int]:
    """Return for each layer those that must stand before it, as a bit set.

    They are the ones whose outputs it reads, with all that these need. The last layer, the loss, stays last, and the
    first, where reading data is part of its time. Without edges each layer needs the one before it.
    """
    found = _needed_first(chain)
    for j in range(len(chain)):
        for i in members(found[j]):
            found[j] |= found[i]
    return found


def _needed_first(chain: Chain) -> list[int]:
    """Return of :func:`needed` some, of which a layer is free once the last is there."""
    count = len(chain)
    direct = [0] * count
    for i, j in chain.edges if chain.edges is not None else pairwise(range(count)):
        direct[j] |= 1 << i
    direct[-1] = (1 << (count - 1)) - 1
    return [x | (i > 0) for i, x in enumerate(direct)] if chain.read_in_passes_ns else direct


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
    for j, some in enumerate(_needed_first(chain)):
        for i in members(some):
            after[i] |= 1 << j
    come = sum(1 << i for i in early)

    def with_early(ideal: int, new: int) -> int:
        """Return an ideal with what comes along with its ``new`` layers."""
        while new:
            may = 0
            for i in members(new):
                may |= after[i]
            new = sum(1 << k for k in members(may & come & ~ideal) if not before[k] & ~ideal)
            ideal |= new
        return ideal

    first = sum(1 << i for i in early if not before[i])
    found = {0}
    layer = {0: sum(1 << j for j in members(alone) if not needs[j] & ~first)}  # ideals, with what may come next
    while layer:
        bigger: dict[int, int] = {}
        for ideal, free in layer.items():
            for j in members(free):
                new = group[j] if ideal else group[j] | first
                one = with_early(ideal | new, new)
                if one in bigger:
                    continue
                more, may = free ^ 1 << j, 0
                for i in members(one & ~ideal):
                    may |= after[i]
                for k in members(may & alone & ~more & ~one):
                    if not needs[k] & ~one:
                        more |= 1 << k
                bigger[one] = more
            if len(found) + len(bigger) > most:
                return None
        found |= bigger.keys()
        layer = bigger
    return by_work(chain, found)


def by_work(chain: Chain, some: Iterable[int]) -> list[int]:
    """Return ``some`` ideals in order of the work that they have, each behind those inside it."""
    found = list(some)
    work = np.array([x.forward_ns + x.backward_ns for x in chain.layers], dtype=np.int64)
    before = np.matmul(layers_in(found, len(chain)), work, dtype=np.int64).tolist()
    return [x for *_, x in sorted((ns, x.bit_count(), x) for ns, x in zip(before, found, strict=True))]


def layers_in(some: Sequence[int], count: int) -> npt.NDArray[np.bool_]:
    """Return which of ``count`` layers each of ``some`` ideals has, shape (ideals, layers)."""
    octets = b"".join(ideal.to_bytes((count + 7) // 8, "little") for ideal in some)
    rows = np.frombuffer(octets, dtype=np.uint8).reshape(len(some), -1)
    return np.unpackbits(rows, axis=1, count=count, bitorder="little").astype(np.bool_)


def members(bits: int) -> list[int]:
    """Return the members of a bit set in order."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found

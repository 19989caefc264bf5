"""Which layers of a DAG needn't be cut apart from others, as they take no time and hold nothing of their own?

Operator graphs are full of them: an output that is picked from several, an addition in place, an unused result. Each
may stand in many places and so doubles the ideals (:mod:`...cost.layer_orders`), but one of them is as good as any:

- A layer that makes and keeps nothing stands *early*, as soon as all that it needs is there. What it reads crosses
  no more cuts for that.
- A layer whose output nobody reads stands *beside* another that needs, reads and keeps whatever it does. That one's
  stage has all of it anyway, and the stage that it comes from has no more than before.

Neither moves work or weights between stages, adds to what crosses a cut, or to what any part of a stage keeps; so the
best stages between ideals that hold them there are the best of all. PipeDream's GNMT with 8 layers has 48 such ideals
of 6,565, that with 16 has 100 of more than 400,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...cost.layer_orders import needed
from ...cost.saved import TensorFacts, storages
from ...problem import Chain


@dataclass(frozen=True)
class IdleLayers:
    """Layers that stand ``early``, in order, and the one that each of others stands ``beside``, in the end."""

    early: tuple[int, ...]
    beside: dict[int, int]


def idle_layers(chain: Chain) -> IdleLayers:
    """Return the layers of ``chain`` that needn't be cut apart from others."""
    facts, before = storages(chain).facts, needed(chain)
    readers = [set(x) for x in chain.readers]
    kept_by: list[set[int]] = [set() for _ in facts.sizes]
    for i, tensors in enumerate(facts.kept):
        for t in tensors:
            kept_by[t].add(i)
    early, beside = list[int](), dict[int, int]()
    for i in range(len(chain) - 1):
        if not _idle(chain, facts, i):
            continue
        own = i + 1
        unread = not readers[own] and kept_by[own] <= {i}
        if all(_empty(facts, t) for t in facts.kept[i]) and (unread or _empty(facts, own)):
            early.append(i)
        elif unread and own not in facts.kept[i]:
            others = readers[facts.reads[i][0]] if facts.reads[i] else range(len(chain))
            places = (j for j in sorted(others) if _has_all(facts, before, j, i) and _end(beside, j) != i)
            place = next(places, None)
            if place is not None:
                beside[i] = place
    return IdleLayers(tuple(early), {i: _end(beside, i) for i in beside})


def _idle(chain: Chain, facts: TensorFacts, i: int) -> bool:
    """Whether layer ``i`` takes no time and has no memory but that of tensors."""
    layer = chain.layers[i]
    time = layer.forward_ns + layer.backward_ns + layer.weight_part_ns + layer.optimizer_ns
    return not (time or layer.weight_bytes or layer.parameter_count or facts.private[i])


def _empty(facts: TensorFacts, tensor: int) -> bool:
    return not facts.sizes[tensor] and not facts.storages[tensor] and facts.parents[tensor] < 0


def _has_all(facts: TensorFacts, before: Sequence[int], j: int, i: int) -> bool:
    """Whether layer ``j`` needs, reads and keeps all that layer ``i`` does."""
    if i == j or before[i] & ~before[j]:
        return False
    return {*facts.reads[i]} <= {*facts.reads[j]} and {*facts.kept[i]} <= {*facts.kept[j]}


def _end(beside: dict[int, int], layer: int) -> int:
    """Return the layer beside which ``layer`` stands in the end, itself where it is free."""
    while layer in beside:
        layer = beside[layer]
    return layer

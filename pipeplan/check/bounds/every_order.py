"""How short can a period be in whatever order a DAG's layers stand?

What a layer holds it holds while all that need it are run, whatever else stands between; layers are whole in every
order; and of the layers on one way through the network the order is known, so that all that is proved of a chain holds
for them, as if the others cost nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...cost import time_model
from ...cost.saved import first_saved, storages
from ...problem import Chain, Layer, Problem
from .averages import layer_bound, load_bound, memory_bound
from .blocks import Blocks, work_overflows
from .facts import Facts
from .strong import MOST_LAYERS, Part, Proved, longest_refuted, strong_bound

TESTS = 12  # periods at which whole layers are dealt out


def every_order_proof(problem: Problem) -> Proved:
    """Return the best lower bound (ns) for class ``any`` over all orders of the layers, and what it follows from."""
    relaxed = time_model.relative(problem)
    found: list[tuple[int, Part]] = [
        (max(1, load_bound(relaxed)), "work"),
        (layer_bound(relaxed), "layer"),
        (memory_bound(relaxed, any_order=True), "averages"),
    ]
    best = Proved(*max(found, key=lambda one: one[0]))
    if len(problem.chain) > MOST_LAYERS:
        return best
    facts = Facts(relaxed)
    facts.kept = np.array(first_saved(relaxed.chain, any_order=True), dtype=np.int64)
    blocks = Blocks(facts)

    def refuted(period: int) -> Part | None:
        packed = blocks.worthwhile and blocks.too_many(period)
        return "blocks" if packed or work_overflows(facts, period) else None

    best = longest_refuted(refuted, best, TESTS)
    if problem.chain.tied or problem.platform.devices[0].times is not None:
        return best
    way = replace(problem, chain=longest_way(problem.chain))
    proved = strong_bound(way, best)
    return proved if proved.infeasible or proved.period_ns > best.period_ns else best


def longest_way(chain: Chain) -> Chain:
    """Return the layers of a DAG on the way from layer to reader that takes longest, as a network of their own.

    Its stages cost no more than those of ``chain`` with these layers: of what is read, crosses a cut or is kept there
    is only what layers of the way make themselves, in storages that no view shares.
    """
    count, facts = len(chain), storages(chain).facts
    time = [x.forward_ns + x.backward_ns for x in chain.layers]
    best, before = list(time), [-1] * count
    for i, j in sorted(chain.edges or (), key=lambda edge: edge[1]):
        if best[i] + time[j] > best[j]:
            best[j], before[j] = best[i] + time[j], i
    way = [max(range(count), key=lambda i: best[i])]
    while before[way[-1]] >= 0:
        way.append(before[way[-1]])
    way.reverse()
    place = {old: new for new, old in enumerate(way)}
    reads_input = way[0] in chain.readers[0]
    if reads_input:
        place[-1] = -1
    views = {t for t, parent in enumerate(facts.parents) if parent >= 0} | set(facts.parents)

    def alone(old: int) -> Layer:
        kept = [t for t in facts.kept[old] if t - 1 in place and t not in views]
        private = facts.private[old]
        if facts.undeclared_bytes[old]:  # which may be what it reads
            private = max(0, private - sum(facts.sizes[t] for t in facts.reads[old]))
        size = private + sum(facts.storages[t] if t == old + 1 else facts.sizes[t] for t in kept)
        saves = tuple(sorted(place[t - 1] for t in kept))
        return replace(chain.layers[old], saved_bytes=size, saves=saves, view_of=None, weight_needs=None)

    return replace(
        chain,
        layers=tuple(map(alone, way)),
        input_bytes=chain.input_bytes if reads_input else 0,
        edges=tuple((place[i], place[j]) for i, j in chain.edges or () if i in place and j in place),
        order=None,
        inputs=chain.inputs and tuple(place[i] for i in chain.inputs if i in place),
    )

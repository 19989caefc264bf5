"""How little must a stage of very many layers recompute, if each byte that it keeps has a price?

There are too many ways to recompute a stage of a long chain to keep them all (:mod:`.labels`). Of those whose segments
take no more than some bytes for their backward, and that pay a price in ns for each byte kept, the cheapest is a
shortest path over all layers; from any layer on it is the cheapest for what is behind. So one path to the chain's end
for each :class:`Terms` gives a label to every stage, near the lower hull of all that there are. A heuristic, by
Lagrange multipliers; not in any paper.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...cost import memory_model
from ...cost.saved import storages
from ...deadline import Deadline
from ...integers import NEVER, Ints
from ...problem import Chain
from ..tables.options import Ranges
from .labels import Flags

_WIDEST = 64  # layers of a segment
_MOST_TERMS = 80
_FIRST = 2  # row of what a stage's first part keeps
_STEPS = range(-6, 7)  # the prices to begin with: powers of two of all forwards over all that is saved


class Terms(NamedTuple):
    """What a kept byte costs (ns), and how many bytes a segment may take for its backward."""

    price: float
    most: int


def first_terms(chain: Chain, memory: int) -> tuple[Terms, ...]:
    """Return terms from storing everything to keeping least, on devices of ``memory`` bytes."""
    parts = _Parts.of(chain)
    largest = int(np.where(parts.transient < NEVER, parts.transient, 0).max())
    unit = int(chain.sums.forward_ns[-1]) / max(1, int(parts.runs[0][:, 0].sum()))
    prices = [unit * 2.0**step for step in (*_STEPS, 20)]
    sizes = [max(1, min(largest, memory)) >> step for step in range(6)]
    return (Terms(0.0, 0), *(Terms(price, size) for size in sizes for price in prices))


def nearby(used: Sequence[Terms]) -> tuple[Terms, ...]:
    """Return ``used`` terms and others near them, finer the fewer there are."""
    finest = ((8, 4, (0.75, 1, 1.5)), (4, 2, (0.75, 1, 1.5)), (4, 2, (1,)), (2, 1, (1,)))
    for parts, reach, shares in finest:
        prices = [2.0 ** (step / parts) for step in range(-reach, reach + 1)]
        found = {Terms(x.price * y, int(x.most * z)) for x in used for y in prices for z in shares}
        if len(found) <= _MOST_TERMS:
            break
    return (Terms(0.0, 0), *sorted(found | {*used})) if used else ()


@dataclass(frozen=True)
class _Parts:
    """What segments and stored runs add to a stage, shape (L, width) by first layer and length less one.

    ``keeps`` and ``runs`` are three rows: of parts behind others, of those whose input's storage is held already, and
    of a stage's first part. ``holds`` says that it is held behind a segment, ``run_holds`` behind a run, by whether it
    was before. Runs that follow each other are one: in chains without skip connections they are of single layers, which
    add up, else of up to ``width``, which may count more. NEVER is what isn't there, or would pay nothing.
    """

    transient: Ints
    recompute: Ints
    keeps: tuple[Ints, ...]
    runs: tuple[Ints, ...]
    holds: Ints
    run_holds: tuple[Ints, ...]

    @staticmethod
    def of(chain: Chain) -> _Parts:
        """Return those of up to :data:`_WIDEST` layers of ``chain``."""
        count, width = len(chain), min(_WIDEST, len(chain))
        wide = 1 if chain.edges is None else width
        start = np.arange(count)[:, None]
        end = start + np.arange(1, width + 1)
        stop = np.minimum(end, count)

        def table(values: Any) -> Ints:
            return np.broadcast_to(np.asarray(values, dtype=np.int64), stop.shape)

        later, transient, recompute = map(table, memory_model.segment(chain, start, stop, inside=True))
        kinds = ((False, True), (True, True), (False, False))  # held, inside
        runs = [table(memory_model.stored(chain, start, stop, *kind))[:, :wide] for kind in kinds]
        if chain.edges is not None:
            runs[0] = runs[0] + storages(chain).beyond[start]
        holds = [table(memory_model.keeps_output(chain, start, stop, held, False))[:, :wide] for held in (False, True)]
        return _Parts(
            np.where((end > count) | (transient <= 0), NEVER, transient),
            recompute,
            (later, np.zeros_like(later), table(memory_model.segment(chain, start, stop)[0])),
            tuple(np.where(end[:, :wide] > count, NEVER, run) for run in runs),
            table(memory_model.keeps_output(chain, start, stop, False, True)),
            tuple(holds),
        )

    @property
    def states(self) -> int:
        """Whether the storage of what goes on is ever held: then there are two states."""
        return 2 if self.holds.any() or self.run_holds[0].any() else 1

    def run(self, length: Ints) -> Ints:
        """Return where the tables of runs say what one of the ``length`` (less one) adds."""
        last = self.runs[0].shape[1] - 1
        return np.asarray(np.minimum(length, last))

    def first(self, i: int, row: int, length: Ints, again: Flags) -> tuple[Ints, Ints, Ints]:
        """Return what parts from layer ``i`` of the ``length`` (less one), recomputed where ``again``, keep, take for
        their backward, and cost (ns)."""
        transient = self.transient[i][length]
        return (
            np.where(again, self.keeps[row][i][length], self.runs[row][i][self.run(length)]),
            np.where(again & (transient < NEVER), transient, 0),
            np.where(again, self.recompute[i][length], 0),
        )


@dataclass(frozen=True)
class _Paths:
    """The cheapest ways to the chain's end on each of the ``terms``: by first layer, whether its input is held, and
    terms, the first part's length less one, and whether that is recomputed."""

    parts: _Parts
    length: Ints
    recomputed: Flags


@lru_cache(maxsize=2)
def _paths(chain: Chain, terms: tuple[Terms, ...], deadline: Deadline) -> _Paths:
    parts = _Parts.of(chain)
    (count, width), (_, run_width) = parts.transient.shape, parts.runs[0].shape
    states, ways = parts.states, np.arange(len(terms))
    price, most = np.array([x.price for x in terms]), np.array([x.most for x in terms])
    value = np.full((count + width + 1, states, len(terms)), np.inf)  # beyond the end there is no way
    value[count] = 0
    length = np.zeros((count, states, len(terms)), dtype=np.int64)
    recomputed = np.zeros(length.shape, dtype=np.bool_)
    runs, segments = np.arange(run_width), np.arange(width)
    for i in range(count - 1, -1, -1):
        deadline.check()
        wide = int(np.searchsorted(np.minimum.accumulate(parts.transient[i][::-1])[::-1], most.max(), side="right"))
        refused = parts.transient[i, :wide, None] > most
        for held in range(states):
            stored = value[i + 1 + runs, parts.run_holds[held][i]] + price * parts.runs[held][i, :, None]
            at = stored.argmin(axis=0)
            least = stored[at, ways]
            if wide:
                cost = parts.recompute[i, :wide, None] + price * parts.keeps[held][i, :wide, None]
                cost += value[i + 1 + segments[:wide], parts.holds[i, :wide]]
                cost[refused] = np.inf
                other = cost.argmin(axis=0)
                less = cost[other, ways] < least
                least, at = np.where(less, cost[other, ways], least), np.where(less, other, at)
                recomputed[i, held] = less
            value[i, held], length[i, held] = least, at
    return _Paths(parts, length, recomputed)


@dataclass(frozen=True)
class PricedLabels:
    """Labels of the stages that start at one layer, entry 0 the empty one (:class:`.labels.Labels`); each is the
    beginning of one of the ``paths``, on the terms ``way``, and its last part ends where the stage does."""

    kept: Ints
    peak: Ints
    cost: Ints
    position: Ints
    way: Ints
    paths: _Paths
    exact: bool = False

    def ranges(self, label: int) -> Ranges:
        """Return the recomputed segments of a label, in chain order."""
        place, stop, way = int(self.position[0]), int(self.position[label]), int(self.way[label])
        parts, held, found = self.paths.parts, 0, list[tuple[int, int]]()
        while place < stop:
            step, again = int(self.paths.length[place, held, way]), self.paths.recomputed[place, held, way]
            if again:
                found.append((place, min(stop, place + step + 1)))
            held = int((parts.holds if again else parts.run_holds[held])[place, step])
            place += step + 1
        return tuple(found)

    def on_terms(self, stop: int, cost: int) -> Ints:
        """Return the terms on which the layers before ``stop`` are recomputed in ``cost`` ns."""
        return np.unique(self.way[(self.position == stop) & (self.cost == cost)])


def priced_labels(
    chain: Chain, terms: tuple[Terms, ...], cuts: Ints, most_cost: Ints, most_peak: Ints, deadline: Deadline
) -> dict[int, PricedLabels]:
    """Return by first layer the labels of stages between some ``cuts``, a few for each.

    They cost and hold at most what the caps allow, shape (cuts, cuts), negative where no stage passes. Layer by layer
    from the last, the numbers of the paths to every cut are those behind the first part and its own: O(L * cuts within
    reach * terms). What a label holds is no less than what its stage holds.
    """
    paths = _paths(chain, terms, deadline)
    parts, (count, states, ways) = paths.parts, paths.length.shape
    ring = parts.transient.shape[1] + 1
    last = np.where((most_peak >= 0) & (most_cost >= 0), np.arange(len(cuts)), 0).max(axis=1)
    reach = np.maximum.accumulate(last)  # the last cut that anything asks for that starts no later
    numbers = np.zeros((3, ring, states, ways, len(cuts)), dtype=np.int64)  # kept, peak, cost
    positions, nothing = cuts.tolist(), np.zeros(1, dtype=np.int64)
    found = {i: PricedLabels(nothing, nothing, nothing, nothing + i, nothing, paths) for i in positions}
    for i in range(count, -1, -1):
        before = bisect_right(positions, i) - 1  # the last cut no later
        here = positions[before] == i
        if here:
            numbers[:, i % ring, :, :, before] = 0
        low, high = before + 1, int(reach[before]) + 1
        if i == count or low >= high:
            continue
        deadline.check()
        for held in range(states):
            numbers[:, i % ring, held, :, low:high] = _added(paths, numbers, i, held, held, low, cuts[low:high])
        if here:
            own = slice(low, int(last[before]) + 1)
            some = _added(paths, numbers, i, 0, _FIRST, low, cuts[own])
            fits = (some[1] <= most_peak[before, own]) & (some[2] <= most_cost[before, own])
            way, at = np.nonzero(fits)
            columns = (*some[:, way, at], cuts[own][at], way)
            kept, peak, cost, position, way = (
                np.concatenate([[first], x]) for first, x in zip((0, 0, 0, i, 0), columns, strict=True)
            )
            found[i] = PricedLabels(kept, peak, cost, position, way, paths)
    return found


def _added(paths: _Paths, numbers: Ints, i: int, held: int, row: int, low: int, cuts: Ints) -> Ints:
    """Return (kept, peak, cost) of the paths from layer ``i`` to ``cuts``, the first of which has number ``low``.

    It is what their first part adds, by the tables' ``row``, to the ``numbers`` behind it: three, by layer modulo the
    ring, held, way and cut.
    """
    parts, step, again = paths.parts, paths.length[i, held], paths.recomputed[i, held]
    behind = np.where(again, parts.holds[i, step], parts.run_holds[held][i, parts.run(step)])
    ways, stops = np.arange(len(step)), cuts - i - 1
    rest = numbers[:, (i + step + 1) % numbers.shape[1], behind, ways, low : low + len(cuts)]
    near = int(np.searchsorted(stops, int(step.max())))  # cuts that some first parts reach beyond
    rest[:, :, :near][:, stops[:near] < step[:, None]] = 0
    length = np.minimum(step[:, None], stops[: near + 1])  # the last for all cuts that are farther
    kept, transient, cost = (
        x[:, np.arange(len(cuts)).clip(max=near)] for x in parts.first(i, row, length, again[:, None])
    )
    return np.stack([kept + rest[0], kept + np.maximum(transient, rest[1]), cost + rest[2]])

"""Can given stages keep to a period, and in which order on each device? By propagation and branching, at one period.

With the period T fixed, two operations u < v of a resource with r replicas follow each other in one of a few ways: v
starts ``k`` times r T, and the length of u, or more, after u, and ends before u's next turn but k. (k is -K of
ALGORITHMS section 6.) A way bounds the distance of starts, distances add up along paths, and what a device holds is
linear in its k: each narrows the other until nothing changes, and then a k is split. Mostly nothing is to be split: a
period below what can be reached is refuted at once, which takes the integer program many times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import lcm

import numpy as np

from ...cost.stage_graph import StageGraph
from ...integers import Ints, smallest
from ...plan import Pattern
from ..pattern import memory_fits, starts_of
from .retime import height_bounds, order_of, retime

FAR = -(2**61)


@dataclass(frozen=True, slots=True)
class Settled:
    """The best pattern that was found, if any, a period (ns) that no pattern is below, and how many times was split.

    ``proved``: there is no pattern below the best, nor below the periods that were asked for.
    """

    pattern: Pattern | None
    bound_ns: int
    nodes: int
    proved: bool


def settle(graph: StageGraph, low: int, high: int, nodes: int, held: int | None = None) -> Settled:
    """Return the pattern of the shortest period in [low, high] as far as splitting ``nodes`` times finds it, of those
    whose stages hold at most ``held`` microbatches together, the one that each has at hand left out. Deterministic.
    """
    best, used = None, 0
    if graph.policy.vertical_sync or any(stage.lent for stage in graph.stages):
        return Settled(None, low, 0, False)
    while low <= high:
        search = _Search(graph, high, nodes - used, held)
        order = search.run(height_bounds(graph, high, high))
        used += search.nodes
        if order is None:
            if search.spent:
                return Settled(best, low, used, False)
            return Settled(best, high + 1, used, True)
        pattern = retime(graph, order)
        if pattern is None or pattern.period_ns > high or not memory_fits(graph, starts_of(pattern), pattern.period_ns):
            return Settled(best, low, used, False)  # operations without length may lose their order
        best, high = pattern, pattern.period_ns - 1
    return Settled(best, low, used, True)


def emptiest(graph: StageGraph, pattern: Pattern, high: int, nodes: int) -> Pattern:
    """Return the pattern that holds the fewest microbatches, summed over stages, of those with a period (ns) of at most
    ``high``, and of these the shortest one, as far as splitting ``nodes`` times finds it; ``pattern`` if there is none
    that holds fewer."""
    low, best = graph.period_floor_ns, pattern
    while True:
        order = order_of(graph, starts_of(best), best.period_ns)
        held = -sum(order[pair] for pair in _stays(graph))
        found = settle(graph, high, high, nodes, held - 1)
        nodes -= found.nodes
        if found.pattern is None:
            break
        best = found.pattern
    shortest = None if best is pattern else settle(graph, low, best.period_ns - 1, nodes, held).pattern
    return shortest or best


def _stays(graph: StageGraph) -> list[tuple[int, int]]:
    """Return each stage's forward and backward, whose height counts what it holds beside the one at hand."""
    return [(graph.position["F", s], graph.position["B", s]) for s in range(len(graph.stages))]


@dataclass(slots=True)
class _State:
    """``after[u, v]``: v starts at least so long (ns) after u; ``least`` and ``most`` bound the k of each pair."""

    after: Ints
    least: Ints
    most: Ints


def _closed(after: Ints) -> bool:
    """Make of steps the longest ways; return whether none comes back later than it began."""
    for i in range(len(after)):
        np.maximum(after, after[:, i, None] + after[i], out=after)
    return not after.diagonal().any()


@dataclass(frozen=True, slots=True)
class _Room:
    """At one instant a device has ``room`` for ``of_more`` bytes times the k of the pairs ``more``, those ``of_less``
    times the k of ``less`` taken off, and for its versions; ``own`` are the pairs whose k count them, one less than
    what is in flight, with ``of_own`` bytes each."""

    more: Ints
    of_more: Ints
    less: Ints
    of_less: Ints
    room: int
    own: tuple[tuple[int, int], ...]  # (pair, stage)
    of_own: tuple[int, ...]

    @staticmethod
    def of(weigh: Ints, room: int, own: tuple[tuple[int, int], ...]) -> _Room:
        """Return it for what ``weigh`` says of every pair."""
        more, less = np.flatnonzero(weigh > 0), np.flatnonzero(weigh < 0)
        return _Room(more, weigh[more], less, -weigh[less], room, own, tuple(int(weigh[pair]) for pair, _ in own))


class _Search:
    def __init__(self, graph: StageGraph, period: int, budget: int, held: int | None) -> None:
        self.graph, self.period, self.budget, self.nodes, self.spent = graph, period, budget, 0, False
        self.held = held
        self.weights = cache(lambda s, k: graph.weights_bytes(s, graph.versions(s, k + 1, 1)))

    def run(self, ways: dict[tuple[int, int], tuple[int, int]]) -> dict[tuple[int, int], int] | None:
        """Return the heights of a pattern; None where there is none, or the budget is ``spent``."""
        graph, period = self.graph, self.period
        pairs = sorted(ways)
        if any(least > most for least, most in ways.values()):
            return None
        self.u, self.v = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in (0, 1))
        length = np.array([op.duration_ns for op in graph.operations], dtype=np.int64)
        self.of_u, self.of_v = length[self.u], length[self.v]
        self.turn = np.array(
            [graph.resources[graph.operations[u].resource].replicas * period for u, _ in pairs], dtype=np.int64
        )
        self.index = {pair: i for i, pair in enumerate(pairs)}
        self.rooms = [room for device in range(len(graph.resources)) for room in self._rooms(device)]
        if self.held is not None:
            weigh = np.zeros(len(pairs), dtype=np.int64)
            weigh[[self.index[pair] for pair in _stays(graph)]] = 1
            self.rooms.append(_Room.of(weigh, self.held, ()))
        count = len(length)
        after = np.full((count, count), FAR, dtype=np.int64)
        np.fill_diagonal(after, 0)
        slack = lcm(*(resource.replicas for resource in graph.resources)) * period
        if slack > -FAR // 4:  # numbers of replicas without common divisors, whose sums would be too large
            self.spent = True
            return None
        at = np.arange(count - 1)
        after[at, at + 1], after[at + 1, at] = length[:-1], -(length[:-1] + slack)
        if graph.policy.most_lifetime is not None:
            after[-1, 0] = max(after[-1, 0], length[-1] - graph.policy.most_lifetime * period)
        least = np.array([-ways[pair][1] for pair in pairs], dtype=np.int64)
        most = np.array([-ways[pair][0] for pair in pairs], dtype=np.int64)
        found = self._solve(_State(after, least, most)) if _closed(after) else None
        return None if found is None else {pair: -int(found.least[i]) for pair, i in self.index.items()}

    def _solve(self, state: _State) -> _State | None:
        if not self._narrow(state):
            return None
        width = state.most - state.least
        open_ = np.flatnonzero(width)
        if not len(open_):
            return state
        if self.nodes >= self.budget:
            self.spent = True
            return None
        self.nodes += 1
        at = int(open_[np.lexsort((-(self.of_u + self.of_v)[open_], width[open_]))[0]])
        middle = int(state.least[at])
        for low, high in ((state.least[at], middle), (middle + 1, state.most[at])):
            part = _State(state.after.copy(), state.least.copy(), state.most.copy())
            part.least[at], part.most[at] = low, high
            found = self._solve(part)
            if found is not None or self.spent:
                return found
        return None

    def _narrow(self, state: _State) -> bool:
        """Narrow the bounds until nothing changes; return whether anything is left."""
        u, v, turn, after = self.u, self.v, self.turn, state.after
        while True:
            if not self._lengthen(after, (state.least * turn + self.of_u, self.of_v - (state.most + 1) * turn)):
                return False
            least = np.maximum(state.least, -((-after[u, v] - self.of_v) // turn) - 1)
            most = np.minimum(state.most, (-after[v, u] - self.of_u) // turn)
            if (least > most).any() or not self._fit(least, most):
                return False
            if (least == state.least).all() and (most == state.most).all():
                return True
            state.least, state.most = least, most

    def _lengthen(self, after: Ints, own: tuple[Ints, Ints]) -> bool:
        """Let u and v of each pair start at least ``own`` after each other; return whether all ways may be so long.

        ``after`` has the longest ways, one step at a time where few get longer.
        """
        ends = np.concatenate([self.u, self.v]), np.concatenate([self.v, self.u])
        risen = np.flatnonzero((ns := np.concatenate(own)) > after[ends])
        if len(risen) < len(after):
            for i, j, most in zip(*(x[risen].tolist() for x in (*ends, ns)), strict=True):
                if most > after[i, j]:
                    if most + after[j, i] > 0:
                        return False
                    np.maximum(after, after[:, i, None] + (most + after[j]), out=after)
            return True
        after[ends] = np.maximum(after[ends], ns)
        return _closed(after)

    def _fit(self, least: Ints, most: Ints) -> bool:
        """Narrow the bounds by what devices hold; return whether they can hold it."""
        for held in self.rooms:
            more, less, own = held.more, held.less, held.own
            left = held.room - int(held.of_more @ least[more] - held.of_less @ most[less])
            left -= sum(self.weights(s, int(least[pair])) for pair, s in own)
            if left < 0:
                return False
            most[more] = np.minimum(most[more], least[more] + left // held.of_more)
            least[less] = np.maximum(least[less], most[less] - left // held.of_less)
            for (pair, s), each in zip(own, held.of_own, strict=True):
                here, top = int(least[pair]), int(most[pair])
                enough = left + self.weights(s, here) + each * here

                def too_many(k: int, s: int = s, each: int = each, enough: int = enough) -> bool | None:
                    return self.weights(s, k) + each * k > enough or None

                if top > here and too_many(top):
                    found = smallest(too_many, here + 1, top, here + 1)
                    assert found is not None, "it is too many"
                    most[pair] = found[0] - 1
        return not (least > most).any()

    def _rooms(self, device: int) -> list[_Room]:
        graph, memory = self.graph, self.graph.resources[device].memory_bytes
        if memory is None:
            return []
        stages = graph.stages_on(device)
        memory -= sum(graph.stages[s].buffer_bytes for s in stages)
        own = tuple((self.index[graph.position["F", s], graph.position["B", s]], s) for s in stages)
        found = []
        for s in stages:
            extra = graph.stages[s].peak_bytes - graph.stages[s].kept_bytes
            for at, more in ((graph.position["F", s], 0), (graph.position["B", s], extra)):
                if at == graph.position["B", s] and not extra:
                    continue
                weigh, room = np.zeros(len(self.u), dtype=np.int64), memory - more
                for q in stages:
                    room -= self._hold(weigh, q, at)
                found.append(_Room.of(weigh, room, own))
        return found

    def _hold(self, weigh: Ints, q: int, at: int) -> int:
        """Add to ``weigh`` what stage q keeps when operation ``at`` starts; return what it keeps at k = 0."""
        graph = self.graph
        kept = graph.stages[q].kept_bytes
        forward, backward = graph.position["F", q], graph.position["B", q]
        if at in (forward, backward):
            weigh[self.index[forward, backward]] += kept
            return kept
        constant = 0
        for other, sign in ((backward, 1), (forward, -1)):
            if other < at:
                weigh[self.index[other, at]] -= sign * kept
            else:
                weigh[self.index[at, other]] += sign * kept
                constant += sign * kept
        return constant

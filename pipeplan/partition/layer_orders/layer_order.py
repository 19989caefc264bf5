"""In which order should the layers of a DAG stand to be cut into stages?

Cuts are ideals (:mod:`..cost.layer_orders`), and the exact search over contiguous stages (:mod:`.contiguous`) runs
between them as between the cuts of a chain. Where they are few, it has them all, and what it finds is the best over
all orders of the layers. Among many it has those along some orders, and then those around the best cuts so far.
Ideals as the states of exact searches: Tarnawski et al., Efficient algorithms for device placement of DNN graph
operators (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from ...cost.layer_orders import by_work, ideals, members, needed, several_orders
from ...plan import Allocation, in_order
from ...problem import Chain, Problem
from ..contiguous.contiguous import contiguous, smallest_period
from .ideal_chain import IdealChain
from .idle_layers import idle_layers


@dataclass(frozen=True)
class OrderEffort:
    """How many ideals are in tables ``at_once``, and how many ``rounds`` look at those around the best cuts."""

    at_once: int
    rounds: int


EFFORTS = {
    "quick": OrderEffort(200, 0),
    "normal": OrderEffort(500, 1),
    "high": OrderEffort(1_200, 8),
}


@dataclass(frozen=True)
class Ordered:
    """A contiguous allocation of the layers in ``order``, the best between some ``ideals``, or between all of them."""

    order: tuple[int, ...]
    allocation: Allocation
    ideals: int
    complete: bool

    @property
    def exact(self) -> bool:
        """Whether no order has a better one."""
        return self.complete and self.allocation.claimed_period_ns == self.allocation.lower_bound_ns


def orders_matter(problem: Problem) -> bool:
    """Whether there are several orders of the layers, and they can be compared.

    The devices' own profiles are by the profile's order, and copies of tied weights wait by the order of stages.
    """
    own = problem.platform.devices[0].times is not None
    copies = problem.chain.tied and problem.tied != "together" and problem.policy.updates_together
    return not own and not copies and several_orders(problem.chain)


def best_ordered(problem: Problem, effort: OrderEffort = EFFORTS["normal"], seed: int = 0) -> Ordered | None:
    """Return the best contiguous allocation that is found over all orders of the layers; None where nothing fits.

    Where all ideals are in tables it comes with a lower bound for all orders, and is exact where that is reached.
    """
    every = _all_ideals(problem.chain, effort.at_once)
    if every is None:
        return _best_between_some(problem, effort, seed)
    return _best_between(problem, every, complete=True)


def between_all(problem: Problem, effort: OrderEffort) -> IdealChain | None:
    """Return the chain of all ideals that need be told apart; None where tables take too many."""
    every = _all_ideals(problem.chain, effort.at_once)
    return None if every is None else IdealChain.of(problem.chain, _legal(problem, every))


def _all_ideals(chain: Chain, most: int) -> list[int] | None:
    idle = idle_layers(chain)
    return ideals(chain, most, idle.early, idle.beside)


def _best_between_some(problem: Problem, effort: OrderEffort, seed: int) -> Ordered | None:
    """Return the best allocation that is found along some orders, and then around its cuts."""
    chain = problem.chain
    some = {ideal for order in _some_orders(chain, effort.at_once, seed) for ideal in _along(order)}
    best = _best_between(problem, some, complete=False)
    for _ in range(effort.rounds):
        if best is None or problem.deadline.passed:
            break
        along = _along(best.order)
        ends = [along[stage.stop] for stage in best.allocation.stages[:-1]]
        found = _best_between(problem, _around(chain, along, ends, effort.at_once), complete=False)
        if found is None or _claim(found) >= _claim(best):
            break
        best = found
    return best


def _with_all_segments(problem: Problem, found: Ordered) -> Ordered:
    """Return ``found``, or what is better along its order where segments may end at any layer."""
    if problem.checkpointing != "segments" or found.allocation.claimed_period_ns == found.allocation.lower_bound_ns:
        return found
    along = smallest_period(replace(problem, chain=problem.chain.reordered(found.order)))
    if along is None or _claim(found) <= (along.claimed_period_ns or 0):
        return found
    return replace(found, allocation=replace(along, lower_bound_ns=found.allocation.lower_bound_ns))


def _claim(found: Ordered) -> int:
    assert found.allocation.claimed_period_ns is not None
    return found.allocation.claimed_period_ns


def _best_between(problem: Problem, some: Iterable[int], complete: bool) -> Ordered | None:
    """Return the best allocation that is cut at ``some`` ideals alone."""
    legal = _legal(problem, some)
    between = IdealChain.of(problem.chain, legal)
    for allocation in contiguous(replace(problem, chain=between)):
        found = _with_all_segments(problem, _placed(between, allocation, len(legal)))
        return replace(found, complete=complete)
    return None


def _legal(problem: Problem, some: Iterable[int]) -> list[int]:
    """Return those of ``some`` ideals at which stages may be cut, in order of their work."""
    groups = [] if problem.tied != "together" and problem.policy.updates_together else problem.chain.tied
    return by_work(problem.chain, (x for x in some if all(x >> i & 1 == x >> j & 1 for i, j in groups)))


def _placed(between: IdealChain, allocation: Allocation, count: int) -> Ordered:
    """Return an ``allocation`` between ideals as one of layers that stand in an order."""
    order = between.order_through(end for stage in allocation.stages for end in stage.ends)
    _, stages = in_order(between, allocation.stages)
    return Ordered(order, replace(allocation, stages=stages), count, complete=False)


def _along(order: Sequence[int]) -> list[int]:
    """Return the ideals that an order passes through."""
    found = [0]
    for layer in order:
        found.append(found[-1] | 1 << layer)
    return found


def _around(chain: Chain, along: Iterable[int], ends: Iterable[int], most: int) -> list[int]:
    """Return the ideals ``along`` an order and those nearest to ``ends``, by layers that one has more or less: about
    ``most`` in all."""
    before, count = needed(chain), len(chain)
    after = [sum(1 << j for j in range(count) if before[j] >> i & 1) for i in range(count)]
    found = dict.fromkeys([*ends, *along])
    near = list(dict.fromkeys(ends))
    for ideal in near:  # which grows meanwhile
        more = [ideal | 1 << i for i in range(count) if not ideal >> i & 1 and not before[i] & ~ideal]
        less = [ideal ^ 1 << i for i in members(ideal) if not after[i] & ideal]
        for other in (*more, *less):
            if len(found) >= most:
                return list(found)
            if other not in found:
                found[other] = None
                near.append(other)
    return list(found)


def _some_orders(chain: Chain, most: int, seed: int) -> list[list[int]]:
    """Return orders that have about ``most`` ideals in all: the profile's, the one that follows a branch to its end,
    the one that takes branches in turn, the one whose cuts are small, and some by chance."""
    count, chance = len(chain), Random(seed)
    tensors = list(zip(chain.tensor_bytes, chain.readers, strict=True))
    reads = [[t for t, (_, readers) in enumerate(tensors) if i in readers] for i in range(count)]

    def latest(i: int, place: Mapping[int, int]) -> int:
        return max((place[t - 1] for t in reads[i] if t), default=-1)

    def growth(i: int, place: Mapping[int, int]) -> int:
        last = (t for t in reads[i] if all(j == i or j in place for j in tensors[t][1]))
        return chain.layers[i].output_bytes - sum(tensors[t][0] for t in last)

    orders = [
        list(range(count)),
        _greedy(chain, lambda i, place: -latest(i, place)),
        _greedy(chain, latest),
        _greedy(chain, growth),
    ]
    seen = {ideal for order in orders for ideal in _along(order)}
    for _ in range(2 * most // count):
        if len(seen) >= most:
            break
        likes = [chance.random() for _ in range(count)]
        orders.append(_greedy(chain, lambda i, _, likes=likes: likes[i]))  # type: ignore[misc]
        seen |= set(_along(orders[-1]))
    return orders


def _greedy(chain: Chain, rule: Callable[[int, Mapping[int, int]], float]) -> list[int]:
    """Return the order in which that layer comes next which the ``rule``, given the places before, calls least."""
    before, place, done = needed(chain), dict[int, int](), 0
    waiting = set(range(len(chain)))
    while waiting:
        layer = min((i for i in waiting if not before[i] & ~done), key=lambda i: (rule(i, place), i))
        place[layer] = len(place)
        waiting.remove(layer)
        done |= 1 << layer
    return list(place)

"""In which order should the layers of a DAG stand to be cut into stages?

Cuts are ideals (:mod:`..cost.layer_orders`), and the exact search over contiguous stages (:mod:`.contiguous`) runs
between them as between the cuts of a chain. Where there are few, it has them all, and what it finds is the best over
all orders of the layers; among many it has those along some orders, and then those around the best cuts so far. Ideals
as the states of exact searches: Tarnawski et al., Efficient algorithms for device placement of DNN graph operators
(2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from ..cost.ideal_chain import IdealChain
from ..cost.layer_orders import ideals, members, needed, several_orders
from ..plan import Allocation
from ..problem import Chain, Problem
from .contiguous.contiguous import contiguous

MOST = 600  # ideals that are looked at together
ROUNDS = 3  # in which those around the best cuts are looked at


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


def best_ordered(problem: Problem, most: int = MOST, rounds: int = ROUNDS, seed: int = 0) -> Ordered | None:
    """Return the best contiguous allocation over all orders of the layers, or over some where they have more than
    ``most`` ideals; None where nothing fits."""
    chain = problem.chain
    every = ideals(chain, most)
    if every is not None:
        return _best_between(problem, every, complete=True)
    some = {ideal for order in _some_orders(chain, most, seed) for ideal in _along(order)}
    best = _best_between(problem, some, complete=False)
    for _ in range(rounds):
        if best is None or problem.deadline.passed:
            break
        along = _along(best.order)
        ends = [along[stage.stop] for stage in best.allocation.stages[:-1]]
        found = _best_between(problem, _around(chain, along, ends, most), complete=False)
        if found is None or _claim(found) >= _claim(best):
            break
        best = found
    return best


def _claim(found: Ordered) -> int:
    assert found.allocation.claimed_period_ns is not None
    return found.allocation.claimed_period_ns


def _best_between(problem: Problem, some: Iterable[int], complete: bool) -> Ordered | None:
    """Return the best allocation that is cut at ``some`` ideals alone."""
    chain = problem.chain
    groups = [] if problem.tied != "together" and problem.policy.updates_together else chain.tied
    work = [x.forward_ns + x.backward_ns for x in chain.layers]
    legal = [x for x in some if all(x >> i & 1 == x >> j & 1 for i, j in groups)]
    legal.sort(key=lambda x: (sum(work[i] for i in members(x)), x.bit_count(), x))
    positions = IdealChain.of(chain, legal)
    for allocation in contiguous(replace(problem, chain=positions)):
        order, stages = positions.placed(allocation.stages)
        return Ordered(order, replace(allocation, stages=stages), len(legal), complete)
    return None


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

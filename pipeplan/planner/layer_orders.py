"""In which order are a DAG's layers planned? In the profile's, or in another where contiguous stages win by it.

Stages win by an order in which little crosses their cuts; one that branches share out evenly may help as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from ..check.bounds import quick_proof
from ..deadline import OutOfTime
from ..partition.contiguous.contiguous import contiguous
from ..problem import MICROBATCHES_PER_DEVICE, Chain, Problem
from .periodic.incumbent import Settings
from .periodic.interval import at_interval
from .plan import Planned

Rule = Callable[[int, Mapping[int, int]], float]  # of a layer, given the places of those that stand before it


def needed(chain: Chain) -> list[int]:
    """Return for each layer those that must stand before it, as a bit set.

    They are the ones whose outputs it reads, with all that these need. The last layer, the loss, stays last, and the
    first, where reading data is part of its time. Without edges each layer needs the one before it.
    """
    count = len(chain)
    found = [int(i > 0 and chain.read_in_passes_ns > 0) for i in range(count)]
    for i, j in sorted(chain.edges if chain.edges is not None else pairwise(range(count)), key=lambda edge: edge[1]):
        found[j] |= found[i] | 1 << i
    found[-1] = (1 << (count - 1)) - 1
    return found


def several_orders(chain: Chain) -> bool:
    """Whether the layers may stand in another order than they do: some two neighbours may change places."""
    if chain.edges is None:
        return False
    before = needed(chain)
    return any(not before[i + 1] >> i & 1 for i in range(len(chain) - 1))


def other_orders(chain: Chain) -> Iterator[tuple[int, ...]]:
    """Yield orders that differ from the chain's: the one whose cuts are small, the one that takes branches in turn, the
    one that follows a branch to its end."""
    tensors = list(zip(chain.tensor_bytes, chain.readers, strict=True))
    reads = [[t for t, (_, readers) in enumerate(tensors) if i in readers] for i in range(len(chain))]

    def latest(i: int, place: Mapping[int, int]) -> int:
        return max((place[t - 1] for t in reads[i] if t), default=-1)

    def growth(i: int, place: Mapping[int, int]) -> int:
        last = (t for t in reads[i] if all(j == i or j in place for j in tensors[t][1]))
        return chain.layers[i].output_bytes - sum(tensors[t][0] for t in last)

    found = [_greedy(chain, rule) for rule in (growth, latest, lambda i, place: -latest(i, place))]
    yield from (order for order in dict.fromkeys(found) if order != tuple(range(len(chain))))


def _greedy(chain: Chain, rule: Rule) -> tuple[int, ...]:
    """Return the order in which that layer comes next which the ``rule`` calls least, of those that may."""
    before, place, done = needed(chain), dict[int, int](), 0
    waiting = set(range(len(chain)))
    while waiting:
        layer = min((i for i in waiting if not before[i] & ~done), key=lambda i: (rule(i, place), i))
        place[layer] = len(place)
        waiting.remove(layer)
        done |= 1 << layer
    return tuple(place)


def planned_in_best_order(
    problem: Problem, settings: Settings, plan: Callable[[Problem], Planned]
) -> tuple[Planned, Problem]:
    """Return the ``plan`` of ``problem`` in the order of its layers whose contiguous stages have the shortest period,
    and the problem so.

    Another than the profile's has to pay (:meth:`.incumbent.Settings.to_pay`). Layers stay as they are where devices
    have profiles of their own, which are by the profile's order, and where another order comes too late for the
    problem's deadline.
    """
    if problem.platform.devices[0].times is not None or not several_orders(problem.chain):
        return plan(problem), problem
    settings.status.phase = "order of the layers"
    tried, best, best_ns = 1, problem, _period_ns(problem)
    if best_ns is None or best_ns > quick_proof(problem).period_ns * (1 + settings.gap):
        with suppress(OutOfTime):
            for order in other_orders(problem.chain):
                other = replace(problem, chain=problem.chain.reordered(order))
                period, tried = _period_ns(other), tried + 1
                if period is not None and (best_ns is None or period < settings.to_pay(best_ns)):
                    best, best_ns = other, period
    found = plan(best)
    return replace(found, plan=found.plan.telling(layer_order={"orders": tried})), best


def _period_ns(problem: Problem) -> int | None:
    """Return the shortest period of contiguous stages, each recomputed in whole or not; None where none fit."""
    if problem.policy.accumulate is None and not problem.policy.open:
        count = MICROBATCHES_PER_DEVICE * len(problem.platform)
        problem = at_interval(problem, count if problem.policy.drains else 1)
    whole = problem if problem.checkpointing == "none" else replace(problem, checkpointing="stages")
    with suppress(OutOfTime):
        return next((x.claimed_period_ns for x in contiguous(whole)), None)
    return None

"""Lower bounds on the period that hold for every plan of class ``any``, however layers are placed and scheduled.

Bounds of narrower classes come from exact algorithms (``contiguous`` is its own bound); the planner assembles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from . import costs
from .plan import Bound
from .problem import Problem
from .search import smallest


def any_bound(problem: Problem) -> Bound:
    """Return the best lower bound for class ``any`` with the replicas and checkpointing that ``problem`` allows."""
    period = max(1, load_bound(problem), layer_bound(problem), memory_bound(problem))
    return Bound("any", problem.replicas, problem.checkpointing, period)


def work_ns(problem: Problem) -> Fraction:
    """Return U: the least time that one microbatch takes in all on devices of speed 1, without recomputation."""
    sums = problem.chain.sums
    # each replica steps once per interval; over all replicas a microbatch pays at least 1 / accumulate of a step
    step = Fraction(int(sums.optimizer_ns[-1]), problem.policy.accumulate or 1)
    return int(sums.forward_ns[-1]) + int(sums.backward_ns[-1]) + step


def load_bound(problem: Problem) -> int:
    """Return U / sum of speeds: even perfectly shared work takes that long."""
    return ceil(work_ns(problem) / sum(device.speed for device in problem.platform.devices))


def layer_bound(problem: Problem) -> int:
    """Return the time of the largest layer on the fastest device, shared by all devices where replicas are allowed."""
    fastest = max(device.speed for device in problem.platform.devices)
    share = len(problem.platform) if problem.replicas else 1
    largest = max(layer.forward_ns + layer.backward_ns for layer in problem.chain.layers)
    return ceil(largest / fastest / share)


def memory_bound(problem: Problem) -> int:
    """Return the least period at which work, memory averaged over time, and communication could all be met.

    A tensor that layer i saves first is held at least from the start of F_i to the end of B_i, U(i..L) on the fastest
    device, by one microbatch in every period: ``sum saved_i * U(i..L) <= T * (memory - static)``. Recomputing layer i,
    wholly or in part, takes its forward once more and leaves its tensors held for B_i alone; what to recompute is a
    fractional knapsack over the idle time ``T * sum of speeds - U`` (ALGORITHMS section 5, "a bound for the full
    class"). A plan is one stage on r devices, whose weights are held and synchronised r times, or it has a cut, whose
    buffers stand on both its ends; the bound is the least over these cases. Weak where peaks exceed averages.
    """
    cases = _cases(problem)
    menus = _menus(problem)
    fastest = max(device.speed for device in problem.platform.devices)
    held = sum(item.size * item.lifetime_ns for item in menus[0])
    high = 2 * ceil(work_ns(problem) / min(device.speed for device in problem.platform.devices)) + 1
    best = None
    for case in cases:
        if case.room_bytes <= 0 and held:
            continue
        bound = case.floor_ns
        for menu in menus:
            top = max(high, case.floor_ns, ceil(Fraction(held, max(1, case.room_bytes)) / fastest))
            found = smallest(lambda t, case=case, menu=menu: _enough(problem, case, menu, t) or None, bound, top)  # type: ignore[misc]
            bound = top if found is None else found[0]
        best = bound if best is None else min(best, bound)
    return best or 0


@dataclass(frozen=True, slots=True)
class _Case:
    """A kind of plan: bytes left for activations over all its devices, their speeds' sum, the least period besides."""

    room_bytes: int
    speed: Fraction
    floor_ns: int


@dataclass(frozen=True, slots=True)
class _Item:
    """Bytes held for ``lifetime_ns``, or for ``backward_ns`` when ``recompute_ns`` of work is spent; None: never."""

    size: int
    lifetime_ns: int
    backward_ns: int
    recompute_ns: int | None


def _cases(problem: Problem) -> list[_Case]:
    platform, policy, sums = problem.platform, problem.policy, problem.chain.sums
    devices = sorted(platform.devices, key=lambda device: device.memory_bytes, reverse=True)
    speeds = sorted((device.speed for device in platform.devices), reverse=True)
    weight_bytes, parameters = int(sums.weight_bytes[-1]), int(sums.parameters[-1])
    weights = costs.weights_bytes(policy, weight_bytes, parameters, 1)
    gradient = costs.gradient_bytes(policy, weight_bytes, parameters)
    fastest_link = max(level.bandwidth for level in platform.levels)
    cases = []
    for r in range(1, len(platform) + 1 if problem.replicas else 2):
        room = sum(device.memory_bytes for device in devices[:r]) - r * weights
        sync = costs.sync_period_ns(policy, gradient, r, fastest_link)
        cases.append(_Case(room, sum(speeds[:r], Fraction(0)), sync))
    if len(platform) > 1 and len(problem.chain) > 1:
        least_cut = min(problem.chain.cut_bytes[1:-1])
        transfer = min(platform.transfer_ns(least_cut, k) for k in range(len(platform.levels)))
        room = sum(device.memory_bytes for device in devices) - weights - 4 * least_cut
        floor = transfer if platform.full_duplex else 2 * transfer
        cases.append(_Case(room, sum(speeds, Fraction(0)), floor))
    return cases


def _menus(problem: Problem) -> list[list[_Item]]:
    """Return what may be dropped and at what price; each list gives a valid bound.

    In a chain whose layers save their inputs, dropping the input of layer i also needs the forward of layer i - 1, and
    the network's own input is never dropped; that is the second list.
    """
    chain = problem.chain
    total = chain.sums.forward_ns + chain.sums.backward_ns
    free = problem.checkpointing != "none"
    layers = list(enumerate(chain.layers))
    lifetimes = [int(total[-1] - total[i]) for i, _ in layers]
    menus = [
        [
            _Item(chain.first_saved[i], lifetimes[i], layer.backward_ns, layer.forward_ns if free else None)
            for i, layer in layers
        ]
    ]
    if free and chain.edges is None and all(layer.saved_bytes is None for layer in chain.layers):
        menus.append(
            [
                _Item(
                    chain.first_saved[i],
                    lifetimes[i],
                    layer.backward_ns,
                    chain.layers[i - 1].forward_ns if i else None,
                )
                for i, layer in layers
            ]
        )
    return [[item for item in menu if item.size] for menu in menus]


def _enough(problem: Problem, case: _Case, menu: Sequence[_Item], period: int) -> bool:
    """Whether at ``period`` dropping the best items within the idle time brings the average under the room."""
    idle = period * case.speed - work_ns(problem)
    if idle < 0:
        return False
    fastest = max(device.speed for device in problem.platform.devices)
    excess = Fraction(sum(item.size * item.lifetime_ns for item in menu)) / fastest - period * case.room_bytes
    savings = [
        (Fraction(item.size * (item.lifetime_ns - item.backward_ns)) / fastest, item.recompute_ns)
        for item in menu
        if item.recompute_ns is not None
    ]
    savings.sort(key=lambda pair: pair[0] / pair[1] if pair[1] else Fraction(2**62), reverse=True)
    for saving, price in savings:
        if excess <= 0:
            break
        share = min(Fraction(1), idle / price) if price else Fraction(1)
        excess -= share * saving
        idle -= share * (price or 0)
    return excess <= 0

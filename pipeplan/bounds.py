"""Lower bounds on the period that hold for every plan of class ``any``, however layers are placed and scheduled.

Bounds of narrower classes come from exact algorithms (``contiguous`` is its own bound); the planner assembles them.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from . import costs
from .plan import Bound
from .problem import Problem


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
    """Return the period below which activations, averaged over time, exceed all memory; 0 with checkpointing.

    A tensor saved first for layer i is held at least from the start of F_i to the end of B_i, which is U(i..L) on the
    fastest device, by one microbatch in every period. So ``T * (memory - weights) >= sum saved_i * U(i..L)``, with
    every layer's weights held at least once. Weak: it compares an average with a peak.
    """
    if problem.checkpointing != "none":
        return 0
    chain, policy = problem.chain, problem.policy
    sums = chain.sums
    fastest = max(device.speed for device in problem.platform.devices)
    weights = costs.weights_bytes(policy, int(sums.weight_bytes[-1]), int(sums.parameters[-1]), 1)
    room = sum(device.memory_bytes for device in problem.platform.devices) - weights
    total_ns = sums.forward_ns + sums.backward_ns
    held = sum(saved * int(total_ns[-1] - total_ns[i]) for i, saved in enumerate(chain.first_saved) if saved)
    if held == 0 or room <= 0:
        return 0
    return ceil(Fraction(held, room) / fastest)

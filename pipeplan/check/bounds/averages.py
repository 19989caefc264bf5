"""How short can a period be by the work of all devices, and by the largest layer? Quickly."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from ...cost import time_model
from ...integers import ceil_div
from ...problem import Problem


def work_ns(problem: Problem) -> Fraction:
    """Return U: the least time that one microbatch takes in all on devices of speed 1, without recomputation."""
    chain, sums = problem.chain, problem.chain.sums
    # each replica steps once per interval; over all replicas a microbatch pays at least 1 / accumulate of a step, and
    # where they share it, no more, however many there are: more than accumulate of them make updates rarer
    fewest = problem.most_replicas if problem.policy.zero else 1
    step = Fraction(time_model.whole_step_ns(chain, 0, len(chain)), problem.policy.update_interval(fewest))
    if problem.policy.overlaps:  # with all-reduces
        step = Fraction(0)
    return int(sums.forward_ns[-1]) + int(sums.backward_ns[-1]) + step


def load_bound(problem: Problem) -> int:
    """Return U / sum of speeds: even perfectly shared work takes that long."""
    return ceil(work_ns(problem) / sum(device.speed for device in problem.platform.devices))


def fill_bound(problem: Problem) -> int:
    """Return the least period of drained plans without replicas by work, as far as devices have begun; 0 for others.

    The device that is the i-th to have a stage begins when a forward has come through i layers and over as many cuts at
    least: the fastest may be the first. Weight parts may come last, so that none is sure to end early.
    """
    platform, policy = problem.platform, problem.policy
    count = policy.accumulate
    if not policy.drains or problem.replicas or count is None:
        return 0
    speeds = sorted((device.speed for device in platform.devices), reverse=True)
    levels = range(0 if platform.blocking else len(platform.levels))
    moves = [min((platform.transfer_ns(x, k) for k in levels), default=0) for x in problem.chain.cut_bytes[1:-1]]
    trip, forward = min(moves, default=0), problem.chain.sums.forward_ns
    work, done, total, power = count * work_ns(problem), Fraction(0), Fraction(0), Fraction(0)
    for i, speed in enumerate(speeds[: len(problem.chain)]):
        head = int(forward[i]) / speeds[0] + i * trip
        if power and done + power * (head - total) >= work:
            break
        done, total, power = done + power * (head - total), head, power + speed
    return ceil_div(ceil(total + (work - done) / power), count)


def layer_bound(problem: Problem) -> int:
    """Return the time of the largest layer on the fastest device, shared by all devices where replicas are allowed."""
    fastest = max(device.speed for device in problem.platform.devices)
    share = len(problem.platform) if problem.replicas else 1
    largest = max(layer.forward_ns + layer.backward_ns for layer in problem.chain.layers)
    return ceil(largest / fastest / share)

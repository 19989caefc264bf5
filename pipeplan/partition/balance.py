"""What do the simplest plans look like? One stage per device with equal compute, or the whole model on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import numpy as np
import numpy.typing as npt

from ..cost import memory_model, time_model
from ..integers import ceil_div
from ..plan import Allocation, Stage
from ..problem import Problem

Times = npt.NDArray[np.float64]


def balance(problem: Problem) -> Iterator[Allocation]:
    """Yield the allocation whose longest stage is shortest: nothing recomputed, then, where allowed, every stage.

    Optimal for compute alone among one-device stages in platform order that use every device (as many as there are
    layers, if those are fewer), at each device's speed. Among the optimal ones it has the least sum of squared stage
    times. Transfers and memory are not looked at; the claimed period is the longest stage. O(P L^2), vectorised.
    Source: the block partition problem (torchgpipe's ``balance``), solved by dynamic programming.
    """
    yield _balanced(problem, recompute=False)
    if problem.checkpointing != "none":
        yield _balanced(problem, recompute=True)


def _balanced(problem: Problem, recompute: bool) -> Allocation:
    chain, platform, policy = problem.chain, problem.platform, problem.policy
    count = len(chain)

    @cache
    def work_at(speed: Fraction, stop: int) -> Times:
        start = np.arange(stop + 1)
        again = chain.sums.forward_ns[stop] - chain.sums.forward_ns[start] if recompute else 0
        total = time_model.work_ns(chain, policy, start, stop, again, speed=speed)
        return np.asarray(total, dtype=np.float64)  # exact up to 2**53 ns

    def work(device: int, stop: int) -> Times:
        return work_at(platform.devices[device].speed, stop)

    longest, _ = _best_cuts(count, len(platform), work, np.maximum)

    def squared(device: int, stop: int) -> Times:
        times = work(device, stop)
        return np.where(times <= longest, times**2, np.inf)

    _, cuts = _best_cuts(count, len(platform), squared, np.add)
    stages = tuple(Stage(start, stop, (device,), ((start, stop),) if recompute else ()) for device, start, stop in cuts)
    return Allocation(stages, int(longest))


def _best_cuts(
    count: int,
    devices: int,
    cost: Callable[[int, int], Times],
    combine: Callable[[Times, Times], Times],
) -> tuple[float, list[tuple[int, int, int]]]:
    """Return the least combined cost of (device, start, stop) ranges in order, and those ranges.

    ``cost(device, stop)`` has one entry for each start in 0..stop. With fewer layers than devices every range is one
    layer, and the devices that serve best are used.
    """
    spare = count < devices
    best = np.full((devices + 1, count + 1), np.inf)
    best[0, 0] = 0
    chosen = np.zeros((devices + 1, count + 1), dtype=np.int64)
    for d in range(devices):
        for stop in range(count + 1):
            through = combine(best[d, : stop + 1], cost(d, stop))
            through[stop] = best[d, stop] if spare else np.inf  # an empty range leaves the device unused
            if spare:
                through[: max(stop - 1, 0)] = np.inf
            chosen[d + 1, stop] = np.argmin(through)
            best[d + 1, stop] = through[chosen[d + 1, stop]]
    ranges: list[tuple[int, int, int]] = []
    stop = count
    for d in range(devices - 1, -1, -1):
        start = int(chosen[d + 1, stop])
        if start < stop:
            ranges.append((d, start, stop))
        stop = start
    return float(best[devices, count]), ranges[::-1]


def data_parallel(problem: Problem) -> Iterator[Allocation]:
    """Yield one stage on all devices: storing every activation, then, where allowed, recomputing the whole chain.

    The claimed period is the most of compute / devices and weight synchronisation. Nothing comes when there are several
    devices and replicas are not allowed.
    """
    platform, count = problem.platform, len(problem.chain)
    devices = tuple(range(len(platform)))
    if len(devices) > 1 and not problem.replicas:
        return
    policy = problem.policy
    gradient = memory_model.gradient_of(problem.chain, policy, 0, count)
    bandwidth, _ = platform.paths[platform.level_of(devices)]
    sync = time_model.sync_period_ns(policy, gradient, len(devices), bandwidth)
    speed = platform.slowest(devices).speed
    for checkpoint in ((),) if problem.checkpointing == "none" else ((), ((0, count),)):
        _, _, recompute = memory_model.activations(problem.chain, 0, count, checkpoint)
        work = time_model.work_ns(problem.chain, policy, 0, count, recompute, len(devices), speed)
        claim = max(ceil_div(work, len(devices)), sync)
        yield Allocation((Stage(0, count, devices, checkpoint),), claim)

"""What do the simplest plans look like? One stage per device with equal compute, or the whole model on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import isqrt

import numpy as np
import numpy.typing as npt

from ..cost import memory_model, time_model
from ..deadline import Deadline
from ..integers import ceil_div, smallest
from ..plan import Allocation, Stage
from ..problem import Checkpointing, Problem
from .cuts import legal_cuts

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

    kinds = [platform.devices.index(x) for x in platform.devices]  # of equal devices the first

    @cache
    def work_at(kind: int, stop: int) -> Times:
        start, device = np.arange(stop + 1), platform.devices[kind]
        timed = chain.timed(device.times)
        again = timed.sums.forward_ns[stop] - timed.sums.forward_ns[start] if recompute else 0
        total = time_model.Passes(timed, policy, start, stop, speed=device.speed).work_ns(again)
        return np.asarray(total, dtype=np.float64)  # exact up to 2**53 ns

    def work(device: int, stop: int) -> Times:
        return work_at(kinds[device], stop)

    longest, _ = _best_cuts(count, len(platform), work, np.maximum, problem.deadline)

    def squared(device: int, stop: int) -> Times:
        times = work(device, stop)
        return np.where(times <= longest, times**2, np.inf)

    _, cuts = _best_cuts(count, len(platform), squared, np.add, problem.deadline)
    stages = tuple(Stage(start, stop, (device,), ((start, stop),) if recompute else ()) for device, start, stop in cuts)
    return Allocation(stages, int(longest))


def _best_cuts(
    count: int,
    devices: int,
    cost: Callable[[int, int], Times],
    combine: Callable[[Times, Times], Times],
    deadline: Deadline,
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
            deadline.check()
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
    """Yield one stage on all devices: storing every activation, then, where allowed, recomputing the whole chain, or
    its layers one by one.

    The claimed period is the most of compute / devices and weight synchronisation. Nothing comes when there are several
    devices and replicas are not allowed.
    """
    platform, count = problem.platform, len(problem.chain)
    devices = tuple(range(len(platform)))
    if len(devices) > 1 and not problem.replicas:
        return
    policy = problem.policy
    gradient = memory_model.gradient_of(problem.chain, policy, 0, count)
    sync = time_model.sync_period_ns(policy, gradient, len(devices), *platform.paths[platform.level_of(devices)])
    slowest = platform.slowest(devices)
    chain = problem.chain.timed(slowest.times)
    ways = (), ((0, count),), tuple((i, i + 1) for i in range(count))
    for checkpoint in ways[: len(ways_to_recompute(problem))]:
        _, _, recompute = memory_model.activations(chain, 0, count, checkpoint)
        work = time_model.Passes(chain, policy, 0, count, len(devices), slowest.speed).work_ns(recompute)
        claim = max(ceil_div(work, len(devices)), sync)
        yield Allocation((Stage(0, count, devices, checkpoint),), claim)


def simplest(problem: Problem) -> Iterator[Allocation]:
    """Yield what takes next to no time to find: all on the largest device, a greedy balanced cut, data parallelism.

    Each stored and, where allowed, recomputed: whole, or in about as many segments as a segment has layers. The cut
    fills device after device up to the least time that suffices, at each device's speed, without regard to transfers.
    O(P log L) for each of some tens of times.
    """
    devices, count = problem.platform.devices, len(problem.chain)
    largest = max(range(len(devices)), key=lambda d: (devices[d].memory_bytes, devices[d].speed))
    everything = tuple(range(len(devices))) if problem.replicas else (largest,)
    for recompute in ways_to_recompute(problem):
        for placed in ([((largest,), 0, count)], _filled(problem, recompute != "none"), [(everything, 0, count)]):
            yield Allocation(tuple(Stage(i, j, group, in_segments(i, j, recompute)) for group, i, j in placed))


def ways_to_recompute(problem: Problem) -> tuple[Checkpointing, ...]:
    """Return what of a stage may be recomputed, from nothing on."""
    ways: tuple[Checkpointing, ...] = ("none", "stages", "segments")
    return ways[: ways.index(problem.checkpointing) + 1]


def in_segments(start: int, stop: int, how: Checkpointing) -> tuple[tuple[int, int], ...]:
    """Return what is recomputed of ``layers[start:stop]``: nothing, all of it, or all in segments of about its root."""
    if how != "segments":
        return () if how == "none" else ((start, stop),)
    length = isqrt(stop - start)
    return tuple((i, min(i + length, stop)) for i in range(start, stop, length))


def _filled(problem: Problem, recompute: bool) -> list[tuple[tuple[int, ...], int, int]]:
    """Return (devices, start, stop) of the greedy cut whose longest stage is shortest."""
    cuts, devices = legal_cuts(problem), problem.platform.devices

    @cache
    def work_of(kind: int) -> Times:
        sums = problem.chain.timed(devices[kind].times).sums
        times: Times = ((2 if recompute else 1) * sums.forward_ns + sums.backward_ns)[cuts] / float(devices[kind].speed)
        return times

    works = [work_of(devices.index(device)) for device in devices]
    longest = min(float(work[-1]) for work in works)

    def within(time: int) -> list[tuple[tuple[int, ...], int, int]] | None:
        found: list[tuple[tuple[int, ...], int, int]] = []
        at = 0
        for d, work in enumerate(works):
            stop = int(np.searchsorted(work, work[at] + time, side="right")) - 1
            if stop > at:
                found.append(((d,), int(cuts[at]), int(cuts[stop])))
                at = stop
            if at == len(cuts) - 1:
                return found
        return None

    found = smallest(within, 1, int(longest) + 1)
    assert found is not None, "the fastest device can take all"
    return found[1]

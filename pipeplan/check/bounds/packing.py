"""Do the runs of any cutting of the chain fit side by side into the devices' memories, each into one?

What a run takes on its device at every instant, or when the last of the device's forwards starts and one microbatch is
inside all its layers, over what the device has, is x. The sum of x over the runs of one
device is at most 1, and so is that of ceil((q + 1) x - 1) / q for q = 1, 2, .. (a dual feasible function: of runs that
take more than one in q + 1, q fit). So the least sum over all cuttings, times replicas, is at most the number of
devices; a shortest path. ALGORITHMS section 11.3, condition 6.
"""

from __future__ import annotations

import numpy as np

from ...integers import Ints
from .facts import Facts, Floats
from .pooled import cheapest
from .runs import ROUNDING, Runs

PARTS = (1, 2, 3, 4, 5)


def needs_more_devices(facts: Facts, runs: Runs, tau: int | None = None) -> bool:
    """Whether runs, whatever they are, take more devices than there are, in periods of ``tau`` ticks."""
    possible = runs.possible
    if not possible.any():
        return True
    sizes = [device.memory_bytes for device in facts.problem.platform.devices]
    if shortest(cheapest(facts, runs, runs.at_once)) > sum(sizes) * (1 + ROUNDING):
        return True
    taken = [runs.at_once / max(sizes), *(shares(runs.at_once, max(sizes), parts) for parts in PARTS)]
    memory = max(sizes) - int(runs.spare[possible].min())  # which every device with a run takes beside, at some instant
    if memory > 0:
        taken += [runs.always / memory, *(shares(runs.always, memory, parts) for parts in PARTS)]
    every = len(facts.problem.platform) * (1 + ROUNDING)
    found = [cheapest(facts, runs, share) for share in taken]
    if tau is not None:
        work = busy(facts, runs) / tau
        found += [work, *((1 - part) * work + part * share for part in (0.25, 0.5, 0.75) for share in found)]
    return any(shortest(costs) > every for costs in found)


def busy(facts: Facts, runs: Runs) -> Floats:
    """Return the least ticks of work of all replicas of each run, with what it must recompute, (L + 1, L + 1)."""
    load = facts.behind[:, None] - facts.behind[None, :]
    return np.asarray(np.where(runs.possible, load + facts.recomputed, np.inf).min(axis=0))


def shares(sizes: Ints, room: int, parts: int) -> Floats:
    """Return the dual feasible function of ``parts`` of ``sizes`` that go into bins of ``room``."""
    return np.asarray(np.maximum(-(-(parts + 1) * sizes // room) - 1, 0) / parts)


def shortest(costs: Floats) -> float:
    """Return the least sum of ``costs[first, end]`` over the cuttings of the whole chain."""
    count = len(costs) - 1
    found = np.full(count + 1, np.inf)
    found[count] = 0
    for end in range(count, 0, -1):
        np.minimum(found[:end], costs[:end, end] + found[end], out=found[:end])
    return float(found[0])

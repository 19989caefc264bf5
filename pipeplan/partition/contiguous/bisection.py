"""What is the smallest period of stages that begin and end at given cuts? Decisions (:mod:`.decision`), bisected."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain as chained

import numpy as np

from ...cost import time_model
from ...deadline import OutOfTime
from ...integers import Ints
from ...plan import Allocation
from ...problem import Device
from ..devices.orders import FEW, Order
from ..tables.options import quickest_replicas
from ..tables.stages import SearchTables
from .claims import claim, claimed_ns
from .decision import decide


def shortest_between(
    tables: SearchTables, least_delay: Ints, low: int, high: int, best: Allocation | None, tolerance: int | None
) -> tuple[Allocation | None, int]:
    """Return the best allocation between the cuts of ``tables``, no shorter than ``low`` and no longer than ``high``,
    and a period below which there is none.

    With ``tolerance`` it may stop when the gap is below that part of the period; without, it is exact. At the deadline
    it ends with what it has, if it has any. Orders of devices are searched in turn, each for what beats the best of
    those before, and also those near one that did; with ``tolerance`` a few. Where some are left out nothing above
    ``low`` is proved.
    """
    orders = tables.orders
    if orders is None:
        return _in_order(tables, least_delay, low, high, best, tolerance)
    most = orders.most if tolerance is None else min(FEW, orders.most)
    seen: set[tuple[Device, ...]] = set()
    waiting: Iterator[Order] = orders.first(_devices_of(best))
    proved = high + 1
    while len(seen) < most and (order := next(waiting, None)) is not None:
        if (kinds := orders.along_kinds(order)) in seen:
            continue
        seen.add(kinds)
        found, reached = _in_order(tables.in_order(order), least_delay, low, high, best, tolerance)
        if found is not best:
            waiting = chained(orders.near(order), waiting)
        best, proved = found, min(proved, reached)
    return best, proved if len(seen) == orders.count else low


def _devices_of(best: Allocation | None) -> list[int]:
    return [] if best is None else [d for stage in best.stages for d in stage.devices]


def _in_order(
    tables: SearchTables, least_delay: Ints, low: int, high: int, best: Allocation | None, tolerance: int | None
) -> tuple[Allocation | None, int]:
    """Do the same for what stages can take by ``tables.states``; ``best`` may be something else."""
    problem = tables.problem
    width, probe = max(1, low // 64), True
    try:
        while best is None:  # widen from below: periods below the optimum are decided quickly
            period = min(high, low + width)
            stages = decide(tables, period, least_delay)
            if stages is not None:
                best = claim(problem, stages, period)
            elif period == high:
                return None, high + 1
            else:
                low, width = period + 1, 2 * width
        while (gap := claimed_ns(best) - low) > (claimed_ns(best) // tolerance if tolerance else 0):
            period = claimed_ns(best) - 1 if probe else low + gap // 2
            stages = decide(tables, period, least_delay)
            if stages is None:
                low, probe = period + 1, True
            else:
                best, probe = claim(problem, stages, period), False
    except OutOfTime:
        if best is None:
            raise
    return best, low


def plain_delays(tables: SearchTables) -> Ints:
    """Return for each cut the bare time of all that is behind it: a lower bound on the delay there."""
    best, policy, cuts = tables.best_device, tables.problem.policy, tables.cuts
    chain = tables.problem.chain.timed(best.times)
    end = np.int64(len(chain))
    replicas = quickest_replicas(tables.problem)
    bare: Ints = time_model.work_ns(chain, policy, cuts, end, replicas=replicas, speed=best.speed)
    return bare

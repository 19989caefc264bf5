"""Which order is better than those that are known? Passes are moved in their devices' orders, and all is timed anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log

from .timing import Orders

REACH = 10  # places that a pass is moved at most


def anneal(orders: Orders, seed: int, steps: int, heat: float, over: Callable[[], bool]) -> tuple[int, list]:
    draw = random.Random(seed)
    problem = orders.problem
    count = problem.microbatches
    best, best_words = orders.value, orders.words()
    devices = problem.devices
    weight = 1.0 / (2*len(devices))
    tried = accepted = 0
    rnd = draw.random
    cost = orders.value + weight * orders.total
    for step in range(steps):
        if over(): break
        temperature = heat * (1 - step / steps)
        device = devices[int(rnd() * len(devices))]
        queue = orders.queues[device]
        at = int(rnd() * len(queue))
        shift = 1 + int(rnd() * rnd() * REACH)
        to = at + shift if rnd() < 0.5 else at - shift
        if not 0 <= to < len(queue): continue
        o = queue[at]; kind = o // count
        between = queue[at + 1 : to + 1] if to > at else queue[to:at]
        bad = False
        need = orders.needs[o]
        for other in between:
            if other // count == kind or other == need or orders.needs[other] == o:
                bad = True; break
        if bad: continue
        low, high = min(at, to), max(at, to)
        new = queue[:]
        del new[at]; new.insert(to, o)
        if not problem.holds(device, [x // count for x in new]): continue
        tried += 1
        since = orders.starts[queue[low]]
        old = orders.queues, orders.starts, orders.ends, orders.value, orders.total
        orders.queues = list(orders.queues); orders.queues[device] = new
        slack = -temperature * log(rnd() or 1e-9) if temperature > 0 else 0
        limit = int(orders.value + slack + 1)
        ok = orders.retime(device, low, limit, since)
        if ok:
            c = orders.value + weight * orders.total
            if c > cost + slack: ok = False
        if not ok:
            orders.queues, orders.starts, orders.ends, orders.value, orders.total = old
            continue
        accepted += 1
        cost = c
        if orders.value < best:
            best, best_words = orders.value, orders.words()
    return best, best_words, tried, accepted

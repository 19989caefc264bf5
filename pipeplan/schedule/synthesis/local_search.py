"""Which order is better than those that are known? Passes move in their devices' orders, and all is timed anew.

Simulated annealing: one pass moves by a few places at a time; a worse order is taken with a probability that falls
while the search cools.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import log

from .problem import OrderProblem, Word
from .timing import Orders

REACH = 10  # places that a pass moves at most
LOOK = 64  # moves between two looks at the clock


def anneal(
    problem: OrderProblem,
    words: Sequence[Word],
    moves: int,
    heat: float,
    seed: int,
    over: Callable[[], bool],
    enough: int,
) -> tuple[int, int, list[Word]]:
    """Return how many of ``moves`` were tried, and the value and the words of the best order that they led to.

    It begins with ``words``.

    ``heat``: by how many ns an order that is taken at the beginning may be worse, in the mean. The same ``seed`` gives
    the same answer, unless the search is ``over`` before. It ends at a value of ``enough``.
    """
    orders = Orders(problem, words)
    if not orders.settle():
        raise AssertionError("what a search begins with doesn't deadlock")
    draw = random.Random(seed).random
    devices = [device for device in problem.devices if len(orders.queues[device]) > 1]
    best, found = orders.value, orders.words()
    cost = orders.cost
    tried = 0
    for move in range(moves):
        if best <= enough or (move % LOOK == 0 and over()):
            break
        tried += 1
        device = devices[int(draw() * len(devices))]
        size = len(orders.queues[device])
        at = int(draw() * size)
        step = 1 + int(draw() * draw() * REACH)
        to = at + step if draw() < 0.5 else at - step
        worse = -heat * (1 - move / moves) * log(1 - draw())
        if not 0 <= to < size:
            continue
        before = orders.state(device)
        if not orders.move(device, at, to, int(orders.value + worse) + 1):
            continue
        if orders.links and not orders.settle():
            orders.restore(device, before)
            continue
        now = orders.cost
        if now > cost + worse:
            orders.restore(device, before)
            continue
        cost = now
        if orders.value < best:
            best, found = orders.value, orders.words()
    return tried, best, found

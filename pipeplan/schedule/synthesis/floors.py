"""What can no order of an order problem beat? Work, the ways in and out, and what devices hold for how long."""

from __future__ import annotations

from ...integers import ceil_div
from .problem import OrderProblem


def floor(problem: OrderProblem) -> int:
    """Return the least that work, the ways to and from each machine, and memory times time allow the value to be."""
    found = [0]
    rests = problem.rests
    for machine, kinds in enumerate(problem.on):
        if not kinds:
            continue
        leaving = min(rests[k] for k in kinds)
        entering = min(problem.head[k] for k in kinds)
        if problem.spans and not problem.begins_at_once(machine):
            entering, leaving = 0, min(problem.tail[k] for k in kinds) + min(problem.head[k] for k in kinds)
        found.append(entering + max(problem.work[machine], _held(problem, machine)) + leaving)
    return max(found)


def _held(problem: OrderProblem, machine: int) -> int:
    """Return how long a device with all its memory full of what microbatches hold would be at it."""
    least = 0
    for store in problem.stores:
        area = 0
        for kind in problem.on[machine]:
            begin, end = problem.head[kind], problem.head[kind] + problem.durations[kind]
            area -= store.starts[kind] * begin + store.ends[kind] * end
        if store.room[machine] > 0:
            least = max(least, ceil_div(problem.microbatches * area, store.room[machine]))
    return least

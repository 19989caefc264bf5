"""How small can the value of an order be at least? By work and memory times time, then by linear programs."""

from __future__ import annotations

from math import gcd

from ...deadline import Deadline
from ...integers import ceil_div
from ..periodic.ilp import Solver, SolverLimits
from .problem import NEVER_COUNTS, OrderProblem
from .time_indexed import Slots, ask, slot_length

MOST_COUNTS = 30_000  # of a linear program: it takes some seconds
SOLVER_S = 60.0  # that one may take, whatever it is worth
NARROW, WIDE = 1, 3  # slots that are looked at one by one, at either end: times those of the way of a microbatch
WIDE_COUNTS = 7_000  # which makes for more difficult programs
PRECISION = 400  # of the value: a bound is not looked for more closely


def floor(problem: OrderProblem) -> int:
    """Return the least that work, the ways to and from each machine, and memory times time allow the value to be."""
    found = 0
    for machine, kinds in enumerate(problem.on):
        if not kinds:
            continue
        head = min(problem.head[k] for k in kinds)
        entering, leaving = head, min(problem.rests[k] for k in kinds)
        if problem.spans and not problem.begins_at_once(machine):
            leaving = min(problem.tail[k] for k in kinds)  # less its head, which may be later
        found = max(found, entering + max(problem.work[machine], _held(problem, machine)) + leaving)
    return found


def _held(problem: OrderProblem, machine: int) -> int:
    """Return how long a device takes for what microbatches hold of it at least, all its memory being full."""
    least = 0
    for store in problem.stores:
        area = -sum(
            store.starts[k] * problem.head[k] + store.ends[k] * (problem.head[k] + problem.durations[k])
            for k in problem.on[machine]
        )
        if store.room[machine] > 0:
            least = max(least, ceil_div(problem.microbatches * area, store.room[machine]))
    return least


def raised(problem: OrderProblem, low: int, value: int, solver: Solver, deadline: Deadline, window: int = 1) -> int:
    """Return a lower bound of the value, ``low`` or more, by linear programs; an order of ``value`` is known.

    The first asks whether any is better than the known one; the others halve what is left.
    """
    if problem.spans and not all(map(problem.begins_at_once, range(len(problem.on)))):
        return low
    grain = gcd(*problem.durations, *(tail for tail in problem.tail if tail != NEVER_COUNTS)) or 1
    low = min(value, ceil_div(low, grain) * grain)
    asked = value - grain
    while low < value and not deadline.passed:
        seconds = min(SOLVER_S, deadline.remaining_s())
        if ask(slots_of(problem, asked, window), solver, SolverLimits(None, seconds, seconds)).impossible:
            low = asked + grain
        else:
            value = asked
        if value - low <= value // PRECISION:
            break
        asked = low + (value - low) // (2 * grain) * grain
    return low


def bearable(problem: OrderProblem, value: int) -> bool:
    """Whether wide windows take a linear program that solvers answer in seconds."""
    slots = slots_of(problem, value, WIDE)
    return len(problem.durations) * len(slots.seen) <= WIDE_COUNTS


def slots_of(problem: OrderProblem, value: int, window: int) -> Slots:
    """Return the slots of a linear program of a bearable size."""
    way = max(problem.head) + 1
    seen = min(value, 2 * window * way)
    length = slot_length(problem, seen, MOST_COUNTS)
    return Slots(problem, length, value, window * (way // length + 1))

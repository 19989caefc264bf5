"""How small can the value of an order be at least? By work and memory times time, then by linear programs."""

from __future__ import annotations

from collections.abc import Iterator

from ...deadline import Deadline
from ...integers import ceil_div
from ..periodic.solvers import Solver, SolverLimits
from .problem import OrderProblem
from .time_indexed import Slots, refuted, slot_length

MOST_COUNTS: dict[Solver, int] = {"cbc": 4_000, "highs": 20_000}  # of a linear program: it takes some seconds
SOLVER_S = 20.0  # that one may take, whatever it is worth
NARROW, WIDE = 1, 3  # slots that are looked at one by one, at either end: times those of the way of a microbatch
WIDE_COUNTS = 4_000  # which makes for more difficult programs
PRECISION = 400  # of the value: a bound is not looked for more closely
HOPE = 16  # programs of all devices that cannot raise the bound by this part of what is open aren't asked further


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
            store.starts[k] * start + store.ends[k] * (start + problem.durations[k])
            for k, start in _close(problem, machine)
        )
        if store.room[machine] > 0:
            least = max(least, ceil_div(problem.microbatches * area, store.room[machine]))
    return least


def _close(problem: OrderProblem, machine: int) -> Iterator[tuple[int, int]]:
    """Yield each kind of a machine and its start, all as early as they can be but recomputations, which come right
    before their backward: they take memory, so that nothing is held for less time."""
    for kind in problem.on[machine]:
        backward = problem.backward_of.get(kind)
        yield kind, problem.head[kind] if backward is None else problem.head[backward] - problem.durations[kind]


def raised(
    problem: OrderProblem,
    low: int,
    value: int,
    solver: Solver,
    deadline: Deadline,
    window: int = 1,
    each_s: float = SOLVER_S,
) -> int:
    """Return a lower bound of the value, ``low`` or more, by linear programs; an order of ``value`` is known.

    Those of a single device, on which the others' passes only take their time, come first: they are small, and so in
    exact slots of large problems too. Then come programs of all in long slots and, where those say too little, in
    shorter ones. The first of each asks whether any order is better than the known one, or, where one device has said
    something, whether there is more to say; the others halve what is left.
    """
    if not problem.measured:
        return low
    grain = problem.grain

    def halved(low: int, most: int, machines: tuple[int, ...] = (), hope: bool = False) -> int:
        low, high = min(value, ceil_div(low, grain) * grain), value
        asked = high - grain
        if hope:
            asked = min(asked, low + (high - low) // HOPE // grain * grain)
        while low < high and not deadline.passed:
            slots = slots_of(problem, asked, window, most, machines)
            if refuted(slots, solver, SolverLimits(None, each_s, deadline.remaining_s())):
                low, hope = asked + grain, False
            else:
                high = asked
            if hope or high - low <= high // PRECISION:
                break
            asked = low + (high - low) // (2 * grain) * grain
        return low

    alone = low
    for device in _hardest(problem):
        alone = halved(alone, MOST_COUNTS["highs"], (device,))
    hope, low = alone > low, alone
    for most in sorted({MOST_COUNTS["cbc"], MOST_COUNTS[solver]}):
        low = halved(low, most, hope=hope)
    return low


def _hardest(problem: OrderProblem) -> list[int]:
    """Return the devices that may say most alone: the one whose passes begin last and must go back first, such as a V's
    turn, and another that takes longer by itself."""

    def outside(device: int) -> int:
        kinds = problem.on[device]
        back = [problem.rests[k] for k in kinds if not problem.is_weight(k)]
        return min(problem.head[k] for k in kinds) + min(back)

    def alone(device: int) -> int:
        return max(problem.work[device], _held(problem, device))

    used = [device for device in problem.devices if problem.on[device]]
    if len(used) < 2:
        return []
    turn, longest = max(used, key=outside), max(used, key=alone)
    return [turn, longest] if alone(longest) > alone(turn) else [turn]


def bearable(problem: OrderProblem, value: int, solver: Solver) -> bool:
    """Whether wide windows take a linear program that solvers answer in seconds."""
    slots = slots_of(problem, value, WIDE, MOST_COUNTS[solver])
    return len(problem.durations) * len(slots.seen) <= WIDE_COUNTS


def slots_of(problem: OrderProblem, value: int, window: int, most: int, machines: tuple[int, ...] = ()) -> Slots:
    """Return the slots of a linear program of a bearable size, of all ``machines`` or some."""
    way = max(problem.head) + 1
    seen = min(value, 2 * window * way)
    kinds = sum(len(problem.on[machine]) for machine in machines) or len(problem.durations)
    length = slot_length(problem, seen, most, kinds)
    return Slots(problem, length, value, window * (way // length + 1), machines)

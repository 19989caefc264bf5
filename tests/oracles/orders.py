"""The best order of tiny order problems, by trying all of them with the plainest evaluation."""

from __future__ import annotations

from itertools import product

from pipeplan.schedule.synthesis.problem import OrderProblem

Word = tuple[int, ...]


def words(problem: OrderProblem, machine: int) -> list[Word]:
    """Every word of a machine in which nothing comes before what it needs there, and memory does."""
    kinds = problem.on[machine]
    local = {k: _needed_here(problem, machine, k) for k in kinds}
    found: list[Word] = []

    def grow(word: tuple[int, ...], counts: dict[int, int]) -> None:
        if not problem.holds(machine, word):
            return
        if len(word) == len(kinds) * problem.microbatches:
            found.append(word)
            return
        for k in kinds:
            if counts[k] < min((counts[needed] for needed in local[k]), default=problem.microbatches):
                grow((*word, k), {**counts, k: counts[k] + 1})

    grow((), dict.fromkeys(kinds, 0))
    return found


def _needed_here(problem: OrderProblem, machine: int, kind: int) -> list[int]:
    needed = problem.needs[kind]
    while needed >= 0 and problem.machines[needed] != machine:
        needed = problem.needs[needed]
    return [x for x in (needed, problem.again[kind]) if x >= 0]


def value(problem: OrderProblem, order: list[Word]) -> int | None:
    """What an order is worth, from its definition; None where it deadlocks."""
    ends: dict[tuple[int, int], int] = {}
    queues = []
    for word in order:
        seen: dict[int, int] = {}
        queue = []
        for kind in word:
            queue.append((kind, seen.get(kind, 0)))
            seen[kind] = seen.get(kind, 0) + 1
        queues.append(queue)
    free = [0] * len(queues)
    while any(queues):
        ready = [q for q in queues if q and (problem.needs[q[0][0]] < 0 or (problem.needs[q[0][0]], q[0][1]) in ends)]
        if not ready:
            return None
        for queue in ready:
            kind, m = queue.pop(0)
            machine = problem.machines[kind]
            begin = max(free[machine], ends.get((problem.needs[kind], m), 0))
            ends[kind, m] = free[machine] = begin + problem.durations[kind]
    return max(end + problem.tail[kind] for (kind, _), end in ends.items())


def best(problem: OrderProblem) -> int:
    """The least value of all orders, for machines that are all devices."""
    every = [words(problem, machine) for machine in range(len(problem.on))]
    values = (value(problem, list(order)) for order in product(*every))
    return min(x for x in values if x is not None)

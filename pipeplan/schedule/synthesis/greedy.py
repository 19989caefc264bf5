"""Which orders come about if every device runs, of the passes that are there, the one of highest priority?

Memory is taken only where the device's oldest microbatch can still be finished, so that no order deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from .problem import OrderProblem, Store, Word


@dataclass(frozen=True, slots=True)
class Rule:
    """``ranks`` of kinds of passes, least first; the share of a pass's length for which a better one is waited for."""

    ranks: tuple[int, ...]
    patience: tuple[int, int] = (0, 1)


def rules(problem: OrderProblem) -> Iterator[Rule]:
    """Yield rules to try: backwards before forwards, or after them, or alike; late stages before early ones or after
    them; weight gradients last; and waiting or not."""
    kinds = range(len(problem.durations))
    for late, order, patience in product((1, -1), ((1, 0), (0, 1), (0, 0)), ((0, 1), (1, 2), (1, 1))):
        keys = [(problem.is_weight(k), order[problem.is_backward(k)], -late * problem.head[k]) for k in kinds]
        ranks = {kind: rank for rank, kind in enumerate(sorted(kinds, key=keys.__getitem__))}
        yield Rule(tuple(ranks[k] for k in kinds), patience)


def greedy(problem: OrderProblem, rule: Rule) -> list[Word]:
    """Return the words of a rule."""
    return _Run(problem, rule).words()


class _Run:
    def __init__(self, problem: OrderProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        number = len(problem.on)
        self.arrivals: list[list[int]] = [[] for _ in problem.durations]  # when the next ones of a kind can start
        self.begun = [0] * len(problem.durations)
        self.held = [[0] * number for _ in problem.stores]
        self.free = [0] * number
        self.after: list[list[int]] = [[] for _ in problem.durations]
        for kind, needed in enumerate(problem.needs):
            if needed < 0:
                self.arrivals[kind] = [0] * problem.microbatches
            else:
                self.after[needed].append(kind)
        self.chains = [problem.one_by_one(machine) for machine in range(len(problem.on))]
        self.found: list[list[int]] = [[] for _ in problem.on]

    def words(self) -> list[Word]:
        """Run everything, in order of time."""
        problem = self.problem
        events = [(0, machine) for machine in range(len(problem.on))]
        while events:
            now, machine = heappop(events)
            if self.free[machine] > now:
                continue
            kind = self._choose(machine, now)
            if kind is None:
                continue
            self.begun[kind] += 1
            self.found[machine].append(kind)
            end = self.free[machine] = now + problem.durations[kind]
            for held, store in zip(self.held, problem.stores, strict=True):
                held[machine] += store.starts[kind] + store.ends[kind]
            heappush(events, (end, machine))
            for other in self.after[kind]:
                self.arrivals[other].append(end)
                heappush(events, (end, problem.machines[other]))
        return [tuple(word) for word in self.found]

    def _choose(self, machine: int, now: int) -> int | None:
        problem, ranks = self.problem, self.rule.ranks
        best: int | None = None
        for kind in problem.on[machine]:
            if self._next(kind) > now or (best is not None and ranks[kind] > ranks[best]):
                continue
            if self._fits(machine, kind):
                best = kind
        if best is not None and any(self._worth(kind, best, now) for kind in problem.on[machine]):
            return None
        return best

    def _worth(self, kind: int, best: int, now: int) -> bool:
        """Whether to wait for a pass instead of running another one, which is there."""
        (part, whole), ranks = self.rule.patience, self.rule.ranks
        wait = self._next(kind) - now
        return (
            0 < whole * wait < part * self.problem.durations[best]
            and ranks[kind] < ranks[best]
            and self._fits(self.problem.machines[kind], kind)
        )

    def _next(self, kind: int) -> int:
        at = self.arrivals[kind]
        return at[self.begun[kind]] if self.begun[kind] < len(at) else 2**62

    def _fits(self, machine: int, kind: int) -> bool:
        if machine not in self.problem.devices:
            return True
        return all(
            self._safe(store, held[machine], machine, kind)
            for store, held in zip(self.problem.stores, self.held, strict=True)
        )

    def _safe(self, store: Store, held: int, machine: int, kind: int) -> bool:
        """Whether the pass fits, and thereafter what the oldest microbatch on the device lacks."""
        room = store.room[machine]
        held += store.starts[kind]
        if held > room:
            return False
        held += store.ends[kind]
        if store.starts[kind] + store.ends[kind] <= 0:
            return True
        chain = self.chains[machine]
        counts = [self.begun[k] + (k == kind) for k in chain]
        oldest = min(counts)
        for k, count in zip(chain, counts, strict=True):
            if count == oldest:
                held += store.starts[k]
                if held > room:
                    return False
                held += store.ends[k]
        return True

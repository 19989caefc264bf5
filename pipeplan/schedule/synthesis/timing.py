"""When does every pass of an order start, and what is the order worth? Exact, as soon as possible, and fast."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .problem import OrderProblem, Word

Queues = list[list[int]]  # [machine] -> operations in order: kind * microbatches + microbatch


class Orders:
    """An order for every machine, with the start and end of every operation, and its value.

    Links run what comes first: their orders follow from those of the devices.
    """

    def __init__(self, problem: OrderProblem, words: Sequence[Word]) -> None:
        count = problem.microbatches
        self.problem = problem
        self.needs = [
            -1 if needed < 0 else needed * count + m for needed in problem.needs for m in range(count)
        ]
        self.lengths = [duration for duration in problem.durations for _ in range(count)]
        self.links = [i for i in range(len(problem.on)) if i not in problem.devices and problem.on[i]]
        self.machine_of = [machine for machine in problem.machines for _ in range(count)]
        self.queues: Queues = []
        for word in words:
            seen = dict.fromkeys(word, 0)
            queue = []
            for kind in word:
                queue.append(kind * count + seen[kind])
                seen[kind] += 1
            self.queues.append(queue)
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.tails = [tail for tail in problem.tail for _ in range(count)]
        self.value = self.total = -1

    def words(self) -> list[Word]:
        """Return the orders as words."""
        count = self.problem.microbatches
        return [tuple(o // count for o in queue) for queue in self.queues]

    def settle(self) -> bool:
        """Time everything anew, links in the order in which transfers come; False where the order deadlocks."""
        for _ in range(4):
            if not self.retime(None, 0, None):
                return False
            if not self._sort_links():
                return True
        return self.retime(None, 0, None)

    def _sort_links(self) -> bool:
        changed = False
        for link in self.links:
            queue, ends, needs = self.queues[link], self.ends, self.needs
            order = sorted(queue, key=lambda o: (ends[needs[o]], o))
            if order != queue:
                self.queues[link] = order
                changed = True
        return changed

    def retime(self, machine: int | None, at: int, limit: int | None, since: int = 0) -> bool:
        """Time what may have changed as ``machine``'s queue did from place ``at`` on, which started at ``since``.

        False, with nothing changed, where the order deadlocks or its value would be above ``limit``.
        """
        queues, needs, lengths, offsets = self.queues, self.needs, self.lengths, self.problem.offsets
        total = len(needs)
        number = len(queues)
        if machine is None:
            places = [0] * number
            ends, starts = [-1] * total, [0] * total
        else:
            ends, starts = self.ends[:], self.starts[:]
            places = [bisect_left(queue, since, key=starts.__getitem__) for queue in queues if queue is not None]
            places[machine] = at
            for queue, place in zip(queues, places, strict=True):
                for o in queue[place:]:
                    ends[o] = -1
        free = [
            ends[queue[place - 1]] if place else 0 for queue, place in zip(queues, places, strict=True)
        ]
        left = [
            sum([lengths[o] for o in queue[place:]]) for queue, place in zip(queues, places, strict=True)
        ]
        most = [2**62 if limit is None else limit - offset for offset in offsets]
        open_ = [i for i in range(number) if places[i] < len(queues[i])]
        while open_:
            moved = False
            still = []
            for i in open_:
                queue, place, now, rest, top = queues[i], places[i], free[i], left[i], most[i]
                stop = len(queue)
                begun = place
                while place < stop:
                    o = queue[place]
                    needed = needs[o]
                    if needed >= 0:
                        ready = ends[needed]
                        if ready < 0:
                            break
                        if ready > now:
                            now = ready
                            if now + rest > top:
                                return False
                    starts[o] = now
                    length = lengths[o]
                    now += length
                    rest -= length
                    ends[o] = now
                    place += 1
                if place > begun:
                    moved = True
                    places[i], free[i], left[i] = place, now, rest
                if place < stop:
                    still.append(i)
            if not moved:
                return False
            open_ = still
        value, sum_ = self._value(ends, free)
        if limit is not None and value > limit:
            return False
        self.starts, self.ends, self.value, self.total = starts, ends, value, sum_
        return True

    def _value(self, ends: Sequence[int], free: Sequence[int]) -> tuple[int, int]:
        count, tail = self.problem.microbatches, self.problem.tail
        value = max(ends[kind * count + count - 1] + tail[kind] for kind in range(len(tail)))
        return value, sum(free[i] for i in self.problem.devices)

"""When does every pass of an order start, and what is the order worth? Exact, as soon as possible, and fast."""

from __future__ import annotations

from collections.abc import Sequence

from .problem import OrderProblem, Word

NONE = 2**62
SHARE = 0.5  # that the mean of when devices are done has in what an order costs


class Orders:
    """An order for every machine, with the start and end of every operation (kind * microbatches + microbatch), and its
    ``value``. Links run what comes first."""

    def __init__(self, problem: OrderProblem, words: Sequence[Word]) -> None:
        count = problem.microbatches
        self.problem = problem
        self.needs = [-1 if needed < 0 else needed * count + m for needed in problem.needs for m in range(count)]
        self.lengths = [duration for duration in problem.durations for _ in range(count)]
        self.queues = [self._queue(word) for word in words]
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.value, self.cost = NONE, float(NONE)

    def _queue(self, word: Word) -> list[int]:
        seen = dict.fromkeys(word, 0)
        queue = []
        for kind in word:
            queue.append(kind * self.problem.microbatches + seen[kind])
            seen[kind] += 1
        return queue

    def words(self) -> list[Word]:
        """Return the orders as words."""
        return [tuple(o // self.problem.microbatches for o in queue) for queue in self.queues]

    def settle(self) -> bool:
        """Time everything, links in the order in which transfers come; False where the order deadlocks.

        ``cost`` is what a search seeks to lessen: of orders of one value those are better whose devices end sooner.
        """
        found = self._time()
        for _ in range(4):
            if not found or not self._sort_links():
                break
            found = self._time()
        return found

    def _sort_links(self) -> bool:
        changed = False
        ends, needs = self.ends, self.needs
        for link in set(range(len(self.queues))).difference(self.problem.devices):
            order = sorted(self.queues[link], key=lambda o: (ends[needs[o]], o))
            if order != self.queues[link]:
                self.queues[link], changed = order, True
        return changed

    def _time(self) -> bool:
        queues, needs, lengths, devices = self.queues, self.needs, self.lengths, self.problem.devices
        starts, ends = [0] * len(needs), [-1] * len(needs)
        places, free = [0] * len(queues), [0] * len(queues)
        waiting = [i for i, queue in enumerate(queues) if queue]
        while waiting:
            begun = list(places)
            for i in waiting:
                queue, place, now = queues[i], places[i], free[i]
                while place < len(queue):
                    o = queue[place]
                    needed = needs[o]
                    if needed >= 0:
                        ready = ends[needed]
                        if ready < 0:
                            break
                        now = max(now, ready)
                    starts[o] = now
                    now += lengths[o]
                    ends[o] = now
                    place += 1
                places[i], free[i] = place, now
            if places == begun:
                return False
            waiting = [i for i in waiting if places[i] < len(queues[i])]
        self.starts, self.ends, count = starts, ends, self.problem.microbatches
        self.value = max(ends[kind * count + count - 1] + tail for kind, tail in enumerate(self.problem.tail))
        self.cost = self.value + SHARE * sum(free[i] for i in devices) / len(devices)
        return True

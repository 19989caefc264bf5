"""When does every pass of an order start, and what is the order worth? Exact, as soon as possible, and fast."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from .problem import OrderProblem, Word

Queue = list[int]  # operations in order: kind * microbatches + microbatch
NONE = 2**62
SHARE = 0.5  # that the mean of when devices are done has in what an order costs
State = tuple[list[Queue], list[int], list[int], int, int, list[list[int]], list[list[int]]]


class Orders:
    """An order for every machine, with the start and end of every operation, its ``value``, and the ``total`` of when
    devices are done. Links run what comes first."""

    def __init__(self, problem: OrderProblem, words: Sequence[Word]) -> None:
        count = problem.microbatches
        self.problem, self.count = problem, count
        self.needs = [-1 if needed < 0 else needed * count + m for needed in problem.needs for m in range(count)]
        self.together = self._pairs(problem)
        self.lengths = [duration for duration in problem.durations for _ in range(count)]
        self.links = [i for i, kinds in enumerate(problem.on) if kinds and i not in problem.devices]
        self.queues = [self._queue(word) for word in words]
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.value = self.total = NONE
        self.done = [self._done(queue) for queue in self.queues]
        self.held = [[self._held(store, queue) for queue in self.queues] for store in range(len(problem.stores))]

    @property
    def cost(self) -> float:
        """What a search seeks to lessen: of orders of one value those are better whose devices are done sooner."""
        return self.value + SHARE * self.total / len(self.problem.devices)

    def _pairs(self, problem: OrderProblem) -> list[int]:
        """Return of each backward what it recomputes first, and the other way round, or -1. As both are in one queue,
        the order in that is all there is to it."""
        kinds = [again if again >= 0 else problem.backward_of.get(kind, -1) for kind, again in enumerate(problem.again)]
        return [-1 if other < 0 else other * self.count + m for other in kinds for m in range(self.count)]

    def _queue(self, word: Word) -> Queue:
        seen = dict.fromkeys(word, 0)
        queue = []
        for kind in word:
            queue.append(kind * self.count + seen[kind])
            seen[kind] += 1
        return queue

    def _done(self, queue: Queue) -> list[int]:
        """Return how much of its work a machine has done before each place."""
        return list(accumulate((self.lengths[o] for o in queue), initial=0))

    def _held(self, number: int, queue: Queue) -> list[int]:
        """Return what a device holds before each place."""
        store = self.problem.stores[number]
        changes = [start + end for start, end in zip(store.starts, store.ends, strict=True)]
        return list(accumulate((changes[o // self.count] for o in queue), initial=0))

    def state(self, device: int) -> State:
        """Return what :meth:`restore` needs after a device's queue, and with it all times, may have changed."""
        held = [held[device] for held in self.held]
        return self.queues[:], self.starts, self.ends, self.value, self.total, self.done[:], held

    def restore(self, device: int, state: State) -> None:
        """Go back to a state before a device's queue changed."""
        self.queues, self.starts, self.ends, self.value, self.total, self.done, held = state
        for now, before in zip(self.held, held, strict=True):
            now[device] = before

    def words(self) -> list[Word]:
        """Return the orders as words."""
        return [tuple(o // self.count for o in queue) for queue in self.queues]

    def settle(self) -> bool:
        """Time everything, links in the order in which transfers come; False where the order deadlocks."""
        found = self.retime()
        for _ in range(4):
            if not found or not self._sort_links():
                break
            found = self.retime()
        return found

    def _sort_links(self) -> bool:
        changed = False
        ends, needs = self.ends, self.needs
        for link in self.links:
            order = sorted(self.queues[link], key=lambda o: (ends[needs[o]], o))
            if order != self.queues[link]:
                self.queues[link], changed = order, True
                self.done[link] = self._done(order)
        return changed

    def move(self, machine: int, at: int, to: int, limit: int) -> bool:
        """Move the operation at a place of a device's queue to another place.

        False, with nothing changed, where passes of one kind would change places, memory wouldn't do, the order would
        deadlock, or its value be above ``limit``.
        """
        queue, needs, count = self.queues[machine], self.needs, self.count
        moved = queue[at]
        kind, needed, other_part = moved // count, needs[moved], self.together[moved]
        low, high = (at, to) if at < to else (to, at)
        part = queue[low : high + 1]
        for other in part:
            if other != moved and (other // count == kind or other in (needed, other_part) or needs[other] == moved):
                return False
        if at < to:
            part.append(part.pop(0))
        else:
            part.insert(0, part.pop())
        for store, held in zip(self.problem.stores, self.held, strict=True):
            now, room, starts, ends = held[machine][low], store.room[machine], store.starts, store.ends
            for other in part:
                k = other // count
                now += starts[k]
                if now > room:
                    return False
                now += ends[k]
        changed = queue[:]
        changed[low : high + 1] = part
        self.queues[machine] = changed
        if not self.retime(machine, low, self.starts[queue[low]], limit):
            self.queues[machine] = queue
            return False
        self.done[machine] = self._done(changed)
        for number, held in enumerate(self.held):
            held[machine] = self._held(number, changed)
        return True

    def retime(self, machine: int = -1, at: int = 0, since: int = 0, limit: int = NONE) -> bool:
        """Time everything, or what may have changed since ``machine``'s queue did from place ``at`` on, which started
        at ``since``.

        False, with nothing changed, where the order deadlocks or its value would be above ``limit``.
        """
        queues, needs, lengths = self.queues, self.needs, self.lengths
        if machine < 0:
            places = [0] * len(queues)
            starts, ends = [0] * len(needs), [-1] * len(needs)
        else:
            starts, ends = self.starts[:], self.ends[:]
            places = [bisect_left(queue, since, key=starts.__getitem__) for queue in queues]
            places[machine] = at
            for queue, place in zip(queues, places, strict=True):
                for o in queue[place:]:
                    ends[o] = -1
        free = [ends[queue[place - 1]] if place else 0 for queue, place in zip(queues, places, strict=True)]
        left = [done[-1] - done[place] for done, place in zip(self.done, places, strict=True)]
        most = [limit - offset for offset in self.problem.offsets]
        waiting = [i for i, queue in enumerate(queues) if places[i] < len(queue)]
        while waiting:
            unfinished = []
            stuck = True
            for i in waiting:
                queue, place, now, rest, top = queues[i], places[i], free[i], left[i], most[i]
                begun, stop = place, len(queue)
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
                    stuck = False
                    places[i], free[i], left[i] = place, now, rest
                if place < stop:
                    unfinished.append(i)
            if stuck:
                return False
            waiting = unfinished
        value = self._value(ends)
        if value > limit:
            return False
        self.starts, self.ends, self.value = starts, ends, value
        self.total = sum(free[i] for i in self.problem.devices)
        return True

    def _value(self, ends: Sequence[int]) -> int:
        count = self.count
        return max(ends[kind * count + count - 1] + tail for kind, tail in enumerate(self.problem.tail))

"""Which order comes about if every pass moves into the first gap that takes it, all from the end backwards and then all
forwards?

Source: double justification (Valls, Ballestin and Quintanilla 2005, of project schedules), here with memory that passes
fill and empty. From times that are shaken a little before, it is a local search of wide steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import log

from ...deadline import Deadline
from .problem import NEVER_COUNTS, OrderProblem, Word

NONE = 2**62
SHARE = 0.5  # that the mean of when devices are done has in what an order costs
LOOK = 4  # rounds between two looks at the clock
REACHES = (0.1, 0.25, 0.5)  # how far to either side passes are shaken at once, as shares of the whole time
FURTHEST = 0.5  # by how much times are shaken at most: the standard deviation over the mean work of a microbatch


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


def justified(problem: OrderProblem, words: Sequence[Word]) -> tuple[int, list[Word]]:
    """Return the value and the words of an order that is as good as ``words``, which don't deadlock, or better."""
    lines = Line(problem, False), Line(problem, True)
    best = Orders(problem, words)
    if not best.settle():
        raise AssertionError("what is to be justified doesn't deadlock")
    while True:
        orders = _there_and_back(problem, lines, best.ends)
        if orders is None or orders.value >= best.value:
            return best.value, best.words()
        best = orders


def shake(
    problem: OrderProblem, words: Sequence[Word], rounds: int, heat: float, seed: int, deadline: Deadline, enough: int
) -> tuple[int, int, list[Word]]:
    """Return how many of ``rounds`` were tried, and the value and the words of the best order that they led to.

    In each of them the times of passes within a random part of the run are shaken, and all are justified in the order
    that results. What is worse is taken with a probability that falls while the search cools: at first where it is
    ``heat`` ns worse in the mean. The same ``seed`` gives the same answer, unless the ``deadline`` comes before; a
    value of ``enough`` ends it.
    """
    lines = Line(problem, False), Line(problem, True)
    orders = Orders(problem, words)
    if not orders.settle():
        raise AssertionError("what a search begins with doesn't deadlock")
    rng = random.Random(seed)
    most = FURTHEST * sum(problem.work) / len(problem.devices) / problem.microbatches
    best, found, tried = orders.value, orders.words(), 0
    for number in range(rounds):
        if best <= enough or (number % LOOK == 0 and deadline.passed):
            break
        tried += 1
        shaken = _shaken(problem, orders, rng, most * rng.random())
        worse = -heat * (1 - number / rounds) * log(1 - rng.random())
        other = None if shaken is None else _there_and_back(problem, lines, shaken)
        if other is None or other.cost > orders.cost + worse:
            continue
        orders = other
        if orders.value < best:
            best, found = orders.value, orders.words()
    return tried, best, found


def _shaken(problem: OrderProblem, orders: Orders, rng: random.Random, by: float) -> list[float] | None:
    """Return when operations end, some shaken by a standard deviation, none before what it needs; None where devices
    don't hold what they would do in this order."""
    count, ends = problem.microbatches, orders.ends
    whole = max(ends)
    middle, reach = whole * rng.random(), whole * rng.choice(REACHES)
    times = [end + rng.gauss(0, by) if abs(end - middle) < reach else float(end) for end in ends]
    for kind in problem.by_depth:
        for o in range(kind * count, kind * count + count):
            if o > kind * count:
                times[o] = max(times[o], times[o - 1])
            for needed in problem.before[kind]:
                times[o] = max(times[o], times[needed * count + o - kind * count])
    rank = ranks(problem)
    for device in problem.devices:
        queue = sorted(orders.queues[device], key=lambda o: (times[o], rank[o]))
        if not problem.holds(device, [o // count for o in queue]):
            return None
    return times


def ranks(problem: OrderProblem) -> list[int]:
    """Return which operation comes first of several at one time: that of the earlier kind, then microbatch."""
    place = {kind: at for at, kind in enumerate(problem.by_depth)}
    count = problem.microbatches
    return [place[kind] * count + m for kind in range(len(problem.needs)) for m in range(count)]


def _there_and_back(problem: OrderProblem, lines: tuple[Line, Line], ends: Sequence[float]) -> Orders | None:
    """Return the orders that result from justifying backwards and then forwards; None where links would deadlock, or
    passes that take no time not fit the memory."""
    forth, back = lines
    late = back.ends(sorted(range(len(ends)), key=lambda o: (-ends[o], -back.rank[o])))
    forth.ends(sorted(range(len(ends)), key=lambda o: (-late[o], forth.rank[o])))
    words = forth.words()
    if not all(problem.holds(device, words[device]) for device in problem.devices):
        return None
    orders = Orders(problem, words)
    return orders if orders.settle() else None


class Line:
    """The operations of a problem in the direction of time, or ``back`` against it: what follows is needed there, and
    passes take up at their end what they leave at their start."""

    def __init__(self, problem: OrderProblem, back: bool) -> None:
        self.problem, self.count = problem, problem.microbatches
        count, kinds = self.count, range(len(problem.durations))
        needed: list[list[int]] = [[] for _ in kinds]
        for kind, others in enumerate(problem.before):
            for other in others:
                needed[other if back else kind].append(kind if back else other)
        step = 1 if back else -1
        self.needs = [
            [other * count + m for other in needed[kind]] + [kind * count + m + step] * (0 <= m + step < count)
            for kind in kinds
            for m in range(count)
        ]
        counted = [tail for tail in problem.tail if tail > NEVER_COUNTS]
        self.release = [max(0, tail - min(counted)) if back else 0 for tail in problem.tail]
        self.rank = ranks(problem)
        self.stores = [
            ([-x for x in store.ends], [-x for x in store.starts], store.room)
            if back
            else (list(store.starts), list(store.ends), store.room)
            for store in problem.stores
        ]
        self.devices = frozenset(problem.devices)

    def words(self) -> list[Word]:
        """Return the words of what :meth:`ends` has placed last."""
        return [tuple(row.kinds) for row in self.rows]

    def ends(self, order: Sequence[int]) -> list[int]:
        """Place operations one by one, in an ``order`` in which devices hold them, each into the first gap; return when
        they end. Memory lets each come last at least, as then no more is held than in the order itself."""
        problem, count, needs, release = self.problem, self.count, self.needs, self.release
        durations, machines = problem.durations, problem.machines
        self.rows = [_Row() for _ in problem.on]
        ends = [0] * len(order)
        for o in order:
            kind = o // count
            ready = release[kind]
            for needed in needs[o]:
                if ends[needed] > ready:
                    ready = ends[needed]
            machine = machines[kind]
            stores = self.stores if machine in self.devices else ()
            ends[o] = self.rows[machine].place(kind, ready, durations[kind], stores, machine)
        return ends


_Change = tuple[list[int], list[int], tuple[int, ...]]  # as passes of a kind start, as they end; room


class _Row:
    """What a machine does: starts, ends and kinds of its passes in order of time."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.kinds: list[int] = []
        self.held: dict[int, list[int]] = {}  # for each store what is held before each pass, and behind the last

    def place(self, kind: int, ready: int, duration: int, stores: Sequence[_Change], machine: int) -> int:
        """Place a pass into the first gap from ``ready`` on in which it fits; return its end."""
        starts, ends = self.starts, self.ends
        size = at = len(starts)
        while at and ends[at - 1] > ready:
            at -= 1
        while True:
            begin = max(ready, ends[at - 1]) if at else ready
            if at == size or (begin + duration <= starts[at] and self._holds(at, kind, stores, machine)):
                break
            at += 1
        starts.insert(at, begin)
        ends.insert(at, begin + duration)
        self.kinds.insert(at, kind)
        for number, (first, then, _) in enumerate(stores):
            held, change = self.held.setdefault(number, [0]), first[kind] + then[kind]
            held[at:] = [held[at], *(x + change for x in held[at:])]
        return begin + duration

    def _holds(self, at: int, kind: int, stores: Sequence[_Change], machine: int) -> bool:
        """Whether memory allows a pass before the one at a place."""
        for number, (first, then, room) in enumerate(stores):
            held, change = self.held.get(number, [0]), first[kind] + then[kind]
            if held[at] + first[kind] > room[machine]:
                return False
            if change > 0:
                for place in range(at, len(self.kinds)):
                    if held[place] + change + first[self.kinds[place]] > room[machine]:
                        return False
        return True

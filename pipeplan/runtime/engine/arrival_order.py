"""In which order does a message-driven rank work? In that in which what it needs arrives (Myelin, Algorithm 2)."""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from ...schedule.program import Arrival, Step
from ..exchange.threaded import ThreadedTransport
from ..lowering.instructions import Backward, Forward, Pass, Receive, Send
from ..training.rank import Rank
from .executor import MiniBatchEnd


def arrival_order(
    rank: Rank,
    end: MiniBatchEnd,
    inbox: ThreadedTransport,
    limit: int,
    most_held: Mapping[int, int],
    clock: Callable[[], int] = time.monotonic_ns,
) -> Iterator[int]:
    """Yield indices of the instructions of ``rank`` in the order in which it is to carry them out, each once.

    The rule that the simulator runs chooses among what has come; every pass is followed by its send.
    A first stage has at most ``limit`` microbatches in the pipeline: it starts with as many, and goes on with one for
    each that is through, while any remain. Of stage s a rank holds at most ``most_held[s]`` microbatches between their
    forward and their backward, at least 1; more wait before it, so that no order needs more memory for activations than
    there is. After the last pass of a mini-batch come its sums, updates and checkpoint as they are listed; so weights
    are those of training without a pipeline. Where the caller carries out an index before it asks for the next one, the
    time in between is that of the operation.

    Nothing deadlocks: threads receive without the rank's doing, and hold all that ``limit`` lets into the pipeline, so
    every send gets through and no rank ever waits for room. A rank then waits only when none of its microbatches has
    come, or those that have come wait before stages that hold all they may. Take the last stage that holds a microbatch
    or has one before it, when nothing is computed or under way: if it holds one, that one's backward has come, because
    no later stage has it; if it holds none, the forward of the one before it may begin. So somebody works until all
    are through, whatever the rule and the order. Only then does the first stage's update begin, and with it the next
    mini-batch: messages are always of the mini-batch at hand.

    What has arrived and waits for its turn is held beside the buffers that the memory model counts: at most ``limit``
    messages for each pipeline that a rank serves, less what it computes and what is elsewhere.

    Source: Myelin section IV, Algorithm 2, with a guard on its line 25: nothing is injected when no microbatch remains.
    """
    instructions = rank.lowered.instructions[rank.number]
    for _, group in groupby(range(len(instructions)), key=lambda i: rank.lowered.minibatch(instructions[i])):
        indices = list(group)
        if not end.allows(instructions[indices[0]]):
            return
        yield from _MiniBatch(rank, indices, end, inbox, most_held, clock).order(limit)


Place = tuple[Pass, int, int]  # kind, stage, microbatch


class _MiniBatch:
    """One mini-batch on one rank: what is to be done, and what could be done next."""

    def __init__(
        self,
        rank: Rank,
        indices: Sequence[int],
        end: MiniBatchEnd,
        inbox: ThreadedTransport,
        most_held: Mapping[int, int],
        clock: Callable[[], int],
    ) -> None:
        lowered, instructions = rank.lowered, rank.lowered.instructions[rank.number]
        self._end, self._inbox, self._clock = end, inbox, clock
        self._decide, self._position = lowered.rule(rank.number), lowered.program.position
        self._last = len(lowered.plan.allocation.stages) - 1
        self._room = dict(most_held)
        self._passes: dict[Place, int] = {}  # those that have not run
        self._sends: dict[Place, int] = {}
        self._ends: list[int] = []
        for index in indices:
            match instructions[index]:
                case Forward(s, m, _):
                    self._passes["F", s, m] = index
                case Backward(s, m, _):
                    self._passes["B", s, m] = index
                case Send(kind, s, m, _):
                    self._sends[kind, s, m] = index
                case Receive():
                    pass  # the threads do it
                case _:
                    self._ends.append(index)
        self._remaining = deque(m for kind, s, m in self._passes if (kind, s) == ("F", 0))
        self._announced: list[Arrival] = []

    def order(self, limit: int) -> Iterator[int]:
        """Yield the indices of the mini-batch's instructions."""
        for _ in range(limit):
            self._inject()
        while self._passes:
            chosen = self._next()
            self._announced.remove(chosen)
            assert chosen.kind in ("F", "B"), "only passes are announced"
            kind: Pass = "F" if chosen.kind == "F" else "B"
            place = kind, chosen.stage, chosen.step.microbatch
            self._room[chosen.stage] += 1 if kind == "B" else -1
            yield self._passes.pop(place)
            sent = self._sends.get(place)
            if sent is not None:
                yield sent
            self._follow(place, sent is not None)
        yield from self._ends

    def _next(self) -> Arrival:
        """Return what the rule chooses among what has come, waiting until it chooses something."""
        news = self._inbox.news(0)
        while True:
            for message in news:
                kind, sender = message.edge
                self._announce((kind, sender + 1 if kind == "F" else sender - 1, message.microbatch), message.at_ns)
            now = self._clock()
            chosen = self._decide(now, [a for a in self._announced if a.kind == "B" or self._room[a.stage] > 0])
            if chosen is not None:
                return chosen
            self._end.at(next(iter(self._passes.values())))
            news = self._inbox.news(min((a.at_ns for a in self._announced if a.at_ns > now), default=None))

    def _follow(self, place: Place, sent: bool) -> None:
        """Announce what a pass makes possible on this rank."""
        kind, s, m = place
        if kind == "F" and s == self._last:
            self._announce(("B", s, m))
        elif kind == "F" and not sent:  # the next stage is here too
            self._announce(("F", s + 1, m))
        elif kind == "B" and s > 0 and not sent:
            self._announce(("B", s - 1, m))
        elif kind == "B" and s == 0:
            self._inject()

    def _inject(self) -> None:
        if self._remaining:
            self._announce(("F", 0, self._remaining.popleft()))

    def _announce(self, place: Place, at_ns: int | None = None) -> None:
        kind, s, m = place
        assert place in self._passes, "a message is of the mini-batch at hand, and comes once"
        at_ns = self._clock() if at_ns is None else at_ns
        insort(self._announced, Arrival(at_ns, Step(m, self._position[kind, s]), kind, s))

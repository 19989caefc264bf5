"""Do all ranks come through what their hosts issue (:mod:`oracles.gpu`), as NCCL and CUDA carry it out?

A stream does one thing after the other. What several ranks do in a communicator begins when all have come to it in its
stream, and all must then do the same. The host goes on at once, unless it waits for events or other hosts. Nothing here
depends on times: what can go on goes on, so one run is a proof for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any, Literal

from oracles.gpu import Begins, HostsMeet, HostWaits, Recorded, Together, Waited

from pipeplan.runtime.lowering.instructions import ReduceTied, Update

Semantics = Literal["asynchronous", "settled before updates", "in order", "blocking"]
SEMANTICS: tuple[Semantics, ...] = ("asynchronous", "settled before updates", "in order", "blocking")


class Rank:
    """Where one rank is: how far its host, what its streams have before them, which events are over."""

    def __init__(self, trace: list[Any], semantics: Semantics) -> None:
        self.trace, self._semantics = trace, semantics
        self.at = 0
        self.streams: dict[Hashable, deque[Any]] = {}
        self._over: set[int] = set()
        self._begun: deque[Together] = deque()  # exchanges that aren't over, as the host issued them

    @property
    def through(self) -> bool:
        """Whether all is done."""
        return self.at == len(self.trace) and self._idle

    @property
    def _idle(self) -> bool:
        return not any(self.streams.values())

    def go_on(self) -> bool:
        """Let host and streams go as far as they can without others; whether anything moved."""
        moved = False
        while self._host() or self._device():
            moved = True
        return moved

    def meets(self) -> HostsMeet | None:
        """Which other hosts this one waits for."""
        here = self.trace[self.at] if self.at < len(self.trace) else None
        return here if isinstance(here, HostsMeet) and (self._semantics != "blocking" or self._idle) else None

    def heads(self) -> list[Together]:
        """The exchanges for which this rank is ready."""
        found = [queue[0] for queue in self.streams.values() if queue and isinstance(queue[0], Together)]
        return [x for x in found if x is self._begun[0]] if self._semantics == "in order" else found

    def finish(self, exchange: Together) -> None:
        """Have done an exchange."""
        self.streams[exchange.stream].popleft()
        self._begun.remove(exchange)

    def _host(self) -> bool:
        if self.at == len(self.trace):
            return False
        here = self.trace[self.at]
        held_up = self._semantics == "blocking" and not self._idle
        match here:
            case HostsMeet():
                return False
            case HostWaits(None):
                held_up = not self._idle
            case HostWaits(event):
                held_up = held_up or event not in self._over
            case Begins(Update() | ReduceTied()) if self._semantics == "settled before updates":
                held_up = not self._idle
            case Recorded(stream, _) | Waited(stream, _) | Together(stream, _, _) if not held_up:
                self.streams.setdefault(stream, deque()).append(here)
                if isinstance(here, Together):
                    self._begun.append(here)
        self.at += not held_up
        return not held_up

    def _device(self) -> bool:
        moved = False
        for queue in self.streams.values():
            while queue and not isinstance(queue[0], Together):
                if isinstance(queue[0], Waited) and queue[0].event not in self._over:
                    break
                if isinstance(queue[0], Recorded):
                    self._over.add(queue[0].event)
                queue.popleft()
                moved = True
        return moved


def stuck(traces: Mapping[int, list[Any]], semantics: Semantics) -> list[str]:
    """Return where ranks stand for good, a sentence for each; [] if all come through.

    AssertionError where ranks meet and don't do the same.
    """
    ranks = {number: Rank(trace, semantics) for number, trace in traces.items()}
    moved = True
    while moved:
        moved = False
        for rank in ranks.values():
            moved |= rank.go_on()
        for number, rank in ranks.items():
            meeting = rank.meets()
            if meeting is not None and number == min(meeting.ranks):
                there = [ranks[other].meets() for other in meeting.ranks]
                if all(x is not None and x.ranks == meeting.ranks for x in there):
                    assert there == [meeting] * len(there), f"the hosts meet in {there}"
                    for other in meeting.ranks:
                        ranks[other].at += 1
                    moved = True
            for exchange in rank.heads():
                if number == min(exchange.ranks):
                    parts = [_same(ranks[other], exchange) for other in exchange.ranks]
                    if all(part is not None for part in parts):
                        _check([part.what for part in parts if part is not None])
                        for other, part in zip(exchange.ranks, parts, strict=True):
                            assert part is not None
                            ranks[other].finish(part)
                        moved = True
    return [
        f"rank {number} has issued {rank.at} of {len(rank.trace)}: "
        + "; ".join(f"{name} is in {queue[0]}" for name, queue in rank.streams.items() if queue)
        for number, rank in ranks.items()
        if not rank.through
    ]


def _same(rank: Rank, exchange: Together) -> Together | None:
    return next((x for x in rank.heads() if x.stream == exchange.stream), None)


def _check(parts: list[Any]) -> None:
    """AssertionError unless all ranks of an exchange do the same, or to each other what the other expects."""
    if parts[0][0] != "sum":
        assert all(part == parts[0] for part in parts), f"in one exchange stand {parts}"
        return
    assert len({part[1] for part in parts}) == 1, f"in one sum stand {parts}"
    for i, (_, _, coming, _) in enumerate(parts):
        assert list(coming) == [going[i] for _, _, _, going in parts], f"shares differ: {parts}"

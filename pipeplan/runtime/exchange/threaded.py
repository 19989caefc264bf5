"""How do messages travel beside a rank's work? By threads, in while it computes and out while it goes on.

gloo can be waited for, not polled, and its sends are rendezvous. So every peer that sends along an edge has a thread
here that keeps receives posted ahead, and every peer that is sent to has one that waits until each message is through.
A message is two tensors, its microbatch and what it carries: whoever receives need not know the sender's order.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..lowering.instructions import Edge, Instruction, Receive, Send, sentence
from ..lowering.segments import Repeated
from ..model.network import TensorSpec
from .transport import Group, PeerLost, Transport, exchanging, lane

POSTED: Final = 2  # receives under way on each wire: the next message travels while this one is put away
UNLIMITED: Final = timedelta(days=365)  # patience is counted where the rank itself waits, not while it computes

Wire = tuple[Edge, int]  # an edge, and the rank at its other end


@dataclass(frozen=True, slots=True)
class Message:
    """That something has come along ``edge`` for ``microbatch``, which can be used from ``at_ns`` on."""

    edge: Edge
    microbatch: int
    at_ns: int


class ThreadedTransport(Transport):
    """One rank's exchanges in ``group`` (None: all ranks), by threads.

    On each wire at most ``room`` messages wait to be sent, and further ones in :meth:`send`; the run's order limits how
    many wait to be used. ``delay_ns`` emulates a slow link: every message takes so much longer. PeerLost where a wait
    for another rank takes longer than ``timeout_s``, or a rank has gone.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        specs: Mapping[Edge, TensorSpec],
        room: int,
        timeout_s: float,
        delay_ns: int = 0,
        group: Group = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._specs, self._room, self._timeout_s, self._delay_ns = specs, room, timeout_s, delay_ns
        self._group, self._clock = group, clock
        self._expected: Counter[Wire] = Counter()
        self._outgoing: dict[Wire, SimpleQueue[tuple[Send, Tensor] | None]] = {}
        for times, x in ((part.times, x) for part in Repeated.of(instructions).parts for x in part.instructions):
            if isinstance(x, Receive):
                self._expected[x.edge, x.peer] += times
            elif isinstance(x, Send):
                self._outgoing.setdefault((x.edge, x.peer), SimpleQueue())
        # all of what follows is read and written under one lock, whose changes are announced
        self._changed = threading.Condition()
        self._inbox: dict[tuple[Edge, int], tuple[int, Tensor]] = {}  # when it can be used, and what it is
        self._news: list[Message] = []
        self._unsent: Counter[Wire] = Counter()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._receive_all, wire), daemon=True)
            for wire in self._expected
        ] + [
            threading.Thread(target=self._guarded, args=(self._send_all, wire), daemon=True) for wire in self._outgoing
        ]

    def start(self) -> None:
        """Begin to receive."""
        for thread in self._threads:
            thread.start()

    def take(self, edge: Edge, microbatch: int) -> Tensor:
        """Return what came along ``edge`` for ``microbatch``; waits until it is there."""
        self._wait(lambda: (edge, microbatch) in self._inbox, lambda: self._awaited(edge))
        with self._changed:
            usable_ns, tensor = self._inbox.pop((edge, microbatch))
        while (early_ns := usable_ns - self._clock()) > 0:
            time.sleep(early_ns / 1e9)
        return tensor

    def news(self, until_ns: int | None) -> list[Message]:
        """Return the messages that have come since the last call; if there are none, wait for some until ``until_ns``.

        Without a time to wait until, only messages can end the wait.
        """
        limit_s = self._timeout_s if until_ns is None else max(0.0, (until_ns - self._clock()) / 1e9)
        with self._changed:
            came = self._changed.wait_for(lambda: self._error is not None or bool(self._news), limit_s)
            self._check()
            if not came and until_ns is None:
                raise self._timed_out(self._awaited())
            news, self._news = self._news, []
            return news

    def await_room(self, send: Send) -> bool:
        """Wait while ``room`` messages to the peer are not through."""
        wire = send.edge, send.peer
        with self._changed:
            full = self._unsent[wire] >= self._room
        self._wait(lambda: self._unsent[wire] < self._room, lambda: sentence(send))
        return full

    def send(self, send: Send, tensor: Tensor) -> None:
        """Send ``tensor`` beside what follows, once there is room."""
        wire = send.edge, send.peer
        self.await_room(send)
        with self._changed:
            self._unsent[wire] += 1
        self._outgoing[wire].put((send, tensor.contiguous()))

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for wire, queue in self._outgoing.items():
            self._wait_until_sent(wire)
            queue.put(None)

    # --- the rank itself, waiting ---

    def _wait_until_sent(self, wire: Wire) -> None:
        self._wait(lambda: not self._unsent[wire], lambda: f"what goes to rank {wire[1]}")

    def _wait(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: self._error is not None or ready(), self._timeout_s)
            self._check()
            if not came:
                raise self._timed_out(what())

    def _awaited(self, along: Edge | None = None) -> str:
        """Return what may come next, ``along`` one edge or any."""
        return " and ".join(_next_on(wire) for wire in sorted(self._expected) if along in (None, wire[0]))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _timed_out(self, what: str) -> PeerLost:
        return PeerLost(f"{what}: nothing for {self._timeout_s:g} s")

    # --- the threads ---

    def _guarded(self, work: Callable[[Wire], None], wire: Wire) -> None:
        """Do a thread's work on ``wire``; what goes wrong is the rank's failure."""
        try:
            work(wire)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _receive_all(self, wire: Wire) -> None:
        posted: deque[tuple[Tensor, Tensor, list[dist.Work | None]]] = deque()  # microbatch, what it carries
        left, (edge, peer) = self._expected[wire], wire
        spec = self._specs[edge]
        with exchanging(_next_on(wire)):
            while left or posted:
                while left and len(posted) < POSTED:
                    room = torch.empty(1, dtype=torch.int64), torch.empty(spec.shape, dtype=spec.dtype)
                    both = zip(room, _tags(edge), strict=True)
                    posted.append((*room, [dist.irecv(x, peer, group=self._group, tag=tag) for x, tag in both]))
                    left -= 1
                microbatch, tensor, works = posted.popleft()
                for work in works:
                    _done(work)
                usable_ns = self._clock() + self._delay_ns
                with self._changed:
                    self._inbox[edge, int(microbatch)] = usable_ns, tensor
                    self._news.append(Message(edge, int(microbatch), usable_ns))
                    self._changed.notify_all()

    def _send_all(self, wire: Wire) -> None:
        queue = self._outgoing[wire]
        while (item := queue.get()) is not None:
            send, tensor = item
            header = torch.tensor([send.microbatch])
            with exchanging(sentence(send)):
                for work in [
                    dist.isend(part, send.peer, group=self._group, tag=tag)
                    for part, tag in zip((header, tensor), _tags(wire[0]), strict=True)
                ]:
                    _done(work)
            with self._changed:
                self._unsent[wire] -= 1
                self._changed.notify_all()


def _done(work: dist.Work | None) -> None:
    assert work is not None, "every rank is in its own group"
    work.wait(UNLIMITED)


def _tags(edge: Edge) -> tuple[int, int]:
    """Return the tags of a message's microbatch and of its tensor. What has one tag stays in order."""
    return 2 * lane(edge), 2 * lane(edge) + 1


def _next_on(wire: Wire) -> str:
    (kind, stage), peer = wire
    what = "activations" if kind == "F" else "gradient"
    return f"the next {what} from stage {stage} on rank {peer}"

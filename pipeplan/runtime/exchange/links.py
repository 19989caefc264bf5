"""How do tensors reach other ranks? By memory or threads between CPUs, NCCL between GPUs, the host between shared ones.

NCCL has no tags: what one rank sends another is received in the order sent, and a message that is issued holds its
place in a stream until the other end issues its own. Both ends issue in the program's total order, which cannot
deadlock even if every message blocked everything (proved before the run). Each directed pair of ranks has a process
group, so a communicator and a stream, of its own: messages overlap with passes and with those the other way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ...registry import Late
from ..device import Exchange, group_timeout, moved, new_stream, on_host, settle
from ..lowering.instructions import NOBODY, Edge, Receive, Send
from ..lowering.lowered_run import LoweredRun
from ..model.network import TensorSpec
from .transport import Group, Transport, exchanging

MOST_BLOCKS: Final = 4  # of threads, one for each processor; each moves some 20 GB/s between GPUs of one machine
ROOM: Final = 2  # messages of an edge between processes that wait to be taken, where a sender could go on for ever
LATE: Final = 2  # messages before it that are over when a receive begins

WIRES = (
    Late("runtime.exchange.nearby:open_nearby"),
)  # what opens ways between CPUs of one machine, None where it can't
nearby_transport = Late("runtime.exchange.nearby:NearbyTransport")

Pair = tuple[int, int]  # sender, receiver


@dataclass(frozen=True)
class Links:
    """This rank's ways to the others: ``pairs`` are the groups of those that it exchanges messages with, with NCCL.

    ``nearby`` has wires to those on CPUs if all are on one machine, and messages come in order: otherwise threads
    exchange them (:mod:`.threaded`). ``timeout`` is for groups that are made later.
    """

    exchange: Exchange
    device: torch.device
    timeout: timedelta
    pairs: Mapping[Pair, Group] = field(default_factory=dict)
    nearby: Mapping[int, Any] | None = None

    @property
    def by_threads(self) -> bool:
        """Whether threads send and receive."""
        return self.exchange != "nccl" and self.nearby is None

    def transport(self, rank: int, specs: Mapping[Edge, TensorSpec], evaluates: bool) -> Transport:
        """Return what moves messages without threads."""
        if self.exchange == "nccl":
            return OrderedTransport(rank, specs, self.pairs, self.device, self.timeout)
        return self.through_host(nearby_transport(self.nearby, specs, ROOM if evaluates else None))

    def through_host(self, between_hosts: Transport) -> Transport:
        """Return what moves this device's messages over a transport between hosts."""
        return between_hosts if self.exchange == "gloo" else StagedTransport(between_hosts, self.device)

    def close(self) -> None:
        """End what leads to processes nearby."""
        for wire in (self.nearby or {}).values():
            wire.close()


def open_links(
    lowered: LoweredRun,
    rank: int,
    exchange: Exchange,
    device: torch.device,
    timeout: timedelta,
    nearby: str | None = None,
    backend: str = "nccl",
) -> Links:
    """Make what ``exchange`` needs; all ranks together, for all make all groups in one order, as torch wants it.

    NCCL connects a pair at its first message, at which both ends wait for each other: so that is done here, in order.
    Between hosts messages go by :mod:`.nearby` where all ranks name one machine, ``nearby``.
    """
    found = {
        (r, x.peer)
        for r, orders in enumerate(lowered.instructions)
        for x in orders.kinds()
        if isinstance(x, Send) and x.peer != NOBODY
    }
    if exchange != "nccl":
        peers = sorted({r for pair in found if rank in pair for r in pair if r != rank})
        ways = (wires(rank, peers, nearby, timeout) for wires in WIRES if nearby is not None)
        return Links(exchange, device, timeout, nearby=next(ways, None))
    pairs: dict[Pair, Group] = {}
    in_hosts_order()
    with exchanging("the connecting of GPUs"):
        for pair in in_rounds(found):
            patience = group_timeout(timeout, backend)
            group = dist.new_group(sorted(pair), patience, backend, pg_options=pair_options(backend, patience))
            if rank in pair:
                pairs[pair] = group
        for (sender, receiver), group in pairs.items():
            greeting = torch.zeros(1, device=device)
            if rank == sender:
                dist.send(greeting, receiver, group=group)
            else:
                dist.recv(greeting, sender, group=group)
            settle(device, timeout)
    return Links(exchange, device, timeout, pairs)


def in_rounds(pairs: Collection[Pair]) -> list[Pair]:
    """Return ``pairs`` in an order in which as many as can connect at once: round by round, no rank twice in one.

    Each rank goes through its own pairs in this order, so all are through after at most about twice as many rounds as
    one rank has pairs, where the order of their numbers would let a chain connect one after the other.
    """
    rounds: dict[tuple[bool, int], list[Pair]] = {}
    busy: set[tuple[bool, int, int]] = set()  # way, round and rank
    for pair in sorted(pairs):
        way = pair[0] > pair[1]
        number = next(n for n in count() if not any((way, n, rank) in busy for rank in pair))
        busy.update((way, number, rank) for rank in pair)
        rounds.setdefault((way, number), []).append(pair)
    return [pair for number in sorted(rounds) for pair in rounds[number]]


def in_hosts_order() -> None:
    """Let NCCL begin what a GPU has in several communicators in the order of the host, unless the user says otherwise.

    That is one total order over all ranks, so nothing deadlocks wherever CUDA should not let two of them run at once.
    NCCL has it since 2.26, and does none of it without being asked; RCCL's is said to be broken.
    """
    if torch.version.hip is None:
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")


def pair_options(backend: str, timeout: timedelta) -> Any:
    """Return what the communicator of a pair is made with.

    NCCL moves messages by kernels. A receive that waits for its message keeps its processors from the passes, so it
    gets :data:`MOST_BLOCKS`; and what is ready to go shouldn't queue behind a pass, so its stream comes first.
    """
    if backend != "nccl" or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MOST_BLOCKS  # NCCL_MAX_CTAS goes before
    options._timeout = timeout  # torch warns of another one than the group's
    return options


class OrderedTransport(Transport):
    """Messages in the order of the instructions, with the group of their directed pair.

    A receive is issued in a stream of its own, so that it doesn't wait for the pass queued before it. Its room is of
    the passes' memory, for one message of an edge at a time, as planned: it is made when the last message has been
    taken, and the receive begins when the GPU has come so far. The host is several passes ahead, so it begins no sooner
    than the GPU is but one pass away: at the :data:`LATE`-th message before it. What waits for earlier work
    alone deadlocks no more than one thing after the other. ``take`` lets the passes' stream wait, not the host. A send
    waits for the pass before it, and its tensor is kept until the edge's next send, for which the passes' stream waits
    until it is through.
    """

    def __init__(
        self,
        rank: int,
        specs: Mapping[Edge, TensorSpec],
        pairs: Mapping[Pair, Group],
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self._rank, self._specs, self._pairs, self._device, self._timeout = rank, specs, pairs, device, timeout
        self._stream = new_stream(device)
        self._rooms: dict[Edge, tuple[Tensor, Any]] = {}  # for the next message, and when it can be written to
        self._coming: dict[tuple[Edge, int], tuple[Receive, Tensor, Any]] = {}
        self._sent: dict[Edge, tuple[Send, Tensor, Any]] = {}  # one on each edge, under way
        self._messages: deque[Any] = deque(maxlen=LATE)  # events where the last ones were taken or sent

    def post(self, receive: Receive) -> None:
        """Issue ``receive``."""
        if receive.edge not in self._rooms:  # the edge's first, or one behind another that is still to be taken
            self._rooms[receive.edge] = self._room(receive.edge)
        tensor, free = self._rooms.pop(receive.edge)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(free)
            if self._stream is not None and len(self._messages) == LATE:
                self._stream.wait_event(self._messages[0])
            with exchanging(receive, receive.peer):
                work = dist.irecv(tensor, receive.peer, group=self._pairs[receive.peer, self._rank])
        self._coming[receive.edge, receive.microbatch] = receive, tensor, work

    def take(self, edge: Edge, microbatch: int) -> Tensor:
        """Return what comes along ``edge`` for ``microbatch``; what is queued from here on waits for it."""
        receive, tensor, work = self._coming.pop((edge, microbatch))
        with exchanging(receive, receive.peer):
            work.wait()
        self._messages.append(self._event())
        return tensor

    def look_ahead(self, edge: Edge) -> None:
        """Make room for the next message."""
        self._rooms[edge] = self._room(edge)

    def await_room(self, send: Send) -> bool:
        """Let what is queued from here on wait until the edge's last send is through."""
        if send.edge not in self._sent:
            return False
        before, _, work = self._sent.pop(send.edge)
        with exchanging(before, before.peer):
            work.wait()
        return True

    def send(self, send: Send, tensor: Tensor) -> None:
        """Issue the send of ``tensor``."""
        self.await_room(send)
        tensor = tensor.contiguous()
        with exchanging(send, send.peer):
            work = dist.isend(tensor, send.peer, group=self._pairs[self._rank, send.peer])
        self._sent[send.edge] = send, tensor, work
        self._messages.append(self._event())

    def _room(self, edge: Edge) -> tuple[Tensor, Any]:
        spec = self._specs[edge]
        return torch.empty(spec.shape, dtype=spec.dtype, device=self._device), self._event()

    def _event(self) -> Any:
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def finish(self) -> None:
        """Wait for the last sends."""
        for send, _, _ in list(self._sent.values()):
            self.await_room(send)
        settle(self._device, self._timeout)


class StagedTransport:
    """Messages of a GPU over a transport between hosts: copied to the host before they go, and to the GPU on use."""

    def __init__(self, between_hosts: Transport, device: torch.device) -> None:
        self._between_hosts, self._device = between_hosts, device
        self.start, self.post, self.look_ahead = between_hosts.start, between_hosts.post, between_hosts.look_ahead
        self.await_room, self.finish = between_hosts.await_room, between_hosts.finish

    def take(self, edge: Edge, microbatch: int) -> Tensor:
        """Return a message on the GPU; the host waits for it."""
        return moved(self._between_hosts.take(edge, microbatch), self._device)

    def send(self, send: Send, tensor: Tensor) -> None:
        """Send a message; the host waits for the pass that makes it."""
        copy = on_host(tensor.contiguous())
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._between_hosts.send(send, copy)

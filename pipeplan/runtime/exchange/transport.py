"""What moves tensors between ranks? What wires, gloo, NCCL and message-driven transports share, and gloo's.

gloo's send is a rendezvous, its tags match in any order, and a message that doesn't fit its buffer aborts the process.
So receives are posted ahead of their use with tensors of the agreed shape, the tag names edge and microbatch, and a
sent tensor is kept until its handle has been waited for.
"""

from __future__ import annotations

import json
import os
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PipeplanError
from ..lowering.instructions import Edge, Instruction, Receive, Send, sentence
from ..lowering.segments import Repeated
from ..model.network import TensorSpec

T = TypeVar("T")

Group = Any  # a process group; torch's type for it differs between versions


def lane(edge: Edge) -> int:
    """Return a number that each edge has for itself."""
    kind, stage = edge
    return 2 * stage + (kind == "B")


def everybodys(value: T, group: Group = None) -> list[T]:
    """Return every rank's ``value``, of what JSON has, in rank order, on all of ``group`` (None: of all ranks).

    gloo asks nobody who he is, so nothing is unpickled; tuples come as lists.
    """
    said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(said)]), group)
    room = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    room[: len(said)] = said
    found = [torch.empty_like(room) for _ in sizes]
    dist.all_gather(found, room, group)
    return [json.loads(words[: int(size)].numpy().tobytes()) for words, size in zip(found, sizes, strict=True)]


def send_words(words: bytes, to: int, group: Group = None) -> None:
    """Send rank ``to`` at least one byte, between hosts."""
    said = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    dist.send(torch.tensor([len(said)]), to, group=group)
    dist.send(said, to, group=group)


def received_words(source: int, group: Group = None) -> memoryview:
    """Return what rank ``source`` sends by :func:`send_words`."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=group)
    said = torch.zeros(int(size), dtype=torch.uint8)
    dist.recv(said, source, group=group)
    return said.numpy().data


class Transport(Protocol):
    """What moves tensors between ranks."""

    def start(self) -> None:
        """Begin."""

    def post(self, receive: Receive) -> None:
        """Be ready for a message."""

    def take(self, edge: Edge, microbatch: int) -> Tensor:
        """Return a message, waiting for it."""

    def look_ahead(self, edge: Edge) -> None:
        """Be ready for what comes next along ``edge``, once a message has been taken."""

    def await_room(self, send: Send) -> bool:
        """Wait until the message that is sent next can be under way; whether there was anything to wait for."""

    def send(self, send: Send, tensor: Tensor) -> None:
        """Send a message."""

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""


class PeerLost(PipeplanError):
    """An exchange failed: the other rank has gone or doesn't answer. Seldom the cause, often the first symptom.

    ``peers`` are those that it might be, as far as that is known.
    """

    def __init__(self, message: str, *peers: int) -> None:
        super().__init__(message)
        self.peers = peers


_OF_OTHERS: Final = (RuntimeError, ConnectionError, TimeoutError)  # what gloo and NCCL raise, and what wires do
_ITS_OWN: Final = (torch.OutOfMemoryError, torch.AcceleratorError)  # of a GPU that is full, or has failed


class _Exchanging:
    __slots__ = ("_peers", "_what")

    def __init__(self, what: str | Instruction, peers: tuple[int, ...]) -> None:
        self._what, self._peers = what, peers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _OF_OTHERS) and not isinstance(error, _ITS_OWN):
            what = self._what if isinstance(self._what, str) else sentence(self._what)
            raise PeerLost(f"{what}: {_cause(str(error))}", *self._peers) from error


def exchanging(what: str | Instruction, *peers: int) -> AbstractContextManager[None]:
    """Turn what gloo, NCCL and wires raise into PeerLost, which names the exchange and knows the ``peers``.

    A fault of the own device stays as it is. Messages are sent and received within
    such contexts, so nothing is put into words before it fails.
    """
    return _Exchanging(what, peers)


def _cause(words: str) -> str:
    """Return what an error says in one line: the first, and what NCCL puts behind it as its last error."""
    first, _, rest = words.strip().partition("\n")
    plain = first.rpartition("] ")[2] if first.startswith("[") else first
    plain = plain.partition(". This is typically caused by ")[0]  # gloo's advice, on whatever goes wrong
    _, found, last = rest.partition("Last error:")
    lines = [line.strip() for line in last.splitlines() if line.strip()]
    return f"{plain}: {lines[0]}" if found and lines else plain


class Receiving:
    """A receive that has been posted, in ``group`` (None: all ranks), of what comes into ``tensor``."""

    def __init__(self, receive: Receive, tensor: Tensor, tag: int = 0, group: Group = None) -> None:
        self._receive, self._tensor = receive, tensor
        with exchanging(receive, receive.peer):
            work = dist.irecv(tensor, receive.peer, group=group, tag=tag)
        assert work is not None, "both ranks are in the group"
        self._work = work

    def wait(self) -> Tensor:
        """Return what came; over NCCL the current stream waits for it, not the host."""
        with exchanging(self._receive, self._receive.peer):
            self._work.wait()
        return self._tensor


class Sends:
    """The sends of one rank, one under way on each edge: the next waits for it, and only then may its tensor go."""

    def __init__(self) -> None:
        self._sent: dict[Edge, tuple[Send, dist.Work, Tensor]] = {}

    def issue(self, send: Send, tensor: Tensor, tag: int = 0, group: Group = None) -> None:
        """Send ``tensor`` in ``group`` (None: all ranks), once the edge's send before it is through."""
        self.await_room(send)
        tensor = tensor.contiguous()
        with exchanging(send, send.peer):
            work = dist.isend(tensor, send.peer, group=group, tag=tag)
        assert work is not None, "both ranks are in the group"
        self._sent[send.edge] = send, work, tensor

    def await_room(self, send: Send) -> bool:
        """Wait until the edge's last send is through; False if there is none under way."""
        if send.edge not in self._sent:
            return False
        self._wait(send.edge)
        return True

    def finish(self) -> None:
        """Wait until all are through."""
        for edge in list(self._sent):
            self._wait(edge)

    def _wait(self, edge: Edge) -> None:
        send, work, _ = self._sent[edge]
        with exchanging(send, send.peer):
            work.wait()
        del self._sent[edge]


# --- a slower link, as if there were one ------------------------------------------------------------------------------

GIGA: Final = 10**9


def carried_ns(size: int, rate: int | None) -> int:
    """Return how long ``size`` bytes are under way at ``rate`` bytes per second; None is as fast as can be."""
    return 0 if rate is None else -(-size * GIGA // rate)


def wait_until(due_ns: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
    """Sleep until it is then by ``clock``."""
    while (early_ns := due_ns - clock()) > 0:
        time.sleep(early_ns / GIGA)


class EmulatedLink:
    """What a rank sends to others for sums goes over one link of ``rate`` bytes per second, one thing after the other.

    Bytes go when they can; who waits for them waits until they would have been there, too.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = Lock()
        self._free_ns = 0

    def due_ns(self, size: int) -> int:
        """Return when ``size`` bytes are through that are sent now, behind those before them."""
        with self._lock:
            self._free_ns = max(self._free_ns, time.monotonic_ns()) + carried_ns(size, self._rate)
            return self._free_ns


LAZY = "TORCH_GLOO_LAZY_INIT"
FILES = 2**16  # that a process may have open
LARGEST_TAG = 2**31  # gloo's tags are 32 bits, and torch refuses negative ones


# --- gloo -------------------------------------------------------------------------------------------------------------


def spare_sockets() -> None:
    """Let each rank's groups of gloo connect to those it exchanges with, when it does, unless the user says otherwise.

    Otherwise each connects to all others at once, for which every rank reads through the store what every other one has
    for every third. Rank 0 hears of all results, for which a process may have too few files open by default.
    """
    os.environ.setdefault(LAZY, "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class PostingTransport(ABC):
    """Posts receives in the order of a rank's ``instructions``, on each edge one before its turn.

    So a cut costs each of its ends one buffer per direction, as the memory model says.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        receives = Repeated.of(instructions).where(lambda x: isinstance(x, Receive))
        edges = dict.fromkeys(x.edge for x in receives.kinds() if isinstance(x, Receive))
        self._coming = {edge: iter(receives.where(partial(_comes_along, edge))) for edge in edges}
        self._posted: dict[tuple[Edge, int], Callable[[], Tensor]] = {}
        self._waiting: dict[Edge, int] = dict.fromkeys(self._coming, 0)  # posted, and not taken yet

    def start(self) -> None:
        """Post the first receives."""
        for edge in self._coming:
            self.look_ahead(edge)

    def post(self, receive: Receive) -> None:
        """Post ``receive`` now unless it has been already."""
        while (receive.edge, receive.microbatch) not in self._posted and self._post_next(receive.edge):
            pass

    def take(self, edge: Edge, microbatch: int) -> Tensor:
        """Return what came along ``edge`` for ``microbatch``; waits until it is there."""
        tensor = self._posted.pop((edge, microbatch))()
        self._waiting[edge] -= 1
        return tensor

    def look_ahead(self, edge: Edge) -> None:
        """Post the next receive of ``edge``, unless there is one that waits to be taken."""
        if not self._waiting[edge]:
            self._post_next(edge)

    @abstractmethod
    def _issue(self, receive: Receive) -> Callable[[], Tensor]:
        """Be ready for a message; return what waits for it."""

    def _post_next(self, edge: Edge) -> bool:
        """Whether there was another one to post."""
        receive = next(self._coming[edge], None)
        if isinstance(receive, Receive):
            self._posted[edge, receive.microbatch] = self._issue(receive)
            self._waiting[edge] += 1
        return receive is not None


def _comes_along(edge: Edge, instruction: Instruction) -> bool:
    return isinstance(instruction, Receive) and instruction.edge == edge


class GlooTransport(PostingTransport):
    """One rank's exchanges in the default process group.

    ``specs`` gives the tensor of every edge, ``instructions`` the rank's order. One send is under way on each edge; the
    next waits for it.
    """

    def __init__(self, instructions: Sequence[Instruction], specs: Mapping[Edge, TensorSpec], stages: int) -> None:
        super().__init__(instructions)
        self._specs, self._stages = specs, stages
        self._sends = Sends()

    def await_room(self, send: Send) -> bool:
        """Wait until the edge's last send is through."""
        return self._sends.await_room(send)

    def send(self, send: Send, tensor: Tensor) -> None:
        """Send ``tensor``, once the edge's send before it is through."""
        self._sends.issue(send, tensor, self._tag(send.edge, send.microbatch))

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._sends.finish()

    def _issue(self, receive: Receive) -> Callable[[], Tensor]:
        spec = self._specs[receive.edge]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        return Receiving(receive, tensor, self._tag(receive.edge, receive.microbatch)).wait

    def _tag(self, edge: Edge, microbatch: int) -> int:
        lanes = 2 * self._stages
        return microbatch % (LARGEST_TAG // lanes) * lanes + lane(edge)

"""How do two processes of one machine give each other tensors? By memory that both have, and notes of what is there.

gloo goes through the loopback's TCP, where a thread at each end has to be woken for every part of a message. On cores
that compute that takes each end 0.3 to 0.6 ms of a message; a copy into shared memory and a note about it take 0.1 ms.
What one process has made the other opens by its number in /proc, as the same user alone may. Nothing is in any folder,
so nothing is left whoever dies; that somebody did shows in the pipe from him.

The next message of an edge waits at its sender until the receive of the one before it has been posted, as with a send
of gloo's, which is a rendezvous. So memory has room for those that are posted, and one more.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import ceil
from typing import Any, Final

import torch
from torch import Tensor

from ..lowering.instructions import Edge, Instruction, Receive, Send
from ..lowering.segments import Repeated
from ..model.network import TensorSpec
from .transport import everybodys, exchanging, lane

Message = tuple[int, int]  # what it is, and the how manieth of these; for both ends to tell messages apart

_NOTE: Final = struct.Struct("=4q")  # what has happened, the message, and its place in memory
_GIVEN, _WANTED, _TAKEN = range(3)
_HEARD: Final = 128 * _NOTE.size  # bytes at once, and the most that is said at once: pipes take so much whole
PROCESSES: Final = "/proc/self/ns/pid"  # tells those apart whose numbers of processes aren't the same
_LONGEST_MS: Final = 2**31 - 1  # that can be waited at once


@dataclass(slots=True)
class _Memory:
    """What one process writes to and another reads: slots from places on, each mapped by itself."""

    file: int
    end: int = 0  # how long the writer has made it
    slots: dict[int, Tensor] = field(default_factory=dict)

    def slot(self, place: int, spec: TensorSpec) -> Tensor:
        """Return what is at a place that was made for ``spec``."""
        found = self.slots.get(place)
        if found is None:
            mapped = mmap.mmap(self.file, _room(spec), offset=place)
            found = torch.frombuffer(mapped, dtype=torch.uint8)[: spec.nbytes].view(spec.dtype).view(spec.shape)
            self.slots[place] = found
        return found

    def grow(self, spec: TensorSpec) -> int:
        """Return the place of a new slot for ``spec``."""
        place, self.end = self.end, self.end + _room(spec)
        os.ftruncate(self.file, self.end)
        return place


def _room(spec: TensorSpec) -> int:
    return -(-max(spec.nbytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class Wire:
    """The way to another process and back: one pipe ``says`` notes, another ``hears`` the other's. What goes out is
    written to ``mine``, memory of which slots are used again when the other has read them; what comes in is in ``its``.

    ConnectionError where the other has gone, TimeoutError where it says nothing while ``timeout`` is waited for it.
    """

    def __init__(self, says: int, hears: int, mine: int, its: int, timeout: timedelta) -> None:
        self._says, self._hears, self._mine, self._its = says, hears, _Memory(mine), _Memory(its)
        self._timeout_s = timeout.total_seconds()
        self._free: dict[TensorSpec, list[int]] = {}  # places of our own that can be written to
        self._full: dict[int, TensorSpec] = {}  # those that are to be read, and for what they were made
        self._given: dict[Message, int] = {}  # what there is to be taken, and where
        self._wanted: set[Message] = set()  # what the other is ready for
        self._unsaid = b""  # goes with the next note
        self._coming, self._either = select.poll(), select.poll()  # something to hear; or room to say something
        for pipe, way in ((hears, select.POLLIN), (says, select.POLLOUT)):
            os.set_blocking(pipe, False)
            self._either.register(pipe, way)
        self._coming.register(hears, select.POLLIN)

    def give(self, message: Message, tensor: Tensor, spec: TensorSpec) -> None:
        """Give the other a copy of ``tensor``; nobody waits."""
        free = self._free.setdefault(spec, [])
        place = free.pop() if free else self._mine.grow(spec)
        self._full[place] = spec
        self._mine.slot(place, spec).copy_(tensor.detach())
        self._note(_GIVEN, message, place)
        if not self._say():
            raise ConnectionError("the other process has closed its connection")

    def take(self, message: Message, spec: TensorSpec) -> Tensor:
        """Return what the other gives, once it has."""
        while message not in self._given:
            self._hear()
        place = self._given.pop(message)
        tensor = self._its.slot(place, spec).clone()
        self._note(_TAKEN, message, place)
        if len(self._unsaid) == _HEARD:
            self._say()
        return tensor

    def want(self, message: Message) -> None:
        """Tell the other that ``message`` may come; one that has gone need not know."""
        self._note(_WANTED, message)
        self._say()

    def await_wanted(self, message: Message) -> bool:
        """Wait until the other wants ``message``, which is told once; whether there was anything to wait for."""
        if message not in self._wanted:
            self._hear(patiently=False)
        waits = message not in self._wanted
        while message not in self._wanted:
            self._hear()
        self._wanted.remove(message)
        return waits

    def close(self) -> None:
        """End the connection."""
        for memory in (self._mine, self._its):
            memory.slots.clear()
        for file in (self._says, self._hears, self._mine.file, self._its.file):
            os.close(file)

    def _note(self, what: int, message: Message, place: int = 0) -> None:
        self._unsaid += _NOTE.pack(what, *message, place)

    def _say(self) -> bool:
        """Say what is unsaid; whether the other is there to be told.

        Until there is room for it, what the other says is heard: so two that have much to say don't wait for each
        other.
        """
        said, self._unsaid = self._unsaid, b""
        with suppress(ConnectionError):
            while True:
                with suppress(BlockingIOError):
                    return os.write(self._says, said) > 0
                self._wait(self._either)
                self._hear(patiently=False)
        return False

    def _hear(self, patiently: bool = True) -> None:
        """Take in what the other has said; ``patiently`` wait for something."""
        if patiently:
            self._wait(self._coming)
        try:
            heard = os.read(self._hears, _HEARD)
        except BlockingIOError:
            return
        if not heard:
            raise ConnectionError("the other process has closed its connection")
        for what, kind, number, place in _NOTE.iter_unpack(heard):
            if what == _GIVEN:
                self._given[kind, number] = place
            elif what == _WANTED:
                self._wanted.add((kind, number))
            else:
                self._free[self._full.pop(place)].append(place)

    def _wait(self, news: select.poll) -> None:
        if not news.poll(min(_LONGEST_MS, ceil(1000 * self._timeout_s))):
            raise TimeoutError(f"nothing for {self._timeout_s:g} s")


class Nearby:
    """The ``wires`` of a rank to its peers."""

    def __init__(self, wires: Mapping[int, Wire]) -> None:
        self.wires = wires

    def transport(self, instructions: Sequence[Instruction], specs: Mapping[Edge, TensorSpec]) -> NearbyTransport:
        """Return what moves the messages of ``instructions``."""
        return NearbyTransport(instructions, specs, self.wires)

    def close(self) -> None:
        """End the wires."""
        for wire in self.wires.values():
            wire.close()


def open_nearby(rank: int, peers: Collection[int], machine: str, timeout: timedelta) -> Nearby | None:
    """Return the wires from ``rank`` to its ``peers``, None unless all ranks are on one ``machine`` that has such.

    All ranks call this together, and each is among its peers' peers. Each makes a pipe from every peer and memory to
    it, and says under which numbers it has them.
    """
    with exchanging("the connecting of processes", *peers):
        has_them = hasattr(os, "memfd_create") and os.path.exists(PROCESSES)
        made = {peer: (*os.pipe(), os.memfd_create("pipeplan")) for peer in peers if has_them}
        numbers = {str(peer): (says, memory) for peer, (_, says, memory) in made.items()}
        here: Any = [machine, os.readlink(PROCESSES), os.getpid(), numbers] if has_them else None
        everybody = everybodys(here)
        wires: dict[int, Wire] = {}
        if None not in everybody and len({tuple(said[:2]) for said in everybody}) == 1:
            with suppress(OSError):  # as where a process may not look into others
                for peer, (hears, _, memory) in made.items():
                    _, _, process, its = everybody[peer]
                    ends = zip(its[str(rank)], (os.O_WRONLY, os.O_RDWR), strict=True)
                    says, its_memory = (os.open(f"/proc/{process}/fd/{x}", way) for x, way in ends)
                    wires[peer] = Wire(says, hears, memory, its_memory, timeout)
        everywhere = all(everybodys(has_them and len(wires) == len(peers)))
        for _, says, _ in made.values():  # the peer has its own by now, whose end is to be heard
            os.close(says)
        return Nearby(wires) if everywhere else None


class NearbyTransport:
    """One rank's exchanges over ``wires`` to its peers; ``specs`` gives the tensor of every edge.

    Receives are posted in the order of the rank's ``instructions``, on each edge one before its turn. So a cut costs
    each of its ends one buffer per direction, as the memory model says.
    """

    def __init__(
        self, instructions: Sequence[Instruction], specs: Mapping[Edge, TensorSpec], wires: Mapping[int, Wire]
    ) -> None:
        self._specs, self._wires = specs, wires
        receives = Repeated.of(instructions).where(lambda x: isinstance(x, Receive))
        edges = dict.fromkeys(x.edge for x in receives.kinds() if isinstance(x, Receive))
        self._coming = {edge: iter(receives.where(partial(_comes_along, edge))) for edge in edges}
        self._posted: dict[tuple[Edge, int], Receive] = {}
        self._waiting: dict[Edge, int] = dict.fromkeys(self._coming, 0)  # posted, and not taken yet
        self._sent: dict[Edge, Send] = {}  # the last one of each edge, until it is known that it was wanted

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
        receive = self._posted.pop((edge, microbatch))
        with exchanging(receive, receive.peer):
            tensor = self._wires[receive.peer].take(_message(receive), self._specs[edge])
        self._waiting[edge] -= 1
        return tensor

    def look_ahead(self, edge: Edge) -> None:
        """Post the next receive of ``edge``, unless there is one that waits to be taken."""
        if not self._waiting[edge]:
            self._post_next(edge)

    def await_room(self, send: Send) -> bool:
        """Wait until the edge's last message was wanted."""
        last = self._sent.pop(send.edge, None)
        if last is None:
            return False
        with exchanging(last, last.peer):
            return self._wires[last.peer].await_wanted(_message(last))

    def send(self, send: Send, tensor: Tensor) -> None:
        """Give ``tensor`` to the peer, once the edge's last message was wanted."""
        self.await_room(send)
        with exchanging(send, send.peer):
            self._wires[send.peer].give(_message(send), tensor, self._specs[send.edge])
        self._sent[send.edge] = send

    def finish(self) -> None:
        """Whatever was given stays there to be taken."""

    def _post_next(self, edge: Edge) -> bool:
        """Whether there was another one to post."""
        receive = next(self._coming[edge], None)
        if isinstance(receive, Receive):
            self._posted[edge, receive.microbatch] = receive
            self._wires[receive.peer].want(_message(receive))
            self._waiting[edge] += 1
        return receive is not None


def _comes_along(edge: Edge, instruction: Instruction) -> bool:
    return isinstance(instruction, Receive) and instruction.edge == edge


def _message(exchange: Send | Receive) -> Message:
    return lane(exchange.edge), exchange.microbatch

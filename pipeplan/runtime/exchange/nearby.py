"""How do two processes of one machine give each other tensors? By memory that both have, and notes of what is there.

gloo goes through the loopback's TCP, where a thread at each end has to be woken for every part of a message. On cores
that compute that takes each end 0.3 to 0.6 ms of a message; a copy into shared memory and a note about it take 0.1 ms.
What one process has made the other opens by its number in /proc, as the same user alone may. Nothing is in any folder,
so nothing is left whoever dies; that somebody did shows in the pipe from him.

Memory has room for what waits to be taken: in training no more than is in flight anyway. Where nothing comes back that
a sender would have to wait for, it waits for room.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil
from typing import Any, Final

import torch
from torch import Tensor

from ..lowering.instructions import Edge, Receive, Send
from ..model.network import TensorSpec
from .transport import Transport, everybodys, exchanging, lane

Message = tuple[int, int]  # what it is, and the how manieth of these; for both ends to tell messages apart

_NOTE: Final = struct.Struct("=4q")  # what has happened, the message, and its place in memory
_GIVEN, _TAKEN = range(2)
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
        self._full: dict[int, tuple[TensorSpec, int]] = {}  # those to be read: what made for, and the message's kind
        self._untaken: Counter[int] = Counter()  # those of each kind of message
        self._given: dict[Message, int] = {}  # what there is to be taken, and where
        self._unsaid = b""  # goes with the next note
        self._coming, self._either = select.poll(), select.poll()  # something to hear; or room to say something
        for pipe, way in ((hears, select.POLLIN), (says, select.POLLOUT)):
            os.set_blocking(pipe, False)
            self._either.register(pipe, way)
        self._coming.register(hears, select.POLLIN)

    def give(self, message: Message, tensor: Tensor, spec: TensorSpec) -> None:
        """Give the other a copy of ``tensor``; nobody waits."""
        free = self._free.setdefault(spec, [])
        if not free:
            self._hear(patiently=False)  # perhaps that something was taken
        place = free.pop() if free else self._mine.grow(spec)
        self._full[place] = spec, message[0]
        self._untaken[message[0]] += 1
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
        self._say(patiently=len(self._unsaid) == _HEARD)  # one that has gone need not know
        return tensor

    def await_room(self, kind: int, room: int) -> bool:
        """Wait until fewer than ``room`` messages of a kind are to be taken; whether there was anything to wait for."""
        if self._untaken[kind] >= room:
            self._hear(patiently=False)
        waits = self._untaken[kind] >= room
        while self._untaken[kind] >= room:
            self._hear()
        return waits

    def close(self) -> None:
        """End the connection."""
        for memory in (self._mine, self._its):
            memory.slots.clear()
        for file in (self._says, self._hears, self._mine.file, self._its.file):
            os.close(file)

    def _note(self, what: int, message: Message, place: int) -> None:
        self._unsaid += _NOTE.pack(what, *message, place)

    def _say(self, patiently: bool = True) -> bool:
        """Say what is unsaid; whether the other is there to be told.

        Until there is room for it, what the other says is heard: so two that have much to say don't wait for each
        other.
        """
        said, self._unsaid = self._unsaid, b""
        with suppress(ConnectionError):
            while True:
                with suppress(BlockingIOError):
                    return os.write(self._says, said) > 0
                if not patiently:
                    self._unsaid = said
                    return True
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
            else:
                spec, own = self._full.pop(place)
                self._free[spec].append(place)
                self._untaken[own] -= 1

    def _wait(self, news: select.poll) -> None:
        if not news.poll(min(_LONGEST_MS, ceil(1000 * self._timeout_s))):
            raise TimeoutError(f"nothing for {self._timeout_s:g} s")


def open_nearby(rank: int, peers: Collection[int], machine: str, timeout: timedelta) -> dict[int, Wire] | None:
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
        return wires if everywhere else None


class NearbyTransport(Transport):
    """One rank's exchanges over ``wires`` to its peers; ``specs`` gives the tensor of every edge.

    With ``room`` a send waits while so many of its edge are to be taken.
    """

    def __init__(self, wires: Mapping[int, Wire], specs: Mapping[Edge, TensorSpec], room: int | None = None) -> None:
        self._wires, self._specs, self._room = wires, specs, room
        self._coming: dict[tuple[Edge, int], Receive] = {}

    def post(self, receive: Receive) -> None:
        """Know from whom it comes."""
        self._coming[receive.edge, receive.microbatch] = receive

    def take(self, edge: Edge, microbatch: int) -> Tensor:
        """Return what came along ``edge`` for ``microbatch``; waits until it is there."""
        receive = self._coming.pop((edge, microbatch))
        with exchanging(receive, receive.peer):
            return self._wires[receive.peer].take((lane(edge), microbatch), self._specs[edge])

    def await_room(self, send: Send) -> bool:
        """Wait for room, if there is a limit."""
        if self._room is None:
            return False
        with exchanging(send, send.peer):
            return self._wires[send.peer].await_room(lane(send.edge), self._room)

    def send(self, send: Send, tensor: Tensor) -> None:
        """Give ``tensor`` to the peer."""
        with exchanging(send, send.peer):
            self._wires[send.peer].give((lane(send.edge), send.microbatch), tensor, self._specs[send.edge])

"""How do two processes of one machine give each other tensors? By memory that both have, and notes of what is there.

gloo goes through the loopback's TCP, where a thread at each end has to be woken for every part of a message. On cores
that compute that takes each end 0.3 to 0.6 ms of a message; a copy into shared memory and a note about it take 0.1 ms.
Neither memory nor sockets are in any folder, so nothing is left whoever dies; that somebody did shows in his socket.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import timedelta
from hmac import compare_digest
from math import ceil
from typing import Final

import torch
from torch import Tensor

from ...model.network import TensorSpec
from ..transport import everybodys, exchanging

Message = tuple[int, int]  # what it is, and the how manieth of these; for both ends to tell messages apart

_NOTE: Final = struct.Struct("=4q")  # what has happened, the message, and its place in memory
_GIVEN, _WANTED, _TAKEN = range(3)
_HEARD: Final = 128 * _NOTE.size  # bytes at once, and the most that is said at once
_TIME: Final = struct.Struct("@ll")  # seconds and microseconds, as sockets want them
_LONGEST_MS: Final = 2**31 - 1  # that can be waited at once
_WHO: Final = struct.Struct("=3i")  # process, user and group of who connects
_RANK: Final = struct.Struct("=q")
_SECRET: Final = 16  # bytes by which a process that connects is known to be one of the run's


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
    """The way to another process and back. What goes out is written to memory of our own, of which slots are used again
    when the other has read them; what comes in is read from the other's.

    ConnectionError where the other has gone, TimeoutError where it says nothing while ``timeout`` is waited for it.
    """

    def __init__(self, link: socket.socket, mine: int, its: int, timeout: timedelta) -> None:
        self._link, self._mine, self._its = link, _Memory(mine), _Memory(its)
        self._timeout_s = timeout.total_seconds()
        self._free: dict[TensorSpec, list[int]] = {}  # places of our own that can be written to
        self._full: dict[int, TensorSpec] = {}  # those that are to be read, and for what they were made
        self._given: dict[Message, int] = {}  # what there is to be taken, and where
        self._wanted: set[Message] = set()  # what the other is ready for
        self._unsaid = b""  # goes with the next note
        link.settimeout(None)
        limit = _TIME.pack(int(self._timeout_s), max(1, timeout.microseconds))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._either = select.poll()  # until there is room to say something, or something to hear
        self._either.register(link, select.POLLIN | select.POLLOUT)

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
        self._link.close()
        for memory in (self._mine, self._its):
            memory.slots.clear()
            os.close(memory.file)

    def _note(self, what: int, message: Message, place: int = 0) -> None:
        self._unsaid += _NOTE.pack(what, *message, place)

    def _say(self) -> bool:
        """Say what is unsaid; whether the other is there to be told.

        Until there is room for it, what the other says is heard: so two that have much to say don't wait for each
        other.
        """
        said, self._unsaid = self._unsaid, b""
        try:
            while not self._sent(said):
                if not self._either.poll(min(_LONGEST_MS, ceil(1000 * self._timeout_s))):
                    raise self._silence()
                self._hear(patiently=False)
        except ConnectionError:
            return False
        return True

    def _sent(self, said: bytes) -> bool:
        try:
            return self._link.send(said, socket.MSG_DONTWAIT) > 0
        except BlockingIOError:
            return False

    def _hear(self, patiently: bool = True) -> None:
        """Take in what the other has said; ``patiently`` wait for something."""
        try:
            heard = self._received(0 if patiently else socket.MSG_DONTWAIT)
        except BlockingIOError as error:
            if patiently:
                raise self._silence() from error
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

    def _received(self, flags: int) -> bytes:
        try:
            return self._link.recv(_HEARD, flags)
        except ConnectionResetError:  # told once, where the other hadn't heard all; what it said is still there
            return self._link.recv(_HEARD, flags)

    def _silence(self) -> TimeoutError:
        return TimeoutError(f"nothing for {self._timeout_s:g} s")


# --- the connecting -------------------------------------------------------------------------------------------------


def open_wires(rank: int, peers: Collection[int], machine: str, timeout: timedelta) -> dict[int, Wire] | None:
    """Return wires from ``rank`` to its ``peers``, or None unless all ranks are on one ``machine`` that has such.

    All ranks call this together, and each is among its peers' peers.
    """
    with exchanging("the connecting of processes", *peers):
        listener, secret = _listener(), secrets.token_bytes(_SECRET)
        here = None if listener is None else (machine, _network(), listener.getsockname()[1:].decode(), secret.hex())
        all_here = everybodys(here)
        if listener is None:
            return None
        with closing(listener):
            there = [x for x in all_here if x is not None]
            if len(there) < len(all_here) or len({tuple(x[:2]) for x in there}) > 1:
                return None
            listener.settimeout(timeout.total_seconds())
            links: dict[int, socket.socket] = {}
            for peer in peers:
                if peer > rank:
                    links[peer] = link = _socket()
                    link.settimeout(timeout.total_seconds())
                    _, _, name, its_secret = there[peer]
                    link.connect(b"\0" + name.encode())
                    link.send(bytes.fromhex(its_secret) + _RANK.pack(rank))
            links |= _accepted(listener, secret, len(peers) - len(links), timeout)
            return _wires(links, timeout)


def _accepted(listener: socket.socket, secret: bytes, count: int, timeout: timedelta) -> dict[int, socket.socket]:
    """Return the links of ``count`` peers that connect to ``listener`` and know its ``secret``, by rank.

    Its name stands in /proc, so that anybody on the machine may connect. Those of other users are shown out at once,
    those that say something else when they do; those that say nothing keep nobody waiting.
    """
    until, links = time.monotonic() + timeout.total_seconds(), dict[int, socket.socket]()
    with ExitStack() as silent, selectors.DefaultSelector() as heard:
        heard.register(listener, selectors.EVENT_READ)
        while len(links) < count:
            ready = heard.select(max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"nothing for {timeout.total_seconds():g} s")
            for link in (key.fileobj for key, _ in ready):
                assert isinstance(link, socket.socket), "nothing else is registered"
                if link is listener:
                    new = silent.enter_context(listener.accept()[0])
                    _, user, _ = _WHO.unpack(new.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _WHO.size))
                    if user == os.geteuid():
                        heard.register(new, selectors.EVENT_READ)
                    else:
                        new.close()
                    continue
                heard.unregister(link)
                said = link.recv(_HEARD, socket.MSG_DONTWAIT)
                if len(said) == _SECRET + _RANK.size and compare_digest(said[:_SECRET], secret):
                    (rank,) = _RANK.unpack(said[_SECRET:])
                    links[rank] = socket.socket(fileno=link.detach())
                else:
                    link.close()
    return links


def _wires(links: Mapping[int, socket.socket], timeout: timedelta) -> dict[int, Wire]:
    """Return the wire to each peer over the link to it, at whose other end the same is done.

    All are given memory before any is waited for, as peers may wait for each other in a circle.
    """
    mine = {peer: os.memfd_create("pipeplan") for peer in links}
    for peer, link in links.items():
        socket.send_fds(link, [b"memory"], [mine[peer]])
    found: dict[int, Wire] = {}
    for peer, link in links.items():
        _, files, _, _ = socket.recv_fds(link, _HEARD, 1)
        if not files:
            raise ConnectionError("the other process has closed its connection")
        os.set_inheritable(files[0], False)
        found[peer] = Wire(link, mine[peer], files[0], timeout)
    return found


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _listener() -> socket.socket | None:
    """Return a socket that others can connect to by a name that is in no folder; None where there is no such thing."""
    if sys.platform != "linux":
        return None
    found = _socket()
    try:
        os.close(os.memfd_create("pipeplan"))
        found.bind(b"\0pipeplan-" + secrets.token_hex(_SECRET).encode())
        found.listen(socket.SOMAXCONN)
    except OSError:
        found.close()
        return None
    return found


def _network() -> str:
    """Return what tells containers apart in which such names aren't the same."""
    return os.readlink("/proc/self/ns/net") if os.path.exists("/proc/self/ns/net") else ""

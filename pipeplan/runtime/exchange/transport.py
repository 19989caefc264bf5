"""What moves tensors between ranks? The protocol that wires, NCCL and threads share, and what is alike in them."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PipeplanError
from ..lowering.instructions import Edge, Instruction, Receive, Send, sentence

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
    """What moves tensors between ranks; one that has nothing to do for some of this leaves it out."""

    def start(self) -> None:
        """Begin."""
        return

    def post(self, receive: Receive) -> None:
        """Be ready for a message."""
        return

    def take(self, edge: Edge, microbatch: int) -> Tensor:
        """Return a message, waiting for it."""

    def look_ahead(self, edge: Edge) -> None:
        """Be ready for what comes next along ``edge``, once a message has been taken."""
        return

    def await_room(self, send: Send) -> bool:
        """Wait until the message that is sent next can be under way; whether there was anything to wait for."""

    def send(self, send: Send, tensor: Tensor) -> None:
        """Send a message."""

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        return


class PeerLost(PipeplanError):
    """An exchange failed: the other rank has gone or doesn't answer. Seldom the cause, often the first symptom.

    ``peers`` are those that it might be, as far as that is known.
    """

    def __init__(self, message: str, *peers: int) -> None:
        super().__init__(message)
        self.peers = peers


_OF_OTHERS: Final = (RuntimeError, ConnectionError, TimeoutError)  # what gloo and NCCL raise, and what wires do


_processes: list[int] = []  # the numbers of those that are ranks to this process; without any those of the ranks


def number_processes(numbers: Sequence[int]) -> None:
    """Let each rank that this process exchanges with be that process of ``numbers``, as others know it that fail."""
    _processes[:] = numbers


@contextmanager
def exchanging(what: str | Instruction, *peers: int) -> Iterator[None]:
    """Turn what gloo, NCCL and wires raise into PeerLost, which names the exchange and knows the ``peers``.

    A fault of the own device stays one, from NCCL too. Messages are sent and received within such contexts, so nothing
    is put into words before it fails.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # a GPU that is full, or has failed
        raise
    except _OF_OTHERS as error:
        words = f"{what if isinstance(what, str) else sentence(what)}: {_cause(str(error))}"
        if "unhandled cuda error" in words:  # of NCCL's calls here
            raise (torch.OutOfMemoryError if "out of memory" in words else torch.AcceleratorError)(words) from error
        known = (_processes[peer] if _processes else peer for peer in peers)
        raise PeerLost(words, *known) from error


def _cause(words: str) -> str:
    """Return what an error says in one line: the first, and what NCCL puts behind it as its last error."""
    first, _, rest = words.strip().partition("\n")
    plain = first.rpartition("] ")[2] if first.startswith("[") else first
    plain = plain.partition(". This is typically caused by ")[0]  # gloo's advice, on whatever goes wrong
    last = rest.partition("Last error:")[2].strip().partition("\n")[0].rstrip()
    return f"{plain}: {last}" if last else plain


LAZY = "TORCH_GLOO_LAZY_INIT"
FILES = 2**16  # that a process may have open


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

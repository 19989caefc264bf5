"""What moves tensors between ranks? The protocol that gloo, NCCL and message-driven transports share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PipeplanError
from ..lowering.instructions import Edge, Receive, Send, sentence


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


@contextmanager
def exchanging(what: str, *peers: int) -> Iterator[None]:
    """Turn what gloo and NCCL raise into PeerLost, which names the exchange and knows the ``peers``.

    What the device itself lacks, which is no fault of others, stays as it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLost(f"{what}: {_cause(str(error))}", *peers) from error


def _cause(words: str) -> str:
    """Return what an error says in one line: the first, and what NCCL puts behind it as its last error."""
    first, _, rest = words.strip().partition("\n")
    plain = first.rpartition("] ")[2] if first.startswith("[") else first
    _, found, last = rest.partition("Last error:")
    lines = [line.strip() for line in last.splitlines() if line.strip()]
    return f"{plain}: {lines[0]}" if found and lines else plain


class Sends:
    """The sends of one rank, one under way on each edge: the next waits for it, and only then may its tensor go."""

    def __init__(self) -> None:
        self._sent: dict[Edge, tuple[Send, dist.Work, Tensor]] = {}

    def issue(self, send: Send, tensor: Tensor, tag: int = 0, group: Any = None) -> None:
        """Send ``tensor`` in ``group`` (None: all ranks), once the edge's send before it is through."""
        self.await_room(send)
        tensor = tensor.contiguous()
        with exchanging(sentence(send), send.peer):
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
        with exchanging(sentence(send), send.peer):
            work.wait()
        del self._sent[edge]

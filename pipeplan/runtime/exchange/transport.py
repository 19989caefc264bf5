"""What moves tensors between ranks: the protocol that gloo, NCCL and message-driven transports share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from ...errors import PipeplanError
from ..lowering.instructions import (
    Edge,
    Receive,
    Send,
)


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

    def send(self, send: Send, tensor: Tensor) -> None:
        """Send a message."""

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""


class PeerLost(PipeplanError):
    """An exchange failed: the other rank has gone or doesn't answer. Seldom the cause, often the first symptom."""


@contextmanager
def exchanging(what: str) -> Iterator[None]:
    """Turn what gloo raises into PeerLost, which names the exchange."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        _, _, plain = message.rpartition("] ") if message.startswith("[") else ("", "", message)
        raise PeerLost(f"{what}: {plain}") from error

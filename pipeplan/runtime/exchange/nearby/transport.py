"""How do activations and gradients travel within one machine? Along edges, by wires, when their receives are posted.

The rules are those of :mod:`..gloo`, so the same order of instructions comes through: the next message of an edge waits
at its sender until the receive of the one before it has been posted. So memory has room for those that are posted, and
one more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Final

from torch import Tensor

from ...lowering.instructions import Edge, Instruction, Receive, Send
from ...model.network import TensorSpec
from ..posting import PostingTransport
from ..transport import exchanging, lane
from .wires import Message, Wire, open_wires

PING: Final[Message] = (-1, 0)


class Nearby:
    """The wires of a rank to its peers."""

    def __init__(self, wires: Mapping[int, Wire]) -> None:
        self._wires = wires

    def transport(self, instructions: Sequence[Instruction], specs: Mapping[Edge, TensorSpec]) -> NearbyTransport:
        """Return what moves the messages of ``instructions``."""
        return NearbyTransport(instructions, specs, self._wires)

    def pass_on(self, tensor: Tensor, peer: int, sends: bool) -> Tensor:
        """Give ``peer`` a tensor, or take one like it from there, beside all messages; return it."""
        spec, wire = TensorSpec.of(tensor), self._wires[peer]
        if not sends:
            return wire.take(PING, spec)
        wire.give(PING, tensor, spec)
        return tensor

    def close(self) -> None:
        """End the wires."""
        for wire in self._wires.values():
            wire.close()


def open_nearby(rank: int, peers: Collection[int], machine: str, timeout: timedelta) -> Nearby | None:
    """Return the wires from ``rank`` to its ``peers``, None unless all are on one ``machine`` that has such.

    All ranks call this together.
    """
    wires = open_wires(rank, peers, machine, timeout)
    return None if wires is None else Nearby(wires)


class NearbyTransport(PostingTransport[None]):
    """One rank's exchanges over ``wires`` to its peers; ``specs`` gives the tensor of every edge."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        specs: Mapping[Edge, TensorSpec],
        wires: Mapping[int, Wire],
        ahead: int = 1,
    ) -> None:
        super().__init__(instructions, ahead)
        self._specs, self._wires = specs, wires
        self._sent: dict[Edge, Send] = {}  # the last one of each edge, until it is known that it was wanted

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

    def _issue(self, receive: Receive) -> None:
        self._wires[receive.peer].want(_message(receive))

    def _arrived(self, receive: Receive, posted: None) -> Tensor:
        with exchanging(receive, receive.peer):
            return self._wires[receive.peer].take(_message(receive), self._specs[receive.edge])


def _message(exchange: Send | Receive) -> Message:
    return lane(exchange.edge), exchange.microbatch

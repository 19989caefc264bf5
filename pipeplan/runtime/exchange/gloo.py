"""How do activations and gradients travel over gloo? Along edges, one send under way on each.

gloo's send is a rendezvous, its tags match in any order, and a message that doesn't fit its buffer aborts the process.
So receives are posted ahead of their use with tensors of the agreed shape, the tag names edge and microbatch, and a
sent tensor is kept until its handle has been waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..lowering.instructions import Edge, Instruction, Receive, Send
from ..model.network import TensorSpec
from .posting import PostingTransport
from .transport import Sends, exchanging

LARGEST_TAG = 2**31  # gloo's tags are 32 bits, and torch refuses negative ones


class GlooTransport(PostingTransport[tuple[dist.Work, Tensor]]):
    """One rank's exchanges in the default process group.

    ``specs`` gives the tensor of every edge, ``instructions`` the rank's order. One send is under way on each edge; the
    next waits for it. With ``ahead`` 1 a cut costs each of its ends one buffer per direction, as the memory model says.
    """

    def __init__(
        self, instructions: Sequence[Instruction], specs: Mapping[Edge, TensorSpec], stages: int, ahead: int = 1
    ) -> None:
        super().__init__(instructions, ahead)
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

    def _issue(self, receive: Receive) -> tuple[dist.Work, Tensor]:
        spec = self._specs[receive.edge]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        with exchanging(receive, receive.peer):
            work = dist.irecv(tensor, receive.peer, tag=self._tag(receive.edge, receive.microbatch))
        assert work is not None, "every rank is in the default group"
        return work, tensor

    def _arrived(self, receive: Receive, posted: tuple[dist.Work, Tensor]) -> Tensor:
        work, tensor = posted
        with exchanging(receive, receive.peer):
            work.wait()
        return tensor

    def _tag(self, edge: Edge, microbatch: int) -> int:
        kind, stage = edge
        lanes = 2 * self._stages
        return microbatch % (LARGEST_TAG // lanes) * lanes + 2 * stage + (kind == "B")

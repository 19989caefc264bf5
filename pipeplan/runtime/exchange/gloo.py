"""How do activations and gradients travel over gloo? Along edges, one send under way on each.

gloo's send is a rendezvous, its tags match in any order, and a message that doesn't fit its buffer aborts the process.
So receives are posted ahead of their use with tensors of the agreed shape, the tag names edge and microbatch, and a
sent tensor is kept until its handle has been waited for.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..lowering.instructions import Edge, Instruction, Receive, Send
from ..model.network import TensorSpec
from .posting import PostingTransport
from .transport import Receiving, Sends, lane

LAZY = "TORCH_GLOO_LAZY_INIT"
FILES = 2**16  # that a process may have open
LARGEST_TAG = 2**31  # gloo's tags are 32 bits, and torch refuses negative ones


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


class GlooTransport(PostingTransport[Receiving]):
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

    def _issue(self, receive: Receive) -> Receiving:
        spec = self._specs[receive.edge]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        return Receiving(receive, tensor, self._tag(receive.edge, receive.microbatch))

    def _arrived(self, receive: Receive, posted: Receiving) -> Tensor:
        return posted.wait()

    def _tag(self, edge: Edge, microbatch: int) -> int:
        lanes = 2 * self._stages
        return microbatch % (LARGEST_TAG // lanes) * lanes + lane(edge)

"""How do activations and gradients travel over gloo? Along edges, one send under way on each.

gloo's send is a rendezvous, its tags match in any order, and a message that doesn't fit its buffer aborts the process.
So receives are posted ahead of their use with tensors of the agreed shape, the tag names edge and microbatch, and a
sent tensor is kept until its handle has been waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..lowering.instructions import Edge, Instruction, Receive, Send
from ..lowering.repeats import Repeated, Upcoming
from ..model.network import TensorSpec
from .transport import Sends, exchanging

LARGEST_TAG = 2**31  # gloo's tags are 32 bits, and torch refuses negative ones


class GlooTransport:
    """One rank's exchanges in the default process group.

    ``specs`` gives the tensor of every edge, ``instructions`` the rank's order, in which receives are posted: ``ahead``
    of them on each edge before they are asked for. One send is under way on each edge; the next waits for it. With
    ``ahead`` 1 a cut costs each of its ends one buffer per direction, as the memory model says.
    """

    def __init__(
        self, instructions: Sequence[Instruction], specs: Mapping[Edge, TensorSpec], stages: int, ahead: int = 1
    ) -> None:
        self._specs = specs
        self._stages = stages
        self._ahead = ahead
        receives = Repeated.of(instructions).where(lambda x: isinstance(x, Receive))
        edges = dict.fromkeys(x.edge for x in receives.kinds() if isinstance(x, Receive))
        self._coming = {edge: Upcoming(receives.where(partial(_comes_along, edge))) for edge in edges}
        self._posted: dict[tuple[Edge, int], tuple[Receive, dist.Work, Tensor]] = {}
        self._waiting: dict[Edge, int] = dict.fromkeys(self._coming, 0)  # posted, and not taken yet
        self._sends = Sends()

    def start(self) -> None:
        """Post the first receives."""
        for edge in self._coming:
            self.look_ahead(edge)

    def post(self, receive: Receive) -> None:
        """Post ``receive`` now unless it has been already."""
        while (receive.edge, receive.microbatch) not in self._posted and self._coming[receive.edge]:
            self._post_next(receive.edge)

    def take(self, edge: Edge, microbatch: int) -> Tensor:
        """Return what came along ``edge`` for ``microbatch``; waits until it is there."""
        receive, work, tensor = self._posted.pop((edge, microbatch))
        with exchanging(receive, receive.peer):
            work.wait()
        self._waiting[edge] -= 1
        return tensor

    def look_ahead(self, edge: Edge) -> None:
        """Post the next receives of ``edge``, as many as may be there at once."""
        while self._waiting[edge] < self._ahead and self._coming[edge]:
            self._post_next(edge)

    def await_room(self, send: Send) -> bool:
        """Wait until the edge's last send is through."""
        return self._sends.await_room(send)

    def send(self, send: Send, tensor: Tensor) -> None:
        """Send ``tensor``, once the edge's send before it is through."""
        self._sends.issue(send, tensor, self._tag(send.edge, send.microbatch))

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._sends.finish()

    def _post_next(self, edge: Edge) -> None:
        receive = self._coming[edge].popleft()
        assert isinstance(receive, Receive), "only receives are coming"
        spec = self._specs[edge]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        with exchanging(receive, receive.peer):
            work = dist.irecv(tensor, receive.peer, tag=self._tag(edge, receive.microbatch))
        assert work is not None, "every rank is in the default group"
        self._posted[edge, receive.microbatch] = receive, work, tensor
        self._waiting[edge] += 1

    def _tag(self, edge: Edge, microbatch: int) -> int:
        kind, stage = edge
        lanes = 2 * self._stages
        return microbatch % (LARGEST_TAG // lanes) * lanes + 2 * stage + (kind == "B")


def _comes_along(edge: Edge, instruction: Instruction) -> bool:
    return isinstance(instruction, Receive) and instruction.edge == edge

"""How do activations and gradients travel over gloo? Along edges, one send under way on each.

gloo's send is a rendezvous, its tags match in any order, and a message that doesn't fit its buffer aborts the process.
So receives are posted ahead of their use with tensors of the agreed shape, the tag names edge and microbatch, and a
sent tensor is kept until its handle has been waited for.
"""

from __future__ import annotations

import os
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..lowering.instructions import Edge, Instruction, Receive, Send
from ..lowering.repeats import Repeated
from ..model.network import TensorSpec
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


class PostingTransport(ABC):
    """Posts receives in the order of a rank's ``instructions``, on each edge one before its turn.

    So a cut costs each of its ends one buffer per direction, as the memory model says.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        receives = Repeated.of(instructions).where(lambda x: isinstance(x, Receive))
        edges = dict.fromkeys(x.edge for x in receives.kinds() if isinstance(x, Receive))
        self._coming = {edge: iter(receives.where(partial(_comes_along, edge))) for edge in edges}
        self._posted: dict[tuple[Edge, int], Callable[[], Tensor]] = {}
        self._waiting: dict[Edge, int] = dict.fromkeys(self._coming, 0)  # posted, and not taken yet

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
        tensor = self._posted.pop((edge, microbatch))()
        self._waiting[edge] -= 1
        return tensor

    def look_ahead(self, edge: Edge) -> None:
        """Post the next receive of ``edge``, unless there is one that waits to be taken."""
        if not self._waiting[edge]:
            self._post_next(edge)

    @abstractmethod
    def _issue(self, receive: Receive) -> Callable[[], Tensor]:
        """Be ready for a message; return what waits for it."""

    def _post_next(self, edge: Edge) -> bool:
        """Whether there was another one to post."""
        receive = next(self._coming[edge], None)
        if isinstance(receive, Receive):
            self._posted[edge, receive.microbatch] = self._issue(receive)
            self._waiting[edge] += 1
        return receive is not None


def _comes_along(edge: Edge, instruction: Instruction) -> bool:
    return isinstance(instruction, Receive) and instruction.edge == edge


class GlooTransport(PostingTransport):
    """One rank's exchanges in the default process group.

    ``specs`` gives the tensor of every edge, ``instructions`` the rank's order. One send is under way on each edge; the
    next waits for it.
    """

    def __init__(self, instructions: Sequence[Instruction], specs: Mapping[Edge, TensorSpec], stages: int) -> None:
        super().__init__(instructions)
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

    def _issue(self, receive: Receive) -> Callable[[], Tensor]:
        spec = self._specs[receive.edge]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        return Receiving(receive, tensor, self._tag(receive.edge, receive.microbatch)).wait

    def _tag(self, edge: Edge, microbatch: int) -> int:
        lanes = 2 * self._stages
        return microbatch % (LARGEST_TAG // lanes) * lanes + lane(edge)

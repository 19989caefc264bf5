"""When is a rank ready for a message? At the receive's place among its instructions, or before: a few ahead of use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from ..lowering.instructions import Edge, Instruction, Receive
from ..lowering.repeats import Repeated, Upcoming

Posted = TypeVar("Posted")


class PostingTransport(ABC, Generic[Posted]):
    """Posts receives in the order of a rank's ``instructions``, on each edge ``ahead`` of them before their turn."""

    def __init__(self, instructions: Sequence[Instruction], ahead: int = 1) -> None:
        self._ahead = ahead
        receives = Repeated.of(instructions).where(lambda x: isinstance(x, Receive))
        edges = dict.fromkeys(x.edge for x in receives.kinds() if isinstance(x, Receive))
        self._coming = {edge: Upcoming(receives.where(partial(_comes_along, edge))) for edge in edges}
        self._posted: dict[tuple[Edge, int], tuple[Receive, Posted]] = {}
        self._waiting: dict[Edge, int] = dict.fromkeys(self._coming, 0)  # posted, and not taken yet

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
        tensor = self._arrived(*self._posted.pop((edge, microbatch)))
        self._waiting[edge] -= 1
        return tensor

    def look_ahead(self, edge: Edge) -> None:
        """Post the next receives of ``edge``, as many as may be there at once."""
        while self._waiting[edge] < self._ahead and self._coming[edge]:
            self._post_next(edge)

    @abstractmethod
    def _issue(self, receive: Receive) -> Posted:
        """Be ready for a message."""

    @abstractmethod
    def _arrived(self, receive: Receive, posted: Posted) -> Tensor:
        """Return a message, waiting for it."""

    def _post_next(self, edge: Edge) -> None:
        receive = self._coming[edge].popleft()
        assert isinstance(receive, Receive), "only receives are coming"
        self._posted[edge, receive.microbatch] = receive, self._issue(receive)
        self._waiting[edge] += 1


def _comes_along(edge: Edge, instruction: Instruction) -> bool:
    return isinstance(instruction, Receive) and instruction.edge == edge

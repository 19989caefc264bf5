"""How are gradients summed over a stage's replicas? In chunks that are under way while others are used.

A chunk is summed as by a ring, each rank adding up one share of it, with as many bytes: 2(r-1)/r of the chunk to and
from each rank. But every element is added in the order of the ranks, wherever it stands in a chunk, and 16-bit ones in
32 bits; so the sum's bits don't depend on how a gradient is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import EmulatedLink, Group, exchanging, wait_until

WHAT = "the sum of gradients"


def added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of ``parts`` in their order, in the first one's place or, of 16-bit ones, in 32 bits elsewhere."""
    total = parts[0].float() if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total


def shares(size: int, ranks: int, first: int = 0) -> list[int]:
    """Return how many of ``size`` elements each of ``ranks`` adds up; those from ``first`` on have one more."""
    share, more = divmod(size, ranks)
    return [share + ((rank - first) % ranks < more) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class SumGroup:
    """The ranks of ``group``, whose sums take as long as over ``link``, if there is one."""

    group: Group = None
    link: EmulatedLink | None = None


class ChunkSum:
    """The sum of ``chunk`` over ``group``, in place: call :meth:`begin`, :meth:`turn`, :meth:`end` in this order.

    Between them nothing waits. Who has use for its own share of the sum alone, and then something to give to all in its
    place, calls :meth:`add` and :meth:`spread` instead of :meth:`turn`. All ranks of the group call the methods of all
    chunks in one order, with one ``first`` for each chunk (:func:`shares`).
    """

    def __init__(self, chunk: Tensor, over: SumGroup, first: int = 0) -> None:
        group = over.group
        self._chunk, self._group, self._link = chunk, group, over.link
        self._ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._others = [other for other in dist.get_process_group_ranks(group) if other != dist.get_rank()]
        self._shares = shares(chunk.numel(), self._ranks, first)
        self._own = self._shares[rank]
        begin = sum(self._shares[:rank])
        self._place = slice(begin, begin + self._own)
        self._parts = self._nothing = chunk.new_empty(0)
        self._work: Any = None
        self._due_ns = 0

    def begin(self) -> None:
        """Send every rank its share of the chunk."""
        self._parts = self._chunk.new_empty(self._own * self._ranks)
        self._exchange(self._parts, self._chunk, [self._own] * self._ranks, self._shares)

    def turn(self) -> None:
        """Wait for everybody's part of the own share, add them up, and send the sum to all."""
        self._wait()
        parts = self._parts.view(self._ranks, self._own)
        parts.copy_(added(parts.unbind()).to(parts.dtype, copy=True))
        self._exchange(self._chunk, self._parts, self._shares, [self._own] * self._ranks)

    def add(self) -> None:
        """Wait for everybody's part of the own share and put their sum into it."""
        self._wait()
        self._chunk[self._place].copy_(added(self._parts.view(self._ranks, self._own).unbind()))
        self._parts = self._nothing

    def spread(self) -> None:
        """Send what the own share of the chunk has by now to all."""
        self._parts = self._chunk[self._place].repeat(self._ranks)
        self._exchange(self._chunk, self._parts, self._shares, [self._own] * self._ranks)

    def end(self) -> None:
        """Wait until the chunk is summed, or has what all have spread."""
        self._wait()
        self._parts = self._nothing

    @property
    def scratch(self) -> Tensor:
        """What is needed beside the chunk while something is under way: as much again."""
        return self._parts

    def _exchange(self, into: Tensor, source: Tensor, coming: list[int], going: list[int]) -> None:
        if self._link is not None:
            self._due_ns = self._link.due_ns((sum(going) - self._own) * source.element_size())
        with exchanging(WHAT, *self._others):
            self._work = dist.all_to_all_single(into, source, coming, going, group=self._group, async_op=True)

    def _wait(self) -> None:
        with exchanging(WHAT, *self._others):
            self._work.wait()
        if self._link is not None:
            wait_until(self._due_ns)

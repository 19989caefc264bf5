"""How do a stage's gradients become new weights? All at once or in buckets, and all of them or a replica's share.

The masters are what the optimizer works on: the weights themselves, or copies in 32 bits of 16-bit ones, or the true
values of predicted ones. Between updates they are those of the newest version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...device import CPU
from ...exchange.replica_sum import ChunkSum
from ..weights.buckets import cut_into_buckets
from ..weights.late import delayed
from ..weights.versions import Versions
from .bucketed_optimizer import BucketedOptimizer
from .optimizers import MakeOptimizer, MakeSchedule
from .shards import Kept, Rows, SharedChunk, Sharing, gathered, shared_chunks
from .stage_optimizer import Factor, Rates, Stepping, WholeOptimizer

Parted = Callable[[Sequence[nn.Parameter], Sequence[nn.Parameter]], list[dict[str, Any]] | None]


def in_one_group(leaves: Sequence[nn.Parameter], masters: Sequence[nn.Parameter]) -> None:
    """Ask for no parameter groups."""


class Stepper:
    """Steps the weights of ``versions`` as ``how`` says; ``masters`` has the 32-bit values of 16-bit ones.

    ``parted`` makes torch's parameter groups of masters by the weights that they are for.
    """

    def __init__(
        self,
        versions: Versions,
        make_optimizer: MakeOptimizer,
        make_schedule: MakeSchedule | None = None,
        how: Stepping = Stepping(),  # noqa: B008, RUF100 -- it is frozen
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        parted: Parted = in_one_group,
    ) -> None:
        leaves = versions.installed
        device = leaves[0].device if leaves else CPU
        self._versions, self._how, self._mixed = versions, how, bool(masters) or how.predicts
        home = CPU if how.offload else device
        values = [masters[x] if masters else x.data.clone() if how.predicts else x.data for x in leaves]
        delays = how.delays or [0.0] * len(leaves)
        self._masters = [
            delayed(nn.Parameter(x.to(home) if self._mixed else x), delay)
            for x, delay in zip(values, delays, strict=True)
        ]
        if how.predicts and versions.in_turns:
            versions.true = self._masters
        self._shapes = [leaf.shape for leaf in leaves]
        self.buckets = cut_into_buckets(leaves, how.bucket, len(leaves) - versions.own)
        self.chunks = None if how.sharing is None else self._chunks_of(how.sharing)
        rates = self.rates = Rates(self._masters, make_optimizer, make_schedule, parted(leaves, self._masters))
        self._optimizer: WholeOptimizer | BucketedOptimizer
        if (how.bucket is None and how.sharing is None) or not leaves:
            self._optimizer = WholeOptimizer(self._masters, rates, self._mixed, how.observed)
        else:
            rows = None if self.chunks is None else Rows(self.chunks)
            own = self.buckets if self.chunks is None else [bucket for chunk in self.chunks for bucket in chunk.own]
            self._optimizer = BucketedOptimizer(self._masters, rates, self._mixed, device, own, how, rows)
        self._whole: list[Kept] | None = None  # of all shares, while a checkpoint is written or read

    def _chunks_of(self, sharing: Sharing) -> tuple[SharedChunk, ...]:
        apart = sum(bucket.slices[0].index >= self._versions.own for bucket in self.buckets)
        return shared_chunks(self.buckets, apart, sharing, self._how.bucket)

    @property
    def by_bucket(self) -> bool:
        """Whether each of :attr:`buckets` is a part of what is stepped."""
        return self._optimizer.parts == len(self.buckets)

    def parts(self, tied: bool) -> range:
        """Return the optimizer's parts that an update steps, those of weights ``tied`` to other ranks' among them."""
        every, own = self._optimizer.parts, self._versions.own
        if tied:
            return range(every)
        if self.chunks is not None:
            return range(sum(len(chunk.own) for chunk in self.chunks if chunk.summed))
        return range(sum(x.slices[0].index < own for x in self.buckets) if self.by_bucket else every)

    def begin(self) -> None:
        """Let masters that are weights themselves be in the version that is being made."""
        for master, made in zip(self._masters, self._versions.made, strict=True):
            if not self._mixed and master.data_ptr() != made.data_ptr():
                made.copy_(master.data)
                master.data = made

    def step(self, part: int, gradients: Sequence[Tensor | None], factor: Factor = 1.0) -> None:
        """Make one of the optimizer's parts of the version that is being made from ``gradients`` times ``factor``."""
        self._optimizer.step(part, gradients, factor, self._versions.made)

    def step_tied(self, gradients: Sequence[Tensor | None], factor: Factor) -> None:
        """Step the tied weights of the newest version, which no pass has used yet."""
        weights = self._versions.weights()
        stepped: list[Any] = [*[None] * self._versions.own, *weights[self._versions.own :]]
        whole = self.chunks is None and not self.by_bucket
        for part in range(0 if whole else self.parts(tied=False).stop, self._optimizer.parts):
            self._optimizer.step(part, gradients, factor, stepped)
        for chunk in self.chunks or ():
            if not chunk.summed:
                self._spread(chunk, weights)

    def show_true(self) -> None:
        """Let passes to come, of which none is under way, read the weights themselves; all replicas together."""
        if not self._how.predicts:
            return
        self._optimizer.settle()
        weights = self._versions.weights()
        rows = None if self.chunks is None else Rows(self.chunks)
        for index, weight in enumerate(weights):
            if rows is None:
                weight.copy_(self._masters[index].data)
            else:
                rows.put(index, self._masters[index].data, weight)
        for chunk in self.chunks or ():
            self._spread(chunk, weights)

    def _spread(self, chunk: SharedChunk, weights: Sequence[Tensor]) -> None:
        """Give the own share of ``chunk`` of ``weights`` to all, and take theirs."""
        assert self._how.sharing is not None, "only shares are spread"
        assert self._how.sharing.group is not None, "over those that share"
        row = torch.empty(chunk.stop - chunk.start, dtype=chunk.dtype, device=weights[0].device)
        chunk.give(weights, row)
        exchange = ChunkSum(row, self._how.sharing.group, chunk.first)
        exchange.spread()
        exchange.end()
        chunk.take(row, weights)

    def finish(self) -> None:
        """End an update of all weights."""
        self._optimizer.finish()

    # --- for checkpoints: whole weights and states ---

    def assemble(self) -> None:
        """Bring what replicas share together on the first of them, until :meth:`part` is called; all do so at once."""
        self._optimizer.settle()
        if self._how.sharing is not None:
            mixed = self._mixed
            kept = [Kept(x.data if mixed else None, self._optimizer.state_of(i)) for i, x in enumerate(self._masters)]
            self._whole = gathered(kept, self._shapes, self._rows_of, self._how.sharing)

    def _rows_of(self, rank: int) -> Rows:
        assert self._how.sharing is not None, "only shares have rows"
        return Rows(self._chunks_of(replace(self._how.sharing, rank=rank)))

    def make_room(self) -> None:
        """Have whole masters to be filled, of which :meth:`take_masters` takes the own share."""
        if self._how.sharing is not None:
            self._whole = [Kept(torch.empty(shape) if self._mixed else None, {}) for shape in self._shapes]

    def part(self) -> None:
        """Forget what others keep."""
        self._whole = None

    def master(self, index: int) -> Tensor:
        """Return the weight at ``index`` as the optimizer has it: the newest version's, in full precision."""
        whole = None if self._whole is None else self._whole[index].master
        return self._masters[index].data if whole is None else whole

    def state_of(self, index: int) -> Mapping[str, Any]:
        """Return what the optimizer remembers of the weight at ``index``."""
        return self._optimizer.state_of(index) if self._whole is None else self._whole[index].state

    def restore_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Let the optimizer remember ``state`` of the weight at ``index``."""
        self._optimizer.restore_state(index, state)

    def take_masters(self) -> None:
        """Give the newest version, if it has 16 bits, the values of the full-precision weights."""
        for index, weight in enumerate(self._versions.weights() if self._mixed else ()):
            whole = self.master(index)
            weight.copy_(whole)
            if self.chunks is not None:
                self._masters[index].data.copy_(Rows(self.chunks).taken(index, whole))
        self.part()

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the optimizer works on, and whether it is in host memory for want of room."""
        return self._optimizer.tensors()

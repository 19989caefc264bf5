"""How do a stage's gradients become new weights? All at once or in buckets, and all of them or a replica's share.

The masters are what the optimizer works on: the weights themselves, or copies in 32 bits of 16-bit ones, or the true
values of predicted ones; then the new values go to the others after a step. Between updates they are those of the
newest version. Elementwise optimizers give the same bits either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...device import CPU
from ...exchange.replica_sum import ChunkSum
from ..weights.buckets import Kept, Rows, SharedChunk, Sharing, cut_into_buckets, gathered, is_large, shared_chunks
from ..weights.late import delayed
from ..weights.versions import Versions
from .optimizers import MakeOptimizer, MakeSchedule
from .stage_optimizer import Factor, Rates, Stepping, changes

Parted = Callable[[Sequence[nn.Parameter], Sequence[nn.Parameter]], list[dict[str, Any]] | None]


class Stepper:
    """Steps the weights of ``versions`` all at once, as ``how`` says; ``masters`` has the 32-bit values of 16-bit ones.

    ``parted`` makes torch's parameter groups of masters by the weights that they are for.
    """

    def __init__(
        self,
        versions: Versions,
        make_optimizer: MakeOptimizer,
        make_schedule: MakeSchedule | None = None,
        how: Stepping = Stepping(),  # noqa: B008, RUF100 -- it is frozen
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        parted: Parted | None = None,
    ) -> None:
        leaves = versions.installed
        self._device = leaves[0].device if leaves else CPU
        self._versions, self._how, self._mixed = versions, how, bool(masters) or how.predicts
        home = CPU if how.offload else self._device
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
        groups = None if parted is None else parted(leaves, self._masters)
        self.rates = Rates(self._masters, make_optimizer, make_schedule, groups)
        self._whole: list[Kept] | None = None  # of all shares, while a checkpoint is written or read
        self._prepare()

    def _prepare(self) -> None:
        """Bring masters and state to where they are kept."""

    def _chunks_of(self, sharing: Sharing) -> tuple[SharedChunk, ...]:
        apart = sum(bucket.slices[0].index >= self._versions.own for bucket in self.buckets)
        return shared_chunks(self.buckets, apart, sharing, self._how.bucket)

    @property
    def every(self) -> int:
        """The number of parts that are stepped one after the other: 1, if anything is trained."""
        return 1 if self.rates.optimizer else 0

    @property
    def by_bucket(self) -> bool:
        """Whether each of :attr:`buckets` is a part of what is stepped."""
        return self.every == len(self.buckets)

    def parts(self, tied: bool) -> range:
        """Return the parts that an update steps, those of weights ``tied`` to other ranks' among them."""
        if tied:
            return range(self.every)
        if self.chunks is not None:
            return range(sum(len(chunk.own) for chunk in self.chunks if chunk.summed))
        own = self._versions.own
        return range(sum(x.slices[0].index < own for x in self.buckets) if self.by_bucket else self.every)

    def begin(self) -> None:
        """Let masters that are weights themselves be in the version that is being made."""
        for master, made in zip(self._masters, self._versions.made, strict=True):
            if not self._mixed and master.data_ptr() != made.data_ptr():
                made.copy_(master.data)
                master.data = made

    def step(self, part: int, gradients: Sequence[Tensor | None], factor: Factor = 1.0) -> None:
        """Make one of the parts of the version that is being made from ``gradients`` times ``factor``."""
        self._step(part, gradients, factor, self._versions.made)

    def _step(
        self, part: int, gradients: Sequence[Tensor | None], factor: Factor, weights: Sequence[Tensor | None]
    ) -> None:
        """Step a part; ``weights`` apart from masters get the new values."""
        assert self.rates.optimizer is not None, "otherwise there are no parts"
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.to(master.dtype)
        if changes(factor):
            torch._foreach_mul_([master.grad for master in self._masters if master.grad is not None], factor)
        self.rates.optimizer.step()
        if self._mixed:
            for master, weight in zip(self._masters, weights, strict=True):
                if weight is not None:
                    weight.copy_(self.rates.predicted(master, self.rates.group_of[master]))
        self._how.observed()
        for master in self._masters:
            master.grad = None

    def step_tied(self, gradients: Sequence[Tensor | None], factor: Factor) -> None:
        """Step the tied weights of the newest version, which no pass has used yet."""
        weights = self._versions.weights()
        stepped: list[Any] = [*[None] * self._versions.own, *weights[self._versions.own :]]
        whole = self.chunks is None and not self.by_bucket
        for part in range(0 if whole else self.parts(tied=False).stop, self.every):
            self._step(part, gradients, factor, stepped)
        for chunk in self.chunks or ():
            if not chunk.summed:
                self._spread(chunk, weights)

    def show_true(self) -> None:
        """Let passes to come, of which none is under way, read the weights themselves; all replicas together."""
        if not self._how.predicts:
            return
        self._settle()
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
        """End an update of all weights: the schedule goes on."""
        self.rates.advance()

    def _settle(self) -> None:
        """Wait until all is where it is kept."""

    # --- for checkpoints: whole weights and states ---

    def assemble(self) -> None:
        """Bring what replicas share together on the first of them, until :meth:`part` is called; all do so at once."""
        self._settle()
        if self._how.sharing is not None:
            mixed = self._mixed
            kept = [Kept(x.data if mixed else None, self._kept(i)) for i, x in enumerate(self._masters)]
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
        return self._kept(index) if self._whole is None else self._whole[index].state

    def _kept(self, index: int) -> dict[str, Any]:
        """Return what is remembered here, without Nones."""
        state = {} if self.rates.optimizer is None else self.rates.optimizer.state.get(self._masters[index], {})
        return {key: value for key, value in state.items() if value is not None}

    def restore_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Let the optimizer remember ``state`` of the weight at ``index``, next to it."""
        if self.rates.optimizer is not None and state:
            master = self._masters[index]
            known = {key: self.rates.at_home(key, x, master.device) for key, x in state.items()}
            self.rates.optimizer.state[master] = known

    def take_masters(self) -> None:
        """Give the newest version, if it has 16 bits, the values of the full-precision weights."""
        for index, weight in enumerate(self._versions.weights() if self._mixed else ()):
            whole = self.master(index)
            weight.copy_(whole)
            if self.chunks is not None:
                self._masters[index].data.copy_(Rows(self.chunks).taken(index, whole))
        self.part()

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the optimizer keeps, and whether it is in host memory for want of room on the device."""
        for index, master in enumerate(self._masters):
            yield master.data, False
            if master.grad is not None:
                yield master.grad, False
            yield from ((value, False) for value in self._kept(index).values() if is_large(value))

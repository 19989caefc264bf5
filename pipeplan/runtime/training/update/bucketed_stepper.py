"""How are weights stepped bucket by bucket, with little memory on the device?

With ``offload`` the 32-bit copies of 16-bit weights and the optimizer's state are in host memory, and a piece of a
bucket at a time is fetched, stepped and brought home (Myelin section V-B).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..weights.buckets import Slice, is_large
from .offload import PIECES, Fetched, Piece, host_rooms, in_pieces, region_size
from .optimizers import delay_of, delayed
from .stepper import Factor, Stepper, changes


class BucketedStepper(Stepper):
    """Steps bucket by bucket; offloaded are masters of 16-bit weights, and state.

    The optimizer must be elementwise. It sees the slices of one bucket as its weights; what it remembers of them is
    kept in tensors of the weights' shapes, so that no other bucket size makes a difference, or of slices that replicas
    share in rows. Device memory beside weights and gradient: one bucket of each thing that is on the host, and of the
    gradient in 32 bits.
    """

    def _prepare(self) -> None:
        how = self._how
        self._offload, self._buffers = how.offload, how.buffers
        own = self.buckets if self.chunks is None else [bucket for chunk in self.chunks for bucket in chunk.own]
        self._pieces = in_pieces(own, how.offload)
        self._order = [piece for pieces in self._pieces for piece in pieces]
        self._room = max((bucket.size for bucket in own), default=0)
        self._buffers.room = max(self._buffers.room, self._room)
        self._state: list[dict[str, Any]] = [{} for _ in self._masters]
        self._next: dict[int, dict[str, Any]] = {}  # counts, and what is new, of each weight after this update
        if self._mixed and how.offload:  # masters come from the host
            self.rates.steps_on(self._device)
        rows = self._rows
        self._kept_shapes = [x.shape if rows is None else (rows.sizes[i],) for i, x in enumerate(self._masters)]
        self._rooms = self._host_rooms()  # now, as locking memory takes its time
        for index, master in enumerate(self._masters if self._mixed else ()):
            if rows is not None:
                master.data = rows.taken(index, master.data)
            if how.offload:
                master.data = self._rooms["weights"][index].copy_(master.data)
        for index, master in enumerate(self._masters):  # some optimizers begin with a state
            self.restore_state(index, self.rates.optimizer.state.pop(master, {}) if self.rates.optimizer else {})

    def _host_rooms(self) -> dict[str, list[Tensor]]:
        """Return where in host memory what is offloaded of each weight will be, by name."""
        if not self._offload or not self._masters:
            return {}
        dtypes = [master.dtype for master in self._masters]
        names = ["weights"] * self._mixed + self.rates.large_state(dtypes[0], self._device)
        return {name: host_rooms(self._kept_shapes, dtypes, self._device) for name in names}

    @property
    def every(self) -> int:
        """The number of buckets."""
        return len(self._pieces)

    def _step(
        self, part: int, gradients: Sequence[Tensor | None], factor: Factor, weights: Sequence[Tensor | None]
    ) -> None:
        for piece in self._pieces[part]:
            self._step_piece(piece, gradients, factor, weights)
            self._how.observed()

    def _step_piece(
        self, piece: Piece, gradients: Sequence[Tensor | None], factor: Factor, weights: Sequence[Tensor | None]
    ) -> None:
        optimizer = self.rates.optimizer
        assert optimizer is not None, "otherwise there are no buckets"
        fetched = self._buffers.taken(self, piece) or self._fetched(piece)
        for following in self._following(piece):
            if not self._buffers.has_ahead(self, following):
                self._buffers.keep_ahead(self, following, self._fetched(following))
        if fetched.event is not None:
            fetched.event.wait()
        stepped = self._given(optimizer, piece, fetched, gradients, factor)
        optimizer.step()
        home: list[tuple[Tensor, Tensor]] = []
        for span, parameter in stepped:
            home.append((self._master_of(span), parameter.data))
            if self._mixed:
                group = self.rates.group_of[self._masters[span.index]]
                weight = weights[span.index]
                assert weight is not None, "what isn't stepped yet is in later parts"
                span.of(weight).copy_(self.rates.predicted(parameter, group))
            home += self._keep(span, optimizer.state.get(parameter, {}))
        home = [(to, of) for to, of in home if to.data_ptr() != of.data_ptr()]
        if self._offload:
            self._buffers.bring_home(self._device, piece.region, home)
        else:
            for to, of in home:
                to.copy_(of)

    def _given(
        self,
        optimizer: torch.optim.Optimizer,
        piece: Piece,
        fetched: Fetched,
        gradients: Sequence[Tensor | None],
        factor: Factor,
    ) -> list[tuple[Slice, nn.Parameter]]:
        """Let ``optimizer`` have the slices of ``piece`` for its weights, and nothing else; return what they are."""
        for group in optimizer.param_groups:
            group["params"] = []
        optimizer.state.clear()
        given: list[tuple[Slice, nn.Parameter]] = []
        offset = self._offset(piece)
        for span, weight, state in zip(piece.slices, fetched.weights, fetched.states, strict=True):
            gradient, master = gradients[span.index], self._masters[span.index]
            parameter = delayed(nn.Parameter(weight), delay_of(master))
            if gradient is not None:
                found = span.of(gradient if gradient.is_contiguous() else gradient.contiguous())
                if found.dtype != master.dtype:
                    copy = self._buffer("gradient", master.dtype, offset, span.size)
                    found = copy.copy_(found)
                if changes(factor):
                    found.mul_(factor)
                parameter.grad = found
                if state:
                    optimizer.state[parameter] = state
            optimizer.param_groups[self.rates.group_of[master]]["params"].append(parameter)
            given.append((span, parameter))
            offset += span.size
        return given

    def _following(self, piece: Piece) -> Iterator[Piece]:
        """Yield the pieces behind ``piece`` that can be on the device together with it."""
        regions = {piece.region}
        for other in self._order[piece.number + 1 : piece.number + PIECES] if self._offload else ():
            if other.region in regions:
                return
            regions.add(other.region)
            yield other

    def _fetched(self, piece: Piece) -> Fetched:
        """Return weights and state of ``piece``: themselves, or on the way to buffers from where they are kept."""
        offset, copies = self._offset(piece), list[tuple[Tensor, Tensor]]()
        weights: list[Tensor] = []
        states: list[dict[str, Any]] = []

        def there(name: str, home: Tensor) -> Tensor:
            copies.append((self._buffer(name, home.dtype, offset, home.numel()), home))
            return copies[-1][0]

        for span in piece.slices:
            home = self._master_of(span)
            weights.append(there("weights", home) if self._offload and self._mixed else home)
            states.append({})
            for key, value in self._state[span.index].items():
                if is_large(value):
                    kept = self._place(span).of(value)
                    states[-1][key] = there(key, kept) if self._offload else kept
                else:
                    states[-1][key] = value.clone() if isinstance(value, Tensor) else value
            offset += span.size
        event = self._buffers.fetched(self._device, piece.region, copies) if self._offload else None
        return Fetched(weights, states, event)

    def _keep(self, span: Slice, state: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Take back what the optimizer remembers of a slice; the next slice of the weight begins as this one did.

        Yield what is to be copied, to where and from where.
        """
        kept, after = self._state[span.index], self._next.setdefault(span.index, {})
        for key, value in state.items():
            if value is None:
                continue
            if not is_large(value):
                after[key] = value
                continue
            if key not in kept and key not in after:
                after[key] = self._home_of(key, span.index, value)
            yield self._place(span).of(kept[key] if key in kept else after[key]), value

    def finish(self) -> None:
        """End an update: counts and the schedule go on."""
        for index, after in self._next.items():
            self._state[index].update(after)
        self._next.clear()
        self._buffers.forget(self)
        if self.rates.optimizer is not None:
            self.rates.optimizer.state.clear()
        super().finish()

    def _settle(self) -> None:
        self._buffers.settle()

    def _kept(self, index: int) -> dict[str, Any]:
        return dict(self._state[index])

    def restore_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Let the optimizer remember ``state`` of the weight at ``index``, if any of it is stepped here."""
        if self._rows is not None and not self._rows.sizes[index]:
            return  # nor would its counts go on
        for key, value in state.items():
            if is_large(value):
                shaped = value.view(self._kept_shapes[index]) if self._rows is None else self._rows.taken(index, value)
                self._state[index][key] = self._home_of(key, index, shaped).copy_(shaped)
            else:
                self._state[index][key] = self.rates.at_home(key, value, self._device)

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the optimizer keeps, and whether it is in host memory for want of room on the device."""
        for master in self._masters:
            yield master.data, self._offload and self._mixed
        for state in (*self._state, *self._next.values()):
            yield from ((value, self._offload) for value in state.values() if is_large(value))
        if self._offload and self.rates.optimizer is not None:
            # one bucket of it while it is stepped, in the buffers but for the first time
            for state in self.rates.optimizer.state.values():
                yield from ((x, False) for x in state.values() if is_large(x))
        yield from ((buffer, False) for buffer in self._buffers.tensors())

    def _place(self, span: Slice) -> Slice:
        return span if self._rows is None else self._rows.place(span)

    def _master_of(self, span: Slice) -> Tensor:
        place = self._place(span) if self._mixed else span  # otherwise it is the whole weight itself
        return place.of(self._masters[span.index].data)

    def _offset(self, piece: Piece) -> int:
        return piece.region * region_size(self._room) if self._offload else 0

    def _buffer(self, name: str, dtype: torch.dtype, offset: int, size: int) -> Tensor:
        return self._buffers.take(name, dtype, self._device, offset, size)

    def _home_of(self, key: str, index: int, like: Tensor) -> Tensor:
        """Return room for what the optimizer remembers of the weight at ``index``."""
        shape = self._kept_shapes[index]
        if not self._offload:
            return torch.empty(shape, dtype=like.dtype, device=self._device)
        known = self._rooms.get(key)
        return known[index] if known is not None else host_rooms([tuple(shape)], [like.dtype], self._device)[0]

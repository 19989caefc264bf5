"""How are one stage's weights in full precision stepped? At once, or bucket by bucket with little memory.

Of 16-bit weights ("mixed") a copy in 32 bits is what the optimizer works on; after its step the new values go to the
16-bit ones. With ``offload`` that copy and the optimizer's state are in host memory, and one bucket at a time is
fetched, stepped and sent back (Myelin section V-B). Elementwise optimizers give the same bits either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from .buckets import Bucket, Slice
from .optimizers import MakeOptimizer, MakeSchedule
from .shards import Rows, is_large

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)  # each element's step depends on its own gradient and state alone


def nothing() -> None:
    """Observe nothing."""


def is_elementwise(make_optimizer: MakeOptimizer) -> bool:
    """Whether what ``make_optimizer`` makes is known to step every element by itself."""
    return type(make_optimizer([nn.Parameter(torch.zeros(1))])) in ELEMENTWISE


def check_elementwise(make_optimizer: MakeOptimizer, why: str) -> None:
    """Raise BadInput unless the optimizer can be stepped in parts; ``why`` says what asks for it."""
    made = make_optimizer([nn.Parameter(torch.zeros(1))])
    if type(made) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise BadInput(
            f"optimizer: {type(made).__name__} isn't known to step each element by itself, as {why} needs; {known} do"
        )


class Rates:
    """What both ways to step share: the optimizer of ``masters``, if there are any, and its learning-rate schedule."""

    def __init__(
        self, masters: Sequence[nn.Parameter], make_optimizer: MakeOptimizer, make_schedule: MakeSchedule | None
    ) -> None:
        self.optimizer = make_optimizer(list(masters)) if masters else None
        self._schedule = make_schedule(self.optimizer) if self.optimizer and make_schedule else None

    def advance(self) -> None:
        """Let the schedule go on after an update."""
        if self._schedule is not None:
            self._schedule.step()

    @property
    def groups(self) -> list[dict[str, Any]] | None:
        """The optimizer's options as they are now, without weights; None for a stage that trains nothing."""
        if self.optimizer is None:
            return None
        return [{key: x for key, x in group.items() if key != "params"} for group in self.optimizer.param_groups]

    @property
    def schedule(self) -> dict[str, Any] | None:
        """The state of the learning-rate schedule, None without one."""
        return None if self._schedule is None else self._schedule.state_dict()

    def restore(self, groups: Sequence[Mapping[str, Any]] | None, schedule: dict[str, Any] | None) -> None:
        """Go on with the options and the schedule of another run's optimizer."""
        if self.optimizer is not None and groups is not None:
            for group, before in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(before)
        if self._schedule is not None and schedule is not None:
            self._schedule.load_state_dict(schedule)

    def at_home(self, key: str, value: Any, home: torch.device) -> Any:
        """Return an entry of the optimizer's state where it wants it: a counter where it counts."""
        assert self.optimizer is not None, "only optimizers have state"
        group = self.optimizer.param_groups[0]
        counts_there = group.get("capturable") or group.get("fused")
        return value.to(home) if isinstance(value, Tensor) and (key != "step" or counts_there) else value


class WholeOptimizer:
    """One step over all ``masters``. ``mixed`` says that gradients and weights outside have 16 bits.

    ``observed`` hears when memory is at its fullest.
    """

    def __init__(
        self, masters: Sequence[nn.Parameter], rates: Rates, mixed: bool, observed: Callable[[], None]
    ) -> None:
        self.rates = rates
        self._masters, self._mixed, self._observed = list(masters), mixed, observed

    @property
    def parts(self) -> int:
        """The number of steps that an update is made in: 1, if anything is trained."""
        return 1 if self.rates.optimizer else 0

    def step(self, part: int, gradients: Sequence[Tensor | None], scale: float, weights: Sequence[Tensor]) -> None:
        """Step all weights with ``gradients`` divided by ``scale``; 16-bit ``weights`` get the new values."""
        assert self.rates.optimizer is not None, "otherwise there are no parts"
        for master, gradient in zip(self._masters, gradients, strict=True):
            if gradient is not None and self._mixed:
                gradient = gradient.to(master.dtype).mul_(1 / scale)
            master.grad = gradient
        self.rates.optimizer.step()
        if self._mixed:
            for master, weight in zip(self._masters, weights, strict=True):
                weight.copy_(master.data)
        self._observed()
        for master in self._masters:
            master.grad = None

    def finish(self) -> None:
        """End an update: the schedule goes on."""
        self.rates.advance()

    def state_of(self, index: int) -> dict[str, Any]:
        """Return what the optimizer remembers of the weight at ``index``, without Nones."""
        state = {} if self.rates.optimizer is None else self.rates.optimizer.state.get(self._masters[index], {})
        return {key: value for key, value in state.items() if value is not None}

    def restore_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Let the optimizer remember ``state`` of the weight at ``index``, next to it."""
        if self.rates.optimizer is not None and state:
            master = self._masters[index]
            known = {key: self.rates.at_home(key, x, master.device) for key, x in state.items()}
            self.rates.optimizer.state[master] = known

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the optimizer keeps, all next to the weights."""
        for index, master in enumerate(self._masters):
            yield master.data, False
            if master.grad is not None:
                yield master.grad, False
            yield from ((value, False) for value in self.state_of(index).values() if is_large(value))


class BucketBuffers:
    """Device memory for one bucket at a time, used again and again by all stages of a rank."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, device: torch.device, offset: int, size: int, room: int) -> Tensor:
        """Return ``size`` elements from ``offset`` on of the buffer ``name``, made for ``room`` elements at least."""
        key = name, dtype, device
        if key not in self._tensors or self._tensors[key].numel() < room:
            self._tensors.pop(key, None)
            self._tensors[key] = torch.empty(room, dtype=dtype, device=device)
        return self._tensors[key][offset : offset + size]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the buffers."""
        yield from self._tensors.values()


class BucketedOptimizer:
    """One step for each of ``buckets``; with ``offload`` masters of 16-bit weights and state on the host.

    The optimizer must be elementwise. It sees the slices of one bucket as its weights; what it remembers of them is
    kept in tensors of the weights' shapes, so that no other bucket size makes a difference, or of slices that replicas
    share in ``rows``. Device memory beside weights and gradient: one bucket of each thing that is on the host, and of
    the gradient in 32 bits.
    """

    def __init__(
        self,
        masters: Sequence[nn.Parameter],
        rates: Rates,
        mixed: bool,
        observed: Callable[[], None],
        device: torch.device,
        buckets: Sequence[Bucket],
        offload: bool,
        buffers: BucketBuffers,
        rows: Rows | None = None,
    ) -> None:
        self.rates = rates
        self._masters, self._mixed, self._observed = list(masters), mixed, observed
        self._offload = offload
        self._device = device
        self._buckets = buckets
        self._room = max((bucket.size for bucket in buckets), default=0)
        self._buffers = buffers
        self._state: list[dict[str, Any]] = [{} for _ in masters]
        self._next: dict[int, dict[str, Any]] = {}  # counts, and what is new, of each weight after this update
        groups = self.rates.optimizer.param_groups if self.rates.optimizer else []
        self._group = {parameter: g for g, group in enumerate(groups) for parameter in group["params"]}
        self._rows = rows
        self._shapes = [master.shape if rows is None else (rows.sizes[i],) for i, master in enumerate(masters)]
        for index, master in enumerate(self._masters if mixed else ()):
            if rows is not None:
                master.data = rows.taken(index, master.data)
            if offload:
                master.data = self._on_host(master.data)
        for index, master in enumerate(self._masters):  # some optimizers begin with a state
            self.restore_state(index, self.rates.optimizer.state.pop(master, {}) if self.rates.optimizer else {})

    @property
    def parts(self) -> int:
        """The number of buckets."""
        return len(self._buckets)

    def step(self, part: int, gradients: Sequence[Tensor | None], scale: float, weights: Sequence[Tensor]) -> None:
        """Step bucket ``part`` of ``gradients`` divided by ``scale``; 16-bit ``weights`` get the new values."""
        assert self.rates.optimizer is not None, "otherwise there are no buckets"
        bucket = self._buckets[part]
        offset = 0
        stepped: list[tuple[Slice, int, nn.Parameter]] = []
        for group in self.rates.optimizer.param_groups:
            group["params"] = []
        self.rates.optimizer.state.clear()
        for span in bucket.slices:
            gradient = gradients[span.index]
            master = self._masters[span.index]
            parameter = nn.Parameter(self._fetched("weights", self._master_of(span), offset, self._mixed))
            if gradient is not None:
                found = span.of(gradient if gradient.is_contiguous() else gradient.contiguous())
                if self._mixed:
                    copy = self._buffer("gradient", master.dtype, offset, span.size)
                    found = copy.copy_(found).mul_(1 / scale)
                parameter.grad = found
                state = self._fetched_state(span, offset)
                if state:
                    self.rates.optimizer.state[parameter] = state
            self.rates.optimizer.param_groups[self._group[master]]["params"].append(parameter)
            stepped.append((span, offset, parameter))
            offset += span.size
        self.rates.optimizer.step()
        for span, _, parameter in stepped:
            _returned(self._master_of(span), parameter.data)
            if self._mixed:
                span.of(weights[span.index]).copy_(parameter.data)
            self._keep(span, self.rates.optimizer.state.get(parameter, {}))
        self._observed()

    def _fetched_state(self, span: Slice, offset: int) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, value in self._state[span.index].items():
            if is_large(value):
                state[key] = self._fetched(key, self._place(span).of(value), offset, True)
            else:
                state[key] = value.clone() if isinstance(value, Tensor) else value
        return state

    def _keep(self, span: Slice, state: Mapping[str, Any]) -> None:
        """Take back what the optimizer remembers of a slice; the next slice of the weight begins as this one did."""
        kept, after = self._state[span.index], self._next.setdefault(span.index, {})
        for key, value in state.items():
            if value is None:
                continue
            if not is_large(value):
                after[key] = value
                continue
            if key not in kept and key not in after:
                shape = self._shapes[span.index]
                whole = torch.empty(shape, dtype=value.dtype, device=value.device if not self._offload else "meta")
                after[key] = self._on_host(whole) if self._offload else whole
            _returned(self._place(span).of(kept[key] if key in kept else after[key]), value)

    def finish(self) -> None:
        """End an update: counts and the schedule go on."""
        for index, after in self._next.items():
            self._state[index].update(after)
        self._next.clear()
        if self.rates.optimizer is not None:
            self.rates.optimizer.state.clear()
        self.rates.advance()

    def state_of(self, index: int) -> dict[str, Any]:
        """Return what the optimizer remembers of the weight at ``index``."""
        return dict(self._state[index])

    def restore_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Let the optimizer remember ``state`` of the weight at ``index``, if any of it is stepped here."""
        if self._rows is not None and not self._rows.sizes[index]:
            return  # nor would its counts go on
        for key, value in state.items():
            if is_large(value):
                shaped = value.view(self._shapes[index]) if self._rows is None else self._rows.taken(index, value)
                self._state[index][key] = self._on_host(shaped) if self._offload else shaped.to(self._device)
            else:
                self._state[index][key] = self.rates.at_home(key, value, self._device)

    def tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield what the optimizer keeps, and whether it is in host memory for want of room on the device."""
        for master in self._masters:
            yield master.data, self._offload and self._mixed
        for state in (*self._state, *self._next.values()):
            yield from ((value, self._offload) for value in state.values() if is_large(value))
        if (
            self.rates.optimizer is not None
        ):  # one bucket of it while it is stepped, in the buffers but for the first time
            states = self.rates.optimizer.state.values()
            if self._offload:
                yield from ((x, False) for state in states for x in state.values() if is_large(x))
        yield from ((buffer, False) for buffer in self._buffers.tensors())

    def _place(self, span: Slice) -> Slice:
        return span if self._rows is None else self._rows.place(span)

    def _master_of(self, span: Slice) -> Tensor:
        place = self._place(span) if self._mixed else span  # otherwise it is the whole weight itself
        return place.of(self._masters[span.index].data)

    def _fetched(self, name: str, home: Tensor, offset: int, moves: bool) -> Tensor:
        """Return ``home``, or its values in a buffer on the device where it isn't kept there."""
        if not (self._offload and moves):
            return home
        return self._buffer(name, home.dtype, offset, home.numel()).copy_(home, non_blocking=True)

    def _buffer(self, name: str, dtype: torch.dtype, offset: int, size: int) -> Tensor:
        return self._buffers.take(name, dtype, self._device, offset, size, self._room)

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory, which a GPU can read without the processor's help; of meta tensors the room."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        return host if tensor.is_meta else host.copy_(tensor)


StageOptimizer = WholeOptimizer | BucketedOptimizer  # either steps the full-precision weights of a stage, in its parts


def _returned(home: Tensor, value: Tensor) -> None:
    """Bring ``value`` home unless it never left."""
    if home.data_ptr() != value.data_ptr():
        home.copy_(value, non_blocking=True)

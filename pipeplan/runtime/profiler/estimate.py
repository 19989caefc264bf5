"""What would a profile be on another device? The same steps on fake tensors; a roofline moves the clock.

Each operation takes the longest of flops / (60% of the peak), bytes / (80% of the memory's bandwidth) and the time to
launch it. Flops are torch's counts (``torch.utils.flop_counter``) where they hold up. They don't for attention (no
count for the fused kernel on CPU tensors, full squares for causal masks, none for grouped heads) and LSTMs (no count
for the fused layer); both are counted here. What is saved for the backward is what autograd saves from fake tensors,
with fused attention, as it runs on a GPU; an LSTM's workspace is taken as six numbers per state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...errors import CodeFailed, PipeplanError
from ...files.accelerators import Accelerator
from ...version import __version__
from ..model.structure import mapped
from ..model.user_code import said
from .clock import Clock
from .measure import Data, MeasuredModel, built_network, network_chain, profile_network
from .steps import USUAL, MeasureOptions

COMPUTE_SHARE = 0.6
BANDWIDTH_SHARE = 0.8
LSTM_WORKSPACE = 6  # numbers kept per state: four gates, the cell and its tanh
LSTM_KERNELS = 2  # per time step: the product with the state, and the pointwise rest in one

aten = torch.ops.aten
_NO_KERNEL = {  # they make a tensor's description or reserve memory
    aten._unsafe_view, aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided, aten._reshape_alias, aten.lift_fresh, aten.set_, aten.resize_,
}  # fmt: skip
_GATHERS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward, aten._convolution, aten.cudnn_convolution}
_ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu: 1.0}
_ATTENTION_BACKWARD = {aten._scaled_dot_product_flash_attention_for_cpu_backward: 2.5}  # forward again, four products
_LSTM, _LSTM_BACKWARD = aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward


def estimate_model(
    build: Callable[[int], Any],
    batch: int,
    device: Accelerator,
    options: MeasureOptions = USUAL,
    *,
    name: str,
    date: str,
    data: Data | None = None,
) -> MeasuredModel:
    """Build a model by the model contract on fake tensors, and estimate its profile on ``device``.

    Nothing is computed and no parameter takes memory. Of ``options`` those about conversion, the optimizer, splitting
    and what is said count; the optimizer's work is counted in kernels over all tensors of a layer. Sizes and saved
    bytes are exact for what torch runs, times are a roofline.
    """
    with _fake() as mode, _FusedAttention():
        try:
            clock = RooflineClock(device)
            once = replace(
                options,
                steps=1,
                warmup=0,
                seconds=None,
                device="cpu",
                threads=1,
                hold="all",
                clock=clock,
                optimizer=options.optimizer or _plain_sgd,
            )
            try:
                network, loss, target = built_network(build, batch, data, once)
            except CodeFailed as error:
                if isinstance(error.__cause__, SystemExit):
                    raise
                raise CodeFailed(_without_values(error)) from error
            network = network.on([mode.from_tensor(x) for x in network.inputs])
            target = mapped(mode.from_tensor, target)
            with clock:
                measurements, _ = profile_network(network, loss, once, target)
        except PipeplanError:
            raise
        except Exception as error:
            raise CodeFailed(_without_values(said(error))) from error
        chain = network_chain(
            network,
            measurements,
            name=name,
            batch=batch,
            device=f"{device.name} (estimated)",
            source=(
                f"estimated by pipeplan {__version__}, torch {torch.__version__}: roofline of {COMPUTE_SHARE:.0%} of "
                f"peak, {BANDWIDTH_SHARE:.0%} of bandwidth, {device.launch} per kernel; not measured; {date}"
            ),
        )
    return MeasuredModel(chain, tuple(measurements), one_at_a_time=False, notes=network.notes)


def _without_values(why: object) -> str:
    return (
        f"the model cannot run without values: {why}. "
        "Let build, forward and loss not look at what is in a tensor, or measure on a device"
    )


def _plain_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0, foreach=True)


@contextmanager
def _fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


class _FusedAttention(TorchFunctionMode):
    """Attention as fused kernels do it: dropout, which they make again from its seed, saves nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            kwargs |= dict(zip(names, args, strict=False))
            return func(**{**kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)


class RooflineClock(TorchDispatchMode, Clock):  # type: ignore[no-untyped-call]  # torch leaves the base untyped
    """A clock that every operation seen advances by its roofline time on ``device``; marks are nanoseconds."""

    def __init__(self, device: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.device = device
        self.now_ns = 0.0

    def mark(self) -> float:
        """Return the time estimated so far."""
        return self.now_ns

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else None
        if packet is _LSTM:
            out = (*out[:3], _lstm_workspace(args[0], out[0]))
        if packet is None or not _is_free(func, packet):
            self.now_ns += self._duration(packet, args, kwargs, out)
        return out

    def _duration(self, packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if packet in (_LSTM, _LSTM_BACKWARD):
            return self._lstm(args, read, made, backward=packet is _LSTM_BACKWARD)
        written = sum(map(_touched, made)) or sum(map(_touched, _changed(packet, args)))
        limit = written if packet in _GATHERS else None  # a look-up reads as much as it puts out
        moved = written + sum(_touched(x) if limit is None else min(_touched(x), limit) for x in read)
        flops = _flops(packet, args, kwargs, out)
        compute = self._compute(flops, next((x for x in read if x.is_floating_point()), None), packet in _CONVOLUTIONS)
        kernels = max(1, sum(args[10][:2])) if packet is aten.convolution_backward else 1  # one per gradient
        return max(compute, self._transfer(moved), kernels * self.device.launch_ns)

    def _compute(self, flops: float, like: Tensor | None, convolution: bool = False) -> float:
        if not flops or like is None:
            return 0.0
        peak = self.device.peak(str(like.dtype).removeprefix("torch."), convolution)
        return flops / (COMPUTE_SHARE * peak) * 1e9

    def _transfer(self, size: float) -> float:
        return size / (BANDWIDTH_SHARE * self.device.bandwidth_bytes) * 1e9

    def _lstm(self, args: Sequence[Any], read: list[Tensor], made: list[Tensor], backward: bool) -> float:
        """Return the time of an LSTM layer: one product with all inputs, then step by step with the states."""
        x, inputs, states = args[0], args[1], args[2]
        steps, batch = int(x.shape[0]), int(x.shape[1])
        factor = 2 if backward else 1  # gradients of the operand and of the weights
        whole = max(
            self._compute(2 * factor * steps * batch * inputs.numel(), x),
            self._transfer(sum(map(_touched, read + made))),
        )
        step = max(
            self._compute(2 * batch * states.numel(), x),
            self._transfer(states.nbytes),
            LSTM_KERNELS * self.device.launch_ns,
        )
        rest = self._compute(2 * steps * batch * states.numel(), x) if backward else 0.0
        return whole + steps * step + rest


def _is_free(func: Any, packet: Any) -> bool:
    if packet in _NO_KERNEL or func.namespace == "prim":
        return True
    returns = func._schema.returns
    if not returns:
        return False
    alias = returns[0].alias_info
    return alias is not None and not alias.is_write  # a view


def _changed(packet: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that an operation without results changes in place, such as an optimizer's."""
    arguments = getattr(packet, packet.overloads()[0])._schema.arguments
    given = [a for a, b in zip(args, arguments, strict=False) if b.alias_info is not None and b.alias_info.is_write]
    return [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]


def _touched(x: Tensor) -> int:
    """Return the bytes of memory behind ``x``: an expanded tensor has fewer than its shape says."""
    return min(x.nbytes, x.untyped_storage().nbytes())


def _flops(packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    if packet in _ATTENTION:
        causal = bool(_argument(packet, args, kwargs, "is_causal"))
        return _ATTENTION[packet] * _attention_flops(args[0], args[1], args[2], causal)
    if packet in _ATTENTION_BACKWARD:
        causal = bool(_argument(packet, args, kwargs, "is_causal"))
        return _ATTENTION_BACKWARD[packet] * _attention_flops(args[1], args[2], args[3], causal)
    count = flop_registry.get(packet)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0


def _argument(packet: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    names = [argument.name for argument in packet.default._schema.arguments]
    index = names.index(name)
    return args[index] if index < len(args) else kwargs.get(name, packet.default._schema.arguments[index].default_value)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> float:
    """Return the flops of two products; a causal kernel leaves out the half above the diagonal."""
    batch, heads, rows, width = query.shape
    columns = key.shape[2]
    return 2.0 * batch * heads * rows * columns * (width + value.shape[3]) * (0.5 if causal else 1.0)


def _lstm_workspace(x: Tensor, states: Tensor) -> Tensor:
    return torch.empty(LSTM_WORKSPACE * states.numel() * x.element_size(), dtype=torch.uint8, device=x.device)

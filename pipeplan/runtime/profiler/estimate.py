"""What would a profile be on another device? The same steps on fake tensors; a roofline moves the clock.

Each kernel takes the longest of flops / (75% of the peak), bytes / (90% of the memory's bandwidth) and the time of the
least one; a pass through a layer takes as long as its kernels, or as its operations take the host
(:mod:`pipeplan.cost.roofline`). Flops are torch's counts (``torch.utils.flop_counter``) where they hold up. They don't
for attention (no count for the fused kernel on CPU tensors, full squares for causal masks, none for grouped heads) and
LSTMs (no count for the fused layer); both are counted here. What is saved for the backward is what autograd saves from
fake tensors, with fused attention, as it runs on a GPU, and dropout as one kernel with a byte of mask for each number;
an LSTM's workspace is taken as six numbers per state.
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

from ...cost.roofline import Constants, product_share, timed
from ...errors import CodeFailed, PipeplanError
from ...files.accelerators import Accelerator
from ...problem import PassWork
from ...version import __version__
from ..model.structure import mapped
from ..model.user_code import said
from .clock import Clock
from .measure import Data, MeasuredModel, built_network, network_chain, profile_network
from .steps import USUAL, MeasureOptions

LSTM_WORKSPACE = 6  # numbers kept per state: four gates, the cell and its tanh
LSTM_KERNELS = 2  # per time step: the product with the state, and the pointwise rest in one

aten = torch.ops.aten
_DROPOUT = (functional.dropout, torch.dropout, aten.dropout.default)
_NO_KERNEL = {  # they make a tensor's description or reserve memory
    aten._unsafe_view, aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided, aten._reshape_alias, aten.lift_fresh, aten.set_, aten.resize_,
}  # fmt: skip
_GATHERS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.nll_loss_forward}
_CONVOLUTIONS = {aten.convolution, aten.convolution_backward, aten._convolution, aten.cudnn_convolution}
_KINDS = {  # those that an accelerator may have a rate for; convolutions go by their shape
    "norm": (
        aten.native_batch_norm, aten.native_batch_norm_backward, aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward,
        aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm,
        aten.native_group_norm_backward,
    ),
    "activation": (
        aten.relu, aten.relu_, aten.threshold_backward, aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward,
        aten.hardtanh, aten.hardtanh_, aten.hardtanh_backward,
    ),
    "pooling": (
        aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.avg_pool2d, aten.avg_pool2d_backward,
        aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward, aten.mean,
    ),
    "product": (aten.mm, aten.addmm, aten.bmm, aten.baddbmm),
}  # fmt: skip
_PRODUCTS = _KINDS["product"]
_KIND_OF = {packet: kind for kind, packets in _KINDS.items() for packet in packets}
_ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu: 1.0}
_ATTENTION_BACKWARD = {aten._scaled_dot_product_flash_attention_for_cpu_backward: 2.5}  # forward again, four products
ATTENTION_SHARE = 0.65  # of what products reach: FlashAttention-2 (Dao 2023), figures 5 and 6, causal, A100
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
    constants: Constants | None = None,
) -> MeasuredModel:
    """Build a model by the model contract on fake tensors, and estimate its profile on ``device``.

    ``constants`` turn work into time; None: the device's, with the host's times of its own or of eager training.
    Nothing is computed and no parameter takes memory. Of ``options`` those about conversion, the optimizer, splitting
    and what is said count; the optimizer's work is counted in kernels over all tensors of a layer. Sizes and saved
    bytes are exact for what torch runs, times are a roofline.
    """
    constants = device.constants() if constants is None else constants
    with _fake() as mode, _AsOnGpu():
        try:
            clock = RooflineClock(device, constants)
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
                f"estimated by pipeplan {__version__}, torch {torch.__version__}: roofline of "
                f"{constants.compute_share:.0%} of peak, {constants.bandwidth_share:.0%} of bandwidth, {device.launch} "
                f"per kernel, {said_host_time(constants)}; not measured; {date}"
            ),
        )
    chain = timed(chain, constants)
    measurements = [replace(x, layer=layer) for x, layer in zip(measurements, chain.layers, strict=True)]
    bound = tuple(i for i, layer in enumerate(chain.layers) if layer.work and constants.bound_by_host(layer.work))
    return MeasuredModel(chain, tuple(measurements), False, network.notes, bound)


def said_host_time(constants: Constants) -> str:
    """Return in words what an operation takes the host."""
    forward, backward = (f"{ns / 1000:g}us" for ns in (constants.forward_host_ns, constants.backward_host_ns))
    if forward == backward:
        return f"{forward} of the host per operation" if constants.forward_host_ns else "nothing waits for the host"
    return f"{forward} of the host per operation forward, {backward} backward"


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


class _AsOnGpu(TorchFunctionMode):
    """Attention as fused kernels do it: dropout, which they make again from its seed, saves nothing. Dropout elsewhere
    is one kernel, and saves one byte for each number."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            kwargs |= dict(zip(names, args, strict=False))
            return func(**{**kwargs, "dropout_p": 0.0})
        if func in _DROPOUT:
            trains = "training" if func is functional.dropout else "train"
            given = dict(zip(("input", "p", trains), args, strict=False)) | kwargs
            share, trained = given.get("p", 0.5), given.get(trains, True)
            if trained and 0 < share < 1 and not given.get("inplace", False):
                return torch.native_dropout(given["input"], share, True)[0]
        return func(*args, **kwargs)


_Mark = tuple[float, float, int, int]


class RooflineClock(TorchDispatchMode, Clock):  # type: ignore[no-untyped-call]  # torch leaves the base untyped
    """A clock that counts what every operation seen asks of ``device`` and of its host."""

    def __init__(self, device: Accelerator, constants: Constants) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.device = device
        self.constants = constants
        self.compute_ns = self.memory_ns = 0.0
        self.kernels = self.operations = 0

    def mark(self) -> _Mark:
        """Return what was counted so far."""
        return self.compute_ns, self.memory_ns, self.kernels, self.operations

    def between(self, start: _Mark, end: _Mark) -> int:
        """Return how long the device works from one mark to another."""
        return round(self.constants.kernels_ns(self.work(start, end)))

    def work(self, start: _Mark, end: _Mark) -> PassWork:
        """Return what was counted from one mark to another."""
        return PassWork(*(round(b - a) for a, b in zip(start, end, strict=True)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else None
        if packet is _LSTM:
            out = (*out[:3], _lstm_workspace(args[0], out[0]))
        if packet is None or not _is_free(func, packet):
            self._count(packet, args, kwargs, out)
        return out

    def _count(self, packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if packet in (_LSTM, _LSTM_BACKWARD):
            self._lstm(args, read, made, backward=packet is _LSTM_BACKWARD)
            return
        written = sum(map(_touched, made)) or sum(map(_touched, _changed(packet, args)))
        limit = written if packet in _GATHERS else None  # a look-up reads as much as it puts out
        moved = written + sum(_touched(x) if limit is None else min(_touched(x), limit) for x in read)
        flops = _flops(packet, args, kwargs, out)
        rate = self.device.rate(_kind(packet, args))
        compute = self._compute(flops, next((x for x in read if x.is_floating_point()), None), packet in _CONVOLUTIONS)
        kernels = max(1, sum(args[10][:2])) if packet is aten.convolution_backward else 1  # one per gradient
        if packet in _PRODUCTS and self.device.units is not None:
            compute /= product_share(*_product_sizes(packet, args), self.device.units)
        if packet in _ATTENTION or packet in _ATTENTION_BACKWARD:
            compute /= ATTENTION_SHARE
        self._bound(compute / rate, self._transfer(moved) / rate, kernels)
        self.operations += 1

    def _bound(self, compute: float, transfer: float, kernels: int, times: int = 1) -> None:
        """Count what takes longest, so many ``times``."""
        constants = self.constants
        taken = compute / constants.compute_share, transfer / constants.bandwidth_share, kernels * constants.kernel_ns
        longest = max(taken)
        if longest == taken[0]:
            self.compute_ns += times * compute
        elif longest == taken[1]:
            self.memory_ns += times * transfer
        else:
            self.kernels += times * kernels

    def _compute(self, flops: float, like: Tensor | None, convolution: bool = False) -> float:
        if not flops or like is None:
            return 0.0
        return flops / self.device.peak(str(like.dtype).removeprefix("torch."), convolution) * 1e9

    def _transfer(self, size: float) -> float:
        return size / self.device.bandwidth_bytes * 1e9

    def _lstm(self, args: Sequence[Any], read: list[Tensor], made: list[Tensor], backward: bool) -> None:
        """Count an LSTM layer: one product with all inputs, then step by step with the states, all issued at once."""
        x, inputs, states = args[0], args[1], args[2]
        steps, batch = int(x.shape[0]), int(x.shape[1])
        factor = 2 if backward else 1  # gradients of the operand and of the weights
        whole = self._compute(2 * factor * steps * batch * inputs.numel(), x)
        self._bound(whole, self._transfer(sum(map(_touched, read + made))), 0)
        self._bound(
            self._compute(2 * batch * states.numel(), x), self._transfer(states.nbytes), LSTM_KERNELS, times=steps
        )
        if backward:
            self._bound(self._compute(2 * steps * batch * states.numel(), x), 0.0, 0)
        self.operations += 1


def _product_sizes(packet: Any, args: Sequence[Any]) -> tuple[int, int, int, int]:
    """Return the batch, rows, columns and depth of a matrix product."""
    one, other = args[1:3] if packet in (aten.addmm, aten.baddbmm) else args[:2]
    return (int(one.shape[0]) if one.dim() == 3 else 1, int(one.shape[-2]), int(other.shape[-1]), int(one.shape[-1]))


def _kind(packet: Any, args: Sequence[Any]) -> str:
    """Return the kind of an operation that an accelerator may have a rate for."""
    if packet not in _CONVOLUTIONS:
        return _KIND_OF.get(packet, "other")
    weight, stride = (args[2], args[4]) if packet is aten.convolution_backward else (args[1], args[3])
    shape = tuple(weight.shape[2:])
    if all(n == 1 for n in shape):
        return "convolution-1x1"
    return "convolution-3x3" if shape == (3, 3) and all(n == 1 for n in stride) else "convolution"


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

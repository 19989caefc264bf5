"""What would a profile be on another device? The same steps on fake tensors; a roofline moves the clock.

Each kernel (:mod:`.operations`) takes the longest of flops / (80% of the peak) and bytes / (90% of the bandwidth), at
the rate of its kind, and the time of the least one; a pass through a layer takes as long as its kernels, or as its
operations take the host (:mod:`pipeplan.cost.roofline`). Flops are torch's counts (``torch.utils.flop_counter``) where
they hold up. They don't for attention (no count for the fused kernel on CPU tensors, full squares for causal masks,
none for grouped heads) and LSTMs (no count for the fused layer); both are counted here. What is saved for the backward
is what autograd saves from fake tensors, with fused attention and RMS norms, as on a GPU, and dropout as one kernel
with a byte of mask for each number; an LSTM's workspace is taken as six numbers per state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...cost.roofline import Attended, Blocks, Constants, Product, Shape, timed
from ...errors import CodeFailed, PipeplanError
from ...files.machines.accelerators import Accelerator
from ...problem import Exchange, PassWork
from ...version import __version__
from ..device import Clock
from ..model.contract import Built, Data, built_by
from ..model.operations import aten, tensors_among
from ..model.structure import mapped
from ..model.user_code import RAISED, said
from .like_blocks import Unlike, shortened, told
from .measure import MeasuredModel, built_network, network_chain, profile_network
from .operations import Kernel, is_free, kernels_of, touched
from .steps import USUAL, MakeOptimizer, MeasureOptions

CONVOLUTIONS = (  # what the plan's reader should know; scripts/checks/published_layers.py, the usual constants
    "times of convolutions as estimated: plans of ten CNNs made on such times take 13% longer on average, 79% at "
    "worst, than plans made on their times measured on a V100 (docs/research/estimates.md)"
)
LSTM_WORKSPACE = 6  # numbers kept per state: four gates, the cell and its tanh
EXCHANGE = "pipeplan::exchange"  # the operation by which zoo/rank_part marks what a group sends
LSTM_KERNELS = 2  # per time step: the product with the state, and the pointwise rest in one

_DROPOUT = (functional.dropout, torch.dropout, aten.dropout.default)
_RMS_NORM = (functional.rms_norm, torch.rms_norm, aten.rms_norm.default)
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
        autocast=options.autocast and replace(options.autocast, device="cuda"),
        optimizer=_begun(options.optimizer or partial(torch.optim.SGD, lr=0.0, foreach=True)),
        note=lambda text: None,  # nothing is held
    )
    about = {
        "name": name,
        "batch": batch,
        "device": f"{device.name} (estimated)",
        "source": (
            f"estimated by pipeplan {__version__}, torch {torch.__version__}: roofline of "
            f"{constants.compute_share:.0%} of peak, {constants.bandwidth_share:.0%} of bandwidth, {device.launch} "
            f"per kernel, {said_host_time(constants)}; not measured; {date}"
        ),
    }
    group = getattr(build, "group", None) or getattr(getattr(build, "config", None), "group", None)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, AsOnGpu(group):
        try:
            estimated = partial(_estimated, data=data, once=once, mode=mode, about=about)
            found = _by_like_blocks(_built(build, batch), estimated) or estimated(_built(build, batch))
        except PipeplanError:
            raise
        except Exception as error:
            raise CodeFailed(_without_values(said(error))) from error
    within = device.range_of(found.chain, constants, clock.convolutions)
    chain = replace(timed(found.chain, constants), worth=CONVOLUTIONS if clock.convolutions else "", within=within)
    measurements = [replace(x, layer=layer) for x, layer in zip(found.layers, chain.layers, strict=True)]
    bound = tuple(i for i, layer in enumerate(chain.layers) if layer.work and constants.bound_by_host(layer.work))
    return replace(found, chain=chain, layers=tuple(measurements), host_bound=bound)


def _estimated(
    built: Built, data: Data | None, once: MeasureOptions, mode: FakeTensorMode, about: dict[str, Any]
) -> MeasuredModel:
    """Return what was counted in one step of the whole of a built model."""
    with _without_values_said():
        network, loss, target, _ = built_network(built, data, once)
    network = network.on([mode.from_tensor(x) for x in network.inputs])
    target = mapped(mode.from_tensor, target)
    assert isinstance(once.clock, RooflineClock)
    with once.clock:
        measurements, *_ = profile_network(network, loss, once, target)
    return MeasuredModel(network_chain(network, measurements, **about), tuple(measurements), False, network.notes)


def _by_like_blocks(built: Built, estimated: Callable[[Built], MeasuredModel]) -> MeasuredModel | None:
    """Return what is estimated of a model with few of its like blocks as that of the whole; None where they aren't."""
    with shortened(built) as (few, runs):
        if not runs:
            return None
        try:
            found = estimated(few)
            for run in runs:
                chain, source = told(found.chain, run)
                found = replace(found, chain=chain, layers=tuple(found.layers[i] for i in source))
        except (Unlike, *RAISED):  # the whole model may run, or says what is wrong
            return None
    return found


def _built(build: Callable[[int], Any], batch: int) -> Built:
    with _without_values_said():
        return built_by(build, batch)


@contextmanager
def _without_values_said() -> Iterator[None]:
    """Say of code of the user's that fails in the context that it has no values there."""
    try:
        yield
    except CodeFailed as error:
        if isinstance(error.__cause__, SystemExit):
            raise
        raise CodeFailed(_without_values(error)) from error


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


class _Ones(TorchFunctionMode):
    """Lets code that looks at a number in a tensor, as Adafactor at norms of weights, find a 1 there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.Tensor.item else func(*args, **(kwargs or {}))


def _begun(make: MakeOptimizer) -> MakeOptimizer:
    """Return what makes optimizers that have their state, and look at nothing."""

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made = make(parameters)
        step = made.step

        def blindly() -> None:
            with _Ones():
                step()

        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        blindly()
        made.zero_grad()
        made.step = blindly  # type: ignore[method-assign,assignment]  # of this one alone
        return made

    return optimizer


class AsOnGpu(TorchFunctionMode):
    """Attention as fused kernels do it: dropout, which they make again from its seed, saves nothing. Dropout elsewhere
    is one kernel, and saves one byte for each number; so is an RMS norm, which saves what a layer norm does. Where the
    ranks of a group share sequences, attention is a rank's part."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self._attention: Callable[..., Tensor] = functional.scaled_dot_product_attention
        if getattr(group, "context", 1) > 1:
            self._attention = partial(group.attended, self._attention)

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            kwargs |= dict(zip(names, args, strict=False))
            width, value = kwargs["query"].shape[-1], kwargs["value"]
            padded = functional.pad(value, (0, width - value.shape[-1])) if width > value.shape[-1] else value
            return self._attention(**{**kwargs, "value": padded, "dropout_p": 0.0})[..., : value.shape[-1]]
        if func in _DROPOUT:
            trains = "training" if func is functional.dropout else "train"
            given = dict(zip(("input", "p", trains), args, strict=False)) | kwargs
            share, trained = given.get("p", 0.5), given.get(trains, True)
            if trained and 0 < share < 1 and not given.get("inplace", False):
                return torch.native_dropout(given["input"], share, True)[0]
        if func in _RMS_NORM:
            given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
            x, weight = given["input"], given.get("weight")
            if weight is None or weight.dtype == x.dtype:
                return functional.layer_norm(x, given["normalized_shape"], weight)
        return func(*args, **kwargs)


_Mark = tuple[float, float, int, int, int]


class RooflineClock(TorchDispatchMode, Clock):  # type: ignore[no-untyped-call]  # torch leaves the base untyped
    """A clock that counts what every operation seen asks of ``device`` and of its host."""

    def __init__(self, device: Accelerator, constants: Constants) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.device, self.bandwidth = device, device.bandwidth_bytes
        self.constants = constants
        self.compute_ns = self.memory_ns = 0.0
        self.kernels = self.operations = 0
        self.convolutions = False  # whether one was counted
        self.exchanged: list[Exchange] = []

    def mark(self) -> _Mark:
        """Return what was counted so far."""
        return self.compute_ns, self.memory_ns, self.kernels, self.operations, len(self.exchanged)

    def between(self, start: _Mark, end: _Mark) -> int:
        """Return how long the device works from one mark to another."""
        return round(self.constants.kernels_ns(self.work(start, end)))

    def work(self, start: _Mark, end: _Mark) -> PassWork:
        """Return what was counted from one mark to another."""
        return PassWork(*(round(b - a) for a, b in zip(start[:-1], end[:-1], strict=True)))

    def exchanges(self, start: _Mark, end: _Mark, backward: bool) -> list[Exchange]:
        """Return what a group's ranks exchanged between two marks, alike ones counted."""
        made = dict[Exchange, list[Exchange]]()
        for one in self.exchanged[start[-1] : end[-1]]:
            made.setdefault(replace(one, backward=backward, hidden=0, beside_ns=0), []).append(one)
        return [
            replace(x, count=len(of), hidden=sum(y.hidden for y in of), beside_ns=min(y.beside_ns for y in of))
            for x, of in made.items()
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # what returns nothing changes tensors in place, which have no values; torch would make some up, in real memory
        out: Any = func(*args, **kwargs) if func._schema.returns else None
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else None
        if packet is _LSTM:
            size = LSTM_WORKSPACE * out[0].numel() * args[0].element_size()
            out = (*out[:3], torch.empty(size, dtype=torch.uint8, device=args[0].device))
        if getattr(packet, "_qualified_op_name", None) == EXCHANGE:
            whole = max(args[0], out, key=lambda x: x.nbytes)
            given: tuple[Any, ...] = (*args[1:], *(False, 1, 0, 1)[len(args) - 3 :])
            kind, ranks, hidden, times, _, apart = given
            ranks = ranks if kind in ("all-to-all", "send") else 0  # among others than those of the tensor degree
            self.exchanged.append(Exchange(kind, False, times * whole.nbytes, 1, int(hidden), ranks, apart=apart))
            self.operations += 1
        elif packet is None or not is_free(func, packet):
            self._count(func, packet, args, kwargs, out)
        return out

    def _count(self, func: Any, packet: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        self.operations += 1
        if packet in (_LSTM, _LSTM_BACKWARD):
            self._lstm(args, out, backward=packet is _LSTM_BACKWARD)
            return
        for kernel in kernels_of(func, args, kwargs, out):
            self.launch(kernel)

    def launch(self, kernel: Kernel) -> None:
        """Count a kernel, at what its kind and its shape reach."""
        kind, number, compute, transfer = self.asked(kernel)
        arithmetic, traffic = self.device.rate(kind, number, kernel.last)
        begun = self.mark()
        self._bound(compute / arithmetic, transfer / traffic, 1)
        if kind.startswith("attention") and self.exchanged and self.exchanged[-1].kind == "send":
            ns = self.exchanged[-1].beside_ns or self.between(begun, self.mark())
            self.exchanged[-1] = replace(self.exchanged[-1], beside_ns=ns)

    def asked(self, kernel: Kernel, number: str | None = None) -> tuple[str, str, float, float]:
        """Return a kernel's kind, what ``tflops`` calls its numbers (None: what its type says), and the ns of its
        arithmetic and of its traffic at all of peak and bandwidth, but for what its shape leaves idle."""
        kind, flops, dtype, moved, shape, _ = kernel
        self.convolutions |= kind.startswith("convolution")
        number = number or self.device.number("float32" if dtype is None else _name(dtype), kind)
        if isinstance(shape, Product) and kind == "product" and not shape.aligned(number):
            kind += "-unaligned"
        compute = flops / self.device.peak(number) * 1e9 if flops else 0.0
        share = self._share(shape, number == "float32" and kind == "convolution-3x3")
        transfer = self._transfer(moved) / (share if isinstance(shape, Blocks) else 1.0)
        return kind, number, compute / share, transfer

    def _share(self, shape: Shape | None, winograd: bool) -> float:
        units = self.device.units
        if isinstance(shape, Attended):  # what is usual has no rate for its best shape
            return 1.0 if self.device.rates is None else shape.share(units or 1)
        if shape is None or units is None:
            return 1.0
        if winograd and isinstance(shape, Product):
            return shape.winograd_share(units)
        return shape.share(units)

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

    def _compute(self, flops: float, dtype: torch.dtype) -> float:
        return flops / self.device.peak(_name(dtype)) * 1e9

    def _transfer(self, size: float) -> float:
        return size / self.bandwidth * 1e9

    def _lstm(self, args: Sequence[Any], out: Any, backward: bool) -> None:
        """Count an LSTM layer: one product with all inputs, then step by step with the states, all issued at once."""
        x, inputs, states = args[0], args[1], args[2]
        steps, batch = int(x.shape[0]), int(x.shape[1])
        factor = 2 if backward else 1  # gradients of the operand and of the weights
        tensors = tensors_among((args, out))
        whole = self._compute(2 * factor * steps * batch * inputs.numel(), x.dtype)
        self._bound(whole, self._transfer(sum(map(touched, tensors))), 0)
        self._bound(
            self._compute(2 * batch * states.numel(), x.dtype), self._transfer(states.nbytes), LSTM_KERNELS, times=steps
        )
        if backward:
            self._bound(self._compute(2 * steps * batch * states.numel(), x.dtype), 0.0, 0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

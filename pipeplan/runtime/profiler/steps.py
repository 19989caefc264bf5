"""How long is each layer in a training step? A clock marks its work: all layers at once, or one at a time."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ...cost.roofline import NO_WORK
from ...errors import BadInput
from ...names import shown
from ...problem import LOSS_NAME, Chain, Exchange, LayerWork
from ..device import Clock
from ..exchange.layer_group import LayerGroup
from ..model.autocast import Autocast
from ..model.network import LayerCode, Network, leaf
from ..model.places import place_all, resident
from ..model.user_code import RAISED, code_failed

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Hold = Literal["auto", "all", "one"]
WINDOW = 5  # rounds of warm-up that a median is of
AGREEING = 0.02  # of a median, by which two that agree may differ


@dataclass(frozen=True, slots=True)
class Others:
    """``count`` processes, each of which unpickles ``train`` and calls ``train(options)`` over and over."""

    count: int
    train: Callable[[MeasureOptions], object]


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """How a model is measured: in how many steps of training, with what, on which device."""

    steps: int = 10  # measured steps, at least 1; times are their medians
    warmup: int = 3  # steps before them
    seconds: float | None = None  # of measuring, after which no further step begins
    optimizer: MakeOptimizer | None = None  # makes the optimizer of a layer from its parameters; None: plain SGD
    split_backward: bool = False  # whether the gradients of weights and of inputs are told apart, in further steps
    device: str = "cpu"  # where to measure
    threads: int = 1  # CPU threads
    dtype: torch.dtype | None = None  # what the model and its floating-point inputs are converted to; None: as built
    autocast: Autocast | None = None  # what casts its operations
    hold: Hold = "auto"
    """"all" has all layers on the device at once, "one" one at a time, "auto" one where all don't fit."""
    clock: Clock | None = None  # None: the device's
    merge: Callable[[Chain], Chain] | None = None
    """What merges layers of a DAG, by no times: those that it makes one are timed as one. None: each is by itself."""
    others: Others | None = None  # processes that compute meanwhile
    together: LayerGroup | None = None  # processes that run each layer together, all of which measure
    in_flight: int = 1  # microbatches between their forward and their backward at once, as a stage holds them
    read: Callable[[], object] | None = None
    """What makes a microbatch's data, as those who have the first layer or the loss do; timed in each step."""
    say: Callable[[str], None] = lambda text: None  # hears what is being done
    note: Callable[[str], None] = lambda text: None  # hears what was decided
    begun: Callable[[], None] = lambda: None  # hears that the steps begin

    @property
    def make_optimizer(self) -> MakeOptimizer:
        """What makes optimizers: by default one that does a full step's work and leaves the weights alone."""
        return self.optimizer or partial(torch.optim.SGD, lr=0.0)

    def agreed(self, value: Any) -> Any:
        """Return ``value``, of what JSON has, as the first of those has it that run each layer together."""
        return value if self.together is None else self.together.told(value)


USUAL = MeasureOptions()


@dataclass
class Samples:
    """Times of one layer, one entry for each measured step, and what was asked of an estimated device in the last.

    ``reading_ns`` is what reading took before the first layer.
    """

    forward_ns: list[int] = field(default_factory=list)
    backward_ns: list[int] = field(default_factory=list)
    inputs_only_ns: list[int] = field(default_factory=list)
    optimizer_ns: list[int] = field(default_factory=list)
    reading_ns: list[int] = field(default_factory=list)
    work: LayerWork | None = None
    exchanges: tuple[Exchange, ...] = ()


def measured(
    network: Network, entry: torch.optim.Optimizer, clock: Clock, options: MeasureOptions, one: bool
) -> list[Samples]:
    """Measure whole steps of the network; or ``one`` layer at a time, with nothing but its own module, inputs, outputs
    and what it saves on the device."""
    samples = [Samples() for _ in network.layers]
    if not one:
        place_all([layer.module for layer in network.layers], options.device)
        _Steps(network, entry, clock, options).measure(samples, options.seconds, clock.warm_s)
        return samples
    values = dict(enumerate(network.inputs))
    device = options.device
    home = "cpu" if torch.device(device).type == "cuda" else device
    seconds = None if options.seconds is None else options.seconds / len(network)
    for index, (layer, sample, over) in enumerate(zip(network.layers, samples, network.over, strict=True)):
        options.say(f"layer {index + 1} of {len(network)}: {layer.name}")
        quiet = replace(options, say=lambda text: None, read=None if index else options.read)
        with resident(layer.module, device, release=True):
            inputs = [values[v].to(device).detach().requires_grad_(values[v].requires_grad) for v in layer.reads]
            alone = Network((layer,), (), (), network.structure, network.chain)
            warm_s = 0.0 if index else clock.warm_s  # then the device is at work
            _Steps(alone, entry, clock, quiet, inputs).measure([sample], seconds, warm_s)
            outputs = layer.forward(list(map(leaf, inputs)))
            for value, out in zip(layer.makes, outputs, strict=True):
                values[value] = out.detach().to(home).requires_grad_(out.requires_grad)
            del outputs
            layer.module.zero_grad(set_to_none=True)
        for value in over:
            del values[value]
    return samples


def _rounds(options: MeasureOptions, seconds: float | None, warm_s: float = 0.0) -> Iterator[bool]:
    """Yield True for each round of warm-up, then False for each that counts, fewer when ``seconds`` have passed.

    One of each stays, of warm-up if there is any. Warm-up takes a quarter of the time at most. A device whose clocks
    rise under load is warmed up for ``warm_s`` seconds at least, until two medians agree, ten times that at most.
    """
    began = time.monotonic()

    def passed(share: float) -> bool:
        return seconds is not None and time.monotonic() - began > share * seconds

    took: list[float] = []
    while len(took) < options.warmup or (took and warm_s and not _is_warm(took, warm_s)):
        if took and passed(0.25):
            break
        start = time.monotonic()
        yield True
        took.append(time.monotonic() - start)
    for index in range(options.steps):
        if index and passed(1.0):
            break
        yield False


def _is_warm(took: Sequence[float], warm_s: float) -> bool:
    """Whether rounds of warm-up that ``took`` so many seconds are enough: the last two medians of five agree."""
    if sum(took) < warm_s or len(took) < 2 * WINDOW:
        return sum(took) >= 10 * warm_s
    last, before = (statistics.median(x) for x in (took[-WINDOW:], took[-2 * WINDOW : -WINDOW]))
    return abs(last - before) <= AGREEING * before or sum(took) >= 10 * warm_s


_Marks = list[tuple[Any, Any] | None]  # around the work of layers, or of one layer's passes; None: there was none


def _add(sample: Samples, clock: Clock, marks: _Marks, inputs_only: bool) -> None:
    """Add the times between one layer's ``marks``, around forward, backward and update."""
    forward, backward, optimizer = (clock.between(*pair) if pair else 0 for pair in marks)
    if inputs_only:
        sample.inputs_only_ns.append(backward)
        return
    sample.forward_ns.append(forward)
    sample.backward_ns.append(backward)
    sample.optimizer_ns.append(optimizer)
    work = [clock.work(*pair) if pair else NO_WORK for pair in marks]
    counted = [x for x in work if x is not None]
    sample.work = LayerWork(*counted) if len(counted) == len(work) else None
    both = zip(marks, (False, True), strict=False)
    sample.exchanges = tuple(x for pair, back in both if pair for x in clock.exchanges(*pair, back))


@dataclass(slots=True)
class _Held:
    """A microbatch between forward and backward: values by number, outputs of the layers, gradients that came back."""

    values: dict[int, Tensor]
    made: list[Sequence[Tensor]] = field(default_factory=list)
    gradients: dict[int, Tensor | None] = field(default_factory=dict)


class _Steps:
    """Training steps of a ``network``, with as many microbatches between forward and backward as ``options`` say.

    With ``inputs`` it is one layer alone that reads these, whose backward starts from ones. Gradients of values are
    asked for, not left at leaves: there autograd would copy what several readers get. ``entry`` steps before all others
    do.
    """

    def __init__(
        self,
        network: Network,
        entry: torch.optim.Optimizer,
        clock: Clock,
        options: MeasureOptions,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        self._network, self._entry, self._clock, self._options, self._inputs = network, entry, clock, options, inputs
        trained = [trained_parameters(layer.module) for layer in network.layers]
        self._optimizers = [options.make_optimizer(own) if own else None for own in trained]
        self._held: deque[_Held] = deque()

    def measure(self, samples: Sequence[Samples], seconds: float | None, warm_s: float) -> None:
        """Add the times of steps to ``samples``."""
        options, clock = self._options, self._clock
        rounds = _rounds(options, seconds, warm_s)
        while (warm := options.agreed(next(rounds, None))) is not None:
            options.say("warming up" if warm else f"step {len(samples[0].forward_ns) + 1} of {options.steps}")
            if options.read is not None:
                start = clock.host.mark()
                options.read()
                end = clock.host.mark()
                if not warm:
                    samples[0].reading_ns.append(clock.host.between(start, end))
            for inputs_only in (False, True) if options.split_backward else (False,):
                run = self._step(inputs_only)
                if not warm:
                    for index, sample in enumerate(samples):
                        _add(sample, clock, [row[index] for row in run], inputs_only)

    def _step(self, inputs_only: bool) -> tuple[_Marks, _Marks, _Marks]:
        """Run one step; return marks around each layer's forward, backward and update.

        The backward is that of the oldest microbatch once there are as many as are to be in flight.
        """
        layers, clock, held = self._network.layers, self._clock, self._held
        count = len(layers)
        run: tuple[_Marks, _Marks, _Marks] = [None] * count, [None] * count, [None] * count
        for layer in layers:
            begin_sums(layer.module)
        while len(held) < self._options.in_flight:
            if self._inputs is None:
                held.append(_Held(dict(enumerate(self._network.inputs))))
            else:
                held.append(_Held(dict(zip(layers[0].reads, map(leaf, self._inputs), strict=True))))
            self._forward(held[-1], run[0])
        oldest = held.popleft()
        for index in reversed(range(count)):
            layer, outputs = layers[index], oldest.made.pop()
            run[1][index] = self._backward(layer, outputs, oldest, inputs_only)
            for value in layer.makes:
                oldest.values.pop(value)
                oldest.gradients.pop(value, None)
            del outputs
        self._entry.step()
        for index, optimizer in enumerate(self._optimizers):
            if optimizer is not None and not inputs_only:
                start = clock.mark()
                # at rate 0 weights that backwards of those held will read stay as they were, so autograd needn't know
                unseen: Any = _unsafe_preserve_version_counter(tuple(layers[index].module.parameters()))
                with unseen if held else nullcontext():
                    optimizer.step()
                run[2][index] = (start, clock.mark())
        clock.settle()
        return run

    def _forward(self, held: _Held, marks: _Marks) -> None:
        values, gradients = held.values, held.gradients
        for index, layer in enumerate(self._network.layers):
            inputs = [values[v] for v in layer.reads]
            start = self._clock.mark()
            outputs = layer.forward(inputs)
            marks[index] = (start, self._clock.mark())
            held.made.append(outputs)
            values.update((v, leaf(out)) for v, out in zip(layer.makes, outputs, strict=True))
            if layer.place == LOSS_NAME:
                gradients[layer.makes[0]] = None  # a scalar's is 1
            elif self._inputs is not None:
                gradients.update((v, torch.ones_like(out)) for v, out in zip(layer.makes, outputs, strict=True))
            del outputs, inputs

    def _backward(
        self, layer: LayerCode, outputs: Sequence[Tensor], held: _Held, inputs_only: bool
    ) -> tuple[Any, Any] | None:
        """Run the backward of a layer and add to the gradients of what it reads; None where nothing is to compute."""
        values, gradients = held.values, held.gradients
        roots = [
            (out, gradients[value])
            for value, out in zip(layer.makes, outputs, strict=True)
            if out.requires_grad and value in gradients
        ]
        read = [v for v in layer.reads if values[v].requires_grad]
        trained = [] if inputs_only else trained_parameters(layer.module)
        if not roots or not (read or trained):
            layer.module.zero_grad(set_to_none=True)
            return None
        tensors, starts = [out for out, _ in roots], [gradient for _, gradient in roots]
        wanted = [*(values[v] for v in read), *trained]
        start = self._clock.mark()
        try:
            found = torch.autograd.grad(tensors, wanted, starts, allow_unused=True)
        except RAISED as error:
            raise code_failed(f"the backward of {layer.place}", error) from error
        for value, gradient in zip(read, found, strict=False):
            if gradient is not None:
                before = gradients.get(value)
                gradients[value] = gradient if before is None else before + gradient
        for parameter, gradient in zip(trained, found[len(read) :], strict=True):
            if gradient is None:
                parameter.grad = None  # and no optimizer steps for it
            elif parameter.grad is not None:
                parameter.grad.add_(gradient)
        end = self._clock.mark()
        if self._network.chain and any(value not in gradients for value in read):
            raise BadInput(f"{layer.place}: no gradient comes back to its input")
        return start, end


def begin_sums(module: nn.Module) -> None:
    """Set the sums of gradients to 0: to these a backward adds, as those of all microbatches but an update's first."""
    for parameter in trained_parameters(module):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def dtype_of(name: str) -> torch.dtype:
    """Return torch's type of that name, such as ``bfloat16``; BadInput where it has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"dtype: torch has no type '{shown(name)}'; there are float32, bfloat16 and float16")
    return dtype


def chosen_device(choice: str) -> str:
    """Return where to measure: ``auto`` is a GPU if torch sees one; BadInput for ``cuda`` where it sees none."""
    seen = torch.cuda.is_available()
    if choice == "cuda" and not seen:
        raise BadInput("--device cuda: torch sees no GPU here; measure on the CPU or use --estimate GPU")
    if choice == "auto":
        return "cuda" if seen else "cpu"
    return choice

"""The profiler: what each layer of a sequential torch model costs, measured layer by layer in whole training steps.

The chain it makes has one layer more than the model: the loss is the last one, named ``loss``, with no weights. So
``chain.layers[i]`` is the model's layer i for i < L, and ``chain.layers[L]`` is the loss, which runs on the rank that
holds the end of the chain.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .. import __version__
from ..errors import BadInput
from ..problem import Chain, Layer

Named = list[tuple[str, nn.Module]]
Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

LOSS_NAME = "loss"
standing_still: MakeOptimizer = partial(torch.optim.SGD, lr=0.0)  # a full step's work that leaves the weights alone


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """One layer's costs, times as medians over the steps, and how wide the middle half of the steps is."""

    layer: Layer
    forward_spread_ns: int
    backward_spread_ns: int
    optimizer_spread_ns: int


def profile_model(
    build: Callable[[int], Any],
    batch: int,
    *,
    name: str,
    date: str,
    data: Callable[[int, int], tuple[Tensor, Tensor]] | None = None,
    seed: int = 0,
    steps: int = 10,
    warmup: int = 3,
    optimizer: MakeOptimizer = standing_still,
    split_backward: bool = False,
    device: str = "cpu",
    threads: int = 1,
) -> Chain:
    """Build a model by the model contract, measure it (:func:`profile_layers`) and return its chain.

    ``data(index, seed)`` gives the input and target to measure with; without it the build's example input is used, and
    a target is made up where the loss takes class numbers or a tensor like the output. ``date`` goes into ``source``:
    the library reads no calendar.
    """
    named, example_input, loss = checked_model(build(batch))
    target = None
    if data is not None:
        example_input, target = data(0, seed)
    measurements = profile_layers(
        named,
        example_input,
        loss,
        target=target,
        steps=steps,
        warmup=warmup,
        optimizer=optimizer,
        split_backward=split_backward,
        device=device,
        threads=threads,
    )
    dtypes = {str(p.dtype).removeprefix("torch.") for _, module in named for p in module.parameters()}
    return Chain(
        name=name,
        layers=tuple(x.layer for x in measurements),
        input_bytes=example_input.nbytes,
        tied=tied_layers(named),
        microbatch=batch,
        dtype="+".join(sorted(dtypes)) or str(example_input.dtype).removeprefix("torch."),
        device=device_name(device, threads),
        source=f"measured by pipeplan {__version__}, torch {torch.__version__}, {date}",
    )


def checked_model(result: Any) -> tuple[Named, Tensor, Loss]:
    """Return named layers, example input and loss of what a build function returned; BadInput if it is malformed."""
    if not (isinstance(result, tuple) and len(result) == 3):
        raise BadInput(f"build: expected (layers, example_input, loss), got {_kind(result)}")
    layers, example_input, loss = result
    if not isinstance(example_input, Tensor):
        raise BadInput(f"build: example_input is {_kind(example_input)}, not one tensor")
    if not callable(loss):
        raise BadInput(f"build: loss is {_kind(loss)}, which cannot be called")
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        raise BadInput("build: the loss has parameters; make that part the last layer")
    return named_layers(layers), example_input, loss


def named_layers(layers: Any) -> Named:
    """Return (name, module) pairs of an ``nn.Sequential``, a list of modules or such pairs.

    Layers without a name are called by class and index.
    """
    if isinstance(layers, nn.Sequential):
        # the table itself: named_children() leaves out a module that stands in it twice
        layers = list(layers._modules.items())
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise BadInput(f"layers: expected an nn.Sequential or a list of modules, got {_kind(layers)}")
    if not layers:
        raise BadInput("layers: there are none")
    named = []
    for index, entry in enumerate(layers):
        name, module = entry if isinstance(entry, tuple) and len(entry) == 2 else ("", entry)
        if not isinstance(module, nn.Module):
            raise BadInput(f"layers[{index}]: {_kind(module)} is not an nn.Module")
        named.append((name if name and not name.isdigit() else f"{type(module).__name__.lower()}{index}", module))
    return named


def profile_layers(
    layers: Any,
    example_input: Tensor,
    loss: Loss,
    *,
    target: Tensor | None = None,
    steps: int = 10,
    warmup: int = 3,
    optimizer: MakeOptimizer = standing_still,
    split_backward: bool = False,
    device: str = "cpu",
    threads: int = 1,
) -> list[LayerMeasurement]:
    """Measure each layer, and the loss as the last one, in ``warmup`` + ``steps`` training steps on ``device``.

    A step runs the whole chain as a pipeline would with every layer a stage: forward layer by layer, each on the
    detached output of the one before; backward layer by layer from the loss; then one optimizer step per layer.
    Gradients are fresh in every step. ``optimizer`` makes the optimizer of a layer from its parameters; the default is
    plain SGD, at rate 0 so that the weights stay; batch norm statistics do move. A step of a lone scalar goes before
    them: what it costs to enter an optimizer's cold code (0.2 ms was seen) is no layer's.

    With ``split_backward`` each step is followed by one whose backward computes the gradients of the layers' inputs
    alone, and the difference is the ``backward_weight_ns`` of a layer.

    Times are medians by a monotonic clock, on ``threads`` CPU threads or, on a GPU, between CUDA events. Saved bytes
    are counted in a pass of their own (:func:`saved_bytes`). Weight bytes and ``parameters`` count all parameters of a
    layer, each once, frozen ones and those tied to other layers too; buffers don't count. BadInput names a layer that
    doesn't map one tensor to one, works on its input in place, or passes no gradient on.
    """
    if steps < 1 or warmup < 0:
        raise BadInput(f"steps: {steps} measured steps after {warmup} of warm-up; at least 1 and 0 are needed")
    named = named_layers(layers)
    if not isinstance(example_input, Tensor):
        raise BadInput(f"example_input: {_kind(example_input)} is not one tensor")
    for _, module in named:
        module.to(device).train()
    first = example_input.detach().to(device)
    with _steady(threads):
        target = _made_up_target(named, first, loss) if target is None else target.to(device)
        saved = saved_bytes(named, first, loss, target)
        optimizers = [optimizer(parameters) if (parameters := _trained(module)) else None for _, module in named]
        lone = nn.Parameter(torch.zeros(1, device=device))
        lone.grad = torch.zeros_like(lone)
        entry = optimizer([lone])
        step = partial(_step, named, optimizers, entry, first, loss, target, _Clock(torch.device(device)))
        runs, inputs_only = [], []
        for _ in range(warmup + steps):
            runs.append(step())
            if split_backward:
                inputs_only.append(step(inputs_only=True))
    runs, inputs_only = runs[warmup:], inputs_only[warmup:]
    return [
        _measurement(index, name, module, runs, inputs_only, saved[index])
        for index, (name, module) in enumerate([*named, (LOSS_NAME, nn.Identity())])
    ]


def _measurement(
    index: int, name: str, module: nn.Module, runs: list[_Run], inputs_only: list[_Run], saved: int
) -> LayerMeasurement:
    forward = [run.forward_ns[index] for run in runs]
    backward = [run.backward_ns[index] for run in runs]
    update = [run.optimizer_ns[index] for run in runs]
    backward_weight_ns = None
    if inputs_only:
        rest = _median([run.backward_ns[index] for run in inputs_only]) if _trained(module) else _median(backward)
        backward_weight_ns = max(_median(backward) - rest, 0)
    parameters = list(module.parameters())
    layer = Layer(
        name=name,
        forward_ns=_median(forward),
        backward_ns=_median(backward),
        weight_bytes=sum(p.nbytes for p in parameters),
        output_bytes=runs[0].output_bytes[index],
        saved_bytes=saved,
        backward_weight_ns=backward_weight_ns,
        optimizer_ns=_median(update),
        parameters=sum(p.numel() for p in parameters),
    )
    return LayerMeasurement(layer, _spread(forward), _spread(backward), _spread(update))


def saved_bytes(layers: Any, example_input: Tensor, loss: Loss, target: Tensor) -> list[int]:
    """Count the bytes that the forward of each layer, and last of the loss, keeps for its backward.

    What autograd saves is seen by hooks; a storage counts once and in full, however many views of it are saved;
    parameters and buffers don't count. A boundary tensor that both neighbours save (the output of a ReLU that feeds a
    convolution) counts for the later layer, as its input: this is the convention of the memory model, where a
    recomputed segment keeps the input of its first layer. So the sum over the layers is what the whole model saves.

    Storages are told apart by address, hence held until nothing later can alias them: the inside of a layer until its
    forward ends, boundary tensors until the end.
    """
    named = named_layers(layers)
    tensors = [t for _, module in named for t in (*module.parameters(), *module.buffers())]
    permanent = {t.untyped_storage()._cdata for t in tensors}
    counted = [0] * (len(named) + 1)
    boundary: dict[int, torch.UntypedStorage] = {}
    owner: dict[int, int] = {}

    def count(index: int, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        seen: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen.setdefault(storage._cdata, storage)
            return tensor

        boundary[x.untyped_storage()._cdata] = x.untyped_storage()
        with saved_tensors_hooks(pack, _unpack):
            out = run(x)
        boundary[out.untyped_storage()._cdata] = out.untyped_storage()
        for key, storage in seen.items():
            if key in permanent:
                continue
            if key in owner:
                counted[owner[key]] -= storage.nbytes()
            counted[index] += storage.nbytes()
            if key in boundary:
                owner[key] = index
        return _leaf(out)

    x = example_input.detach().clone()  # a view would count with all of its storage
    target = target.detach().clone()
    for index, (name, module) in enumerate(named):
        x = count(index, partial(_forward, index, name, module), x)
    count(len(named), lambda x: _loss(loss, x, target), x)
    return counted


def tied_layers(layers: Any) -> tuple[tuple[int, int], ...]:
    """Return the pairs of layers that share a parameter, each holder paired with the next one."""
    holders: dict[int, list[int]] = {}
    for index, (_, module) in enumerate(named_layers(layers)):
        for parameter in module.parameters():
            holders.setdefault(id(parameter), []).append(index)
    return tuple(sorted({pair for indices in holders.values() for pair in pairwise(indices)}))


def device_name(device: str, threads: int) -> str:
    """Return a readable name of ``device``: the CPU's model and the number of threads, or the GPU's name."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.partition(":") for line in cpuinfo.read_text(errors="replace").splitlines())
        model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), model)
    return f"{model}, {threads} thread{'s' * (threads > 1)}"


@dataclass(frozen=True, slots=True)
class _Run:
    """One step: times and output sizes per layer."""

    forward_ns: list[int]
    backward_ns: list[int]
    optimizer_ns: list[int]
    output_bytes: list[int]


def _step(
    named: Named,
    optimizers: Sequence[torch.optim.Optimizer | None],
    entry: torch.optim.Optimizer,
    example_input: Tensor,
    loss: Loss,
    target: Tensor,
    clock: _Clock,
    inputs_only: bool = False,
) -> _Run:
    count = len(named) + 1
    inputs, outputs = [example_input], []
    forward, backward, update = ([(clock.mark(),) * 2] * count for _ in range(3))
    for _, module in named:
        module.zero_grad(set_to_none=True)
    for index, (name, module) in enumerate(named):
        start = clock.mark()
        outputs.append(_forward(index, name, module, inputs[index]))
        forward[index] = (start, clock.mark())
        inputs.append(_leaf(outputs[index]))
    start = clock.mark()
    outputs.append(_loss(loss, inputs[-1], target))
    forward[-1] = (start, clock.mark())
    sizes = [out.nbytes for out in outputs]
    gradient = None
    for index in reversed(range(count)):
        x, out = inputs.pop(), outputs.pop()
        if not out.requires_grad or (inputs_only and not x.requires_grad):
            break  # nothing left to compute from here to the input
        start = clock.mark()
        torch.autograd.backward(out, gradient, inputs=[x] if inputs_only else None)
        backward[index] = (start, clock.mark())
        gradient = x.grad
        if x.requires_grad and gradient is None:
            name = named[index][0] if index < len(named) else LOSS_NAME
            raise BadInput(f"layers[{index}] ({name}): no gradient comes back to its input")
    entry.step()
    for index, optimizer in enumerate(optimizers):
        if optimizer is not None and not inputs_only:
            start = clock.mark()
            optimizer.step()
            update[index] = (start, clock.mark())
    clock.settle()
    forward_ns, backward_ns, update_ns = ([clock.between(*pair) for pair in x] for x in (forward, backward, update))
    return _Run(forward_ns, backward_ns, update_ns, sizes)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _forward(index: int, name: str, module: nn.Module, x: Tensor) -> Tensor:
    """Run one layer; what cannot be a layer of a chain is BadInput."""
    place = f"layers[{index}] ({name})"
    version = x._version
    try:
        out = module(x)
    except Exception as error:
        raise BadInput(f"{place} failed on an input of shape {tuple(x.shape)}, {x.dtype}: {error}") from error
    if not isinstance(out, Tensor):
        raise BadInput(f"{place} returned {_kind(out)}; a layer takes one tensor and returns one")
    if x._version != version:
        raise BadInput(f"{place} changes its input in place; a cut before it would lose the change")
    return out


def _loss(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    try:
        value = loss(output, target)
    except Exception as error:
        raise BadInput(f"loss failed on {tuple(output.shape)} against {tuple(target.shape)}: {error}") from error
    if not isinstance(value, Tensor) or value.dim() > 0:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _kind(value)
        raise BadInput(f"loss returned {shape}, not a scalar tensor")
    if not value.requires_grad:
        raise BadInput("loss does not depend on anything that can be trained")
    return value


def _made_up_target(named: Named, x: Tensor, loss: Loss) -> Tensor:
    """Return class numbers or zeros like the output, whichever the loss takes."""
    for index, (name, module) in enumerate(named):
        x = _leaf(_forward(index, name, module, x))
    classes = partial(torch.zeros, dtype=torch.int64, device=x.device)
    shapes = [shape for shape in (x.shape[:-1], x.shape[:1] + x.shape[2:]) if x.dim() > 1]
    for target in (*map(classes, shapes), torch.zeros_like(x)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch only warns when a loss broadcasts shapes that don't fit
            try:
                _loss(loss, x, target)
            except BadInput:
                continue
            return target
    raise BadInput(f"loss takes no made-up target for an output of shape {tuple(x.shape)}: give data(index, seed)")


def _leaf(output: Tensor) -> Tensor:
    return output.detach().requires_grad_(output.requires_grad)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


class _Clock:
    """Marks on a device's time line: CPU nanoseconds, or CUDA events, which can be read once it is settled."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def between(self, start: Any, end: Any) -> int:
        if start is end:
            return 0
        return round(start.elapsed_time(end) * 1e6) if self._cuda else int(end - start)


@contextmanager
def _steady(threads: int) -> Iterator[None]:
    """Run with a fixed number of CPU threads and no garbage collection in between."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


def _median(values: list[int]) -> int:
    return round(statistics.median(values))


def _spread(values: list[int]) -> int:
    if len(values) < 2:
        return 0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return round(high - low)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"

"""What does each layer of a torch model cost? Measured layer by layer on this machine, or estimated.

The profile it makes has one layer more than the model: the loss is the last one, named ``loss``, with no weights. So
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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...errors import BadInput, CodeFailed
from ...problem import AUTOCAST, Chain, Layer
from ...units import format_bytes
from ...version import __version__
from ..device import CPU, FILL, clock_of, free_bytes, freed_kept, place
from ..model.contract import Built, Data, built_by, example_of, is_whole
from ..model.network import (
    LayerCode,
    Loss,
    Network,
    chain_network,
    final_outputs,
    kind_of,
    named_layers,
    own_loss,
    refuse_converted,
    scalar_loss,
    shared_weights,
    tied_layers,
)
from ..model.pieces import grouped
from ..model.structure import as_type, converted, mapped, tensors_in
from ..model.trace.adapted import SPACE, made_whole, no_reentry, run_uncompiled
from ..model.trace.author import Author
from ..model.trace.compared import apart, compare
from .beside import at_work
from .saved import saved_values, sized_layers, whole_bytes
from .steps import USUAL, MeasureOptions, Samples, measured, trained_parameters


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """One layer's costs, times as medians over the ``steps``, and how wide the middle half of the steps is.

    ``reading_ns`` is the reading of a microbatch, on a CPU as part of its forward.
    """

    layer: Layer
    steps: int
    forward_spread_ns: int
    backward_spread_ns: int
    reading_ns: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A measured model: its profile, its layers with spreads, and whether one layer at a time was on the device.

    ``notes`` say what its author's module gave up to be run by layers, ``host_bound`` the layers with a pass that an
    estimated device waits for its host in.
    """

    chain: Chain
    layers: tuple[LayerMeasurement, ...]
    one_at_a_time: bool
    notes: tuple[str, ...] = ()
    host_bound: tuple[int, ...] = ()


def measure_model(
    build: Callable[[int], Any],
    batch: int,
    options: MeasureOptions = USUAL,
    *,
    name: str,
    date: str,
    data: Data | None = None,
) -> MeasuredModel:
    """Build a model by the model contract and measure it (:func:`profile_network`).

    ``data(index, seed)`` gives the input and target to measure with; without it the build's example input is used, and
    a target is made up where the loss takes class numbers or a tensor like the output. A model that is neither an
    ``nn.Sequential`` nor a list of modules is traced (:func:`.trace.trace_module`), and its profile is a DAG. ``date``
    goes into ``source``: the library reads no calendar.
    """
    options.say("building the model")
    network, loss, target, author = built_network(built_by(build, batch), data, options)
    measurements, one, changed = profile_network(network, loss, options, target, author)
    count = 0 if options.others is None else options.others.count
    how = f"medians of {min(x.steps for x in measurements)} steps{', one layer at a time' if one else ''}"
    how += f", beside {count} other process{'es' if count > 1 else ''}" if count else ""
    how += f", {options.in_flight} microbatches in flight" if options.in_flight > 1 else ""
    chain = network_chain(
        network,
        measurements,
        name=name,
        batch=batch,
        device=device_name(options.device, options.threads),
        source=f"measured by pipeplan {__version__}, torch {torch.__version__}, {how}, {date}",
    )
    chain = replace(chain, beside=1 + count, in_flight=options.in_flight)
    chain = replace(chain, reading_ns=measurements[-1].reading_ns, changed=changed)
    return MeasuredModel(chain, tuple(measurements), one, network.notes)


def measured_again(builder: Callable[[], Callable[[int], Any]], batch: int, options: MeasureOptions) -> MeasuredModel:
    """Measure what ``builder()``, which may come from another process, builds; what it is called doesn't matter."""
    return measure_model(builder(), batch, options, name="", date="")


def built_network(built: Built, data: Data | None, options: MeasureOptions) -> tuple[Network, Loss, Any, Author]:
    """Return a built model's network without the loss, the loss, the target (None: to be made up), and itself."""
    layers, dtype = built.layers, options.dtype
    example_input, target = example_of(built, data)
    if dtype is not None:
        whole = layers if isinstance(layers, nn.Module) else nn.Sequential(*(m for _, m in named_layers(layers)))
        made_whole(whole, example_input)
        example_input, target = as_type((example_input, target), dtype)
        refuse_converted(built.loss, dtype)
        converted(whole, dtype)
    if is_whole(layers):
        options.say("tracing")
        from ..model.trace.trace import trace_module

        network = trace_module(
            layers, example_input, options.device, loss_alone=built.loss is None, autocast=options.autocast
        )
        author = Author.of(layers, example_input, built.loss is None, options.autocast)
    else:
        network = chain_network(layers, example_input, options.autocast)
        roots = [(f"{i}.", code.module) for i, code in enumerate(network.layers)]
        author = Author.of_layers(roots, options.autocast)
    return network, built.loss or own_loss, target, author


def network_chain(
    network: Network, measurements: Sequence[LayerMeasurement], *, name: str, batch: int, device: str, source: str
) -> Chain:
    """Return the profile of a measured network: a chain, or a DAG with the edges of what layers read."""
    whole = network.with_loss(lambda output, target: output, None)
    of_data = tuple(i for i, code in enumerate(network.layers) if code.of_data)
    late = any(value < len(network.inputs) for code in network.layers[1:] for value in code.reads)
    dtypes = {str(p.dtype).removeprefix("torch.") for layer in network.layers for p in layer.module.parameters()}
    if autocast := network.layers[0].autocast:
        dtypes = {AUTOCAST + str(autocast.dtype).removeprefix("torch.")}
    return Chain(
        name=name,
        layers=tuple(x.layer for x in measurements),
        input_bytes=sum(x.nbytes for x in network.inputs),
        edges=None if network.chain else whole.edges(),
        inputs=of_data if (of_data or late) and not network.chain else None,
        tied=tied_layers(code.module for code in network.layers),
        shared=shared_weights(code.module for code in network.layers) or None,
        microbatch=batch,
        dtype="+".join(sorted(dtypes)) or str(network.inputs[0].dtype).removeprefix("torch."),
        device=device,
        source=source,
        own_ways=next((code.name for code in network.layers if _has_own_ways(code.module)), ""),
    )


def _has_own_ways(module: nn.Module) -> bool:
    """Whether a traced layer has regions, which are graphs in it, or an operation that only calls its author's code."""
    if not isinstance(module, fx.GraphModule):
        return False
    regions = any(isinstance(part, fx.GraphModule) for part in module.children())
    return regions or any(getattr(node.target, "namespace", "") == SPACE for node in module.graph.nodes)


def profile_network(
    network: Network, loss: Loss, options: MeasureOptions = USUAL, target: Any = None, author: Author | None = None
) -> tuple[list[LayerMeasurement], bool, str]:
    """Measure each layer, and the loss as the last one, in training steps on a device.

    A step runs the whole network as a pipeline would with every layer a stage: forward layer by layer, each on the
    detached outputs of those before; backward layer by layer from the loss; then one optimizer step per layer.
    Gradients are added to sums that are 0 before each step, as in all microbatches of an update but the first. The
    optimizer is plain SGD by default, at rate 0 so that the weights stay; batch norm statistics do move. A step of a
    lone scalar goes before them: what it costs to enter an optimizer's cold code (0.2 ms was seen) is no layer's.

    ``hold="all"`` does that; all activations are on the device at once. ``hold="one"`` takes one layer at a time
    through all its steps: its module moves to the device and back, its backward starts from a gradient of ones,
    and only values that later layers read stay. ``auto`` takes ``all`` where weights, gradients and saved bytes
    need at most :data:`FILL` of the free memory. After ``seconds`` of measuring no further step begins. The second
    result says whether one layer at a time was held, the third names the buffer of :attr:`Chain.changed`.

    With ``split_backward`` each step is followed by one whose backward computes the gradients of the layers' inputs
    alone, and the difference is the ``backward_weight_ns`` of a layer.

    Layers that :attr:`MeasureOptions.merge` makes one are timed as one, as a stage runs them: the first of them has
    their times, the others none. Each by itself would count once more what the host takes between two.

    Times are medians by a monotonic clock, on ``threads`` CPU threads or, on a GPU, between CUDA events. Saved bytes
    and all other sizes are counted in a pass of their own (:mod:`.saved`). Meanwhile :attr:`MeasureOptions.others`
    compute. What :attr:`MeasureOptions.read` takes is added to the forwards of the first layer and of the loss, but not
    where a GPU computes meanwhile. BadInput names a layer that doesn't map one tensor to one, works on its input in
    place, or passes no gradient on, or the first difference from a step of the ``author``'s, if that is given and fits
    (:mod:`..model.compared`).
    """
    if options.in_flight < 1:
        raise BadInput(f"in flight: {options.in_flight} isn't a number of microbatches from 1 on")
    if options.steps < 1 or options.warmup < 0:
        raise BadInput(
            f"steps: {options.steps} measured steps after {options.warmup} of warm-up; at least 1 and 0 are needed"
        )
    device, hold, say = options.device, options.hold, options.say
    for layer in network.layers:
        layer.module.train()
    network = network.on([x.detach().to(device) for x in network.inputs])
    release = hold != "all"
    modules = [layer.module for layer in network.layers]
    with _steady(options.threads, device), freed_kept(), no_reentry(), run_uncompiled(modules):
        say(f"sizing {len(network)} layers")
        if target is None and loss is not own_loss:
            target = _made_up_target(network.structure(final_outputs(network, device, release)), loss)
        target = mapped(lambda x: x.detach().clone().to(device), target)
        whole, network = network, network.with_loss(loss, target)
        saved, values = saved_values(network, device, release, options.split_backward)
        layers = sized_layers(network, saved, values)
        needed = _needed_bytes(network, whole_bytes(saved, values) * options.in_flight)
        processes = 1 if options.others is None else 1 + options.others.count
        processes = max(processes, 1 if options.together is None else options.together.ranks)
        fits = processes * needed <= FILL * free_bytes(device)
        one = hold == "one" or (hold == "auto" and options.agreed(not fits))
        options.note(f"holding it all takes {format_bytes(needed)}" + ("; one layer at a time" if one else ""))
        changed = "" if author is None else _compare(author, whole, loss, target, options, one)
        clock = options.clock or clock_of(torch.device(device))
        lone = nn.Parameter(torch.zeros(1, device=device))
        lone.grad = torch.zeros_like(lone)
        entry = options.make_optimizer([lone])
        if options.others is not None:
            say(f"starting {options.others.count} other processes")
        with nullcontext() if options.others is None else at_work(options.others, options, one):
            options.begun()
            cuts = _timed_cuts(whole, layers, options)
            timed = grouped(network, cuts)
            samples = dict(zip(cuts, measured(timed, entry, clock, options, one), strict=False))
    codes, none = dict(zip(cuts, timed.layers, strict=False)), _no_time(samples[0])
    reading = _median(samples[0].reading_ns or [0])
    made = [
        _measurement(
            codes.get(index, network.layers[index]),
            layer,
            samples.get(index, none),
            reading if index in (0, len(network) - 1) else 0,
            beside=clock.host is not clock,
        )
        for index, layer in enumerate(layers)
    ]
    return made, one, changed


def _timed_cuts(network: Network, layers: Sequence[Layer], options: MeasureOptions) -> list[int]:
    """Return the cuts between what is timed as one, the loss of ``layers`` always by itself."""
    each = list(range(len(layers) + 1))
    if options.merge is None or network.chain:
        return each
    counted = [LayerMeasurement(replace(layer, forward_ns=1), 0, 0, 0) for layer in layers]
    merged = options.merge(network_chain(network, counted, name="", batch=1, device="", source=""))
    return sorted({*accumulate((layer.forward_ns for layer in merged.layers), initial=0), *each[-2:]})


def _no_time(of: Samples) -> Samples:
    """Return what a layer takes that is timed with one before it."""
    steps, split = [0] * len(of.forward_ns), [0] * len(of.inputs_only_ns)
    return Samples(steps, steps, split, steps)


def _compare(author: Author, network: Network, loss: Loss, target: Any, options: MeasureOptions, one: bool) -> str:
    """Compare ``network`` with its author's model, where that can be run whole; return what :func:`compare` does."""
    if one and options.hold != "one":
        options.note("it wasn't compared with plain training, which doesn't fit; pipeplan run does that where it fits")
        return ""
    options.say("comparing with plain training")
    modules = [*author.modules, *(layer.module for layer in network.layers)]
    begun = time.perf_counter()
    place(modules, torch.device(options.device))
    changed = compare(author, apart(network, loss), loss, network.inputs, target)
    if one:
        place(modules, CPU)
    options.note(f"its layers train as its code does: compared in {time.perf_counter() - begun:.2f} s")
    return changed


def _measurement(code: LayerCode, sized: Layer, samples: Samples, reading_ns: int, beside: bool) -> LayerMeasurement:
    backward_weight_ns = None
    if samples.inputs_only_ns:
        backward = _median(samples.backward_ns)
        rest = _median(samples.inputs_only_ns) if trained_parameters(code.module) else backward
        backward_weight_ns = max(backward - rest, 0)
    layer = replace(
        sized,
        forward_ns=_median(samples.forward_ns) + (0 if beside else reading_ns),
        backward_ns=_median(samples.backward_ns),
        backward_weight_ns=backward_weight_ns,
        optimizer_ns=_median(samples.optimizer_ns),
        work=samples.work,
        exchanges=(*samples.exchanges, *sized.exchanges),
    )
    return LayerMeasurement(
        layer, len(samples.forward_ns), _spread(samples.forward_ns), _spread(samples.backward_ns), reading_ns
    )


def _made_up_target(output: Any, loss: Loss) -> Tensor:
    """Return class numbers or zeros like the output, or one of its tensors, whichever the loss takes."""
    outputs = tensors_in(output)
    for out in outputs:
        classes = partial(torch.zeros, dtype=torch.int64, device=out.device)
        shapes = [shape for shape in (out.shape[:-1], out.shape[:1] + out.shape[2:]) if out.dim() > 1]
        for target in (*map(classes, shapes), torch.zeros_like(out)):
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch only warns when a loss broadcasts shapes that don't fit
                try:
                    scalar_loss(loss, output, target)
                except (BadInput, CodeFailed):
                    continue
                return target
    shown = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"that is {kind_of(output)}"
    raise BadInput(f"loss takes no made-up target for an output {shown}: name a data(index, seed) by --data")


def _needed_bytes(network: Network, saved: int) -> int:
    """Return the bytes of a whole step: parameters, their gradients, and everything saved."""
    parameters = {id(p): p for layer in network.layers for p in layer.module.parameters()}
    return saved + sum(p.nbytes * (2 if p.requires_grad else 1) for p in parameters.values())


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


@contextmanager
def _steady(threads: int, device: str) -> Iterator[None]:
    """Run with a fixed number of CPU threads and no garbage collection in between, and none on a GPU to begin with."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    if torch.device(device).type == "cuda":
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

"""What is a network as code? For each layer of its profile what it reads, what it makes, and how it runs.

Values are numbered: first the network's inputs, then what layers make. The loss is the last layer. A chain has one
value between neighbours; a traced network (:mod:`.trace`) is a DAG.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from ...problem import LOSS_NAME, SharedWeights
from ..device import CPU
from .autocast import Autocast, autocasting, is_cast
from .places import place_all, resident
from .structure import mapped, tensors_in
from .trace.adapted import compiled_lines, with_dense_gradients
from .user_code import RAISED, code_failed, user_code

Named = list[tuple[str, nn.Module]]
Loss = Callable[[Any, Any], Tensor]
LOSS, TARGET = -1, -2  # the numbers of two values that aren't counted: what training minimises, and what it compares


@dataclass(frozen=True, slots=True)
class LayerCode:
    """One layer: ``run(module, *values)`` makes the values ``makes`` of those that it ``reads``.

    ``module`` holds its parameters. ``place`` is how errors call it: ``layers[3] (block2)``. ``path`` is what the
    author's model calls the module whose only call begins here; empty where there is none, None where it is ``name``.
    Whoever runs it does so under its ``autocast``.
    """

    name: str
    place: str
    module: nn.Module
    run: Callable[..., Sequence[Tensor]]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    path: str | None = None
    autocast: Autocast | None = None

    @property
    def of_data(self) -> bool:
        """Whether it hands on an input of the network, which all who need it read from the data."""
        return self.run is unchanged

    def forward(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the layer; CodeFailed when it fails, BadInput when it changes its input in place."""
        versions = [x._version for x in inputs]
        try:
            with autocasting(self.autocast, _device(inputs)):
                outputs = self.run(self.module, *inputs)
        except RAISED as error:
            shapes = " and ".join(f"{tuple(x.shape)}, {x.dtype}" for x in inputs)
            raise code_failed(f"{self.place} failed on an input of shape {shapes}", error) from error
        if [x._version for x in inputs] != versions:
            raise BadInput(
                f"{self.place} changes its input in place, which a cut before it would lose; let it work on a copy "
                "(inplace=False), or make one layer of it and the one before: nn.Sequential(one, other)"
            )
        return outputs


@dataclass(frozen=True, slots=True)
class Network:
    """Layers in topological order, without the loss or, as the last layer, with it.

    ``inputs`` are the tensors of values 0, 1, ..; ``outputs`` are the values that the loss reads, and ``structure``
    makes of their tensors what the model returned. ``chain`` says that each layer reads its predecessor alone; of
    other networks ``shapes`` has the shape and type of every value, and ``trained`` are those that gradients come to.
    ``notes`` say what its author's module gave up.
    """

    layers: tuple[LayerCode, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[int, ...]
    structure: Callable[[Sequence[Tensor]], Any]
    chain: bool
    shapes: Mapping[int, TensorSpec] = field(default_factory=dict)
    trained: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def over(self) -> tuple[tuple[int, ...], ...]:
        """The values that nobody reads any more when each layer has run, the outputs not among them."""
        return over(self.layers, self.outputs)

    def edges(self) -> tuple[tuple[int, int], ...]:
        """Return pairs (maker, reader) of layers."""
        maker = {value: index for index, layer in enumerate(self.layers) for value in layer.makes}
        pairs = {(maker[v], i) for i, layer in enumerate(self.layers) for v in layer.reads if v in maker}
        return tuple(sorted(pairs))

    def with_loss(self, loss: Loss, target: Any) -> Network:
        """Return the network with ``loss(output, target)`` as its last layer."""

        made = 1 + max(value for layer in self.layers for value in (*layer.makes, *layer.reads))
        code = loss_layer(self, loss, scalar_loss)

        def run(own: nn.Module, *outputs: Tensor) -> Sequence[Tensor]:
            return code.run(own, *outputs, target)

        return replace(self, layers=(*self.layers, replace(code, run=run, reads=self.outputs, makes=(made,))))

    def under(self, autocast: Autocast | None) -> Network:
        """Return the network whose layers run under ``autocast``."""
        return replace(self, layers=tuple(replace(code, autocast=autocast) for code in self.layers))

    def on(self, inputs: Sequence[Tensor]) -> Network:
        """Return the network with other tensors as its inputs."""
        return replace(self, inputs=tuple(inputs))


def _device(tensors: Iterable[Any]) -> torch.device:
    """Return where the first of ``tensors`` is."""
    return next((x.device for x in tensors if isinstance(x, Tensor)), CPU)


def chain_network(layers: Any, example_input: Any, autocast: Autocast | None = None) -> Network:
    """Return the network of an ``nn.Sequential``, a list of modules or of (name, module) pairs, without its loss.

    Its layers run under ``autocast``, and their tables have dense gradients.
    """
    named = named_layers(layers)
    if not isinstance(example_input, Tensor):
        raise BadInput(f"example_input is {kind_of(example_input)}, not one tensor")
    modules = [module for _, module in named]
    notes = (*compiled_lines(modules), *with_dense_gradients(modules))
    codes = zip(chain_layers(named), module_names(layers), strict=True)
    paths = tuple(code if path == code.name else replace(code, path=path) for code, path in codes)
    return Network(paths, (example_input,), (len(named),), only, chain=True, notes=notes).under(autocast)


def chain_layers(named: Named, first: int = 0) -> tuple[LayerCode, ...]:
    """Return neighbouring layers of a chain, from layer ``first`` on: layer i reads value i and makes the next one."""
    return tuple(
        LayerCode(name, f"layers[{i}] ({name})", module, _one_to_one(i, name), (i,), (i + 1,))
        for i, (name, module) in enumerate(named, first)
    )


def loss_layer(network: Network, loss: Loss, value_of: Callable[..., Tensor] | None = None) -> LayerCode:
    """Return the last layer of a ``network`` that is trained: the loss of its outputs against the target, which
    ``value_of`` computes (None: :func:`loss_value`)."""
    structure, trained = network.structure, trained_loss(loss)

    def run(own: nn.Module, *values: Any) -> tuple[Tensor]:
        return ((value_of or loss_value)(own if trained else loss, structure(values[:-1]), values[-1]),)

    run.structure = structure  # type: ignore[attr-defined]  # for who wants to see the outputs as the loss does
    reads = (*network.outputs, TARGET)
    autocast = next((layer.autocast for layer in network.layers), None)  # none where a stage is the loss alone
    return LayerCode(LOSS_NAME, LOSS_NAME, trained or nn.Identity(), run, reads, (LOSS,), autocast=autocast)


def trained_loss(loss: Loss | None) -> nn.Module | None:
    """Return ``loss`` if it is a module with weights, which are the last layer's then; None for any other."""
    return loss if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None else None


def refuse_converted(loss: Loss | None, dtype: torch.dtype | None) -> None:
    """Raise BadInput for a ``loss`` with weights in a model that is converted to ``dtype``."""
    if dtype is not None and trained_loss(loss) is not None:
        raise BadInput(
            f"{type(loss).__name__}: a loss with weights is computed in 32 bits, and they would be converted with the "
            "model; run both under autocast instead (profile --dtype autocast-bfloat16)"
        )


def _one_to_one(index: int, name: str) -> Callable[[nn.Module, Tensor], tuple[Tensor]]:
    def run(module: nn.Module, x: Tensor) -> tuple[Tensor]:
        out = module(x)
        if not isinstance(out, Tensor):
            raise BadInput(
                f"layers[{index}] ({name}) returned {kind_of(out)}; a layer of a chain takes one tensor and returns "
                "one. Return the whole model as one module instead of layers, and it is traced"
            )
        return (out,)

    return run


def unchanged(_: nn.Module, *values: Tensor) -> tuple[Tensor, ...]:
    """Return ``values``: what a layer does that hands on an input."""
    return values


def only(outputs: Sequence[Tensor]) -> Tensor:
    """Return the one output of a chain."""
    return outputs[0]


def named_layers(layers: Any) -> Named:
    """Return (name, module) pairs of an ``nn.Sequential``, a list of modules or such pairs.

    Layers without a name are called by class and index.
    """
    if isinstance(layers, nn.Sequential):
        # the table itself: named_children() leaves out a module that stands in it twice
        layers = list(layers._modules.items())
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise BadInput(f"layers: expected an nn.Sequential or a list of modules, got {kind_of(layers)}")
    if not layers:
        raise BadInput("layers: the list is empty")
    named = []
    for index, entry in enumerate(layers):
        name, module = entry if isinstance(entry, tuple) and len(entry) == 2 else ("", entry)
        if not isinstance(module, nn.Module):
            raise BadInput(f"layers[{index}]: {kind_of(module)} is not an nn.Module")
        named.append((name if name and not name.isdigit() else f"{type(module).__name__.lower()}{index}", module))
    return named


def module_names(layers: Any) -> list[str]:
    """Return what an ``nn.Sequential`` calls the layers that :func:`named_layers` returns, or would if it had them."""
    if isinstance(layers, nn.Sequential):
        return list(layers._modules)
    return [(entry[0] if isinstance(entry, tuple) else "") or str(i) for i, entry in enumerate(layers)]


def tied_layers(modules: Iterable[nn.Module]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of layers that share a parameter, each holder paired with the next one.

    Parameters are the same when they are one object or two views of one storage.
    """
    return tuple(sorted({pair for x in shared_weights(modules) for pair in pairwise(x.layers)}))


def shared_weights(modules: Iterable[nn.Module]) -> tuple[SharedWeights, ...]:
    """Return what layers have in common, for each set of layers; of views of one storage as much as the smallest."""
    holders: dict[int, dict[int, tuple[int, int]]] = {}  # storage -> layer -> bytes, parameters
    for index, module in enumerate(modules):
        for p in module.parameters():
            sizes = holders.setdefault(p.untyped_storage()._cdata, {})
            sizes[index] = min(sizes.get(index, (p.nbytes, p.numel())), (p.nbytes, p.numel()))
    total: dict[tuple[int, ...], tuple[int, int]] = {}
    for sizes in holders.values():
        if len(sizes) > 1:
            layers, (size, count) = tuple(sizes), min(sizes.values())
            before = total.get(layers, (0, 0))
            total[layers] = before[0] + size, before[1] + count
    return tuple(SharedWeights(layers, *total[layers]) for layers in sorted(total))


def loss_value(loss: Loss, output: Any, target: Any) -> Tensor:
    """Return ``loss(output, target)``, computed in 32 bits where the output has 16: a mean over many terms needs them,
    and so does the gradient of a scaled loss. A loss with a true attribute ``takes_half`` sees to that itself, and
    autocast does by torch's lists."""
    if getattr(loss, "takes_half", False) or is_cast(_device(tensors_in(output))):
        return loss(output, target)
    return loss(_widened(output), _widened(target))


def _widened(value: Any) -> Any:
    return mapped(lambda x: x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, value)


def own_loss(output: Any, _: Any) -> Tensor:
    """Return the loss of a model that computes it itself and puts out nothing else."""
    loss: Tensor = output
    return loss


def scalar_loss(loss: Loss, output: Any, target: Any) -> Tensor:
    """Return ``loss(output, target)``; BadInput unless it is a scalar that depends on something trained.

    CodeFailed when the loss fails.
    """
    with user_code(f"loss failed on {_shape(output)} against {_shape(target)}"):
        value = loss_value(loss, output, target)
    if not isinstance(value, Tensor) or value.dim() > 0:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
        raise BadInput(f"loss returned {shape}, not a scalar tensor")
    if not value.requires_grad:
        raise BadInput("loss does not depend on anything that can be trained")
    return value


def final_outputs(network: Network, device: str, release: bool) -> list[Tensor]:
    """Run the layers forward one after the other, holding nothing longer than needed, and return the last values."""
    if not release:
        place_all([layer.module for layer in network.layers], device)
    values = dict(enumerate(network.inputs))
    for layer, over in zip(network.layers, network.over, strict=True):
        with resident(layer.module, device, release):
            outputs = layer.forward([values[v] for v in layer.reads])
        values.update((v, leaf(out)) for v, out in zip(layer.makes, outputs, strict=True))
        for value in over:
            del values[value]
    return [values[v] for v in network.outputs]


def over(codes: Sequence[LayerCode], kept: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Return the values that nobody reads any more when each of ``codes`` has run, but those ``kept``."""
    last = {v: i for i, code in enumerate(codes) for v in (*code.makes, *code.reads)}
    return tuple(
        tuple(v for v in dict.fromkeys((*code.reads, *code.makes)) if last[v] == i and v not in kept and v != TARGET)
        for i, code in enumerate(codes)
    )


def leaf(output: Tensor) -> Tensor:
    """Return the tensor as the start of a graph of its own, as it arrives at the next stage."""
    return output.detach().requires_grad_(output.requires_grad)


def kind_of(value: Any) -> str:
    """Return how errors name what ``value`` is."""
    return f"a {type(value).__name__}"


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else kind_of(value)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of the tensor that crosses a cut; both ends must agree before anything is sent.

    ``order`` has its dimensions from the outermost to the innermost in memory, where that isn't their own order: what
    reads the tensor behind the cut then finds it as it would without one, and makes no copy more.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] = ()

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """Return that of ``tensor``."""
        order = tuple(sorted(range(tensor.dim()), key=lambda i: -tensor.stride()[i]))
        wide = [i for i in order if tensor.shape[i] > 1]
        moved = wide != sorted(wide) and all(tensor.stride()[i] for i in wide)  # a view may have gaps, too
        return TensorSpec(tuple(tensor.shape), tensor.dtype, order if moved else ())

    @property
    def in_memory(self) -> TensorSpec:
        """What is sent: the tensor with its dimensions in the order of its memory."""
        return TensorSpec(tuple(self.shape[i] for i in self.order), self.dtype) if self.order else self

    @property
    def differentiable(self) -> bool:
        """Whether its type can carry a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def nbytes(self) -> int:
        """Bytes of one such tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

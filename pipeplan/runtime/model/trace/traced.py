"""How is a model run that is one module? As the layers of its trace, which is that of its profile (:mod:`.trace`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ....errors import BadInput
from ..autocast import Autocast
from ..contract import sample_of
from ..deferred.deferred import mode_of
from ..loaded import LoadedModel, ModelLayer, with_loss_root
from ..network import (
    LayerCode,
    Loss,
    Network,
    TensorSpec,
    converted,
    loss_layer,
    own_loss,
    refuse_converted,
    trained_loss,
)
from ..samples import Data, Samples
from ..structure import mapped, places_in, tensors_in, tensors_of
from .exported import OF_MODULE
from .trace import trace_module


def traced_model(
    module: nn.Module,
    example_input: Any,
    loss: Loss | None,
    data: Data,
    device: torch.device,
    training: bool = True,
    dtype: torch.dtype | None = None,
    autocast: Autocast | None = None,
) -> LoadedModel:
    """Trace ``module``, in training or in evaluation, and return it as a model, with a layer for each of the trace.

    Without ``loss`` the module returns it. With ``dtype`` the trace is that of the module in this type, to which its
    layers are yet to be converted; its data is. Its layers run under ``autocast``.
    """
    refuse_converted(loss, dtype)
    example_input = _as(example_input, dtype)
    mode = mode_of([*tensors_of([module]), *tensors_in(example_input)])
    with mode or nullcontext():  # a trace needs no values
        example = example_input
        if mode is not None:
            example = mapped(lambda x: x if isinstance(x, FakeTensor) else mode.from_tensor(x), example)
        with in_type(module, dtype):
            network = trace_module(module, example, str(device), loss is None, training, autocast)
    constants = with_state_of(module, network)
    compared = loss or own_loss
    codes = (*network.layers, loss_layer(network, compared))
    model = LoadedModel(
        False,
        len(network.inputs),
        (),
        network.shapes,
        network.trained,
        compared,
        Samples(data, lambda _, given: sample_of(given, loss)),
        (("", module),),
        notes=network.notes,
        training=training,
        constants=constants,
    )
    trained = trained_loss(compared)
    if trained is not None:
        model = replace(model, roots=with_loss_root(model.roots, trained))
    wanted = places_in(example_input)

    def entering(index: int, given: Any) -> tuple[tuple[Tensor, ...], Any]:
        x, target = sample_of(given, loss)
        x = _as(x, dtype)
        tensors = _in_order(f"data: microbatch {index}", x, wanted)
        for value, tensor in enumerate(tensors):
            found, spec = TensorSpec(tuple(tensor.shape), tensor.dtype), network.shapes[value]
            if (found.shape, found.dtype) != (spec.shape, spec.dtype):
                raise BadInput(f"data: microbatch {index} has an input of {found}; the example input has {spec}")
        return tuple(tensors), target

    return grouped(replace(model, data=Samples(data, entering)), [(code,) for code in codes])


@contextmanager
def in_type(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within the context, let ``module`` have floating-point weights and buffers of type ``dtype`` in their place."""
    if dtype is None:
        yield
        return
    slots = [
        (part, name, x)
        for part in module.modules()
        for entries in (part._parameters, part._buffers)
        for name, x in entries.items()
        if x is not None
    ]
    converted(module, dtype)
    try:
        yield
    finally:
        for part, name, x in slots:
            setattr(part, name, x)


def _as(value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` with its floating-point tensors in another type."""
    if dtype is None:
        return value
    return mapped(lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def with_state_of(module: nn.Module, network: Network) -> frozenset[str]:
    """Let ``network`` have the weights and buffers that ``module`` has now; return where its constants are."""
    others = set[str]()
    state = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    for code in (layer.module for layer in network.layers):
        own = [*code.named_parameters(remove_duplicate=False), *code.named_buffers(remove_duplicate=False)]
        for place, _ in own:
            found = state.get(place.removeprefix(OF_MODULE)) if place.startswith(OF_MODULE) else None
            if found is None:
                others.add(place)
            else:
                holder, _, name = place.rpartition(".")
                setattr(code.get_submodule(holder), name, found)
    return frozenset(others)


def _in_order(where: str, given: Any, wanted: Sequence[str]) -> list[Tensor]:
    """Return the tensors of ``given`` in the order in which the example has them, whose places are ``wanted``."""
    tensors, places = tensors_in(given), places_in(given)
    if len(tensors) != len(wanted):
        missing = [place for place in wanted if place and place not in places]
        more = f"; it lacks {', '.join(missing)}" if missing and any(places) else ""
        raise BadInput(f"{where} has {len(tensors)} input tensors; the example input has {len(wanted)}{more}")
    if set(places) != set(wanted) or len(set(wanted)) < len(wanted):
        return tensors
    return [tensors[places.index(place)] for place in wanted]


def grouped(model: LoadedModel, groups: Sequence[Sequence[LayerCode]]) -> LoadedModel:
    """Return ``model``, which is traced, with a layer for each of ``groups``; one without code passes values on."""
    first: dict[Any, str] = {}
    first_names: dict[str, str] = {}
    state = ((p + k, x) for p, root in model.roots for k, x in root.state_dict(keep_vars=True).items())
    whole = {name: x for name, x in state if isinstance(x, Tensor)}
    for name, tensor in whole.items():
        if first.setdefault(_identity(tensor), name) != name:
            first_names[name] = first[_identity(tensor)]
    layers = []
    for group in groups:
        alone = len(group) == 1
        module = group[0].module if alone else nn.ModuleList(code.module for code in group)
        own = module.state_dict(keep_vars=True)
        names = {k: first[_identity(x)] for k, x in own.items() if _identity(x) in first}
        name = "..".join(dict.fromkeys(code.name for code in (*group[:1], *group[-1:])))
        layers.append(ModelLayer(name, module, tuple(group), names))
    used = {name for layer in layers for name in layer.names.values()}
    unused = {name: x.detach() for name, x in whole.items() if name not in used and name not in first_names}
    return replace(model, layers=tuple(layers), first_names=first_names, unused=unused)


def _identity(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape

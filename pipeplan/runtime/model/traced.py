"""How is a model run that is one module? As the layers of its trace, which is that of its profile (:mod:`.trace`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import BadInput
from .contract import sample_of
from .deferred import mode_of
from .loaded import LoadedModel, ModelLayer
from .network import LayerCode, Loss, TensorSpec, loss_layer, own_loss
from .pieces import packed
from .spec import Data, Samples
from .structure import mapped, places_in, tensors_in, tensors_of
from .trace import trace_module


def traced_model(
    module: nn.Module,
    example_input: Any,
    loss: Loss | None,
    data: Data,
    device: torch.device,
    training: bool = True,
) -> LoadedModel:
    """Trace ``module``, in training or in evaluation, and return it as a model, with a layer for each of the trace.

    Without ``loss`` the module returns it.
    """
    mode = mode_of([*tensors_of([module]), *tensors_in(example_input)])
    with mode or nullcontext():  # a trace needs no values
        example = example_input
        if mode is not None:
            example = mapped(lambda x: x if isinstance(x, FakeTensor) else mode.from_tensor(x), example)
        network = trace_module(module, example, str(device), loss is None, training)
    compared = loss or own_loss
    codes = (*network.layers, loss_layer(compared, network.outputs, network.structure))
    model = LoadedModel(
        False,
        len(network.inputs),
        (),
        network.shapes,
        compared,
        Samples(data, lambda _, given: sample_of(given, loss)),
        (("", module),),
        notes=network.notes,
        training=training,
    )
    model = grouped(model, [(code,) for code in codes])
    inputs, wanted = model.cut(0), places_in(example_input)

    def entering(index: int, given: Any) -> tuple[Tensor, Any]:
        x, target = sample_of(given, loss)
        tensors = _in_order(f"data: microbatch {index}", x, wanted)
        chosen = [tensors[value] for value in inputs.values]
        for tensor, spec in zip(chosen, inputs.specs, strict=True):
            if len(chosen) > 1 and TensorSpec(tuple(tensor.shape), tensor.dtype) != spec:
                found = TensorSpec(tuple(tensor.shape), tensor.dtype)
                raise BadInput(f"data: microbatch {index} has an input of {found}; the example input has {spec}")
        return packed(chosen), target

    return replace(model, data=Samples(data, entering))


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
    ((_, root),) = model.roots
    first: dict[Any, str] = {}
    first_names: dict[str, str] = {}
    whole = {k: x for k, x in root.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    for name, tensor in whole.items():
        if first.setdefault(_identity(tensor), name) != name:
            first_names[name] = first[_identity(tensor)]
    layers = []
    for group in groups:
        alone = len(group) == 1
        module = group[0].module if alone else nn.ModuleList(code.module for code in group)
        state = module.state_dict(keep_vars=True)
        names = {k: first[_identity(x)] for k, x in state.items() if _identity(x) in first}
        name = "..".join(dict.fromkeys(code.name for code in (*group[:1], *group[-1:])))
        layers.append(ModelLayer(name, module, tuple(group), names))
    used = {name for layer in layers for name in layer.names.values()}
    unused = {name: x.detach() for name, x in whole.items() if name not in used and name not in first_names}
    return replace(model, layers=tuple(layers), first_names=first_names, unused=unused)


def _identity(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape

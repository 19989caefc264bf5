"""How is a model run that is one module? As the layers of its trace, which is that of its profile (:mod:`.trace`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...errors import BadInput
from .loaded import LoadedModel, ModelLayer
from .network import LayerCode, Loss, TensorSpec, loss_layer
from .pieces import packed
from .spec import Data
from .trace import trace_module, written_by


def traced_model(module: nn.Module, example_input: Any, loss: Loss, data: Data, device: torch.device) -> LoadedModel:
    """Trace ``module`` and return it as a model, each layer of the trace a layer of its own."""
    network = trace_module(module, example_input, str(device))
    specs = {v: TensorSpec(shape, dtype) for v, (shape, dtype) in network.shapes.items()}
    codes = (*network.layers, loss_layer(loss, network.outputs, network.structure))
    model = LoadedModel(False, len(network.inputs), (), specs, loss, data, (("", module),))
    model = grouped(model, [(code,) for code in codes])
    inputs = model.cut(0)

    def entering(index: int, seed: int) -> tuple[Tensor, Any]:
        x, target = data(index, seed)
        tensors = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
        if len(tensors) != len(network.inputs):
            raise BadInput(
                f"data: microbatch {index} has {len(tensors)} input tensors; the example input has "
                f"{len(network.inputs)}"
            )
        chosen = [tensors[value] for value in inputs.values]
        for tensor, spec in zip(chosen, inputs.specs, strict=True):
            if len(chosen) > 1 and TensorSpec(tuple(tensor.shape), tensor.dtype) != spec:
                found = TensorSpec(tuple(tensor.shape), tensor.dtype)
                raise BadInput(f"data: microbatch {index} has an input of {found}; the example input has {spec}")
        return packed(chosen), target

    return replace(model, data=entering)


def grouped(model: LoadedModel, groups: Sequence[Sequence[LayerCode]]) -> LoadedModel:
    """Return ``model``, which is traced, with a layer for each of ``groups``."""
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
        name = group[0].name if alone else f"{group[0].name}..{group[-1].name}"
        layers.append(ModelLayer(name, module, tuple(group), names))
    used = {name for layer in layers for name in layer.names.values()}
    unused = {name: x.detach() for name, x in whole.items() if name not in used and name not in first_names}
    return replace(model, layers=tuple(layers), first_names=first_names, unused=unused)


def _identity(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def changed_buffers(module: fx.GraphModule) -> set[int]:
    """Return the storages of the buffers that a traced layer changes."""
    changed: set[int] = set()
    buffers = dict(module.named_buffers())
    for node in module.graph.nodes:
        if node.op == "call_function":
            norm = "batch_norm" in str(node.target) or "instance_norm" in str(node.target)
            for source in node.all_input_nodes if norm else written_by(node):
                if source.op == "get_attr" and str(source.target) in buffers:
                    changed.add(buffers[str(source.target)].untyped_storage()._cdata)
    return changed

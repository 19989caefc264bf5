"""A traced model that is run: its layers as the plan's profile has them, its values, and the names of its state.

The model is traced as for its profile (:mod:`.trace`), so that its layers are the profile's. A plan may have been made
with neighbours merged, the loss among them; then several layers of the trace are one of the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...errors import BadInput
from ...problem import Chain
from .network import LOSS, LayerCode, Loss, Network, TensorSpec, loss_layer
from .pieces import packed, traced_cut
from .spec import Data, LoadedModel, Traced
from .trace import trace_module, written_by


def load_traced(module: nn.Module, example_input: Any, loss: Loss, data: Data, device: torch.device) -> LoadedModel:
    """Trace ``module`` and return it as a model, each layer of the trace a layer of its own."""
    network = trace_module(module, example_input, str(device))
    specs = {v: TensorSpec(shape, dtype) for v, (shape, dtype) in network.shapes.items()}
    groups = tuple((code,) for code in (*network.layers, loss_layer(loss, network.outputs, network.structure)))
    traced = Traced(module, network, groups, specs, frozenset(_trained(network, specs)))
    inputs = traced_cut(traced, 0)

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

    return _grouped(LoadedModel([], [], loss, entering, []), traced)


def _trained(network: Network, specs: Mapping[int, TensorSpec]) -> set[int]:
    """Return the values that depend on something trained, as far as their types can carry gradients."""
    found: set[int] = set()
    for layer in network.layers:
        if found.intersection(layer.reads) or any(p.requires_grad for p in layer.module.parameters()):
            found.update(v for v in layer.makes if specs[v].dtype.is_floating_point)
    return found


def _grouped(model: LoadedModel, traced: Traced) -> LoadedModel:
    """Return ``model`` with a layer for each of the groups of ``traced``, but for the loss where it is one alone."""
    layers = [
        (
            group[0].name if len(group) == 1 else f"{group[0].name}..{group[-1].name}",
            group[0].module if len(group) == 1 else nn.ModuleList(code.module for code in group),
        )
        for group in traced.groups
        if group[0].makes != (LOSS,)
    ]
    first: dict[Any, str] = {}
    first_names: dict[str, str] = {}
    whole = {k: x for k, x in traced.module.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    for name, tensor in whole.items():
        if first.setdefault(_identity(tensor), name) != name:
            first_names[name] = first[_identity(tensor)]
    names = tuple(
        {k: first[_identity(x)] for k, x in module.state_dict(keep_vars=True).items() if _identity(x) in first}
        for _, module in layers
    )
    used = {name for known in names for name in known.values()}
    unused = {name: x.detach() for name, x in whole.items() if name not in used and name not in first_names}
    traced = replace(traced, names=names, unused=unused)
    boundaries = [traced_cut(traced, position).forward for position in range(len(traced.groups))]
    return replace(
        model, layers=layers, keys=[""] * len(layers), boundaries=boundaries, first_names=first_names, traced=traced
    )


def _identity(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def fitted(model: LoadedModel, chain: Chain, cuts: Sequence[int]) -> LoadedModel:
    """Return traced ``model`` with the layers of ``chain``, in which neighbours may have been merged.

    Compared are names, parameters, the sizes of values and who reads them; BadInput names the first difference.
    ``cuts`` are the layers at which stages begin.
    """
    assert model.traced is not None, "lists of layers are the plan's as they are"
    codes = [code for group in model.traced.groups for code in group]
    groups: list[tuple[LayerCode, ...]] = []
    position = 0
    for index, layer in enumerate(chain.layers):
        following = chain.layers[index + 1].name if index + 1 < len(chain) else None
        ends = range(position + 1, len(codes) + 1)
        stop = next((end for end in ends if _is(codes, position, end, layer.name, following)), 0)
        if not stop:
            there = f"has {codes[position].name!r}" if position < len(codes) else "has no more layers"
            raise BadInput(f"model: {there} where the plan's profile {chain.name} has layer {index}, {layer.name!r}")
        groups.append(tuple(codes[position:stop]))
        position = stop
    if position < len(codes):
        raise BadInput(
            f"model: has {codes[position].name!r} behind the {len(chain)} layers that the plan's profile "
            f"{chain.name} has"
        )
    model = _grouped(model, replace(model.traced, groups=tuple(groups)))
    assert model.traced is not None, "it was before"
    _check(model.traced, chain, cuts)
    return model


def _is(codes: Sequence[LayerCode], start: int, stop: int, name: str, following: str | None) -> bool:
    """Whether ``name`` is that of ``codes[start:stop]`` as one layer, and ``following`` of what comes behind them.

    Merged layers are called by the first and the last of them, which may have been merged themselves.
    """
    first, last = codes[start].name, codes[stop - 1].name
    if stop - start > 1 and not (name.startswith(f"{first}..") and name.endswith(f"..{last}")):
        return False
    if stop - start == 1 and name != first:
        return False
    if following is None or stop == len(codes):
        return following is None and stop == len(codes)
    return following == codes[stop].name or following.startswith(f"{codes[stop].name}..")


def _check(traced: Traced, chain: Chain, cuts: Sequence[int]) -> None:
    entering = sum(tensor.nbytes for tensor in traced.network.inputs)
    if entering != chain.input_bytes:
        raise BadInput(
            f"model: its example input has {entering} bytes; the plan's profile says {chain.input_bytes} for "
            f"microbatches of {chain.microbatch}"
        )
    for index, (group, layer) in enumerate(zip(traced.groups, chain.layers, strict=True)):
        weights = sum(parameter.nbytes for code in group for parameter in code.module.parameters())
        if weights != layer.weight_bytes:
            raise BadInput(
                f"model: layer {index} ({layer.name}) has {weights} bytes of parameters; the plan's profile says "
                f"{layer.weight_bytes}"
            )
        made = sum(traced.specs[v].nbytes for v in group[0].makes if v != LOSS)
        if len(group) == 1 and group[0].makes != (LOSS,) and made != layer.output_bytes:
            raise BadInput(
                f"model: layer {index} ({layer.name}) puts out {made} bytes; the plan's profile says "
                f"{layer.output_bytes}"
            )
    _check_edges(traced, chain)
    for cut in cuts:
        if not traced_cut(traced, cut).trained:
            crossing = " and ".join(map(str, traced_cut(traced, cut).specs))
            raise BadInput(f"model: {crossing} crosses the cut before layer {cut} and carries no gradient")
    _check_buffers(traced, chain, cuts)


def _check_edges(traced: Traced, chain: Chain) -> None:
    if chain.edges is None:  # merged at the cuts that one tensor crosses
        return
    maker = {v: i for i, group in enumerate(traced.groups) for code in group for v in code.makes}
    for index, group in enumerate(traced.groups):
        reads = {maker[v] for code in group for v in code.reads if v in maker} - {index}
        planned = {i for i, j in chain.edges if j == index}
        if reads != planned:
            raise BadInput(
                f"model: layer {index} ({chain.layers[index].name}) reads {_listed(reads)}; the plan's profile says "
                f"{_listed(planned)}"
            )


def _listed(layers: set[int]) -> str:
    return f"layers {', '.join(map(str, sorted(layers)))}" if layers else "no layer"


def _check_buffers(traced: Traced, chain: Chain, cuts: Sequence[int]) -> None:
    """Raise BadInput where stages would each change a buffer that the model has once, as batch norm's statistics."""
    stage_of: dict[int, int] = {}
    bounds = [0, *cuts, len(traced.groups)]
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for index in range(start, stop):
            for code in traced.groups[index]:
                for key in _changed_buffers(code.module):
                    if stage_of.setdefault(key, stage) != stage:
                        raise BadInput(
                            f"model: layer {index} ({chain.layers[index].name}) and one in stage {stage_of[key]} "
                            "change the same buffer; a plan with both in one stage can be run"
                        )


def _changed_buffers(module: nn.Module) -> set[int]:
    """Return the storages of the buffers that a traced layer changes."""
    if not isinstance(module, fx.GraphModule):
        return set()
    changed: set[int] = set()
    buffers = dict(module.named_buffers())
    for node in module.graph.nodes:
        if node.op == "call_function":
            norm = "batch_norm" in str(node.target) or "instance_norm" in str(node.target)
            for source in node.all_input_nodes if norm else written_by(node):
                if source.op == "get_attr" and str(source.target) in buffers:
                    changed.add(buffers[str(source.target)].untyped_storage()._cdata)
    return changed

"""What does each layer's forward keep for its backward, and which storages do values lie in? Saved-tensor hooks tell.

What ranges of layers keep follows from it (:mod:`pipeplan.cost.saved`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...problem import Layer
from ..model.network import LayerCode, Network, drop, leaf, place_all, resident


@dataclass(frozen=True, slots=True)
class Saved:
    """What one layer saves: the ``values`` that it reads or makes, and ``private_bytes`` of everything else."""

    private_bytes: int
    values: frozenset[int]


@dataclass(frozen=True, slots=True)
class Value:
    """A value's own bytes, the first value in the same storage, and the bytes of that (0 for a weight's)."""

    size: int
    first: int
    storage_bytes: int


def saved_values(network: Network, device: str, release: bool = False) -> tuple[list[Saved], dict[int, Value]]:
    """Run each layer of ``network`` forward; return what each one saves, and where all values lie.

    A storage counts once and in full, however many views of it are saved; parameters and buffers don't count. Storages
    are told apart by address, hence held until nothing later can alias them: the inside of a layer until its forward
    ends, values until their last reader. With ``release`` no more than one layer's module stands on the device.
    """
    if not release:
        place_all(network, device)
    values = {v: x.detach().clone() for v, x in enumerate(network.inputs)}  # a view counts with all of its storage
    first: dict[int, int] = {}  # storage -> the first value in it
    known: dict[int, Value] = {}
    saved = []
    for index, layer in enumerate(network.layers):
        with resident(layer.module, device, release):
            own = (*layer.module.parameters(), *layer.module.buffers())  # a move gives them other storages
            permanent = {t.untyped_storage()._cdata for t in own}
            seen, outputs = _forward(layer, [values[v] for v in layer.reads])
            values.update((v, leaf(out)) for v, out in zip(layer.makes, outputs, strict=True))
            del outputs
            touched = dict.fromkeys((*layer.reads, *layer.makes))
            for value in touched:
                storage = values[value].untyped_storage()
                key = storage._cdata
                size = 0 if key in permanent else storage.nbytes()
                known.setdefault(value, Value(values[value].nbytes, first.setdefault(key, value), size))
            among = {v for v in touched if values[v].untyped_storage()._cdata in seen}
            boundary = permanent | {values[v].untyped_storage()._cdata for v in touched}
            private = sum(storage.nbytes() for key, storage in seen.items() if key not in boundary)
            seen.clear()
        saved.append(Saved(private, frozenset(among)))
        drop(values, network, index)
        held = {x.untyped_storage()._cdata for x in values.values()}
        first = {key: value for key, value in first.items() if key in held}
    return saved, known


def _forward(layer: LayerCode, inputs: Sequence[Tensor]) -> tuple[dict[int, torch.UntypedStorage], Sequence[Tensor]]:
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage._cdata, storage)
        return tensor.detach()  # an output itself would keep its own graph alive for ever

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer.forward(inputs)
    return seen, outputs


def whole_bytes(saved: Sequence[Saved], values: dict[int, Value]) -> int:
    """Return what the whole network keeps, each storage once."""
    storages = {values[v].first: values[v].storage_bytes for layer in saved for v in layer.values}
    return sum(layer.private_bytes for layer in saved) + sum(storages.values())


def saved_fields(network: Network, saved: Sequence[Saved], values: dict[int, Value]) -> list[dict[str, Any]]:
    """Return the fields of each :class:`~pipeplan.problem.Layer` that say what it saves and where its output lies.

    Where a layer makes several values and another saves some of them only, those count as that layer's own, which is on
    the safe side: a profile knows one output of a layer.
    """
    made = {-1: tuple(range(len(network.inputs))), **{i: layer.makes for i, layer in enumerate(network.layers)}}
    maker = {v: i for i, makes in made.items() for v in makes}
    fields = []
    for i, (layer, kept) in enumerate(zip(network.layers, saved, strict=True)):
        private, saves = kept.private_bytes, set()
        view = _viewed(layer, values, made, maker)
        for source in sorted({maker[v] for v in layer.reads} | {i}):
            some = {v for v in made[source] if v in kept.values}
            if source == view or not some:
                continue
            if all(v in some or (v in values and not values[v].size) for v in made[source]):
                saves.add(source)
            else:
                private += sum({values[v].first: max(values[v].size, values[v].storage_bytes) for v in some}.values())
        if view is not None and kept.values & {*layer.makes, *made[view]}:
            saves = (saves - {i}) | {view}
        size = {x: sum(values[v].size for v in made[x]) for x in saves | {i}}
        storage = sum({values[v].first: values[v].storage_bytes for v in layer.makes}.values())
        alone = sum(storage if x == i else size[x] for x in saves)
        fields.append(
            {
                "saved_bytes": private + alone,
                "saves": tuple(sorted(saves)),
                "view_of": view,
                "storage_bytes": storage if view is None and storage != size[i] else None,
            }
        )
    return fields


def _viewed(
    layer: LayerCode, values: dict[int, Value], made: dict[int, tuple[int, ...]], maker: dict[int, int]
) -> int | None:
    """Return the layer (or -1) whose one value, read by ``layer``, all that this one makes is a view of."""
    storages = {values[v].first for v in layer.makes}
    for value in layer.reads:
        if storages == {values[value].first} and made[maker[value]] == (value,) and values[value].storage_bytes:
            return maker[value]
    return None


def sized_layers(network: Network, saved: Sequence[Saved], values: dict[int, Value]) -> list[Layer]:
    """Return the layers of ``network`` with all their sizes, and times of 0.

    Weight bytes and ``parameters`` count all parameters of a layer, each once, frozen ones and those tied to other
    layers too; buffers don't count.
    """
    layers = []
    for code, fields in zip(network.layers, saved_fields(network, saved, values), strict=True):
        parameters = list(code.module.parameters())
        layers.append(
            Layer(
                name=code.name,
                forward_ns=0,
                backward_ns=0,
                weight_bytes=sum(p.nbytes for p in parameters),
                output_bytes=sum(values[v].size for v in code.makes),
                parameters=sum(p.numel() for p in parameters),
                **fields,
            )
        )
    return layers

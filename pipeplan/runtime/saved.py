"""What each layer's forward keeps for its backward: seen by saved-tensor hooks, each distinct storage counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .network import LayerCode, Loss, Network, chain_network, drop, leaf, resident


@dataclass(frozen=True, slots=True)
class Saved:
    """What one layer saves: ``values`` that it reads or makes (by number), and ``private_bytes`` of everything else."""

    private_bytes: int
    values: frozenset[int]


def saved_bytes(layers: Any, example_input: Tensor, loss: Loss, target: Tensor) -> list[int]:
    """Count the bytes that the forward of each layer, and last of the loss, keeps for its backward.

    What autograd saves is seen by hooks; a storage counts once and in full, however many views of it are saved;
    parameters and buffers don't count. A boundary tensor that both neighbours save (the output of a ReLU that feeds a
    convolution) counts for the later layer, as its input: this is the convention of the memory model, where a
    recomputed segment keeps the input of its first layer. So the sum over the layers is what the whole model saves.
    """
    network = chain_network(layers, example_input)
    device = str(example_input.device)
    return owned_bytes(*saved_values(network.with_loss(loss, target.detach().clone()), device))


def saved_values(network: Network, device: str, release: bool = False) -> tuple[list[Saved], dict[int, int]]:
    """Run each layer of ``network`` forward; return what each one saves, and the bytes of each saved value's storage.

    Values that are views of one storage count as the first of them. Storages are told apart by address, hence held
    until nothing later can alias them: the inside of a layer until its forward ends, values until their last reader.
    With ``release`` no more than one layer's module stands on the device.
    """
    values = {v: x.detach().clone() for v, x in enumerate(network.inputs)}  # a view counts with all of its storage
    first: dict[int, int] = {}  # storage -> the value that it is
    sizes: dict[int, int] = {}
    saved = []
    for index, layer in enumerate(network.layers):
        with resident(layer.module, device, release):
            own = (*layer.module.parameters(), *layer.module.buffers())  # a move gives them other storages
            permanent = {t.untyped_storage()._cdata for t in own}
            seen, outputs = _forward(layer, [values[v] for v in layer.reads])
            values.update((v, leaf(out)) for v, out in zip(layer.makes, outputs, strict=True))
            del outputs
            for value in (*layer.reads, *layer.makes):
                first.setdefault(values[value].untyped_storage()._cdata, value)
            private, among = 0, set()
            for key, storage in seen.items():
                if key in first:
                    among.add(first[key])
                    sizes[first[key]] = storage.nbytes()
                elif key not in permanent:
                    private += storage.nbytes()
            seen.clear()
        saved.append(Saved(private, frozenset(among)))
        drop(values, network, index)
        held = {x.untyped_storage()._cdata for x in values.values()}
        first = {key: value for key, value in first.items() if key in held}
    return saved, sizes


def _forward(layer: LayerCode, inputs: Sequence[Tensor]) -> tuple[dict[int, torch.UntypedStorage], Sequence[Tensor]]:
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage._cdata, storage)
        return tensor.detach()  # an output itself would keep its own graph alive for ever

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer.forward(inputs)
    return seen, outputs


def owned_bytes(saved: Sequence[Saved], sizes: dict[int, int]) -> list[int]:
    """Return the bytes of each layer when a value that several layers save counts for the last of them."""
    owner = {value: index for index, layer in enumerate(saved) for value in layer.values}
    counted = [layer.private_bytes for layer in saved]
    for value, index in owner.items():
        counted[index] += sizes[value]
    return counted


def saved_fields(network: Network, saved: Sequence[Saved], sizes: dict[int, int]) -> list[int | None]:
    """Return the ``saved_bytes`` of each layer's profile: a number, or None for "exactly what it reads".

    None is exact for a tensor that several layers save, wherever cuts fall: each stage counts it once. It is used in a
    DAG where a layer saves what it reads and nothing else, all of it, and no other reader has a number that includes
    it. Numbers count a value for the last layer that saves it.
    """
    if network.chain:
        return list(owned_bytes(saved, sizes))
    makers = {v: layer for layer in network.layers for v in layer.makes}
    inputs = frozenset(range(len(network.inputs)))
    plain = set()
    for i, (layer, kept) in enumerate(zip(network.layers, saved, strict=True)):
        reads = frozenset(layer.reads)
        whole = all(len(makers[v].makes) == 1 for v in reads if v in makers)
        one_source = reads == inputs if reads & inputs else True
        if not kept.private_bytes and kept.values == reads and whole and one_source:
            plain.add(i)
    while True:  # a reader that becomes a number makes the other savers of its values numbers too
        numbers = {
            v for i, kept in enumerate(saved) if i not in plain for v in kept.values & set(network.layers[i].reads)
        }
        mixed = {i for i in plain if saved[i].values & numbers}
        if not mixed:
            break
        plain -= mixed
    owner = {value: i for i, kept in enumerate(saved) for value in kept.values}
    fields: list[int | None] = []
    for i, kept in enumerate(saved):
        mine = sum(sizes[v] for v in kept.values if owner[v] == i)
        fields.append(None if i in plain else kept.private_bytes + mine)
    return fields

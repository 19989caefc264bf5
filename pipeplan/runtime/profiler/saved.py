"""What does each layer's forward keep for its backward, where do values lie, and what does a pass take beside?

Saved-tensor hooks tell what is kept; what ranges of layers keep follows from it (:mod:`pipeplan.cost.saved`). Beside
that a pass takes the gradients of what it made and read, and what its operations need meanwhile: the gradient of logits
is often more than all that the rest of a stage works with. That is counted while each layer runs forward and back: on a
GPU by its allocator, kernels' own workspaces too; elsewhere storages are counted as operations make them and nobody
holds them any more, without what is inside an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ...problem import Exchange, Layer, WeightNeeds, matrix_state
from ..model.network import LayerCode, Network, leaf
from ..model.pieces import Saved
from ..model.places import place_all, resident
from ..model.split_backward import WeightPart, input_part
from ..model.structure import tensors_in
from ..model.user_code import RAISED, code_failed
from .steps import begin_sums


@dataclass(frozen=True, slots=True)
class Kept:
    """What one layer saves: the ``values`` that it reads or makes, and ``private_bytes`` of everything else.
    ``working_bytes`` are what its passes take beside.

    ``later`` is what of that its weights' gradients need, where they are told apart, and ``gradient_bytes`` the
    gradients beside it.
    """

    private_bytes: int
    values: frozenset[int]
    later: Kept | None = None
    gradient_bytes: int = 0
    working_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Value:
    """A value's own bytes, the first value in the same storage, and the bytes of that (0 for a weight's)."""

    size: int
    first: int
    storage_bytes: int


def saved_values(
    network: Network, device: str, release: bool = False, split: bool = False
) -> tuple[list[Kept], dict[int, Value]]:
    """Run each layer of ``network`` forward and back; return what each one saves and works with, and where all values
    lie.

    A storage counts once and in full, however many views of it are saved; parameters and buffers don't count. Storages
    are told apart by address, hence held until nothing later can alias them: the inside of a layer until its forward
    ends, values until their last reader. With ``release`` no more than one layer's module stands on the device. With
    ``split`` each layer runs once more, backward in two parts, to see what the second needs.
    """
    if not release:
        place_all([layer.module for layer in network.layers], device)
    values = {v: x.detach().clone() for v, x in enumerate(network.inputs)}  # a view counts with all of its storage
    first: dict[int, int] = {}  # storage -> the first value in it
    known: dict[int, Value] = {}
    saved = []
    for layer, over in zip(network.layers, network.over, strict=True):
        with resident(layer.module, device, release):
            found, outputs = _alone(layer, [leaf(values[v]) for v in layer.reads], torch.device(device))
            values.update(zip(layer.makes, outputs, strict=True))
            permanent = _permanent(layer)
            for value in dict.fromkeys((*layer.reads, *layer.makes)):
                storage = values[value].untyped_storage()
                size = 0 if storage._cdata in permanent else storage.nbytes()
                known.setdefault(value, Value(values[value].nbytes, first.setdefault(storage._cdata, value), size))
            if split:
                found = replace(found, **_later(layer, [leaf(values[v]) for v in layer.reads]))
        saved.append(found)
        for value in over:
            del values[value]
        held = {x.untyped_storage()._cdata for x in values.values()}
        first = {key: value for key, value in first.items() if key in held}
    return saved, known


def _alone(layer: LayerCode, inputs: Sequence[Tensor], device: torch.device) -> tuple[Kept, Sequence[Tensor]]:
    """Run a layer forward, and back from ones into sums that are there; return what it takes, and what it makes."""
    begin_sums(layer.module)
    seen: Storages = {}
    boxes: list[ReferenceType[_Box]] = []

    def pack(tensor: Tensor) -> _Box:
        storage = tensor.untyped_storage()
        seen.setdefault(storage._cdata, storage)
        box = _Box(tensor)
        boxes.append(ref(box))
        return box

    with nullcontext(_Allocated(device)) if device.type == "cuda" else _Made() as counted:
        with saved_tensors_hooks(pack, lambda box: box.tensor):
            outputs = layer.forward(inputs)
        held = counted.held()
        found = _kept(layer, inputs, outputs, seen)
        seen.clear()
        made = [leaf(out) for out in outputs]
        ends = [x for x in outputs if x.requires_grad]
        del outputs
        try:
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
        except RAISED as error:
            raise code_failed(f"the backward of {layer.place}", error) from error
        finally:
            for box in filter(None, (one() for one in boxes)):
                box.tensor = None
        size = max(counted.most() - held, 0)
    layer.module.zero_grad(set_to_none=True)
    return replace(found, working_bytes=size), made


class _Box:
    """A tensor that autograd saved, in its hands alone; emptied where no backward comes by, as a graph that has saved
    what it made would live for ever otherwise."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


def _permanent(layer: LayerCode) -> set[int]:
    own = (*layer.module.parameters(), *layer.module.buffers())  # a move gives them other storages
    return {t.untyped_storage()._cdata for t in own}


def _kept(layer: LayerCode, inputs: Sequence[Tensor], outputs: Sequence[Tensor], storages: Storages) -> Kept:
    """Return what of ``storages`` are values that a layer reads or makes, and the bytes of those that are its own."""
    boundary = zip((*layer.reads, *layer.makes), (*inputs, *outputs), strict=True)
    keys = {v: x.untyped_storage()._cdata for v, x in boundary}
    elsewhere = _permanent(layer) | set(keys.values())
    private = sum(x.nbytes() for key, x in storages.items() if key not in elsewhere)
    return Kept(private, frozenset(v for v, key in keys.items() if key in storages))


def _later(layer: LayerCode, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Return the fields of a layer's :class:`Kept` about the second part of its backward, after the first from ones."""
    saved = Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        outputs = layer.forward(inputs)
    ends = [(get_gradient_edge(out), torch.ones_like(out)) for out in outputs if out.requires_grad]
    try:
        needs = input_part(ends, [x for x in inputs if x.requires_grad], saved) if ends else WeightPart([], saved)
        saved.drop_but(needs.needed())
    except RAISED as error:
        raise code_failed(f"the backward of {layer.place}", error) from error
    layer.module.zero_grad(set_to_none=True)
    gradients = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in needs.gradients()}
    found = _kept(layer, inputs, outputs, {x.untyped_storage()._cdata: x.untyped_storage() for x in saved.tensors()})
    needs.let_go()
    return {"later": found, "gradient_bytes": sum(gradients.values())}


def whole_bytes(saved: Sequence[Kept], values: dict[int, Value]) -> int:
    """Return what the whole network keeps, each storage once."""
    storages = {values[v].first: values[v].storage_bytes for layer in saved for v in layer.values}
    return sum(layer.private_bytes for layer in saved) + sum(storages.values())


Storages = dict[int, torch.UntypedStorage]  # by identity


def saved_fields(network: Network, saved: Sequence[Kept], values: dict[int, Value]) -> list[dict[str, Any]]:
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
            if source == i:  # of what it made weights, and views of what it read, take nothing more
                some = {v for v in some if values[v].storage_bytes and values[v].first not in layer.reads}
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


def _numbers(parameters: Sequence[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def sized_layers(network: Network, saved: Sequence[Kept], values: dict[int, Value]) -> list[Layer]:
    """Return the layers of ``network`` with all their sizes, and times of 0.

    Weight bytes and ``parameters`` count all parameters of a layer, each once, frozen ones and those tied to other
    layers too; buffers don't count.
    """
    layers = []
    needs: list[WeightNeeds | None] = [None] * len(saved)
    if all(x.later is not None for x in saved):
        later = saved_fields(network, [x.later for x in saved if x.later is not None], values)
        needs = [
            WeightNeeds(fields["saved_bytes"], fields["saves"], kept.gradient_bytes)
            for fields, kept in zip(later, saved, strict=True)
        ]
    told = zip(network.layers, saved, saved_fields(network, saved, values), needs, strict=True)
    for code, kept, fields, need in told:
        parameters = list(code.module.parameters())
        alike = {
            n: [p for p in parameters if getattr(p, "copies", 1) == n]
            for n in {getattr(p, "copies", 1) for p in parameters}
        }
        layers.append(
            Layer(
                name=code.name,
                forward_ns=0,
                backward_ns=0,
                weight_bytes=sum(p.nbytes for p in parameters),
                output_bytes=sum(values[v].size for v in code.makes),
                parameters=_numbers(parameters),
                weight_needs=need,
                working_bytes=kept.working_bytes,
                module=code.path,
                matrix_state=matrix_state(p.shape for p in parameters),
                own_parameters=None if set(alike) <= {1} else sum(-(-_numbers(alike[n]) // n) for n in alike),
                exchanges=tuple(
                    Exchange("all-reduce", False, sum(p.nbytes for p in alike[n]), ranks=n, update=True)
                    for n in sorted(alike)
                    if n > 1
                ),
                **fields,
            )
        )
    return layers


# --- what a pass takes beside -----------------------------------------------------------------------------------------


class _Allocated:
    """What a GPU's allocator gave."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base untyped
    """The storages that operations made, as long as something has them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held = self._most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._made:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
                self._held += storage.nbytes()
        if self._held > self._most:
            self._most = max(self._most, self.held())
        return out

    def held(self) -> int:
        self._made = {key: row for key, row in self._made.items() if not row[0].expired()}  # type: ignore[no-untyped-call]
        self._held = sum(size for _, size in self._made.values())
        return self._held

    def most(self) -> int:
        return self._most

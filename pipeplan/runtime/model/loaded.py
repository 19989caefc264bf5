"""What does a run train? The layers of its plan as code, the values between them, and the names of their state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...errors import BadInput
from ...plan import Stage
from ...problem import LOSS_NAME
from ...registry import Late
from .contract import Samples
from .network import TARGET, LayerCode, Loss, TensorSpec
from .pieces import Cut, Piece, message_spec, pieces_of

if TYPE_CHECKING:
    from ...zoo.text.rank_part import Shard

Roots = tuple[tuple[str, nn.Module], ...]  # modules with the prefixes of their entries in the whole model's state
LOSS_ROOT = f"{LOSS_NAME}."
storing = Late("zoo.text.gpt:storing")


def with_loss_root(roots: Roots, loss: nn.Module) -> Roots:
    """Return ``roots`` and the ``loss``, which has weights; BadInput where one of its names is taken."""
    if any(f"{prefix}{name}".startswith(LOSS_ROOT) for prefix, root in roots for name in root.state_dict()):
        raise BadInput(f"{type(loss).__name__}: its weights are saved as {LOSS_ROOT}NAME, which the model has, too")
    return (*roots, (LOSS_ROOT, loss))


@dataclass(frozen=True)
class ModelLayer:
    """One of the plan's layers: its ``codes`` are the network's, several where the plan has merged neighbours.

    ``names`` says what entries of the state of ``module`` are called in the whole model's; others are no part of it.
    """

    name: str
    module: nn.Module
    codes: tuple[LayerCode, ...]
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its parameters."""
        return sum(parameter.nbytes for parameter in self.module.parameters())

    @property
    def counted_bytes(self) -> int:
        """The same with what its codes share counted in each, as profiles do that don't say what they share."""
        return sum(parameter.nbytes for code in self.codes for parameter in code.module.parameters())

    def with_module(self, module: nn.Module) -> ModelLayer:
        """Return the layer with a copy of its module."""
        parts = [module] if len(self.codes) == 1 else list(module.children())
        codes = tuple(replace(code, module=part) for code, part in zip(self.codes, parts, strict=True))
        return replace(self, module=module, codes=codes)


@dataclass(frozen=True)
class LoadedModel:
    """A built model: its ``layers``, the ``loss`` the last one, and the ``data`` to train on.

    ``specs`` are the shapes and types of all values, of which the first ``inputs`` are data; in a ``chain`` each layer
    reads its predecessor alone. Gradients come back to the values ``trained``, in a chain to all whose types can carry
    them, because a stage waits for the gradient of the next one, whether or not it trains anything. The whole model's
    state is that of ``roots``, modules with the prefixes of their entries. Of what stands in it more than once
    ``first_names`` has the first name for each of the others, and ``unused`` is what no layer has. ``notes`` say what
    the author's module gave up to be run by stages. ``source`` has its state, where it has been built without. A traced
    model is that of its ``training``, or of its evaluation; ``constants`` are what its forward makes of numbers, by
    their places in the modules of codes. ``versions`` are those of the modules' states, which torch keeps beside a
    state. Where several run each layer together ``shards`` says by name which part of a tensor is here. ``compared``
    says how it was compared with plain training, or why not, where that was tried.
    """

    chain: bool
    inputs: int
    layers: tuple[ModelLayer, ...]
    specs: Mapping[int, TensorSpec]
    trained: frozenset[int]
    loss: Loss
    data: Samples
    roots: Roots
    first_names: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: Path | None = None
    training: bool = True
    constants: frozenset[str] = frozenset()
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    compared: str = ""
    shards: Mapping[str, Shard] = field(default_factory=dict)

    @property
    def boundaries(self) -> list[TensorSpec]:
        """What comes in, and what is sent forward if there is a cut before each further layer."""
        entering = message_spec([self.specs[value] for value in range(self.inputs)])
        return [entering, *(self.cut(position).forward for position in range(1, len(self.layers)))]

    @cached_property
    def _data(self) -> dict[int, int]:
        """The values that come from the data, and which input each of them is."""
        handed_on = (code for layer in self.layers for code in layer.codes if code.of_data)
        return {v: v for v in range(self.inputs)} | {code.makes[0]: code.reads[0] for code in handed_on}

    def read_by(self, stage: Stage) -> dict[int, tuple[int, TensorSpec]]:
        """Return the values that ``stage`` reads from the data, which input each of them is, and its shape and type."""
        codes = [code for layer in self.of(stage) for code in layer.codes if not code.of_data]
        read = sorted({v for code in codes for v in code.reads} & self._data.keys())
        return {v: (self._data[v], self.specs[v]) for v in read}

    def cut(self, position: int) -> Cut:
        """Return the cut before layer ``position``, crossed by what is made before it and read behind it."""
        behind = [code for layer in self.layers[position:] for code in layer.codes]
        read, made = {v for code in behind for v in code.reads}, {v for code in behind for v in code.makes}
        values = tuple(sorted(read - made - {TARGET} - self._data.keys()))
        return Cut(values, tuple(self.specs[v] for v in values), tuple(v for v in values if v in self.trained))

    def storing(self, which: Collection[int]) -> LoadedModel:
        """Return the model of which some layers keep what the core of their attention makes, which runs again in all
        others."""
        layers = list(self.layers)
        for i in which:
            codes = (x if x.of_data else replace(x, run=partial(storing, x.run)) for x in layers[i].codes)
            layers[i] = replace(layers[i], codes=tuple(codes))
        return replace(self, layers=tuple(layers))

    def of(self, stage: Stage) -> tuple[ModelLayer, ...]:
        """Return the layers of ``stage``."""
        return self.layers[stage.start : stage.stop]

    def modules(self, stage: Stage) -> list[nn.Module]:
        """Return the modules of the layers of ``stage``."""
        return [layer.module for layer in self.of(stage)]

    def pieces(self, stage: Stage, apart: bool = False) -> tuple[Piece, ...]:
        """Return the stored and the recomputed pieces of ``stage``, stored layers ``apart`` one by one."""
        leaving = self.cut(stage.stop).values
        codes = [[code for code in layer.codes if not code.of_data] for layer in self.of(stage)]
        return pieces_of(stage.start, codes, stage.checkpoint, leaving, apart)


def with_shards(model: LoadedModel) -> LoadedModel:
    """Return ``model`` with the parts of tensors that its modules have."""
    shards = {
        prefix + (f"{path}.{name}" if path else name): shard
        for prefix, root in model.roots
        for path, module in root.named_modules(remove_duplicate=False)
        for name, shard in getattr(module, "shards", {}).items()
    }
    return replace(model, shards=shards)


def constants_of(model: LoadedModel) -> list[Tensor]:
    """Return the tensors that the forward of a traced model makes from numbers: their types are the author's."""
    buffers = (x for layer in model.layers for code in layer.codes for x in code.module.named_buffers())
    return [x for place, x in buffers if place in model.constants]


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

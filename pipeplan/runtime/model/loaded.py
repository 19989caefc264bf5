"""What does a run train? The layers of its plan as code, the values between them, and the names of their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from ...plan import Stage
from .network import TARGET, LayerCode, Loss, TensorSpec
from .pieces import Cut, Piece, pieces_of
from .spec import Samples


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
    reads its predecessor alone. The whole model's state is that of ``roots``, modules with the
    prefixes of their entries. Of what stands in it more than once ``first_names`` has the first name for each of the
    others, and ``unused`` is what no layer has. ``notes`` say what the author's module gave up to be
    run by stages. ``source`` has its state, where it has been built without. A traced model is that of its
    ``training``, or of its evaluation; ``constants`` are what its forward makes of numbers, by their places in the
    modules of codes.
    """

    chain: bool
    inputs: int
    layers: tuple[ModelLayer, ...]
    specs: Mapping[int, TensorSpec]
    loss: Loss
    data: Samples
    roots: tuple[tuple[str, nn.Module], ...]
    first_names: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: Path | None = None
    training: bool = True
    constants: frozenset[str] = frozenset()

    @property
    def boundaries(self) -> list[TensorSpec]:
        """What is sent forward if there is a cut before each layer."""
        return [self.cut(position).forward for position in range(len(self.layers))]

    @cached_property
    def _trained(self) -> set[int]:
        """The values whose gradients come back: as far as their types can carry them, those that depend on weights.

        In a chain all, because a stage waits for the gradient of the next one, whether or not it trains anything.
        """
        floating = {value for value, spec in self.specs.items() if spec.dtype.is_floating_point}
        if self.chain:
            return floating
        found: set[int] = set()
        for code in (code for layer in self.layers for code in layer.codes):
            if found.intersection(code.reads) or any(p.requires_grad for p in code.module.parameters()):
                found |= floating.intersection(code.makes)
        return found

    def cut(self, position: int) -> Cut:
        """Return the cut before layer ``position``, crossed by what is made before it and read behind it."""
        behind = [code for layer in self.layers[position:] for code in layer.codes]
        read, made = {v for code in behind for v in code.reads}, {v for code in behind for v in code.makes}
        values = tuple(sorted(read - made - {TARGET}))
        return Cut(values, tuple(self.specs[v] for v in values), tuple(v for v in values if v in self._trained))

    def of(self, stage: Stage) -> tuple[ModelLayer, ...]:
        """Return the layers of ``stage``."""
        return self.layers[stage.start : stage.stop]

    def modules(self, stage: Stage) -> list[nn.Module]:
        """Return the modules of the layers of ``stage``."""
        return [layer.module for layer in self.of(stage)]

    def pieces(self, stage: Stage) -> tuple[Piece, ...]:
        """Return the stored and the recomputed pieces of ``stage``."""
        leaving = self.cut(stage.stop).values
        return pieces_of(stage.start, [layer.codes for layer in self.of(stage)], stage.checkpoint, leaving)

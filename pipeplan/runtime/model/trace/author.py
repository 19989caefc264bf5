"""What does the author of a model write, and what comes of one step of it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..autocast import Autocast
from ..structure import refilling
from .adapted import called
from .exported import loss_in

Attributes = Mapping[str, tuple[nn.Module, str, tuple[Any, Any]]]
Ran = tuple[Tensor, Sequence[Tensor | None], Callable[[], None]]  # the loss, the outputs, and what runs backward


@dataclass(frozen=True)
class Author:
    """A model as it was written: ``output`` of the tensors that go in, with the weights and buffers of ``roots``.

    Of a list of layers, which run as they are written, ``traced`` is false. Both run under ``autocast``, keeping no
    casts: where one of a weight has several readers, it would add their gradients in 16 bits.
    """

    output: Callable[[Sequence[Tensor]], Any]
    roots: Sequence[tuple[str, nn.Module]]
    traced: bool
    autocast: Autocast | None = None

    @staticmethod
    def of(module: nn.Module, example: Any, returns_loss: bool, autocast: Autocast | None = None) -> Author:
        """Return a module that is called with the like of ``example``."""
        given = refilling(example)

        def output(tensors: Sequence[Tensor]) -> Any:
            found = called(module, given(tensors))
            return loss_in(module, found) if returns_loss else found

        return Author(output, (("", module),), True, autocast)

    @staticmethod
    def of_layers(roots: Sequence[tuple[str, nn.Module]], autocast: Autocast | None = None) -> Author:
        """Return a list of layers, each called with what the one before returns."""

        def output(tensors: Sequence[Tensor]) -> Any:
            (x,) = tensors
            for _, layer in roots:
                x = layer(x)
            return x

        return Author(output, roots, False, autocast)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules."""
        return [module for _, module in self.roots]

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers, by name."""
        return dict(named(self, partial(nn.Module.named_buffers, remove_duplicate=False)))

    @property
    def name(self) -> str:
        """What sentences call it."""
        return type(self.roots[0][1]).__name__ if self.traced else "the list of layers"


@dataclass(frozen=True)
class Step:
    """What came of a step, by name: values, where there are any, how far was drawn, and what Python kept."""

    values: Mapping[str, Tensor | None]
    drawn: tuple[Any, ...]
    kept: Attributes


def named(author: Author, of_module: Callable[[nn.Module], Any]) -> list[tuple[str, Any]]:
    """Return what ``of_module`` names of each root, by names in the whole model."""
    return [(f"{prefix}{name}", x) for prefix, module in author.roots for name, x in of_module(module)]

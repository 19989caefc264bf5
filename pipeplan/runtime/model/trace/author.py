"""What does the author of a model write, what comes of one step of it, and where do two of them differ first?

Equal sums may differ by their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..autocast import Autocast
from ..network import TensorSpec
from ..pieces import Piece
from ..structure import refilling
from .adapted import called
from .exported import OF_MODULE, loss_in

ROUNDINGS: Final = 2**6  # by which equal sums may differ, in the order in which they are added
MOST: Final = 2**-4  # of the largest entry, whatever the type
FEW: Final = 2**3  # roundings of the largest gradient of all, which one that should be 0 may have
GRADIENT: Final = "the gradient of "
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


def first_difference(author: Author, plain: Step, parts: Step, pieces: Sequence[Piece]) -> str | None:
    """Return what first differs in ``parts``, in words; None if nothing does."""
    for what, one, other in zip(("torch", "Python", "NumPy"), plain.drawn, parts.drawn, strict=True):
        if not (torch.equal(one, other) if isinstance(one, Tensor) else one == other):
            return f"its layers draw other random numbers of {what}'s, or in another order"
    gradients = [x for name, x in plain.values.items() if name.startswith(GRADIENT) and x is not None and x.numel()]
    largest = max((float(x.detach().to_dense().abs().max()) for x in gradients), default=0.0)
    for name, there in plain.values.items():
        if name not in parts.values and name.startswith(("output", "buffer")):
            if name.startswith("output"):
                continue  # inside a piece
            here: Tensor | None = author.buffers[name.removeprefix("buffer ")]
        else:
            here = parts.values[name]
        if not alike(here, there, largest if name.startswith("the gradient") else 0.0):
            holder = _holder(pieces, name.removeprefix(GRADIENT)) if name.startswith(GRADIENT) else ""
            return f"{holder}{_in_words(name, here, there)}"
    return None


def _holder(pieces: Sequence[Piece], name: str) -> str:
    codes = (code for piece in pieces for code in piece.layers)
    found = next((x.name for x in codes if any(OF_MODULE + name == y for y, _ in x.module.named_parameters())), None)
    return "" if found is None else f"in layer {found} "


def alike(here: Tensor | None, there: Tensor | None, floor: float) -> bool:
    """Whether two values are one, but for roundings of them and, where they are noise, of what is ``floor`` large."""
    if here is None or there is None:
        return here is there
    if here.shape != there.shape or here.dtype != there.dtype:
        return False
    here, there = here.to_dense(), there.to_dense()
    if torch.equal(here, there) or not there.numel():
        return True
    if not (there.is_floating_point() or there.is_complex()):
        return False
    eps = torch.finfo(there.dtype).eps
    finite = there[there.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    allowed = min(ROUNDINGS * eps, MOST) * largest + FEW * eps * floor
    return torch.allclose(here, there, rtol=0.0, atol=allowed, equal_nan=True)


def _in_words(name: str, here: Tensor | None, there: Tensor | None) -> str:
    if here is None or there is None:
        one, other = ("has none", "has one") if here is None else ("has one", "has none")
        return f"{name}: it {one}, plain training {other}"
    if here.shape != there.shape or here.dtype != there.dtype:
        return f"{name} is {TensorSpec.of(here)} where plain training has {TensorSpec.of(there)}"
    here, there = here.to_dense().reshape(-1), there.to_dense().reshape(-1)
    place = int((here != there).nonzero()[0]) if not here.is_floating_point() else int((here - there).abs().argmax())
    return f"{name} is {here[place].item():.6g} where plain training has {there[place].item():.6g}"

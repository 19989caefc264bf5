"""Where do two runs of one step differ first? Equal sums may differ by their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..network import TensorSpec
from ..pieces import Piece
from .author import Author, Step
from .exported import OF_MODULE

ROUNDINGS: Final = 2**6  # by which equal sums may differ, in the order in which they are added
MOST: Final = 2**-4  # of the largest entry, whatever the type
FEW: Final = 2**3  # roundings of the largest gradient of all, which one that should be 0 may have
GRADIENT: Final = "the gradient of "


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

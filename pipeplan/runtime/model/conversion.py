"""How does a model come to weights of another type? For good, or within a context; what was tied stays tied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from .network import Loss, trained_loss
from .structure import hooked_as, mapped


def refuse_converted(loss: Loss | None, dtype: torch.dtype | None) -> None:
    """Raise BadInput for a ``loss`` with weights in a model that is converted to ``dtype``."""
    if dtype is not None and trained_loss(loss) is not None:
        raise BadInput(
            f"{type(loss).__name__}: a loss with weights is computed in 32 bits, and they would be converted with the "
            "model; run both under autocast instead (profile --dtype autocast-bfloat16)"
        )


def converted(module: nn.Module, dtype: torch.dtype, kept: Sequence[Tensor] = ()) -> None:
    """Convert the floating-point parameters and buffers of ``module`` but those ``kept``; what was tied stays tied."""
    left = set(map(id, kept))
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if id(parameter) not in made:
                    weight = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    made[id(parameter)] = hooked_as(parameter, weight)
                setattr(part, name, made[id(parameter)])
        for name, buffer in list(part._buffers.items()):
            if buffer is not None and buffer.is_floating_point() and id(buffer) not in left:
                setattr(part, name, buffer.to(dtype))


@contextmanager
def in_type(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within the context, let ``module`` have floating-point weights and buffers of type ``dtype`` in their place."""
    if dtype is None:
        yield
        return
    slots = [
        (part, name, x)
        for part in module.modules()
        for entries in (part._parameters, part._buffers)
        for name, x in entries.items()
        if x is not None
    ]
    converted(module, dtype)
    try:
        yield
    finally:
        for part, name, x in slots:
            setattr(part, name, x)


def as_type(value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` with its floating-point tensors in another type."""
    if dtype is None:
        return value
    return mapped(lambda x: x.to(dtype) if x.is_floating_point() else x, value)

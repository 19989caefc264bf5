"""What does one of torch's operations do with the tensors that it gets?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten
DRAWS = {
    aten.normal_, aten.uniform_, aten.random_, aten.exponential_, aten.cauchy_, aten.geometric_, aten.log_normal_,
}  # fmt: skip  # whose numbers don't depend on what was there
FILLS = DRAWS | {aten.zero_, aten.fill_, aten.copy_}


def storage_of(x: Tensor) -> int:
    """Return the number of the storage of ``x``, 0 where it has several."""
    return int(x.untyped_storage()._cdata) if x.layout == torch.strided else 0


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in whatever holds them."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def is_random(func: Any) -> bool:
    """Whether an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def takes_device(func: Any) -> bool:
    """Whether an operation takes the device that it makes a tensor on."""
    return any(argument.name == "device" for argument in func._schema.arguments)


def is_elsewhere(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation is to make something elsewhere, where nothing is promised."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "cpu"


def statistics(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the averages that an operation changes of those that it is given, as norms do without telling torch."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    works = given.get("training") or given.get("use_input_stats")
    return [x for name in ("running_mean", "running_var") if works and (x := given.get(name)) is not None]


def states_of(kwargs: Mapping[str, Any]) -> Sequence[tuple[torch.Generator, Tensor]]:
    """Return the generator that an operation draws from, and its state."""
    generator = kwargs.get("generator") or torch.default_generator
    return ((generator, generator.get_state()),)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    given: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return tensors_in(given)


def is_whole(x: Tensor) -> bool:
    """Whether ``x`` is all of its storage."""
    return x.is_contiguous() and not x.storage_offset() and x.nbytes == x.untyped_storage().nbytes()

"""What does an operation of torch draw, write and put out beside its result?"""

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


def is_random(func: Any) -> bool:
    """Whether an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def statistics(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the averages that an operation changes of those that it is given, as norms do without telling torch."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    given = arguments_of(func, args, kwargs)
    works = given.get("training") or given.get("use_input_stats")
    return [x for name in ("running_mean", "running_var") if works and (x := given.get(name)) is not None]


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], but: str = "") -> list[Tensor]:
    """Return the tensors that an operation changes in place; those of the argument called ``but`` don't count."""
    given = arguments_of(func, args, kwargs)
    written = (x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write)
    return tensors_among([given.get(name) for name in written if name != but])


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an operation is given, by the names that it has for it."""
    return dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | dict(kwargs)


def is_view(func: Any) -> bool:
    """Whether an operation returns a view of what it is given."""
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def tensors_among(value: Any) -> list[Tensor]:
    """Return the tensors in an operation's arguments."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]

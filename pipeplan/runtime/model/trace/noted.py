"""What did a call give that a trace keeps as one operation, and what does it give for tensors without values?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import BadInput
from ..structure import PLAIN, leaves_in, refilling, tensors_in


class Noted:
    """What a call gave: its tensors, its other values, what makes its result of these, and what it ``changed`` in
    place, with whether gradients come to that then; of its modules' own tensors those ``chosen``, and of those
    ``alone``, are the last ``given``."""

    def __init__(
        self,
        name: str,
        output: Any,
        given: Sequence[Tensor],
        changed: Mapping[int, bool],
        chosen: Sequence[int],
        alone: Sequence[nn.Module],
    ) -> None:
        self.name, self.changed, self.chosen, self.alone = name, changed, chosen, alone
        self._others, self._restored = _plain(output), refilling(output)
        place = {x.untyped_storage()._cdata: i for i, x in reversed(list(enumerate(given)))}
        self._made = [
            (x.size(), x.stride(), x.dtype, x.requires_grad, place.get(x.untyped_storage()._cdata), x.storage_offset())
            for x in tensors_in(output)
        ]

    def alike(self, given: Sequence[Tensor]) -> Any:
        """Return the result for tensors without values."""
        for i, trains in self.changed.items():
            torch.autograd.graph.increment_version(given[i])
            if trains and torch.is_grad_enabled() and not given[i].requires_grad:
                given[i].requires_grad_()
        made = []
        for size, stride, dtype, trains, place, offset in self._made:
            if place is not None and given[place].dtype == dtype:
                made.append(given[place].as_strided(size, stride, offset))
                continue
            made.append(given[0].new_empty_strided(size, stride, dtype=dtype))
            if trains and torch.is_grad_enabled():
                made[-1].requires_grad_()
        return self._restored(made)

    def checked(self, output: Any) -> Any:
        """Return ``output``; BadInput where it has other shapes or other values that aren't tensors."""
        sizes = [x.size() for x in tensors_in(output)]
        expected = [size for size, *_ in self._made]
        if sizes != expected:
            raise BadInput(
                f"{self.name} gave tensors of shapes {_shapes(sizes)}, and of {_shapes(expected)} for the example; put "
                "what depends on values and all that reads it into one module whose results always have one shape"
            )
        if _plain(output) != self._others:
            raise BadInput(
                f"{self.name} gave {_plain(output)}, and {self._others} for the example; let it return tensors"
            )
        return output


def _shapes(sizes: Sequence[torch.Size]) -> str:
    return " and ".join(str(tuple(size)) for size in sizes)


def _plain(value: Any) -> list[Any]:
    return [x for x in leaves_in(value) if isinstance(x, PLAIN)]

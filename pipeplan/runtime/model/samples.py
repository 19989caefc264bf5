"""What does a model train on, microbatch by microbatch?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .structure import compact, mapped

Data = Callable[[int, int], Any]  # (microbatch index, seed) -> what a model trains on, often (input, target)


@dataclass(frozen=True, slots=True)
class Samples:
    """What a model trains on, as ``source(index, seed)`` gives it.

    ``entering(index, given)`` makes the network's inputs and the target of that.
    """

    source: Data
    entering: Callable[[int, Any], tuple[tuple[Tensor, ...], Any]]

    def __call__(self, index: int, seed: int) -> tuple[tuple[Tensor, ...], Any]:
        """Return inputs and target of a microbatch."""
        return self.enter(index, self.source(index, seed))

    def enter(self, index: int, given: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Return inputs and target of what was ``given`` for a microbatch; none keeps more memory than its own."""
        inputs, target = self.entering(index, given)
        return tuple(map(compact, inputs)), mapped(compact, target)

    def then(self, change: Callable[[Tensor], Tensor]) -> Samples:
        """Return the same with inputs changed."""

        def changed(index: int, given: Any) -> tuple[tuple[Tensor, ...], Any]:
            inputs, target = self.enter(index, given)
            return tuple(map(change, inputs)), target

        return Samples(self.source, changed)

"""What do ranges of layers cost together, and how often do they count what several of them share?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..integers import IntLike, Ints, plain
from .layers import Layer, SharedWeights


@dataclass(frozen=True)
class SharedSums:
    """One of a chain's :class:`SharedWeights`, and ``holders``, of shape (L + 1,): how many of ``layers[:i]`` have it.

    ``optimizer_ns`` is what a step of it takes: the least share that it has, by its parameters, of a layer's step.
    """

    holders: Ints
    weight_bytes: int
    parameters: int
    optimizer_ns: int
    own: tuple[int, int]  # bytes and parameters whose state a rank keeps

    @staticmethod
    def of(shared: SharedWeights, layers: Sequence[Layer]) -> SharedSums:
        """Return the sums of ``shared`` over ``layers``."""
        count = shared.parameter_count
        steps = [layers[i].optimizer_ns * count // max(1, layers[i].parameter_count) for i in shared.layers]
        holders = np.zeros(len(layers) + 1, dtype=np.int64)
        holders[np.array(shared.layers) + 1] = 1
        size = shared.weight_bytes
        shares = [(x.own[0] * size // max(1, x.weight_bytes), x.own[1] * count // max(1, x.parameter_count))
                  for x in map(layers.__getitem__, shared.layers)]  # fmt: skip
        return SharedSums(np.cumsum(holders), size, count, min(steps), min(shares))

    def again(self, start: IntLike, stop: IntLike) -> IntLike:
        """Return in how many of ``layers[start:stop]`` it is counted, after the first."""
        return plain(np.maximum(self.holders[stop] - self.holders[start] - 1, 0))

    def inside(self, start: int, stop: int) -> bool:
        """Whether any of ``layers[start:stop]`` has it."""
        return bool(self.holders[stop] > self.holders[start])


@dataclass(frozen=True)
class Sums:
    """Prefix sums of a chain's layer costs, each of shape (L + 1,): entry i is the sum over ``layers[:i]``.

    They count what layers share in each of them; ``shared`` says what is known of that.
    """

    forward_ns: Ints
    backward_ns: Ints
    backward_weight_ns: Ints
    optimizer_ns: Ints
    weight_bytes: Ints
    parameters: Ints
    own_bytes: Ints
    own_parameters: Ints
    shared: tuple[SharedSums, ...]

    @staticmethod
    def of(layers: Sequence[Layer], shared: Sequence[SharedWeights] = ()) -> Sums:
        """Return the prefix sums of ``layers``, of which some have ``shared`` weights."""
        rows = [
            (x.forward_ns, x.backward_ns, x.weight_part_ns, x.optimizer_ns, x.weight_bytes, x.parameter_count, *x.own)
            for x in layers
        ]
        found = np.zeros((8, len(rows) + 1), dtype=np.int64)
        found[:, 1:] = np.cumsum(np.array(rows, dtype=np.int64).reshape(-1, 8), axis=0).T
        return Sums(*found, tuple(SharedSums.of(x, layers) for x in shared))  # type: ignore[call-arg]  # it has eight rows

    @cached_property
    def passes_ns(self) -> list[int]:
        """Forward and backward together, as Python's integers: quicker to read one by one."""
        found: list[int] = (self.forward_ns + self.backward_ns).tolist()
        return found

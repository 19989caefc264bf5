"""What is given: a profiled network (Chain), the machine (Platform), how weights are kept (Policy), what is allowed.

Times are integer nanoseconds per microbatch, sizes integer bytes, layer ranges half-open and zero-based.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..choices import Checkpointing, Weights
from ..deadline import NEVER, Deadline
from .chain import AUTOCAST, CHANGED, LOSS_NAME, Chain, Variant, VariantName, Way, connected
from .layers import Collective, Exchange, Layer, LayerTimes, LayerWork, PassWork, SharedWeights, WeightNeeds
from .platform import Device, Level, Platform
from .policy import (
    CLIPPED_TOGETHER,
    ENDLESS,
    MICROBATCHES_PER_DEVICE,
    NOT_PREDICTED,
    SHARING,
    WEIGHTS,
    Engine,
    Policy,
    Precision,
    WeightRules,
    Zero,
    matrix_state,
    small_matrices,
)
from .sums import SharedSums, Sums


@dataclass(frozen=True)
class Problem:
    """An instance: the chain, the platform, the policy, and what a plan may use.

    ``checkpointing`` allows a stage to recompute nothing (``none``), all of itself (``stages``) or any segments.
    Layers that share weights may be in several stages where the policy allows it (``tied`` is ``apart``), or stay in
    one (``together``); ``free`` is a relaxation for searches, where sums over stages take no time.
    Searches for plans raise OutOfTime at the ``deadline``, which changes no answer that comes before it.
    """

    chain: Chain
    platform: Platform
    policy: Policy = Policy()  # noqa: RUF009 -- it is frozen
    replicas: bool = True
    checkpointing: Checkpointing = "stages"
    deadline: Deadline = NEVER
    tied: Literal["apart", "together", "free"] = "apart"

    @property
    def most_replicas(self) -> int:
        """The most replicas that a stage may have."""
        return len(self.platform) if self.replicas else 1

    @cached_property
    def uniform(self) -> tuple[Problem, ...]:
        """The same instance with each of the chain's :attr:`Chain.choices` for all layers, on groups of GPUs."""
        found = self.chain.choices
        return tuple(replace(self, chain=x, platform=self.platform.grouped(x.tensor)) for x in found)

    def with_policy(self, policy: Policy) -> Problem:
        """Return the same instance under another policy."""
        return replace(self, policy=policy)

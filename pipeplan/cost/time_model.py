"""How long do ``layers[start:stop]`` take on a device? Forward, backward, optimizer steps, sums over replicas.

All take integers or integer arrays (shape of the ranges), so that the partitioners' vectorised searches and the
validator compute the same numbers from the same lines. Rules: ALGORITHMS section 3.

What the ranks of a group exchange takes a fixed part, a part for each step, and the bytes: fitted on 98 measured points
of eight A100s by NVSwitch (vTrain's tables, Bang et al. 2024; 1 MiB to 512 MiB, 2 to 8 ranks), 9.3% off on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..integers import IntLike, Ints, ceil_div, plain
from ..problem import Chain, Policy
from .memory_model import bucket_bytes


def scaled(duration: IntLike, speed: Fraction) -> IntLike:
    """Return ``duration`` ns of the profiled device on a device ``speed`` times as fast, rounded up."""
    return ceil_div(duration * speed.denominator, speed.numerator)


@dataclass(frozen=True, slots=True)
class Passes:
    """What ``layers[start:stop]`` of a ``chain`` take on each of ``replicas`` devices, ``speed`` times as fast as the
    profiled one, for one microbatch; ``elsewhere_ns`` of their optimizer's step are made with another stage's."""

    chain: Chain
    policy: Policy
    start: IntLike
    stop: IntLike
    replicas: int = 1
    speed: Fraction = Fraction(1)
    elsewhere_ns: int = 0

    @property
    def forward_ns(self) -> IntLike:
        """Time of the forward."""
        return self._scaled(self.chain.sums.forward_ns)

    def backward_ns(self, recompute_ns: IntLike = 0) -> IntLike:
        """Return the time of the backward, with what is recomputed and its share of the optimizer step."""
        return self._scaled(self.chain.sums.backward_ns, recompute_ns + self.step_share_ns)

    def work_ns(self, recompute_ns: IntLike = 0) -> IntLike:
        """Return the time of both: what a device is busy with a microbatch."""
        return self.forward_ns + self.backward_ns(recompute_ns)

    @property
    def backward_weight_ns(self) -> IntLike:
        """The part of the backward that nothing waits for: weight gradients, and the share of the optimizer step."""
        return self._scaled(self.chain.sums.backward_weight_ns, self.step_share_ns)

    @property
    def step_share_ns(self) -> IntLike:
        """What a backward is charged of the optimizer's step, on the profiled device.

        With ``zero`` a replica's step is that of its share, so that all replicas together make one.
        """
        return update_share_ns(self.policy, self._whole_step_ns, self.replicas, self.policy.sharers(self.replicas))

    @property
    def step_ns(self) -> IntLike:
        """Time that one of the replicas takes for its part of an optimizer step."""
        return scaled(ceil_div(self._whole_step_ns, self.policy.sharers(self.replicas)), self.speed)

    @property
    def _whole_step_ns(self) -> IntLike:
        return whole_step_ns(self.chain, self.start, self.stop) - self.elsewhere_ns

    def _scaled(self, total: Ints, more: IntLike = 0) -> IntLike:
        return scaled(plain(total[self.stop] - total[self.start]) + more, self.speed)


def recompute_ns(forward_ns: int, speed: Fraction = Fraction(1)) -> int:
    """The part of :meth:`Passes.backward_ns` that runs layers again, rounded down: what is left has the rest."""
    return forward_ns * speed.denominator // speed.numerator


def whole_step_ns(chain: Chain, start: IntLike, stop: IntLike) -> IntLike:
    """Return the time of an optimizer step on ``layers[start:stop]``; what several of them share is stepped once."""
    total = chain.sums.optimizer_ns
    found = plain(total[stop] - total[start])
    for shared in chain.sums.shared:
        found = found - shared.again(start, stop) * shared.optimizer_ns
    return found


def update_share_ns(policy: Policy, update_ns: IntLike, replicas: int, sharers: int = 1) -> IntLike:
    """What a microbatch's backward is charged of an update that takes ``replicas`` replicas ``update_ns`` each, or so
    long for all ``sharers`` of it together.

    Each replica steps once every ``update_interval`` microbatches, of which it sees one in ``replicas``, so a
    microbatch pays ``replicas / update_interval`` of a step; nothing where they come behind a drained batch.
    """
    if policy.drains:
        return 0
    return ceil_div(update_ns * replicas, policy.update_interval(replicas) * sharers)


def overlapped_ns(policy: Policy, all_reduce_ns: int, step_ns: int, parameters: int) -> int:
    """Return the time of an all-reduce in chunks of ``coarsening`` buckets, each stepped while the next is summed.

    Two machines in a row, n equal chunks: all of the longer, and one chunk of the shorter (Myelin section V-C).
    """
    assert policy.coarsening is not None, "otherwise nothing overlaps"
    chunks = max(1, ceil_div(parameters, policy.coarsening * policy.bucket_parameters))
    return max(all_reduce_ns, step_ns) + ceil_div(min(all_reduce_ns, step_ns), chunks)


def sync_period_ns(policy: Policy, gradient: IntLike, replicas: int, bandwidth: int, latency_ns: int = 0) -> IntLike:
    """Least period at which ring all-reduces of ``gradient`` bytes keep up: one each ``update_interval`` microbatches.

    :func:`ring_all_reduce_ns`, shared by these microbatches and then rounded up.
    """
    every, halves = policy.update_interval(replicas), policy.sharing.update
    return ring_all_reduce_ns(gradient, replicas, bandwidth, latency_ns, every, halves)


def exchanged_ns(
    policy: Policy, gradient: IntLike, replicas: int, bandwidth: int, latency_ns: int = 0
) -> tuple[IntLike, IntLike, IntLike]:
    """Return the least time of a forward and of a backward of ``replicas`` that share weights or gradients, of as many
    bytes as a ``gradient`` each, and what the backward takes more.

    Weights are gathered bucket by bucket, the next one while layers compute; what layers make of gradients is scattered
    behind them (ZeRO, section 7.2).
    """
    rules, buckets = policy.sharing, ceil_div(gradient, bucket_bytes(policy))
    if replicas == 1 or not rules.scattered:
        return 0, 0, 0
    once = collective_ns("all-gather", gradient, replicas, bandwidth, latency_ns, buckets)
    return rules.forward * once, rules.backward * once, rules.scattered * once


def ring_all_reduce_ns(
    size: IntLike, replicas: int, bandwidth: int, latency_ns: int = 0, shared_by: int = 1, halves: int = 2
) -> IntLike:
    """Return the time in which a ring of r ``replicas`` sums ``size`` bytes, rounded up; 0 for no bytes.

    2(r-1) steps, each a transfer of a part in r: 2(r-1)/r * bytes / bandwidth + 2(r-1) * latency. What each of so many
    microbatches has to leave for it, where it is ``shared_by`` several. Half of the steps scatter the sum, half gather
    it; with ``zero`` the optimizer steps between the two, and the second half moves new weights instead, as many bytes
    (of 16 bits in mixed precision). ``halves``: so many of the two.
    """
    steps = halves * (replicas - 1)
    waiting = (size != 0) * np.array(steps * latency_ns * replicas * bandwidth, dtype=object)
    return plain(ceil_div(steps * size * 10**9 + waiting, replicas * bandwidth * shared_by))


FIXED_NS = 22_000
STEP_NS = 3_500
SHARE = (3, 4)  # of the link's bandwidth
STEPS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""Over the ranks but one: how often each part travels. In a ``send`` all of it does, once."""


def collective_ns(
    kind: str, size: IntLike, ranks: int, bandwidth: int, latency_ns: int = 0, times: IntLike = 1
) -> IntLike:
    """Return the ns of a collective over ``ranks`` of a tensor of ``size`` bytes, all of it, by links of ``bandwidth``
    bytes/s each way: NCCL's rings, in which every rank sends each part but one, twice in an all-reduce. Where the
    tensor is in several, ``times`` says how many. Sizes may be an array of Python's integers."""
    if ranks == 1:
        return 0
    steps, parts = (1, 1) if kind == "send" else (STEPS[kind] * (ranks - 1), ranks)
    above, below = SHARE
    begun = (size != 0) * times * (FIXED_NS + steps * (STEP_NS + latency_ns))
    return begun + ceil_div(steps * size * below * 10**9, parts * bandwidth * above)

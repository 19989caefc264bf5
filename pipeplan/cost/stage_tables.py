"""What does every stage between some positions take and hold? The tables that searches and bounds read.

What a stage costs is asked of the two models here alone, for all stages at once; each table is made when somebody first
asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from ..integers import NEVER, IntLike, Ints
from ..problem import Chain, Device, Policy, Problem
from . import memory_model, time_model
from .saved import saved_bytes
from .time_model import Passes


def crossing_bytes(chain: Chain) -> Ints:
    """Return the bytes that cross every position in one direction, shape (L + 1,); the chain's two ends are no cuts."""
    return np.array((0, *chain.cut_bytes[1:-1], 0), dtype=np.int64)


def waits_ns(problem: Problem, cuts: Ints) -> Ints:
    """Return for how long a microbatch's messages in both directions keep a stage that begins or ends at each of
    ``cuts``, of any shape, from computing: over the lowest level, where they block."""
    sizes, which = np.unique(crossing_bytes(problem.chain)[cuts], return_inverse=True)
    held = np.array([2 * problem.platform.held_ns(size, 0) for size in sizes.tolist()], dtype=np.int64)
    return held[which].reshape(cuts.shape)


@dataclass(frozen=True, eq=False)
class StageTables:
    """The stages ``layers[start:stop]`` of a problem; tables have the shape that the two have together.

    Times are ns of a microbatch on a device as fast as ``device``, whose own profile counts; sizes are bytes on each of
    ``replicas``. What stands where there is no stage means nothing.
    """

    problem: Problem
    start: Ints
    stop: Ints

    @staticmethod
    def between(problem: Problem, cuts: Ints) -> StageTables:
        """Return the tables ``[first cut, last cut]`` of all stages between two of the ``cuts``."""
        return StageTables(problem, cuts[:, None], cuts[None, :])

    @cached_property
    def _known(self) -> dict[object, Ints]:
        return {}

    def once(self, key: object, compute: Callable[[], IntLike]) -> Ints:
        """Return what was computed for ``key``, computed now if it wasn't."""
        if key not in self._known:
            self._known[key] = np.asarray(compute())
        return self._known[key]

    @cached_property
    def crossing(self) -> tuple[Ints, Ints]:
        """Bytes that enter and leave in one direction, by first and by last cut."""
        every = crossing_bytes(self.problem.chain)
        return every[self.start], every[self.stop]

    @cached_property
    def waits(self) -> tuple[Ints, Ints]:
        """What a stage waits for messages where it begins and where it ends, as far as they block."""
        return waits_ns(self.problem, self.start), waits_ns(self.problem, self.stop)

    def joined(self, group: Sequence[int]) -> tuple[Device, int, tuple[int, int]]:
        """Return the device that paces a group, how many there are, and bandwidth and latency between them."""
        platform = self.problem.platform
        return platform.slowest(group), len(group), platform.paths[platform.level_of(group)]

    def trip(self, one: Sequence[int], other: Sequence[int]) -> Ints:
        """Return both transfers of a microbatch over each last cut between two groups; nothing where they block."""
        platform, sizes = self.problem.platform, crossing_bytes(self.problem.chain)[self.stop[0]].tolist()
        if platform.blocking or tuple(one) == tuple(other):
            return np.zeros(len(sizes), dtype=np.int64)
        level = platform.level_between(one, other)
        return self.once(("trip", level), lambda: [min(NEVER, 2 * platform.transfer_ns(x, level)) for x in sizes])

    @cached_property
    def weights(self) -> tuple[Ints, Ints]:
        """Bytes of one copy of the weights, and parameters."""
        return memory_model.weights_of(self.problem.chain, self.start, self.stop)

    @cached_property
    def own(self) -> tuple[Ints, Ints]:
        """The same of what ranks keep the state of where replicas share it."""
        return memory_model.own_of(self.problem.chain, self.start, self.stop)

    @cached_property
    def gradients(self) -> Ints:
        """Bytes that replicas exchange."""
        return np.asarray(memory_model.gradient_bytes(self.problem.policy, *self.own))

    @cached_property
    def kept(self) -> Ints:
        """Bytes of a microbatch that is stored."""
        return np.asarray(saved_bytes(self.problem.chain, self.start, self.stop))

    def weights_bytes(self, in_flight: IntLike = 1, replicas: int = 1) -> Ints:
        """Return weights, gradient and optimizer state with so many microbatches in flight."""
        return np.asarray(memory_model.weights_bytes(self.problem.policy, *self.weights, in_flight, replicas, self.own))

    def buffers(self, replicas: int = 1) -> Ints:
        """Return the buffers of messages, and what passes work with."""
        working = self.problem.chain.working_bytes(self.start, self.stop)
        return np.asarray(memory_model.message_bytes(self.problem.policy, *self.crossing, replicas) + working)

    def forward(self, device: Device) -> Ints:
        """Return the forward."""
        return self.once(("forward", device.times, device.speed), lambda: self._passes(device, 1).forward_ns)

    def again(self, device: Device) -> Ints:
        """Return what recomputing all layers takes a device of speed 1, which :meth:`work` may be given."""
        return self.forward(replace(device, speed=Fraction(1)))

    def backward(self, device: Device, replicas: int = 1, again: IntLike = 0) -> Ints:
        """Return the backward with its share of the optimizer's steps, where ``again`` ns are recomputed."""
        return np.asarray(self._passes(device, replicas).backward_ns(again))

    def work(self, device: Device, replicas: int = 1, again: IntLike = 0) -> Ints:
        """Return forward and backward together."""
        return np.asarray(self.forward(device) + self.backward(device, replicas, again))

    def later(self, device: Device, replicas: int = 1) -> Ints:
        """Return the part of the backward that nothing waits for."""
        key = "later", device.times, device.speed, replicas
        return self.once(key, lambda: self._passes(device, replicas).backward_weight_ns)

    def _passes(self, device: Device, replicas: int) -> Passes:
        chain, policy = self.problem.chain.timed(device.times), self.problem.policy
        return Passes(chain, policy, self.start, self.stop, replicas, device.speed)

    def sums(self, replicas: int, path: tuple[int, int]) -> Ints:
        """Return what a ring over so many replicas takes for all gradients, over links of a bandwidth and latency."""
        gradients = np.maximum(self.gradients, 0).astype(object)  # bytes times 1e9 exceed 64 bits
        return self.once(
            ("sums", replicas, path),
            lambda: np.asarray(
                time_model.ring_all_reduce_ns(gradients, replicas, *path, halves=self.problem.policy.sharing.update)
            ).astype(np.int64),
        )

    def exchanging(self, forward: Ints, backward: Ints, replicas: int, path: tuple[int, int]) -> tuple[Ints, Ints]:
        """Return forwards and backwards with what replicas exchange in them, over links of a bandwidth and latency."""
        if not self.problem.policy.sharing.scattered:
            return forward, backward
        whole = memory_model.gradient_bytes(self.problem.policy, *self.weights)
        gradients = np.maximum(whole, 0).astype(object)
        found = time_model.exchanged_ns(self.problem.policy, gradients, replicas, *path)
        least, back, behind = (np.asarray(x).astype(np.int64) for x in found)
        return np.maximum(forward, least), np.maximum(backward, back) + behind

    def steps(self, device: Device, replicas: int) -> Ints:
        """Return what the optimizer's step behind a drained mini-batch takes."""
        if not self.problem.policy.drains:
            return np.zeros_like(self.start + self.stop)
        key = "steps", device.times, device.speed, replicas
        return self.once(key, lambda: self._passes(device, replicas).step_ns)

    def update(self, device: Device, replicas: int, path: tuple[int, int]) -> Ints:
        """Return what an update takes behind the last backward, at least: the sums and the step, or the longer of two
        that overlap."""
        sums, steps = self.sums(replicas, path), self.steps(device, replicas)
        return np.maximum(sums, steps) if self.problem.policy.overlaps else sums + steps


def largest_synced_gradient(policy: Policy, period: int, replicas: int, bandwidth: int, latency_ns: int = 0) -> int:
    """Return the most gradient bytes whose :func:`sync_period_ns` is at most ``period``: its inverse, for searches."""
    steps = policy.sharing.update * (replicas - 1)
    if not steps:
        return 2**62
    left = period * policy.update_interval(replicas) - steps * latency_ns
    most: int = max(0, min(left * replicas * bandwidth // (steps * 10**9), 2**62))
    return most

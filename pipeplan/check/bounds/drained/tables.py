"""What do stages take at least on equal pipelines with several of them on a GPU, wherever layers are cut?

All is for the fastest GPU with the most memory, of a problem whose GPUs differ by a factor alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....cost import memory_model, time_model
from ....integers import Ints, ceil_div
from ....plan import ScheduleKind
from ....problem import Problem
from ....schedule.kinds import KINDS
from .separate import StageTables

NEVER = 2**58  # several of them fit into an int64


@dataclass(frozen=True)
class PlacedTables:
    """``pipelines`` equal ones over so many ranks under a kind of schedule; tables have shape (L + 1, L + 1), times are
    of a mini-batch, ns."""

    problem: Problem
    kind: ScheduleKind
    ranks: int
    pipelines: int

    @cached_property
    def count(self) -> int:
        """The most microbatches of a pipeline."""
        return ceil_div(self.problem.policy.accumulate or 1, self.pipelines)

    @cached_property
    def tables(self) -> StageTables:
        """What stages take on the fastest GPU."""
        return StageTables(self.problem, self.count, KINDS[self.kind].splits)

    @cached_property
    def floor_ns(self) -> int:
        """What the work takes, evenly shared."""
        return self.tables.shared_ns * len(self.problem.platform) // self.ranks

    @cached_property
    def way_ns(self) -> int:
        """What a microbatch takes from the first layer to the loss and back."""
        least = int(self.tables.transfer[1:-1].min(initial=NEVER)) * (self.ranks > 1)
        return int(self.tables.there[-1] + self.tables.back[-1]) + 4 * (self.ranks - 1) * least

    @cached_property
    def work(self) -> Ints:
        """The work of a stage, all microbatches."""
        start, stop = self.tables.ends
        fastest = max(device.speed for device in self.problem.platform.devices)
        chain, policy = self.problem.chain, self.problem.policy
        table = time_model.work_ns(chain, policy, start, np.maximum(start, stop), 0, self.pipelines, fastest)
        return np.asarray(table) * self.count

    @cached_property
    def later(self) -> Ints:
        """The part of :attr:`work` that nothing waits for."""
        start, stop = self.tables.ends
        fastest = max(device.speed for device in self.problem.platform.devices)
        chain, policy = self.problem.chain, self.problem.policy
        table = time_model.backward_weight_ns(chain, policy, start, np.maximum(start, stop), self.pipelines, fastest)
        return np.asarray(table) * self.count

    @cached_property
    def sums(self) -> Ints:
        """What the sum of a stage's gradients takes."""
        return self.tables.sums(self.pipelines)

    @cached_property
    def weights(self) -> Ints:
        """Bytes of a stage's weights."""
        start, stop = self.tables.ends
        of = memory_model.weights_of(self.problem.chain, start, np.maximum(start, stop))
        return np.asarray(memory_model.weights_bytes(self.problem.policy, *of, 1, self.pipelines))

    @cached_property
    def shared(self) -> tuple[int, int]:
        """Bytes, and ns of steps of a mini-batch, that a rank may have once where both of its stages count them."""
        policy, fastest = self.problem.policy, max(device.speed for device in self.problem.platform.devices)
        size = steps = 0
        for one in self.problem.chain.sums.shared:
            more = int(one.holders[-1]) - 1
            size += more * int(memory_model.weights_bytes(policy, one.weight_bytes, one.parameters, 1, self.pipelines))
            sharers = policy.sharers(self.pipelines)
            share = time_model.update_share_ns(policy, one.optimizer_ns, self.pipelines, sharers)
            steps += more * self.count * (int(time_model.scaled(share, fastest)) + 1)
        return size, steps

    @cached_property
    def heads(self) -> list[Ints]:
        """For each rank, what comes before its first forward, by the layer with which it begins."""
        forward = self.tables.there - self.tables.transfer
        trips = np.full(len(forward), NEVER, dtype=np.int64)
        trips[0] = 0
        found = []
        for _ in range(self.ranks):
            found.append(np.minimum(forward + trips, NEVER))
            before = np.concatenate([[NEVER], np.minimum.accumulate(trips)[:-1]])
            trips = np.minimum(before + self.tables.transfer, NEVER)
        return found

    @cached_property
    def price(self) -> float:
        """The least time (ns of a mini-batch) for each byte of a microbatch that a stage doesn't keep."""
        return float(self.tables.price[0, -1]) * self.count

    @property
    def room(self) -> int:
        """Bytes of the GPU that has most, and what stages on one count twice."""
        return max(device.memory_bytes for device in self.problem.platform.devices) + self.shared[0]

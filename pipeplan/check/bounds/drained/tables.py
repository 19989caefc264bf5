"""What do stages take at least in drained plans, wherever layers are cut, and several of them on each GPU?

All is for the fastest GPU with the most memory, of a problem whose GPUs differ by a factor alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ....cost import memory_model, time_model
from ....cost.saved import first_saved
from ....cost.stage_tables import StageTables
from ....integers import Ints, ceil_div
from ....plan import ScheduleKind
from ....problem import Device, Problem

NEVER = 2**58  # several of them fit into an int64
_FINE = 1 - 1e-9  # what rounding of ratios can take off


@dataclass(frozen=True)
class LeastTables:
    """What every stage ``layers[i:j]`` takes at least on any device of a problem, so many of whose microbatches it has;
    tables have shape (L + 1, L + 1)."""

    problem: Problem
    microbatches: int

    @cached_property
    def stages(self) -> StageTables:
        """What every stage takes and holds."""
        return StageTables.between(self.problem, np.arange(len(self.problem.chain) + 1))

    @cached_property
    def fastest(self) -> Device:
        """The fastest device."""
        return max(self.problem.platform.devices, key=lambda device: device.speed)

    @property
    def most_bytes(self) -> int:
        """Memory of the device that has most."""
        return max(device.memory_bytes for device in self.problem.platform.devices)

    def _least_ns(self, times: Ints) -> Ints:
        """Return what work takes the fastest device, rounded down."""
        return np.asarray(times * self.fastest.speed.denominator // self.fastest.speed.numerator)

    @cached_property
    def shared_ns(self) -> int:
        """What the work of all layers takes, evenly shared by as many devices as the fastest."""
        total = self.problem.chain.sums.passes_ns[-1] * self.microbatches
        return int(total / (self.fastest.speed * len(self.problem.platform)))

    @cached_property
    def transfer(self) -> Ints:
        """The least time of a transfer over each cut that a plan may have; none where they block."""
        platform, cut_bytes = self.problem.platform, self.problem.chain.cut_bytes
        levels = range(0 if platform.blocking else len(platform.levels))
        inner = [min((platform.transfer_ns(size, k) for k in levels), default=0) for size in cut_bytes[1:-1]]
        return np.array([0, *inner, 0], dtype=np.int64)

    @cached_property
    def held(self) -> Ints:
        """The least for which a microbatch's messages over each cut keep the devices at its ends from computing."""
        platform, cut_bytes = self.problem.platform, self.problem.chain.cut_bytes
        inner = [2 * min(platform.held_ns(size, k) for k in range(len(platform.levels))) for size in cut_bytes[1:-1]]
        return np.array([0, *inner, 0], dtype=np.int64)

    @cached_property
    def there(self) -> Ints:
        """What comes before a forward behind each cut."""
        return self._least_ns(self.problem.chain.sums.forward_ns) + self.transfer

    @cached_property
    def back(self) -> Ints:
        """What comes behind a gradient at each cut."""
        sums = self.problem.chain.sums
        return self._least_ns(sums.backward_ns - sums.backward_weight_ns) + self.transfer

    @cached_property
    def saved(self) -> Ints:
        """Bytes that a stage keeps of a microbatch if it recomputes nothing, beside what it received in a buffer."""
        chain = self.problem.chain
        sums = np.cumsum([0, *first_saved(chain)])
        received = np.array(chain.cut_bytes, dtype=np.int64) * (self.problem.policy.engine is not None)
        return np.asarray(np.maximum(sums[None, :] - sums[:, None] - received[:, None], 0))

    @cached_property
    def price(self) -> npt.NDArray[np.float64]:
        """Time (ns) for each byte that a stage doesn't keep, at the best ratio of its layers; inf: it keeps all."""
        count, speed = len(self.problem.chain), self.fastest.speed
        table = np.full((count + 1, count + 1), np.inf)
        if self.problem.checkpointing == "none":
            return table
        slow = float(1 / speed)
        layers = zip(self.problem.chain.layers, first_saved(self.problem.chain), strict=True)
        ratios = np.array([layer.forward_ns * slow / size if size else np.inf for layer, size in layers])
        for i in range(count):
            table[i, i + 1 :] = np.minimum.accumulate(ratios[i:])
        return table * _FINE

    def sums(self, replicas: int) -> Ints:
        """Return what the sum of a stage's gradients takes."""
        rings = [self.stages.sums(replicas, path) for path in self.problem.platform.paths]
        least: Ints = np.minimum.reduce(rings)
        return least


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
    def tables(self) -> LeastTables:
        """What stages take on the fastest GPU."""
        return LeastTables(self.problem, self.count)

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
        return self.tables.stages.work(self.tables.fastest, self.pipelines) * self.count

    @cached_property
    def later(self) -> Ints:
        """The part of :attr:`work` that nothing waits for."""
        return self.tables.stages.later(self.tables.fastest, self.pipelines) * self.count

    @cached_property
    def sums(self) -> Ints:
        """What the sum of a stage's gradients takes."""
        return self.tables.sums(self.pipelines)

    @cached_property
    def weights(self) -> Ints:
        """Bytes of a stage's weights."""
        return self.tables.stages.weights_bytes(1, self.pipelines)

    @cached_property
    def shared(self) -> tuple[int, int]:
        """Bytes, and ns of steps of a mini-batch, that a rank may have once where both of its stages count them."""
        policy, fastest = self.problem.policy, self.tables.fastest.speed
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
        return self.tables.most_bytes + self.shared[0]

"""What do stages take at least in drained plans, wherever layers are cut, and several of them on each GPU?

All is for the fastest GPU with the most memory, of a problem whose GPUs differ by a factor alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from ....cost import memory_model, relaxations, time_model
from ....cost.saved import first_saved
from ....cost.stage_tables import StageTables
from ....integers import Ints, ceil_div
from ....plan import ScheduleKind
from ....problem import Device, Problem
from ....schedule.kinds import KINDS
from ...shapes import held_at_first
from ...targets import Shape

NEVER = 2**58  # several of them fit into an int64
_FINE = 1 - 1e-9  # what rounding of ratios can take off


@dataclass(frozen=True)
class LeastTables:
    """What every stage between two of the ``cuts`` takes at least on any device of a problem, so many of whose
    microbatches it has; tables have shape (cuts, cuts)."""

    problem: Problem
    microbatches: int
    cuts: Ints

    @classmethod
    def of(
        cls, problem: Problem, kind: ScheduleKind | None, microbatches: int, cuts: Ints | None = None, *more: bool
    ) -> Self:
        """Return those of a problem under a kind of schedule, which may have no backwards to split; at every cut."""
        relaxed = relaxations.relative(problem)
        if kind is not None and not (KINDS[kind].splits or KINDS[kind].written):
            layers = tuple(replace(layer, backward_weight_ns=0) for layer in relaxed.chain.layers)
            relaxed = replace(relaxed, chain=replace(relaxed.chain, layers=layers))
        return cls(relaxed, microbatches, np.arange(len(problem.chain) + 1) if cuts is None else cuts, *more)

    @cached_property
    def stages(self) -> StageTables:
        """What every stage takes and holds."""
        return StageTables.between(self.problem, self.cuts)

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
        platform = self.problem.platform
        levels = range(0 if platform.blocking else len(platform.levels))
        return self._between(lambda size: min((platform.transfer_ns(size, k) for k in levels), default=0))

    @cached_property
    def held(self) -> Ints:
        """The least for which a microbatch's messages over each cut keep the devices at its ends from computing."""
        platform = self.problem.platform
        return self._between(lambda size: 2 * min(platform.held_ns(size, k) for k in range(len(platform.levels))))

    def _between(self, cost: Callable[[int], int]) -> Ints:
        """Return what the bytes of each inner cut cost, nothing at the ends."""
        inner = [cost(self.problem.chain.cut_bytes[cut]) for cut in self.cuts[1:-1].tolist()]
        return np.array([0, *inner, 0], dtype=np.int64)

    @cached_property
    def there(self) -> Ints:
        """What comes before a forward behind each cut."""
        return self._least_ns(self.problem.chain.sums.forward_ns[self.cuts]) + self.transfer

    @cached_property
    def back(self) -> Ints:
        """What comes behind a gradient at each cut."""
        sums = self.problem.chain.sums
        return self._least_ns((sums.backward_ns - sums.backward_weight_ns)[self.cuts]) + self.transfer

    @cached_property
    def saved(self) -> Ints:
        """Bytes that a stage keeps of a microbatch if it recomputes nothing, beside what it received in a buffer."""
        chain = self.problem.chain
        sums = np.cumsum([0, *first_saved(chain)])[self.cuts]
        received = np.array(chain.cut_bytes, dtype=np.int64)[self.cuts] * (self.problem.policy.engine is not None)
        return np.asarray(np.maximum(sums[None, :] - sums[:, None] - received[:, None], 0))

    @cached_property
    def price(self) -> npt.NDArray[np.float64]:
        """Time (ns) for each byte that a stage doesn't keep, at the best ratio of its layers; inf: it keeps all."""
        layers, saved = self.problem.chain.layers, first_saved(self.problem.chain)
        if self.problem.checkpointing == "none":
            return np.full((len(self.cuts),) * 2, np.inf)
        slow = float(1 / self.fastest.speed)
        ratios = [x.forward_ns * slow / size if size else np.inf for x, size in zip(layers, saved, strict=True)]
        table = np.full((len(layers) + 1,) * 2, np.inf)
        for i in range(len(layers)):
            table[i, i + 1 :] = np.minimum.accumulate(ratios[i:])
        return table[np.ix_(self.cuts, self.cuts)] * _FINE

    def update(self, replicas: int) -> Ints:
        """Return what the update of a stage takes behind its last backward."""
        every = [self.stages.update(self.fastest, replicas, path) for path in self.problem.platform.paths]
        least: Ints = np.minimum.reduce(every)
        return least


@dataclass(frozen=True)
class Placed:
    """Stages of a shape that a kind of schedule places, at most so many microbatches of which a pipeline has; times are
    of a mini-batch, ns."""

    tables: LeastTables
    kind: ScheduleKind
    shape: Shape

    def least(self, than: int | None = None) -> int | None:
        """Return the least time within which stages of this shape may be over, or ``than`` where that is less; None
        where they fit in no way."""
        raise NotImplementedError

    @cached_property
    def floor_ns(self) -> int:
        """What the work takes, evenly shared."""
        return self.tables.shared_ns * len(self.tables.problem.platform) // self.shape.ranks

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The microbatches of each stage that its device holds at one time."""
        shape = self.shape
        if shape.ranks == 1 or "overlap" in KINDS[self.kind].options:  # whose first forwards have no fixed order
            return (1,) * len(shape.groups())
        return held_at_first(self.kind, shape.ranks, shape.chunks, self.tables.microbatches)

    @cached_property
    def held(self) -> Ints:
        """The least for which messages over each cut keep the devices at its ends from computing."""
        return self.tables.microbatches * self.tables.held * (self.shape.ranks > 1)

    @cached_property
    def work(self) -> Ints:
        """The passes of a stage, all microbatches."""
        return self.tables.stages.work(self.tables.fastest, self.shape.pipelines) * self.tables.microbatches

    @cached_property
    def later(self) -> Ints:
        """The part of :attr:`work` that nothing waits for."""
        return self.tables.stages.later(self.tables.fastest, self.shape.pipelines) * self.tables.microbatches

    @cached_property
    def steps(self) -> Ints:
        """What the optimizer's step of a stage takes behind that, but where it overlaps with sums."""
        steps = self.tables.stages.steps(self.tables.fastest, self.shape.pipelines)
        return steps * (not self.tables.problem.policy.overlaps)

    @cached_property
    def sums(self) -> Ints:
        """What the sum of a stage's gradients takes, beside :attr:`steps`."""
        return self.tables.update(self.shape.pipelines) - self.steps

    @cached_property
    def weights(self) -> Ints:
        """Bytes of a stage's weights."""
        return self.tables.stages.weights_bytes(1, self.shape.pipelines)

    @cached_property
    def shared(self) -> tuple[int, int]:
        """Bytes, and ns of steps, that a rank may have once where several of its stages count them."""
        problem, pipelines = self.tables.problem, self.shape.pipelines
        policy, speed = problem.policy, self.tables.fastest.speed
        size = steps = 0
        for one in problem.chain.sums.shared:
            more = int(one.holders[-1]) - 1
            size += more * int(memory_model.weights_bytes(policy, one.weight_bytes, one.parameters, 1, pipelines))
            step = ceil_div(one.optimizer_ns, policy.sharers(pipelines))
            steps += more * (int(time_model.scaled(step, speed)) + 1)
        return size, steps

    @cached_property
    def heads(self) -> list[Ints]:
        """For each rank, what comes before its first forward, by the cut at which it begins."""
        forward = self.tables.there - self.tables.transfer
        trips = np.full(len(forward), NEVER, dtype=np.int64)
        trips[0] = 0
        found = []
        for _ in range(self.shape.ranks):
            found.append(np.minimum(forward + trips, NEVER))
            before = np.concatenate([[NEVER], np.minimum.accumulate(trips)[:-1]])
            trips = np.minimum(before + self.tables.transfer, NEVER)
        return found

    @cached_property
    def price(self) -> float:
        """The least time for each byte of a microbatch that a stage doesn't keep."""
        return float(self.tables.price[0, -1]) * self.tables.microbatches

    @property
    def room(self) -> int:
        """Bytes of the GPU that has most, and what stages on one count twice."""
        return self.tables.most_bytes + self.shared[0]

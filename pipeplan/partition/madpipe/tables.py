"""What do all stages cost on one of equal devices? The tables that both of MadPipe's partitioners read.

MadPipe's class of plans: every device has one stage, but for the *special device*, which may have several that need not
be neighbours (its section 4.2). No replicas, no recomputation. All devices are taken as equal; a stage costs what the
models in ``cost`` say, here in tables over pairs of legal cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from ...cost import memory_model, time_model
from ...cost.saved import first_saved
from ...cost.stage_tables import StageTables
from ...deadline import Deadline
from ...errors import BadInput
from ...integers import IntLike, ceil_div
from ...plan import Allocation, Stage
from ...problem import Device, Level, Platform, Policy, Problem
from ..cuts import legal_cuts, parting, round_trips_ns
from ..in_flight import in_flight_limit

MOST_CUTS = 1000  # the tables take 200 bytes for each pair


def worst_of(platform: Platform) -> Platform:
    """Return equal devices with the least memory, the least speed and the slowest path of ``platform``."""
    return _alike(platform, platform.slowest(range(len(platform))), platform.paths[-1])


def best_of(platform: Platform) -> Platform:
    """Return equal devices with the most memory, the best speed and the fastest path of ``platform``."""
    both_ways = any(map(platform.both_ways, range(len(platform.levels))))
    return replace(_alike(platform, platform.best_device, platform.paths[0]), full_duplex=both_ways)


def _alike(platform: Platform, device: Device, path: tuple[int, int]) -> Platform:
    count = len(platform)
    return replace(platform, devices=(device,) * count, levels=(Level(count, *path),))


StageCosts = tuple[int, int, int]  # work ns, fixed bytes, bytes of one version: see MadPipeTables


@dataclass(frozen=True)
class MadPipeTables:
    """Tables over pairs of legal cuts i < j, for the layers between them as one stage on one of the equal devices.

    ``work`` ns, ``limit`` microbatches in flight that fit a device of its own, ``fixed`` bytes without activations,
    buffers, weight versions and gradients of shared weights that wait, ``version`` bytes of one version, ``saved``
    bytes for each microbatch, ``holds`` bits for the weights that it may share with others; per cut its round trip and
    its buffers, and what the layers before it save at least, wherever they are cut.
    """

    policy: Policy
    deadline: Deadline
    cuts: list[int]
    devices: int
    memory: int
    lifetime: int  # periods that a microbatch may stay
    duplex: bool
    work: list[list[int]]
    limit: list[list[int]]
    fixed: list[list[int]]
    version: list[list[int]]
    saved: list[list[int]]
    holds: list[list[int]]
    borrowing: Callable[[int, int, int], StageCosts]
    round_trip: list[int]
    buffers: list[int]
    least_saved: list[int]

    def select(self, starts: list[int]) -> MadPipeTables:
        """Return the same tables with cuts at the layers ``starts`` and at the end alone."""
        index = [*(self.cuts.index(start) for start in starts), len(self.cuts) - 1]

        def pairs(table: list[list[int]]) -> list[list[int]]:
            return [[table[i][j] for j in index] for i in index]

        return replace(
            self,
            cuts=[self.cuts[i] for i in index],
            work=pairs(self.work),
            limit=pairs(self.limit),
            fixed=pairs(self.fixed),
            version=pairs(self.version),
            saved=pairs(self.saved),
            holds=pairs(self.holds),
            round_trip=[self.round_trip[i] for i in index],
            buffers=[self.buffers[i] for i in index],
            least_saved=[self.least_saved[i] for i in index],
        )

    def costs(self, i: int, j: int, lent: int = 0) -> StageCosts:
        """Return what the layers between two cuts cost as a stage on a device that has the weights ``lent`` (bits)."""
        if lent and lent & self.holds[i][j]:
            return self.borrowing(self.cuts[i], self.cuts[j], lent & self.holds[i][j])
        return self.work[i][j], self.fixed[i][j], self.version[i][j]

    def versions(self, in_flight: IntLike) -> IntLike:
        """Return the weight versions of a stage; under vertical sync those that its own microbatches need."""
        return memory_model.versions(self.policy, in_flight)

    @property
    def periods(self) -> tuple[int, int]:
        """Periods between which the smallest one lies: at the last, every stage holds one microbatch."""
        total = self.work[0][-1]
        return max(1, ceil_div(total, self.devices)), total + sum(self.round_trip) + len(self.cuts)


def tables_of(problem: Problem, platform: Platform) -> MadPipeTables:
    """Return the tables of ``problem`` on ``platform``, whose devices are equal, without replicas and recomputation.

    BadInput for more than :data:`MOST_CUTS` cuts.
    """
    chain, policy = problem.chain, problem.policy
    cuts = legal_cuts(problem, several=True)
    if len(cuts) > MOST_CUTS + 1:
        raise BadInput(
            f"madpipe: the network can be cut in {len(cuts)} places, and at most {MOST_CUTS} are searched; "
            "--granularity 0.1% merges neighbours"
        )
    device, tables = platform.devices[0], StageTables.between(problem, cuts)
    start, stop, saved = tables.start, tables.stop, tables.kept
    none, one = (memory_model.versioned_bytes(policy, *tables.weights, kept) for kept in (0, 1))
    limit = in_flight_limit(problem, start, stop, saved, saved, device.memory_bytes)
    timed = chain.timed(device.times)
    holds = np.zeros(np.broadcast(start, stop).shape, dtype=object)
    for n, shared in enumerate(chain.sums.shared):
        holds |= (shared.holders[stop] > shared.holders[start]).astype(object) << n

    @cache
    def borrowing(first: int, last: int, lent: int) -> StageCosts:
        sums = [x for n, x in enumerate(timed.sums.shared) if lent >> n & 1]
        size, count = memory_model.weights_of(chain, first, last)
        size, count = size - sum(x.weight_bytes for x in sums), count - sum(x.parameters for x in sums)
        none, one = (memory_model.versioned_bytes(policy, size, count, kept) for kept in (0, 1))
        elsewhere = sum(x.optimizer_ns for x in sums)
        work = time_model.work_ns(timed, policy, first, last, speed=device.speed, elsewhere_ns=elsewhere)
        return int(work), int(none) + int(chain.working_bytes(first, last)), int(one - none)

    return MadPipeTables(
        policy=policy,
        deadline=problem.deadline,
        cuts=cuts.tolist(),
        devices=len(platform),
        memory=device.memory_bytes,
        lifetime=policy.most_lifetime or 2**40,
        duplex=platform.full_duplex,
        work=tables.work(device).tolist(),
        limit=np.where(parting(problem, cuts), 0, limit).tolist(),
        fixed=(none + chain.working_bytes(start, stop)).tolist(),
        version=(one - none).tolist(),
        saved=saved.tolist(),
        holds=holds.tolist(),
        borrowing=borrowing,
        round_trip=[0] * len(cuts) if platform.blocking else round_trips_ns(chain, platform, cuts, 0),
        buffers=(2 * tables.crossing[1][0]).tolist(),
        least_saved=np.concatenate([[0], np.cumsum(first_saved(chain))])[cuts].tolist(),
    )


class Stages(NamedTuple):
    """The first stage of a part of the chain (indices of its two cuts, whether on the special device), and the rest."""

    start: int
    stop: int
    special: bool
    behind: Stages | None


def allocation_of(stages: Stages | None, cuts: list[int], period: int) -> Allocation:
    """Return ``stages`` on devices numbered in the order in which the chain first comes to them."""
    special: int | None = None
    used = 0
    made: list[Stage] = []
    while stages is not None:
        device = used
        if stages.special and special is not None:
            device = special
        else:
            used += 1
            special = device if stages.special else special
        made.append(Stage(cuts[stages.start], cuts[stages.stop], (device,)))
        stages = stages.behind
    return Allocation(tuple(made), period)


def merged(allocation: Allocation) -> Allocation:
    """Return ``allocation`` with neighbouring stages on the same devices as one stage."""
    stages: list[Stage] = []
    for stage in allocation.stages:
        if stages and stages[-1].devices == stage.devices:
            stages[-1] = replace(stages[-1], stop=stage.stop, checkpoint=stages[-1].checkpoint + stage.checkpoint)
        else:
            stages.append(stage)
    return replace(allocation, stages=tuple(stages))

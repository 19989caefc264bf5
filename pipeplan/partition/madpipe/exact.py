"""Which plan with one stage on every device but one, the special device, is best by MadPipe's rules? Exactly.

Every device has one stage, but for the *special device*, which may have several that need not be neighbours (its
section 4.2). No replicas, no recomputation. All devices are taken as equal; a stage costs what the models in ``cost``
say, here in tables over pairs of legal cuts, which the paper's own partitioner reads as well.

The dynamic program of MadPipe section 4.2 builds the stages from the end of the chain. Where the paper rounds what
matters to the layers before a cut to a grid of values, here *labels* hold it exactly, and those that another label
equals or betters in every number are dropped. One run answers whether a period can be met; the smallest is bisected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from ...cost import memory_model, time_model
from ...cost.saved import first_saved
from ...cost.stage_tables import StageTables
from ...deadline import Deadline
from ...errors import BadInput
from ...integers import IntLike, ceil_div, extend, smallest
from ...plan import Allocation, Stage
from ...problem import Device, Level, Platform, Policy, Problem
from ..cuts import in_flight_limit, legal_cuts, parting, round_trips_ns

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
        pairs = {x: getattr(self, x) for x in ("work", "limit", "fixed", "version", "saved", "holds")}
        singly = {x: getattr(self, x) for x in ("cuts", "round_trip", "buffers", "least_saved")}
        found: dict[str, Any] = {x: [[table[i][j] for j in index] for i in index] for x, table in pairs.items()}
        found |= {x: [row[i] for i in index] for x, row in singly.items()}
        return replace(self, **found)

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
    none, one = (memory_model.versioned_bytes(policy, *tables.weights, kept, own=tables.own) for kept in (0, 1))
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
        work = time_model.Passes(timed, policy, first, last, speed=device.speed, elsewhere_ns=elsewhere).work_ns()
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


Charge = Literal["paper", "tight", "full"]


def madpipe(problem: Problem, charge: Charge = "full", split: bool = False) -> Iterator[Allocation]:
    """Yield the allocation of the exactly smallest period that the dynamic program claims; nothing when it finds none.

    The claim is no schedule: what a special stage with group count g holds depends on how its device interleaves, and
    ``charge`` says what it is taken for. ``full``: g microbatches; most claims can be scheduled. ``tight``: g for the
    last special stage, at least g - 1 and as many as that one for each other; a relaxation, see
    :func:`one_special_bound`. ``paper``: g - 1, as published (section 4.2.1), often impossible to schedule.
    With ``split`` neighbouring stages may share the special device, so that it can interleave them; otherwise they
    are one. No replicas, no recomputation. Unequal devices and levels are taken at their worst: the least memory, the
    least speed and the slowest path for all. The claim is nonincreasing in memory and bandwidth.
    Time O(labels * L) per period, tens of periods; MadPipe section 4.2 with the grid and Algorithm 1 replaced.
    """
    yield from filter(None, [smallest_period(problem, charge, split)])


def smallest_period(problem: Problem, charge: Charge = "full", split: bool = False) -> Allocation | None:
    """Return the allocation that :func:`madpipe` yields, or None."""
    return _smallest(tables_of(problem, worst_of(problem.platform)), charge, split)


def decide(problem: Problem, period: int, charge: Charge = "full", split: bool = False) -> Allocation | None:
    """Return an allocation that meets ``period`` (ns) by the rules of :func:`madpipe`, or None when there is none."""
    return _decide(tables_of(problem, worst_of(problem.platform)), period, charge, split)


def one_special_bound(problem: Problem, split: bool = True, known_ns: int | None = None) -> int | None:
    """Return a lower bound (ns) on the period of every plan with one stage on all devices but one, without replicas
    and recomputation; None when no such plan exists.

    The ``tight`` charge on equal devices with the most memory, the best speed and the best path of the platform. With
    ``split`` False it holds for plans whose neighbouring stages are on different devices, and is higher. It comes
    sooner, the same, from a period ``known_ns`` that such plans may have.
    """
    found = _smallest(tables_of(problem, best_of(problem.platform)), "tight", split, known_ns)
    return None if found is None else found.claimed_period_ns


def _smallest(tables: MadPipeTables, charge: Charge, split: bool, known_ns: int | None = None) -> Allocation | None:
    """Return an allocation of the smallest period that can be met, which it claims, or None.

    Bisection, but what is found is first made the best of on its own cuts, which is quick, and then the period just
    below is tried: mostly that fails, and the search is over. It begins at ``known_ns`` if that can be met.
    """
    low, high = tables.periods
    best = None if known_ns is None else _decide(tables, known_ns, charge, split)
    best = best or _decide(tables, high, charge, split)
    while best is not None:
        own = tables.select([stage.start for stage in best.stages])
        assert best.claimed_period_ns is not None
        found = smallest(partial(_decide, own, charge=charge, split=split), low, best.claimed_period_ns)
        assert found is not None, "what meets a period meets it on its own cuts"
        period, best = found
        better = _decide(tables, period - 1, charge, split) if period > low else None
        if better is None:
            break
        middle = (low + period - 1) // 2
        much_better = _decide(tables, middle, charge, split)
        low, best = (low, much_better) if much_better is not None else (middle + 1, better)
    return best


class _Label(NamedTuple):
    """What the stages behind a cut, nearest first, mean to those before it; less is better in every number.

    ``delay`` V, from the end of a forward before the cut's transfer to the start of the backward after it; ``load`` ns
    and ``memory`` bytes of the special device; ``first`` the group count of its last stage in the chain (0 while it has
    none, or where the charge doesn't ask); ``beside`` whether the nearest stage is special, and then ``memory`` has its
    buffers for the cut; ``shared`` has a bit for each of the weights on the special device that others may share, where
    more is better. Their bytes count where they come first, from the last cut; their updates in the first stage of the
    chain that holds them, or, below the truth, nowhere where that has a device of its own.
    """

    delay: int
    load: int
    memory: int
    first: int
    beside: bool
    shared: int
    stages: Stages | None


def _decide(tables: MadPipeTables, period: int, charge: Charge, split: bool) -> Allocation | None:
    """Return an allocation that meets ``period``, or None.

    MadPipe section 4.2.2 from the last cut to the first: a label at a cut, with so many devices left, is extended by
    every stage that can end there, on a device of its own or on the special one. Labels are dropped that another one
    equals or betters with as many devices left, or that leave more work or memory than the devices can take.
    """
    last = len(tables.cuts) - 1
    waiting: list[list[list[_Label]]] = [[[] for _ in range(tables.devices)] for _ in range(last + 1)]
    waiting[last][-1].append(_Label(0, 0, 0, 0, False, 0, None))
    for j in range(last, 0, -1):
        kept: list[_Label] = []
        for devices in range(tables.devices - 1, -1, -1):
            for label in sorted(waiting[j][devices], key=lambda x: x[:6]):
                if not _covered(label, kept, split):
                    tables.deadline.check()
                    kept.append(label)
                    for i, left, longer in _extensions(tables, period, charge, split, label, j, devices):
                        if i == 0:
                            return allocation_of(longer.stages, tables.cuts, period)
                        waiting[i][left].append(longer)
            waiting[j][devices].clear()
    return None


def _covered(label: _Label, kept: list[_Label], split: bool) -> bool:
    """Whether stages that can follow ``label`` can always follow one of ``kept``."""
    delay, load, memory, first, beside, shared, _ = label
    for one_delay, one_load, one_memory, one_first, one_beside, one_shared, _ in kept:
        if (
            one_delay <= delay
            and one_load <= load
            and one_memory <= memory
            and one_first <= first
            and (one_first > 0) == (first > 0)  # the last special stage is charged by a rule of its own
            and one_beside in (beside, split)
            and one_shared & shared == shared
        ):
            return True
    return False


def _extensions(
    tables: MadPipeTables, period: int, charge: Charge, split: bool, label: _Label, j: int, devices: int
) -> Iterator[tuple[int, int, _Label]]:
    """Yield (first cut, devices left, label) for each stage before cut ``j``."""
    spare = 0 if charge == "full" else 1  # microbatches that a special stage may be spared, at most
    behind = label.stages
    apart = _after_transfer(tables, period, label.delay, j)
    for i in range(j - 1, -1, -1):
        first_of_none, *_ = tables.costs(i, j, tables.holds[0][i])
        if first_of_none > period:
            return
        if first_of_none == 0:
            continue
        for special in (False, True):
            work, fixed, version = tables.costs(i, j, label.shared if special else 0)
            if special:  # the first stage of a device makes the updates of weights that others there share
                work = first_of_none
            if work > period:
                continue
            shared = label.shared | (tables.holds[i][j] if special else 0)
            if special and label.beside:
                if not split:
                    continue
                delay, memory, buffers = label.delay, label.memory - tables.buffers[j], tables.buffers[i]
            elif apart is None:
                continue
            else:
                delay, memory, buffers = apart, label.memory, tables.buffers[i] + tables.buffers[j]
            delay = extend(delay, work, period)
            count = ceil_div(delay, period)
            if count > tables.lifetime:
                continue
            versions = tables.versions(count)
            load, first, left = label.load, label.first, devices
            if not special:
                if devices == 0 or count > tables.limit[i][j]:
                    continue
                left -= 1
            else:
                load += work
                charged = count - spare
                if charge == "tight":
                    charged = max(first, charged) if first else count
                    first = first or count
                memory += fixed + versions * version + charged * tables.saved[i][j] + buffers
                if load > period:
                    continue
            refund = tables.buffers[i] if special and split else 0
            if memory - refund > tables.memory:
                continue
            rest_work, rest_fixed, rest_version = tables.costs(0, i, shared)
            rest = rest_fixed + (count - spare) * tables.least_saved[i] + versions * rest_version
            if rest_work <= (left + 1) * period - load and rest <= (left + 1) * tables.memory - memory + refund:
                yield i, left, _Label(delay, load, memory, first, special, shared, Stages(i, j, special, behind))


def _after_transfer(tables: MadPipeTables, period: int, delay: int, cut: int) -> int | None:
    """Return the delay behind the transfer over ``cut``, or None where it takes longer than a period."""
    round_trip = tables.round_trip[cut]
    if tables.duplex:  # the two directions don't exclude each other
        return delay + round_trip if round_trip <= 2 * period else None
    return extend(delay, round_trip, period) if round_trip <= period else None

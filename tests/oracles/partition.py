"""Brute force: the truth on small instances, by enumeration, in plain Python and straight from the definitions.

Nothing here shares a line with the searches it checks; only what a stage costs comes from ``pipeplan.cost``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise, permutations, product
from math import ceil

from pipeplan.cost import memory_model, time_model
from pipeplan.plan import Stage
from pipeplan.problem import Chain, Device, Platform, Problem


def contiguous_optimum(problem: Problem, as_listed: bool = False) -> tuple[int, tuple[Stage, ...]] | None:
    """Return (smallest period in ns, its stages) over all contiguous allocations, or None when none is feasible.

    ``as_listed``: stages take devices in the platform's order alone.
    """
    best: tuple[int, tuple[Stage, ...]] | None = None
    judge = ContiguousJudge(problem)
    listed = tuple(range(len(problem.platform)))
    for stages in contiguous_allocations(problem, (listed,) if as_listed else device_orders(problem.platform)):
        period = judge.smallest_period(stages, None if best is None else best[0] - 1)
        if period is not None:
            best = period, stages
    return best


def contiguous_allocations(problem: Problem, orders: tuple[tuple[int, ...], ...]) -> Iterator[tuple[Stage, ...]]:
    """Yield every allocation: all splits into stages, all device groups in these orders, all recomputations."""
    layers, devices = len(problem.chain), len(problem.platform)
    for count in range(1, min(layers, devices) + 1):
        for inner in combinations(range(1, layers), count - 1):
            cuts = (0, *inner, layers)
            for groups in device_groups(count, devices, problem.replicas):
                for recompute in product(*(checkpoints(problem, i, j) for i, j in pairwise(cuts))):
                    for order in orders:
                        yield tuple(
                            Stage(i, j, tuple(order[d] for d in group), checkpoint)
                            for (i, j), group, checkpoint in zip(pairwise(cuts), groups, recompute, strict=True)
                        )


@cache
def device_orders(platform: Platform) -> tuple[tuple[int, ...], ...]:
    """Return all orders of the devices in which each unit's stand together, one for each order of unequal ones."""
    sizes = (1, *platform.unit_sizes)

    def orders(start: int, level: int) -> Iterator[tuple[int, ...]]:
        if level == 0:
            yield (start,)
            return
        parts = range(start, start + sizes[level], sizes[level - 1])
        for units in permutations(parts):
            for inner in product(*(tuple(orders(unit, level - 1)) for unit in units)):
                yield tuple(d for unit in inner for d in unit)

    found: dict[tuple[Device, ...], tuple[int, ...]] = {}
    for order in orders(0, len(platform.levels)):
        found.setdefault(tuple(platform.devices[d] for d in order), order)
    return tuple(found.values())


@cache
def device_groups(count: int, devices: int, replicas: bool) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return all ways to give ``count`` stages devices in order; some devices stay unused."""
    ways = []
    for owners in product(range(-1, count), repeat=devices):  # -1: unused
        used = [owner for owner in owners if owner >= 0]
        if used == sorted(used) and len(set(used)) == count and (replicas or len(used) == count):
            ways.append(tuple(tuple(d for d in range(devices) if owners[d] == s) for s in range(count)))
    return tuple(ways)


def checkpoints(problem: Problem, start: int, stop: int) -> list[tuple[tuple[int, int], ...]]:
    """Return every choice of recomputed segments of ``layers[start:stop]`` that the problem allows."""
    if problem.checkpointing == "none":
        return [()]
    if problem.checkpointing == "stages":
        return [(), ((start, stop),)]
    return list(_segments(start, stop))


def _segments(start: int, stop: int) -> Iterator[tuple[tuple[int, int], ...]]:
    if start == stop:
        yield ()
        return
    for rest in _segments(start + 1, stop):  # the first layer stored
        yield rest
    for end in range(start + 1, stop + 1):
        for rest in _segments(end, stop):
            yield ((start, end), *rest)


def slowest_of(chain: Chain, devices: Sequence[Device]) -> tuple[Chain, Fraction]:
    """Return the chain with the layer times of the devices' own profiles, and how much faster they are than these.

    Where profiles differ, each layer takes what it takes on the slowest device.
    """
    owns = [device.times for device in devices if device.times is not None]
    speed = min(device.speed for device in devices)
    same = len(set(owns)) == 1
    layers = []
    for i, layer in enumerate(chain.layers):

        def worst(column: int, i: int = i) -> int:
            if same:
                return owns[0].columns[column][i]
            return max(ceil(own.columns[column][i] / x.speed) for own, x in zip(owns, devices, strict=True))

        forward, backward, weight_part, step = map(worst, range(4))
        times = {"forward_ns": forward, "backward_ns": backward, "backward_weight_ns": weight_part}
        layers.append(replace(layer, optimizer_ns=step, **times))
    return replace(chain, layers=tuple(layers)), speed if same else Fraction(1)


class ContiguousJudge:
    """Computes what 1F1B* gives for contiguous stages of one problem, remembering what each stage costs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.known: dict[Stage, tuple[int, int, int, int, int, int]] = {}

    def smallest_period(self, stages: tuple[Stage, ...], upper: int | None = None) -> int | None:
        """Return the smallest valid period of at most ``upper`` ns, or None."""
        if upper is None:
            upper = sum(sum(self.cost(s)[:1]) for s in stages) + sum(self.trips(stages)) + self.floor(stages)
        low = self.floor(stages)
        if low > upper or not self.valid(stages, upper):
            return None
        while low < upper:
            middle = (low + upper) // 2
            if self.valid(stages, middle):
                upper = middle
            else:
                low = middle + 1
        return upper

    def floor(self, stages: tuple[Stage, ...]) -> int:
        """Return the least period that loads, links and synchronisation allow."""
        loads = [-(-self.cost(s)[0] // len(s.devices)) for s in stages]
        syncs = [self.cost(s)[5] + more for s, more in zip(stages, self.tied_sums(stages), strict=True)]
        links = [pairs(len(a.devices), len(b.devices)) for a, b in pairwise(stages)]
        ways = [2 if self.both_ways(*two) else 1 for two in pairwise(stages)]
        trips = [-(-(c // ways) // n) for c, n, ways in zip(self.trips(stages), links, ways, strict=True)]
        return max(1, *loads, *syncs, *trips, 1)

    def waiting(self, stage: Stage) -> int:
        """Return the gradient of shared weights that waits in a stage until the first one that has them is done."""
        if self.problem.policy.weights != "2bw" or not self.problem.chain.tied:
            return 0
        ((one, other),) = self.problem.chain.tied
        return self.shared() if stage.start <= other < stage.stop and not stage.start <= one else 0

    def shared(self) -> int:
        """Return the gradient's bytes of the one pair of tied layers: what they share, or all that the smaller has."""
        if self.problem.chain.shared is not None:
            (known,) = self.problem.chain.shared
            return 2 * known.parameter_count if self.problem.policy.precision == "mixed" else known.weight_bytes
        least = min((self.problem.chain.layers[i] for i in self.problem.chain.tied[0]), key=lambda x: x.weight_bytes)
        return 2 * least.parameter_count if self.problem.policy.precision == "mixed" else least.weight_bytes

    def tied_sums(self, stages: tuple[Stage, ...]) -> list[int]:
        """Return what the sums of one pair of tied layers in two stages add to each stage's synchronisation."""
        chain, platform, policy = self.problem.chain, self.problem.platform, self.problem.policy
        more = [0] * len(stages)
        if policy.weights != "2bw" or not chain.tied:
            return more
        (pair,) = chain.tied
        holders = [next(k for k, s in enumerate(stages) if s.start <= i < s.stop) for i in pair]
        if holders[0] == holders[1]:
            return more
        size = self.shared()
        every = [d for k in holders for d in stages[k].devices]
        interval = policy.update_interval(max(len(stages[k].devices) for k in holders))

        def ring(devices: Sequence[int]) -> int:
            bandwidth, latency = platform.paths[platform.level_of(devices)]
            steps, count = 2 * (len(devices) - 1), len(devices)
            whole = Fraction(steps * size * 10**9, count * bandwidth) + steps * latency
            return ceil(whole / interval)

        for k in holders:
            more[k] = ring(every) - ring(stages[k].devices)
        return more

    def valid(self, stages: tuple[Stage, ...], period: int) -> bool:
        """Whether the 1F1B* pattern of ``period`` ns exists, fits the memory and what the policy accumulates over."""
        problem = self.problem
        policy, chain = problem.policy, problem.chain
        if period < self.floor(stages):
            return False
        if policy.weights not in ("flush", "2bw"):
            for i, j in chain.tied:
                if not any(s.start <= i and j < s.stop for s in stages):
                    return False
        delay = 0
        trips = self.trips(stages)
        for k in range(len(stages) - 1, -1, -1):
            stage = stages[k]
            work, weights, parameters, kept, peak, _ = self.cost(stage)
            if work == 0:
                return False
            step = len(stage.devices) * period
            delay = plus(delay, work, step)
            group = -(-delay // step)
            own = kept_in_group(chain, stage.start, stage.stop)
            memory = memory_model.weights_bytes(policy, weights, parameters, group, len(stage.devices), own)
            memory += memory_model.held_bytes(kept, peak, group)
            memory += self.waiting(stage) + most_worked_with(chain, stage.start, stage.stop)
            if k > 0:
                memory += 2 * chain.cut_bytes[stage.start]
            if k < len(stages) - 1:
                memory += 2 * chain.cut_bytes[stage.stop]
            if memory > min(problem.platform.devices[d].memory_bytes for d in stage.devices):
                return False
            if policy.weights == "2bw" and policy.accumulate is not None and -(-delay // period) > policy.accumulate:
                return False
            if k > 0:
                links = pairs(len(stages[k - 1].devices), len(stage.devices))
                both_ways = self.both_ways(stages[k - 1], stage)
                delay = delay + trips[k - 1] if both_ways else plus(delay, trips[k - 1], links * period)
        return True

    def trips(self, stages: tuple[Stage, ...]) -> list[int]:
        """Return the time of both directions of each cut, over the level that joins all devices on its two sides."""
        platform = self.problem.platform
        if platform.blocking:
            return [0] * (len(stages) - 1)
        return [
            2 * platform.transfer_ns(self.problem.chain.cut_bytes[b.start], platform.level_of(a.devices + b.devices))
            for a, b in pairwise(stages)
        ]

    def both_ways(self, one: Stage, other: Stage) -> bool:
        """Whether transfers to and fro don't exclude each other: full duplex, or over links that a server shares."""
        platform = self.problem.platform
        level = platform.level_of(one.devices + other.devices)
        return platform.full_duplex or any(x.links is not None for x in platform.levels[: level + 1])

    def cost(self, stage: Stage) -> tuple[int, int, int, int, int, int]:
        """Return (work ns, weight bytes, parameters, kept bytes, peak bytes, sync period ns) of one replica."""
        if stage not in self.known:
            self.known[stage] = self._cost(stage)
        return self.known[stage]

    def _cost(self, stage: Stage) -> tuple[int, int, int, int, int, int]:
        chain, platform, policy = self.problem.chain, self.problem.platform, self.problem.policy
        i, j = stage.start, stage.stop
        speed = min(platform.devices[d].speed for d in stage.devices)
        if platform.devices[0].times is not None:
            chain, speed = slowest_of(chain, [platform.devices[d] for d in stage.devices])
        kept, peak, recompute = memory_model.activations(chain, i, j, stage.checkpoint)
        work = time_model.Passes(chain, policy, i, j, speed=speed).forward_ns
        work += time_model.Passes(chain, policy, i, j, len(stage.devices), speed).backward_ns(recompute)
        inner = [chain.cut_bytes[cut] for cut in (i, j) if 0 < cut < len(chain)]  # each end receives and sends
        if platform.blocking:
            work += sum(2 * platform.transfer_ns(size, 0) for size in inner)
        work += sum(2 * platform.overhead_ns for size in inner if size)
        weights = sum(layer.weight_bytes for layer in chain.layers[i:j])
        parameters = sum(layer.parameter_count for layer in chain.layers[i:j])
        for known in chain.shared or ():
            if all(i <= holder < j for holder in known.layers):
                weights, parameters = weights - known.weight_bytes, parameters - known.parameter_count
        gradient = memory_model.gradient_bytes(policy, *kept_in_group(chain, i, j))
        path = platform.paths[platform.level_of(stage.devices)]
        return (
            work, weights, parameters, kept, peak,
            time_model.sync_period_ns(policy, gradient, len(stage.devices), *path),
        )  # fmt: skip


def contiguous_decision(problem: Problem, period: int) -> bool:
    """Whether a contiguous allocation has ``period`` ns: the plain recursion on one-level platforms of equal devices.

    For chains that are too long to enumerate. Smallest delay by (first layer, devices used, of them by the first
    stage), nothing pruned.
    """
    chain, devices, platform = problem.chain, len(problem.platform), problem.platform
    assert len(platform.levels) == 1
    assert len(set(platform.devices)) == 1
    judge = ContiguousJudge(problem)
    layers = len(chain)
    trips = [0, *(2 * platform.transfer_ns(chain.cut_bytes[i], 0) for i in range(1, layers)), 0]
    best: dict[tuple[int, int, int], int] = {(layers, 0, 1): 0}
    for start in range(layers - 1, -1, -1):
        for (stop, used, other), behind in list(best.items()):
            for r in range(1, (devices - used if problem.replicas else min(1, devices - used)) + 1):
                links = pairs(r, other)
                if trips[stop] > links * period:
                    continue
                entering = plus(behind, trips[stop], links * period)
                for checkpoint in checkpoints(problem, start, stop):
                    work, weights, parameters, kept, peak, sync = judge.cost(
                        Stage(start, stop, tuple(range(r)), checkpoint)
                    )
                    if work == 0 or work > r * period or sync > period:
                        continue
                    delay = plus(entering, work, r * period)
                    group = -(-delay // (r * period))
                    memory = memory_model.weights_bytes(problem.policy, weights, parameters, group, r)
                    memory += memory_model.held_bytes(kept, peak, group)
                    memory += most_worked_with(chain, start, stop)
                    memory += 2 * (chain.cut_bytes[start] if start else 0)
                    memory += 2 * (chain.cut_bytes[stop] if stop < layers else 0)
                    key = start, used + r, r
                    if memory <= platform.devices[0].memory_bytes and delay < best.get(key, delay + 1):
                        best[key] = delay
    return any(start == 0 for start, _, _ in best)


def kept_in_group(chain: Chain, start: int, stop: int) -> tuple[int, int]:
    """Return the bytes and the number of weights whose state one rank of a group keeps, each shared weight once."""
    size = sum(layer.own[0] for layer in chain.layers[start:stop])
    count = sum(layer.own[1] for layer in chain.layers[start:stop])
    for known in chain.shared or ():
        if all(start <= holder < stop for holder in known.layers):
            size, count = size - known.weight_bytes, count - known.parameter_count
    return size, count


def most_worked_with(chain: Chain, start: int, stop: int) -> int:
    """Return what the pass of one layer works with that takes most."""
    return max(layer.working_bytes for layer in chain.layers[start:stop])


def pairs(one: int, other: int) -> int:
    """Return how many pairs of devices of two groups exchange microbatches: m is on the devices m mod r of each."""
    return len({(m % one, m % other) for m in range(one * other)})


def plus(x: int, y: int, period: int) -> int:
    """Return ``x (+) y``, as ALGORITHMS section 4 defines it."""
    return x + y if -(-x // period) == -(-(x + y) // period) else period * -(-x // period) + y

"""What does a run of neighbouring layers on one group of devices take and hold at least, whatever else a plan does?

The bounds of this package look at *runs*: the longest ranges of neighbouring layers on the same devices, of one stage
or of several. Every plan cuts the chain into runs. All that is said here holds for the fastest device with the most
memory on the fastest level, so it holds for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...cost import memory_model, time_model
from ...cost.saved import entering_bytes, first_saved, saved_bytes, storages
from ...cost.storages import ChainStorages
from ...integers import NEVER, IntLike, Ints, most_in_common
from ...problem import Chain, Problem
from ...schedule.kinds import KINDS, kinds_for

Floats = npt.NDArray[np.float64]
FINEST = 2**40  # ticks of all work, at most, where ticks are finer than a nanosecond


@dataclass(frozen=True)
class Spread:
    """Numbers of replicas from ``low`` to ``high``, looked at together: each condition at whichever is easier."""

    low: int
    high: int


def spreads(most: int) -> list[Spread]:
    """Return all numbers of replicas up to ``most``, one by one up to 8, then in ranges that grow by a quarter."""
    found, low = [], 1
    while low <= most:
        high = low if low <= 8 else min(most, low + low // 4)
        found.append(Spread(low, high))
        low = high + 1
    return found


class Facts:
    """Necessary costs of the runs of a problem whose devices differ by a factor alone (``relaxations.relative``).

    Times are in *ticks* of the fastest device, ``ticks`` to the nanosecond, rounded down layer by layer. Arrays have
    shape (L,) or (L + 1,), tables ``[first, end]`` (L + 1, L + 1).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        chain, policy = problem.chain, problem.policy
        self.count = len(chain)
        speed = max(device.speed for device in problem.platform.devices)
        total = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
        self.ticks = speed.numerator if total * max(speed.numerator, speed.denominator) < FINEST else 1
        factor = Fraction(self.ticks) / speed

        def ticks(times: list[Fraction]) -> Ints:
            return np.array([int(time * factor) for time in times], dtype=np.int64)

        steps = _step_shares(chain, problem)
        self.forward = ticks([Fraction(layer.forward_ns) for layer in chain.layers])
        self.backward = ticks([layer.backward_ns + step for layer, step in zip(chain.layers, steps, strict=True)])
        work = self.forward + self.backward
        self.behind = np.concatenate([np.cumsum(work[::-1])[::-1], [0]]).astype(np.int64)  # of layers[i:]
        self.path_behind = self.behind  # of what a microbatch waits for on its way to the loss and back
        if policy.drains:  # some schedules leave the gradients of weights, and steps, for later
            back = ticks([Fraction(layer.backward_ns - layer.weight_part_ns) for layer in chain.layers])
            path = self.forward + back
            self.path_behind = np.concatenate([np.cumsum(path[::-1])[::-1], [0]]).astype(np.int64)
        self.forward_before = np.concatenate([[0], np.cumsum(self.forward)]).astype(np.int64)
        self.kept = np.array(first_saved(chain), dtype=np.int64)
        self.engine_keeps_input = policy.engine is not None
        found = storages(chain)
        if self.engine_keeps_input and isinstance(found, ChainStorages):
            for tensor, layer in found.first:
                if layer > tensor:  # behind views, so that a run may receive it before
                    self.kept[layer] = found.facts.private[layer]
        kinds = kinds_for(policy.weights)
        self.periodic = all(KINDS[kind].build is None and not KINDS[kind].drains for kind in kinds)

    @cached_property
    def recomputes(self) -> bool:
        """Whether stages may recompute anything."""
        return self.problem.checkpointing != "none"

    @cached_property
    def first_kept(self) -> Ints:
        """Bytes that the first layer of a run keeps when it is stored, beside what further layers are charged for.

        An engine of torch has what enters in a receive buffer, which counts among buffers.
        """
        if self.engine_keeps_input:
            return np.maximum(self.kept - np.array(self._cuts[:-1], dtype=np.int64), 0)
        position = np.arange(self.count)
        return np.maximum(self.kept, saved_bytes(self.problem.chain, position, position + 1))

    @cached_property
    def input_kept(self) -> Ints:
        """Bytes that a segment, recomputed from each layer on, keeps as its input, where no other part holds them."""
        chain, found = self.problem.chain, storages(self.problem.chain)
        if self.engine_keeps_input:
            return np.zeros(self.count, dtype=np.int64)
        position = np.arange(self.count)
        entering = np.broadcast_to(np.asarray(entering_bytes(chain, position, position + 1)), (self.count,))
        if not isinstance(found, ChainStorages):
            return entering.astype(np.int64)  # each part counts what enters it
        own = found.root[:-1] == position
        after, before = found.keepers
        alone = own & (before[:-1] < 0) & ((after[:-1] == position) | (after[:-1] == self.count))
        return np.where(alone, np.minimum(entering, found.storage[:-1]), 0).astype(np.int64)  # expanded tensors

    @cached_property
    def while_recomputed(self) -> Ints:
        """Bytes of :attr:`kept` that a layer holds at least from when it is recomputed until its backward, beside what
        its segment keeps as its input; table ``[first of the segment, layer]``.

        What lies in memory that was there before the segment may be its input, and so may what a layer doesn't name.
        """
        entering = np.zeros((self.count, self.count), dtype=np.int64)
        for layer, home, size in self._entering():
            entering[home:, layer] += size
        return np.asarray(np.triu(np.maximum(self.kept - entering, 0)))

    def _entering(self) -> Iterator[tuple[int, int, int]]:
        """Yield (layer, where it comes from, bytes) of what a layer uses and its segment may have as its input."""
        facts = storages(self.problem.chain).facts
        root = facts.roots(0)
        for layer in range(self.count):
            for home in {root[t] for t in (*facts.reads[layer], *facts.kept[layer])}:
                yield layer, home, max(facts.storages[home], *(facts.sizes[t] for t in facts.reads[layer]), 0)

    @cached_property
    def hop(self) -> Ints:
        """Ticks that a microbatch takes over each cut in all, there and back; 0 at both ends of the chain."""
        factor = (4 if self.problem.platform.blocking else 2) * self.ticks
        return self._transfers * factor

    @cached_property
    def blocked(self) -> Ints:
        """Ticks for which transfers keep the device on either side of each cut from computing."""
        held = np.array([self.problem.platform.held_ns(size, 0) for size in self._cuts], dtype=np.int64)
        return 2 * self.ticks * held

    @cached_property
    def link_load(self) -> Ints:
        """Ticks for which a microbatch occupies a link at each cut, shared by all pairs of devices that take turns."""
        platform = self.problem.platform
        if platform.blocking:
            return np.zeros(self.count + 1, dtype=np.int64)
        levels = range(len(platform.levels))
        share = most_in_common(len(platform)) if self.problem.replicas else 1
        found = [
            min(platform.transfer_ns(size, k) * (1 if platform.both_ways(k) else 2) for k in levels)
            for size in self._cuts
        ]
        return np.array([load * self.ticks // share for load in found], dtype=np.int64)

    @cached_property
    def waits(self) -> bool:
        """Whether what doesn't fit into a period waits for the next: stages of one replica on links of their own."""
        platform = self.problem.platform
        return self.periodic and not self.problem.replicas and not platform.blocking

    @cached_property
    def links_wait(self) -> bool:
        """Whether the two directions of every link exclude each other."""
        platform = self.problem.platform
        return not any(platform.both_ways(k) for k in range(len(platform.levels)))

    @cached_property
    def _cuts(self) -> list[int]:
        return [0, *self.problem.chain.cut_bytes[1:-1], 0]

    @cached_property
    def _transfers(self) -> Ints:
        return np.array([self.problem.platform.transfer_ns(size, 0) for size in self._cuts], dtype=np.int64)

    @cached_property
    def spreads(self) -> list[Spread]:
        """The numbers of replicas that a run may have."""
        return spreads(self.problem.most_replicas)

    @cached_property
    def memories(self) -> Ints:
        """Bytes of the device that has least, at most, among as many as each of :attr:`spreads` begins with; never less
        than one, so that shares of it are numbers."""
        sizes = sorted((max(1, x.memory_bytes) for x in self.problem.platform.devices), reverse=True)
        return np.array([sizes[spread.low - 1] for spread in self.spreads], dtype=np.int64)

    @cached_property
    def fixed(self) -> Ints:
        """Weights and buffers of a run on each of its devices, tables by :attr:`spreads`, bytes."""
        return np.stack([self._fixed(spread, *self._weights) for spread in self.spreads])

    @cached_property
    def fixed_alone(self) -> Ints:
        """The same where weights that layers share count in the first of them only, so that runs can be added up; in
        programs a device works in one of its runs at a time, and what that takes doesn't count."""
        working = 0 if self.periodic else self.problem.chain.working_bytes(*self._ranges)
        if not self.problem.chain.sums.shared:
            return self.fixed - working
        start, stop = self._ranges
        alone = tuple(x[stop] - x[start] for x in self.weights_alone)
        return np.stack([self._fixed(x, *alone) - working for x in self.spreads])

    @cached_property
    def weights_alone(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Prefix sums of weights, bytes and parameters, and of what ranks keep the state of, where those that layers
        share count in the first of them."""
        sums = self.problem.chain.sums
        found = sums.weight_bytes, sums.parameters, sums.own_bytes, sums.own_parameters
        for shared in sums.shared:
            later, each = np.maximum(shared.holders - 1, 0), (shared.weight_bytes, shared.parameters, *shared.own)
            found = tuple(x - later * one for x, one in zip(found, each, strict=True))
        return found

    @cached_property
    def sync_ns(self) -> Floats:
        """Least period (ns) at which the all-reduces of a run keep up, tables by :attr:`spreads`."""
        gradient = memory_model.gradient_bytes(self.problem.policy, *self._weights[2:])
        return np.stack([self.sync_of(spread, gradient) for spread in self.spreads])

    def sync_of(self, spread: Spread, gradient: Ints) -> Floats:
        """Return the least period (ns) at which all-reduces of ``gradient`` bytes keep up."""
        platform = self.problem.platform
        level = next(k for k, size in enumerate(platform.unit_sizes) if size >= spread.low)
        bandwidth, latency = platform.paths[level]
        every = self.problem.policy.update_interval(spread.high)
        exact = np.asarray(gradient).astype(object)  # bytes times 1e9 exceed 64 bits
        halves = self.problem.policy.sharing.update
        found = time_model.ring_all_reduce_ns(exact, spread.low, bandwidth, latency, every, halves)
        return np.asarray(found).astype(np.float64)

    @cached_property
    def _ranges(self) -> tuple[Ints, Ints]:
        position = np.arange(self.count + 1)
        return position[:, None], np.maximum(position[None, :], position[:, None])

    @cached_property
    def _weights(self) -> tuple[Ints, Ints, Ints, Ints]:
        whole = memory_model.weights_of(self.problem.chain, *self._ranges)
        return *whole, *memory_model.own_of(self.problem.chain, *self._ranges)

    def _fixed(self, spread: Spread, *weights: Ints) -> Ints:
        cuts = np.array(self._cuts, dtype=np.int64)
        buffers = self.buffer_bytes(spread, cuts[:, None], cuts[None, :])
        found: Ints = self.held_by_weights(spread, *weights) + buffers + self.problem.chain.working_bytes(*self._ranges)
        return found

    def held_by_weights(self, spread: Spread, size: Ints, count: Ints, *own: Ints) -> Ints:
        """Return what a device holds of weights, gradients and optimizer state."""
        policy = self.problem.policy
        held = [memory_model.weights_bytes(policy, size, count, 1, r, own) for r in {spread.low, spread.high}]  # type: ignore[arg-type]  # two
        more = policy.clip and not policy.drains  # a second gradient waits for the norm of all
        least: Ints = np.minimum.reduce(held)
        return least + memory_model.gradient_bytes(policy, size, count) if more else least

    def buffer_bytes(self, spread: Spread, entering: Ints, leaving: IntLike = 0) -> Ints:
        """Return the bytes of buffers for what enters and leaves a run."""
        return np.asarray(memory_model.message_bytes(self.problem.policy, entering, leaving, spread.high))

    @cached_property
    def least_peak(self) -> Ints:
        """The least that one microbatch holds at its worst instant in a run, whatever is recomputed; table, bytes."""
        count = self.count
        stored = np.concatenate([[0], np.cumsum(self.kept)])
        table = np.zeros((count + 1, count + 1), dtype=np.int64)
        if not self.recomputes:
            first = np.concatenate([self.first_kept - self.kept, [0]])
            alone: Ints = np.triu(stored[None, :] - stored[:, None] + first[:, None], 1)
            return alone
        inside = table.copy()  # behind other parts of the run
        never = np.int64(2**61)
        for i in range(count - 1, -1, -1):
            ends = np.arange(i + 1, count + 1)
            rest = np.where(ends[:, None] <= ends[None, :], inside[i + 1 :, i + 1 :], never)
            held = np.cumsum(self.while_recomputed[i, i:])
            for into, keeps, saved in ((inside, self.input_kept[i], self.kept[i]), (table, *self._first_part(i))):
                segment = (keeps + np.maximum(held[:, None], rest)).min(axis=0)
                into[i, i + 1 :] = np.minimum(segment, saved + rest[0])
        return table

    @cached_property
    def recomputed(self) -> Ints:
        """Ticks of recomputation that each run needs for one microbatch at least, tables by :attr:`spreads`."""
        room = self.memories[:, None, None] - self.fixed
        if not self.recomputes or self.count > MOST_LAYERS:
            return np.zeros_like(room)
        return least_recomputed(self.forward, self.kept, self.first_kept, self.input_kept, self.while_recomputed, room)

    def _first_part(self, layer: int) -> tuple[int, int]:
        return int(self.input_kept[layer]), int(self.first_kept[layer])


def _step_shares(chain: Chain, problem: Problem) -> list[Fraction]:
    """Return what each layer's backward is charged of the optimizer's steps, at least; ns on a device of speed 1."""
    policy = problem.policy
    if policy.overlaps:
        return [Fraction(0)] * len(chain)
    steps = [layer.optimizer_ns for layer in chain.layers]
    for shared in chain.sums.shared:
        held = np.flatnonzero(np.diff(shared.holders))
        for layer in held[1:].tolist():
            steps[layer] = max(0, steps[layer] - shared.optimizer_ns)
    replicas = problem.most_replicas if policy.zero else 1
    share = policy.update_interval(replicas) * (policy.pipelines if policy.zero else 1)
    return [Fraction(step, share) for step in steps]


CELLS = 256  # of the time of all forwards
MOST_LAYERS = 128


def least_recomputed(
    forward: Ints, kept: Ints, first_kept: Ints, input_kept: Ints, while_recomputed: Ints, room: Ints
) -> Ints:
    """Return the least recomputation, in ticks as ``forward``, of each run; NEVER where nothing helps.

    ``room`` are bytes, tables ``[first, end]`` by numbers of replicas, (R, L + 1, L + 1), as what is returned; the rest
    is by layer, as :class:`.facts.Facts` says.
    """
    cell = max(1, -(-int(forward.sum()) // CELLS))
    peaks = _peaks(forward, cell, kept, first_kept, input_kept, while_recomputed)
    cells = np.stack([(peaks > one[:, :, None]).sum(axis=2) for one in room])
    return np.where(cells > CELLS, NEVER, cells * cell)


def _peaks(forward: Ints, cell: int, kept: Ints, first_kept: Ints, input_kept: Ints, while_recomputed: Ints) -> Ints:
    """Return the least that one microbatch holds at its worst instant; table ``[first, end, cells]``, bytes."""
    count = len(forward)
    inside = np.full((count + 1, count + 1, CELLS + 1), NEVER, dtype=np.int64)  # behind other parts of the run
    table = inside.copy()
    inside[count, count] = 0
    for i in range(count - 1, -1, -1):
        inside[i, i] = 0
        segments = np.full((count + 1, CELLS + 1), NEVER, dtype=np.int64)
        held = np.cumsum(while_recomputed[i, i:]).tolist()
        again = (np.cumsum(forward[i:]) // cell).tolist()
        for end, size, cells in zip(range(i + 1, count + 1), held, again, strict=True):
            into = segments[end:, cells:]
            np.minimum(into, np.maximum(size, inside[end, end:, : CELLS + 1 - cells]), out=into)
        segments += int(input_kept[i])
        for rows, stored in ((inside, kept[i]), (table, first_kept[i])):
            np.minimum(segments[i + 1 :], inside[i + 1, i + 1 :] + int(stored), out=rows[i, i + 1 :])
    return table

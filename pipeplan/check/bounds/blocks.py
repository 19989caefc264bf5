"""Can whole layers be dealt out to the devices at a given period, wherever in the chain a device takes them from?

Layers are not divisible, and most of a large network's are equal blocks beside a few others, an embedding and a head.
A group of r devices takes n blocks and some of the others if their work fits into r periods, the all-reduce of their
gradients into one, and their weights with the least that one microbatch needs into the memory. When a device starts the
last of its forwards the same microbatch is inside all its layers, so of blocks those for which there is no room run
again, as whole things too: every microbatch or none. The most blocks that p devices take are a small dynamic program
over groups, exact for chains of equal blocks; which group has which of the others is tried in all ways. ALGORITHMS
section 11.3, condition 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ...cost import memory_model
from ...integers import Ints
from .facts import Facts, Floats

MOST_OTHERS = 3  # layers that are no blocks and are looked at, those with most work
FEWEST = 3  # blocks
MOST_DEVICES = 256
NONE = -(10**9)


class Blocks:
    """The equal blocks of a chain, and what groups of them and of ``others`` take on the devices of a group."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        chain = facts.problem.chain
        looks = [
            (facts.forward[i], facts.backward[i], layer.weight_bytes, layer.parameter_count, *layer.own, facts.kept[i])
            for i, layer in enumerate(chain.layers)
        ]
        look, self.count = Counter(looks).most_common(1)[0]
        self.places = [i for i, one in enumerate(looks) if one == look]
        work = facts.behind[:-1] - facts.behind[1:]
        rest = sorted((i for i, one in enumerate(looks) if one != look), key=lambda i: (-int(work[i]), i))
        self.others = rest[:MOST_OTHERS]
        self.work = work

    @property
    def worthwhile(self) -> bool:
        """Whether there are enough blocks for a packing to say anything, and not too many devices."""
        return self.count >= FEWEST and len(self.facts.problem.platform) <= MOST_DEVICES

    def too_many(self, period: int) -> bool:
        """Whether the devices cannot take all blocks and others at ``period`` ns."""
        devices = len(self.facts.problem.platform)
        alone = np.full(devices + 1, 0, dtype=np.int64)
        group = self._most((), period)
        for p in range(1, devices + 1):
            alone[p] = max(alone[p - 1], int((alone[p - 1 :: -1] + group[1 : p + 1]).max()))
        for parts in _partitions(self.others):
            total = alone
            for part in parts:
                total = _joined(total, self._most(part, period))
            if total[devices] >= self.count:
                return False
        return True

    def _most(self, others: tuple[int, ...], period: int) -> Ints:
        """Return the most blocks of a group of 0, 1, .. devices that has ``others``, NONE where these don't fit."""
        facts = self.facts
        devices = len(facts.problem.platform)
        found = np.full(devices + 1, NONE, dtype=np.int64)
        fixed, sync = self._fixed[others], self._sync[others]
        load = np.arange(self.count + 1) * int(self.work[self.places[0]]) + int(sum(self.work[i] for i in others))
        for place, spread in enumerate(facts.spreads):
            room = facts.memories[place] - fixed[place]
            fits = (load + self._again(room) <= spread.high * period * facts.ticks) & (sync[place] <= period)
            fits &= self._peak <= room
            if fits.any():
                found[spread.low :] = np.maximum(found[spread.low :], int(np.flatnonzero(fits).max()))
        return found

    def _again(self, room: Ints) -> Ints:
        """Return the ticks that blocks take to run again at least, by their number, where there are ``room`` bytes."""
        facts, blocks = self.facts, np.arange(self.count + 1)
        kept = min(int(min(facts.kept[i], facts.first_kept[i])) for i in self.places)
        if not facts.recomputes or not kept:
            return 0 * blocks
        found: Ints = np.maximum(blocks - np.maximum(room, 0) // kept, 0) * int(facts.forward[self.places[0]])
        return found

    @cached_property
    def _fixed(self) -> dict[tuple[int, ...], list[Ints]]:
        """Weights and buffers of a device by others, spread and blocks."""
        spreads = range(len(self.facts.spreads))
        return {part: [self._weights_and_buffers(part, place) for place in spreads] for part in self._parts}

    @cached_property
    def _peak(self) -> Ints:
        """The least that one microbatch takes of a device at its worst instant, by blocks."""
        facts, blocks = self.facts, np.arange(self.count + 1)
        first, last = self.places[0], self.places[-1]
        if not facts.recomputes:
            return blocks * int(facts.kept[first])
        if last - first + 1 > self.count:
            return 0 * blocks
        starts = (np.diagonal(facts.least_peak, n)[first : last + 2 - n] for n in blocks)  # wherever among them
        return np.array([int(found.min()) for found in starts])

    @cached_property
    def _sync(self) -> dict[tuple[int, ...], list[Floats]]:
        facts = self.facts
        return {
            part: [
                facts.sync_of(spread, memory_model.gradient_bytes(facts.problem.policy, c, d))
                for spread in facts.spreads
            ]
            for part in self._parts
            for _, _, c, d in [self._weights(part)]
        }

    @cached_property
    def _parts(self) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(part for parts in _partitions(self.others) for part in ((), *parts)))

    def _weights(self, others: tuple[int, ...]) -> tuple[Ints, ...]:
        """Bytes and parameters, and those of which the state is kept, by the number of blocks; what layers share counts
        in the first that has it."""
        every, blocks = map(np.diff, self.facts.weights_alone), np.arange(self.count + 1)
        return tuple(blocks * min(int(x[i]) for i in self.places) + sum(int(x[i]) for i in others) for x in every)

    def _weights_and_buffers(self, others: tuple[int, ...], place: int) -> Ints:
        facts, chain = self.facts, self.facts.problem.chain
        ends = [end in self.others and end not in others for end in (0, len(chain) - 1)]
        cut = min(chain.cut_bytes[1:-1], default=0)
        partial = (np.arange(self.count + 1) < self.count) | (len(others) < len(self.others))
        sides = np.maximum(partial, sum(ends)) * cut
        weights = facts.held_by_weights(facts.spreads[place], *self._weights(others))
        found: Ints = weights + facts.buffer_bytes(facts.spreads[place], 0 * sides, sides)
        return found


def _joined(one: Ints, other: Ints) -> Ints:
    """Return the most that 0, 1, .. devices take of both."""
    found = np.full(len(one), NONE, dtype=np.int64)
    for p in range(len(one)):
        found[p] = int((one[: p + 1] + other[p::-1]).max())
    return np.maximum(found, NONE)


def _partitions(items: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yield all ways to part ``items`` into groups."""
    if not items:
        yield []
        return
    for parts in _partitions(items[1:]):
        yield [(items[0],), *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], (items[0], *part), *parts[place + 1 :]]

"""What can be left of the devices when the last stages have taken theirs, and what can the stage before them take?

Stages take devices from the chain's last to its first, in one order. A *state* is how many are left then. A replicated
stage runs at the pace of its slowest device and within its smallest memory, so all that counts of a group is its
:class:`Floor`, beside how many devices it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...integers import NEVER, Ints
from ...problem import Device, LayerTimes, Platform, VariantName

Flags = npt.NDArray[np.bool_]


class Take(NamedTuple):
    """Groups of devices of one floor that a stage can take in a state.

    In row a, which leaves a devices (without replicas there is one row alone), ``replicas`` says how many devices the
    group has, 0 where there is none, and ``spans`` the level that joins them. Both have the shape (rows, states).
    """

    floor: int
    replicas: Ints
    spans: Ints
    variant: int = 0  # of those of stages that choose, where the floor is the variant's


class Floor(NamedTuple):
    """The least memory of a group's devices, and of each profile of devices' own the least speed; None: no such
    device."""

    memory_bytes: int
    speeds: tuple[Fraction | None, ...]


@dataclass(frozen=True)
class DeviceKinds:
    """The kinds of a platform's devices, and the floors of the groups that stages can take.

    ``of`` has the kind of each device, numbered by first use. ``eligible`` has for each of the ``floors`` the kinds
    that a group of that floor may contain: those that are at least as good; a single device is of its own kind.
    ``profiles`` are those of devices' own, in the order of a floor's speeds.
    """

    platform: Platform
    kinds: tuple[Device, ...]
    of: tuple[int, ...]
    profiles: tuple[LayerTimes | None, ...]
    floors: tuple[Floor, ...]
    eligible: tuple[frozenset[int], ...]

    @staticmethod
    def on(platform: Platform, replicas: bool) -> DeviceKinds:
        """Return those of ``platform`` for groups, or for single devices alone."""
        kinds = tuple(dict.fromkeys(platform.devices))
        number = {x: i for i, x in enumerate(kinds)}
        profiles = tuple(sorted(dict.fromkeys(x.times for x in kinds), key=repr))
        speeds = [[None, *sorted({x.speed for x in kinds if x.times == times})] for times in profiles]
        alone = {floor_of([x], profiles): frozenset([i]) for i, x in enumerate(kinds)}
        found: dict[Floor, frozenset[int]] = {}
        for least in product(*speeds):
            of_profile = dict(zip(profiles, least, strict=True))
            for memory in sorted({x.memory_bytes for x in kinds}):
                floor = Floor(memory, least)
                good = [
                    i
                    for i, x in enumerate(kinds)
                    if x.memory_bytes >= memory and (pace := of_profile[x.times]) is not None and x.speed >= pace
                ]
                if replicas and good and floor_of([kinds[i] for i in good], profiles) == floor:
                    found[floor] = frozenset(good)
                elif not replicas and floor in alone:
                    found[floor] = alone[floor]
        of = tuple(number[x] for x in platform.devices)
        return DeviceKinds(platform, kinds, of, profiles, tuple(found), tuple(found.values()))

    def slowest(self, floor: int) -> Device:
        """Return a device that is as good as a group of this floor."""
        members = [d for d, kind in enumerate(self.of) if kind in self.eligible[floor]]
        return replace(self.platform.slowest(members), memory_bytes=self.floors[floor].memory_bytes)

    def needed(self, floor: int) -> list[frozenset[int]]:
        """Return sets of kinds of each of which a group of this floor has a device."""
        memory, speeds = self.floors[floor]
        sets = [frozenset(i for i in self.eligible[floor] if self.kinds[i].memory_bytes == memory)]
        for times, speed in zip(self.profiles, speeds, strict=True):
            if speed is not None:
                some = (i for i in self.eligible[floor] if self.kinds[i].times == times)
                sets.append(frozenset(i for i in some if self.kinds[i].speed == speed))
        return sets


def floor_of(devices: Iterable[Device], profiles: Iterable[LayerTimes | None]) -> Floor:
    """Return the floor of a group of ``devices``."""
    group = list(devices)
    speeds = ([x.speed for x in group if x.times == times] for times in profiles)
    return Floor(min(x.memory_bytes for x in group), tuple(min(some, default=None) for some in speeds))


class Step(NamedTuple):
    """A stage takes a group of one of the takes: the states that it finds and leaves."""

    take: int
    found: int
    leaves: int


@dataclass(frozen=True)
class DeviceStates:
    """Devices are taken in ``order``, from its end: state b has the devices at the positions before b left.

    A *label* of a state is what the last stage to take devices leaves beside it: its delay, its number of devices, and
    a level, the lowest of a unit that has all its devices and some of those left. A transfer from the stage before is
    inside that unit where the stage before takes its devices there.
    ``spans[a, b]`` is the level that joins the devices from a to b - 1, ``outer[a, b]`` also joins a - 1 with them;
    without replicas both have the one row of the single devices b - 1.
    """

    kinds: DeviceKinds
    order: tuple[int, ...]
    replicas: bool
    speed_of: tuple[Fraction, ...]  # of each device
    variants: tuple[VariantName, ...] = ()  # where each stage chooses
    single: bool = False  # whether each has one replica, where they choose

    @property
    def in_rows(self) -> bool:
        """Whether takes have a row for each number of devices that they may leave."""
        return self.replicas or bool(self.variants)

    def named(self, take: int) -> VariantName:
        """Return the variant of the stages that a take is for."""
        return self.variants[self.takes[take].variant] if self.variants else (1, False, False)

    @cached_property
    def left(self) -> Ints:
        """How many devices are left in each state."""
        return np.arange(len(self.order) + 1)

    @cached_property
    def uniform(self) -> bool:
        """Whether only the number of devices left counts: all are alike, on one level."""
        return len(self.kinds.platform.levels) == 1 and len(self.kinds.kinds) == 1

    @cached_property
    def speeds(self) -> tuple[Fraction, ...]:
        """How fast the devices left are together; empty where all are alike."""
        if len(self.kinds.kinds) == 1:
            return ()
        total, found = Fraction(0), [Fraction(0)]
        for d in self.order:
            total += self.speed_of[d]
            found.append(total)
        return tuple(found)

    @cached_property
    def first(self) -> Flags:
        """In which states the chain's last stage may take its devices: where all are alike, with all of them left."""
        return self.left == len(self.order) if self.uniform else self.left > 0

    @cached_property
    def takes(self) -> tuple[Take, ...]:
        """The groups of each floor: all eligible devices between a stage's first and its last one.

        Within a floor a stage needs no others: moving the first ones up into a gap keeps the floor and shortens the way
        to the next stage. There is no group where the first or the last device isn't eligible.
        """
        if self.variants:
            return tuple(Take(k, self._groups(x), self._spans, k) for k, (x, *_) in enumerate(self.variants))
        along = np.array([self.kinds.of[d] for d in self.order])
        found = []
        for floor, eligible in enumerate(self.kinds.eligible):
            if not self.replicas:
                (kind,) = eligible
                groups = np.concatenate([[0], (along == kind).astype(np.int64)])[None, :]
            else:
                good = np.isin(along, sorted(eligible))
                groups = _between(good)
                groups[~(good[:, None] & np.concatenate([[False], good])[None, :])] = 0
                for some in self.kinds.needed(floor):
                    groups[_between(np.isin(along, sorted(some))) <= 0] = 0
                groups[groups < 0] = 0
            found.append(Take(floor, groups, self._spans))
        return tuple(found)

    def _groups(self, width: int) -> Ints:
        """Return how many groups of so many devices are a..b-1, shape (P, P + 1), 0 where some would cross servers."""
        first, last = np.arange(len(self.order))[:, None], self.left[None, :]
        inside = self.kinds.platform.unit_sizes[0]
        groups = np.where((last - first) % width, 0, np.maximum(0, (last - first) // width))
        groups[(first % width != 0) & (first // inside != (last - 1) // inside)] = 0
        return np.where(groups > 1, 0, groups) if self.single else groups

    @cached_property
    def _ends(self) -> tuple[Ints, tuple[Ints, ...]]:
        """How many devices, or groups of them, a stage may have, variant by variant, and by variant the index of each
        number."""
        sizes, at, count = [], [], 0
        for variant in range(len(self.variants) or 1):
            own = [x.replicas[x.replicas > 0] for x in self.takes if x.variant == variant]
            sizes.append(np.unique(np.concatenate([[1], *own])))
            at.append(places(sizes[-1]) + count)
            count += len(sizes[-1])
        return np.concatenate(sizes), tuple(at)

    @property
    def sizes(self) -> Ints:
        """How many devices a stage may have, of each variant that it may have."""
        return self._ends[0]

    def place(self, take: int) -> Ints:
        """Return the index in :attr:`sizes` of each number of devices of a take."""
        return self._ends[1][self.takes[take].variant]

    @cached_property
    def variant_of(self) -> Ints:
        """The variant of each of :attr:`sizes`."""
        return np.concatenate([np.full(len(np.unique(x)), k) for k, x in enumerate(self._ends[1])])

    @cached_property
    def _spans(self) -> Ints:
        return self.kinds.platform.spans if self.in_rows else np.zeros((1, len(self.order) + 1), dtype=np.int64)

    @cached_property
    def _outer(self) -> Ints:
        spans, count = self.kinds.platform.spans, len(self.order)
        if not self.in_rows:
            return np.array([[0, 0, *(spans[b - 2, b] for b in range(2, count + 1))]], dtype=np.int64)
        outer = np.zeros_like(spans)
        if len(self.kinds.platform.levels) > 1:  # untouched zeros take no memory
            outer[1:] = spans[:-1]
        return outer

    def lower(self, labels: Ints, take: int, rows: slice, found: Ints, values: Ints) -> None:
        """Lower the ``labels``, shape (states, levels, sizes), to what comes of a take in ``rows`` from the states
        ``found``: ``values``, shape (rows, found). A take in row a leaves state a."""
        sizes = self.place(take)[self.takes[take].replicas[rows][:, found]]
        after = np.arange(rows.start, rows.stop)[:, None] if self.in_rows else found[None, :] - 1
        np.minimum.at(labels, (np.broadcast_to(after, values.shape), self._outer[rows][:, found], sizes), values)

    def into(self, take: int, state: int, level: int) -> Flags:
        """Return from which states a take leads to ``state`` with a label of ``level``."""
        row = state if self.in_rows else 0
        allowed: Flags = self._outer[row] == level
        return allowed if self.in_rows else allowed & (self.left == state + 1)

    def skipped(self, labels: Ints) -> Ints:
        """Return the least labels behind any devices that are skipped; they stay within their level's unit."""
        count = len(self.order)
        behind = np.full(labels.shape, NEVER, dtype=np.int64)
        for level, unit in enumerate(self.kinds.platform.unit_sizes):
            unit = min(unit, count)
            units = -(-count // unit)
            padded = np.full((labels.shape[1], units * unit), NEVER, dtype=np.int64)
            padded[:, :count] = labels[level, :, 1:]
            best = np.minimum.accumulate(padded.reshape(-1, units, unit)[..., ::-1], axis=-1)[..., ::-1]
            behind[level, :, 1:] = best.reshape(labels.shape[1], -1)[:, :count]
        return behind

    def before(self, state: int, level: int) -> Ints:
        """Return the states from which skipping devices inside one unit of ``level`` leads to ``state``."""
        unit = self.kinds.platform.unit_sizes[level]
        return np.arange(state, min(len(self.order), ((state - 1) // unit + 1) * unit) + 1)

    def devices(self, steps: Sequence[Step]) -> list[tuple[int, ...]]:
        """Return the devices of the stages that take ``steps``, of groups the first of each."""
        if self.variants:
            return [tuple(range(x.leaves, x.found, self.named(x.take)[0])) for x in steps]
        found = []
        for step in steps:
            eligible = self.kinds.eligible[self.takes[step.take].floor]
            group = (d for d in self.order[step.leaves : step.found] if self.kinds.of[d] in eligible)
            one_unit = len(self.kinds.platform.levels) == 1  # else the chain's order keeps units together
            found.append(tuple(sorted(group) if one_unit else group))
        return found


def places(sizes: Ints) -> Ints:
    """Return the index of each number up to the largest of ``sizes``, 0 for those that aren't there."""
    place = np.zeros(int(sizes[-1]) + 1, dtype=np.int64)
    place[sizes] = np.arange(len(sizes))
    return place


def _between(which: Flags) -> Ints:
    """Return how many of the devices a..b-1 are ``which``, shape (P, P + 1)."""
    table = np.concatenate([[0], np.cumsum(which.astype(np.int64))]).astype(np.int64)
    return table[None, :] - table[:-1, None]

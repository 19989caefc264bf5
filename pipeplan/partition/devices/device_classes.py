"""Which groups of devices are equally good for a stage?

A replicated stage runs at the pace of its slowest device and within its smallest memory, so all that counts of a group
is its :class:`Floor`, beside how many devices it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from ...problem import Device, LayerTimes, Platform


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

    def floor(self, kinds: Iterable[int]) -> int:
        """Return the number of the floor of a group with devices of these ``kinds``."""
        return self.floors.index(floor_of([self.kinds[i] for i in kinds], self.profiles))

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

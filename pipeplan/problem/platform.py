"""What is the machine? Devices with memory and speed, and the levels of links that join them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import gcd, lcm

import numpy as np

from ..integers import Ints, ceil_div
from .layers import LayerTimes


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: usable memory in bytes, and speed relative to the device that its profile was measured on.

    ``times`` are those of a profile of its own; None: the chain's. On a platform all devices have them, or none.
    """

    memory_bytes: int
    speed: Fraction = Fraction(1)
    times: LayerTimes | None = None


@lru_cache(maxsize=256)
def _extreme(devices: tuple[Device, ...], slow: bool) -> Device:
    """Return the least memory, and for every layer the time of the slowest of ``devices``; or the most and the fastest.

    Where profiles differ times are rounded towards what is sought, so that no sum of them is on its wrong side. Of the
    fastest's backwards both the whole and the part that others wait for are the least of any, each by itself.
    """
    pick = min if slow else max
    memory, speed = pick(x.memory_bytes for x in devices), pick(x.speed for x in devices)
    first = devices[0].times
    if first is None or all(x.times == first for x in devices):
        return Device(memory, speed, first)
    scaled = [
        [[-(-t * s.denominator // s.numerator) if slow else t * s.denominator // s.numerator for t in c] for c in x]
        for x, s in (((*x.times.columns, x.times.waited_ns), x.speed) for x in devices if x.times is not None)
    ]
    extreme = max if slow else min
    columns = [tuple(extreme(at) for at in zip(*kind, strict=True)) for kind in zip(*scaled, strict=True)]
    forward, backward, weight, optimizer, waited = columns
    if not slow:
        weight = tuple(whole - part for whole, part in zip(backward, waited, strict=True))
    return Device(
        memory, Fraction(1), LayerTimes("slowest" if slow else "fastest", forward, backward, weight, optimizer)
    )


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network: it joins ``count`` units of the level below (devices, at the lowest level).

    ``links`` is how many links each of these units has into this level, for all that its devices send beyond the unit;
    None where any two devices have a link of their own.
    """

    count: int
    bandwidth: int  # bytes per second and direction, of each link
    latency_ns: int = 0
    links: int | None = None


@dataclass(frozen=True)
class Platform:
    """Devices in a fixed order, joined by levels, the lowest (inside a server) first (PipeDream section 3.1).

    At most one level has ``links``. A message takes the devices at both its ends ``overhead_ns`` of work, to send it or
    to receive it, beside what the link takes, which keeps them from computing where transfers are ``blocking``.
    ``reserved_bytes`` of each device are for others: its ``memory_bytes`` are without them. Where ``whole`` is another
    platform each device is a group of that one's, of neighbours that run every layer together, as one of them sees it.
    """

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    full_duplex: bool = False
    blocking: bool = False
    reserved_bytes: int = 0
    overhead_ns: int = 0
    whole: Platform | None = None

    def __len__(self) -> int:
        return len(self.devices)

    @staticmethod
    def flat(count: int, memory_bytes: int, bandwidth: int = 12 * 10**9, latency_ns: int = 0) -> Platform:
        """Return ``count`` equal devices on one level; the default 12 GB/s is PCIe 3 x16 (MadPipe section 5.1)."""
        return Platform((Device(memory_bytes),) * count, (Level(count, bandwidth, latency_ns),))

    def reserving(self, size: int) -> Platform:
        """Return the platform with ``size`` bytes less of every device's memory, for others."""
        devices = tuple(replace(x, memory_bytes=x.memory_bytes - size) for x in self.devices)
        return replace(self, devices=devices, reserved_bytes=self.reserved_bytes + size)

    @property
    def width(self) -> int:
        """How many GPUs each device is."""
        return 1 if self.whole is None else len(self.whole) // len(self)

    def gpus(self, device: int) -> range:
        """Return the numbers of a device's GPUs."""
        return range(device * self.width, (device + 1) * self.width)

    def grouped(self, width: int, inside: int | None = None) -> Platform:
        """Return the platform whose devices are groups of ``width`` neighbours; ValueError where ``inside`` of them,
        None: all, cross servers.

        Memory and bandwidth are those of one of the group, each of which sends its part to its counterpart. Links that
        a server's GPUs share are the group's together.
        """
        own, inside = self.levels[0].count, inside or width
        if width == 1:
            return self
        if own % inside or (own % width and width % own):
            raise ValueError(
                f"groups of {width} GPUs don't share {own} {'in a server ' if self.levels[1:] else ''}evenly"
            )
        if len(self) % width:
            raise ValueError(f"groups of {width} GPUs don't share all {len(self)} evenly")
        groups = [self.devices[d : d + width] for d in range(0, len(self), width)]
        devices = tuple(_extreme(tuple(dict.fromkeys(group)), True) for group in groups)
        levels, left = list[Level](), width
        for level in self.levels:
            links, share = level.links, 1
            if links is not None:  # of a unit of the level below, where GPUs of the group, or all of it, are
                ours = min(width, self.unit_sizes[len(levels) - 1])
                links, share = max(1, links // ours), max(1, -(-ours // links))
            part = gcd(level.count, left)
            count, left = level.count // part, left // part
            levels.append(replace(level, count=count, links=links, bandwidth=level.bandwidth // share))
        return replace(self, devices=devices, levels=tuple(levels), whole=self)

    @cached_property
    def unit_sizes(self) -> tuple[int, ...]:
        """Devices in one unit of each level: the running product of the levels' counts."""
        sizes, size = [], 1
        for level in self.levels:
            size *= level.count
            sizes.append(size)
        return tuple(sizes)

    @cached_property
    def shared_level(self) -> int | None:
        """The level whose units share their links, or None."""
        return next((k for k, level in enumerate(self.levels) if level.links is not None), None)

    def shares_links(self, level: int) -> bool:
        """Whether a transfer over ``level`` takes one of the links that its sender's unit has for all it sends."""
        return self.shared_level is not None and level >= self.shared_level

    def both_ways(self, level: int) -> bool:
        """Whether the two directions of a transfer over ``level`` don't exclude each other."""
        return self.full_duplex or self.shares_links(level)

    def link_of(self, device: int) -> int:
        """Return the number of the shared link by which ``device`` sends: the devices of a unit are spread evenly over
        its links, neighbours together."""
        assert self.shared_level is not None, "every two devices have a link of their own"
        links = self.levels[self.shared_level].links or 1
        size = self.unit_sizes[self.shared_level - 1] if self.shared_level else 1
        return device // size * links + device % size * links // size

    def level_of(self, devices: Sequence[int]) -> int:
        """Return the index of the lowest level whose one unit holds all of ``devices``."""
        first, last = min(devices), max(devices)
        return next(k for k, size in enumerate(self.unit_sizes) if first // size == last // size)

    def level_between(self, one: Sequence[int], other: Sequence[int]) -> int:
        """Return the lowest level that joins every two devices of the groups that exchange a microbatch's tensors.

        Microbatch m is on ``one[m % len(one)]`` and ``other[m % len(other)]``: pipelines side by side, each inside a
        server, never leave it. For groups that lie one behind the other it is the level that joins them all.
        """
        if len(self.levels) == 1 or max(one) < min(other) or max(other) < min(one):
            return self.level_of((*one, *other))
        return max(self.level_of((one[m % len(one)], other[m % len(other)])) for m in range(lcm(len(one), len(other))))

    @cached_property
    def paths(self) -> tuple[tuple[int, int], ...]:
        """Bandwidth (bytes/s) and latency (ns) of a transfer that spans levels 0..k: its slowest level decides."""
        return tuple(
            (min(x.bandwidth for x in self.levels[: k + 1]), max(x.latency_ns for x in self.levels[: k + 1]))
            for k in range(len(self.levels))
        )

    def transfer_ns(self, size: int, level: int) -> int:
        """Time to move ``size`` bytes one way over a path that spans ``level``; 0 for no bytes."""
        bandwidth, latency = self.paths[level]
        return latency + ceil_div(size * 10**9, bandwidth) if size else 0

    def held_ns(self, size: int, level: int) -> int:
        """For how long such a transfer keeps the device at either of its ends from computing."""
        if not size:
            return 0
        return self.overhead_ns + (self.transfer_ns(size, level) if self.blocking else 0)

    @cached_property
    def spans(self) -> Ints:
        """The lowest level that joins the devices a..b-1, shape (P, P + 1); 0 where b <= a."""
        count = len(self.devices)
        table = np.zeros((count, count + 1), dtype=np.int64)
        first, last = np.arange(count)[:, None], np.arange(-1, count)[None, :]
        for k in range(1, len(self.levels)):
            below = self.unit_sizes[k - 1]
            table[(first // below != last // below) & (last > first)] = k
        return table

    @property
    def best_device(self) -> Device:
        """The most memory and the most speed (at every layer) that any device has: what no device exceeds."""
        return _extreme(tuple(dict.fromkeys(self.devices)), False)

    def slowest(self, devices: Sequence[int]) -> Device:
        """Return the least memory and the least speed (at every layer) of ``devices``: what a replicated stage gets."""
        if len(devices) == 1:
            return self.devices[devices[0]]
        found = self._paced.get(key := tuple(devices))
        if found is None:
            found = self._paced[key] = _extreme(tuple(dict.fromkeys(self.devices[d] for d in devices)), True)
        return found

    @cached_property
    def _paced(self) -> dict[tuple[int, ...], Device]:
        return {}

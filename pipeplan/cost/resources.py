"""What do operations occupy? The groups of devices of an allocation, and the links between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, lcm

from ..names import format_devices
from ..problem import Platform, connected

BOTH_WAYS, ONE_WAY = " - ", " -> "  # between the ends of a link, in its name


@dataclass(frozen=True, slots=True)
class Resource:
    """What one operation occupies at a time: a device of a group, or a link of those between two groups (``ends``).

    Each of ``replicas`` devices or links sees every ``replicas``-th microbatch. Groups of r and s devices have
    lcm(r, s) links: microbatch m takes that from device ``m mod r`` of the one to device ``m mod s`` of the other.
    Where servers (or other units of a level) share links, it is those by which ``devices`` send beyond their unit.
    A device is ``width`` GPUs.
    """

    name: str
    devices: tuple[int, ...]
    replicas: int
    memory_bytes: int | None = None
    ends: tuple[tuple[int, ...], ...] = ()
    arrow: str = BOTH_WAYS
    width: int = 1

    @property
    def is_link(self) -> bool:
        """Whether this is a link."""
        return self.memory_bytes is None

    def one_name(self, replica: int) -> str:
        """Return the name of one of its devices or links: ``device 3``, ``link 3 - 5``."""
        if not self.is_link:
            return f"device {self.devices[replica]}"
        if self.replicas == 1:
            return self.name
        if not self.ends:
            return f"{self.name}, {replica + 1} of {self.replicas}"
        return "link " + self.arrow.join(str(end[replica % len(end)]) for end in self.ends)


def device_group(platform: Platform, devices: tuple[int, ...], tensor: int = 1) -> Resource:
    """Return a group of devices, each the first of ``tensor``, with the memory of the one that has least."""
    memory = platform.slowest(devices).memory_bytes
    name = f"{'device' if len(devices) == 1 else 'devices'} {format_devices(devices)}"
    return Resource(name, devices, len(devices), memory, width=tensor * platform.width)


def link_between(one_way: bool, one: tuple[int, ...], other: tuple[int, ...]) -> Resource:
    """Return the links between two groups of devices, each for itself."""
    arrow = ONE_WAY if one_way else BOTH_WAYS
    name = "link " + arrow.join(map(format_devices, (one, other)))
    return Resource(name, one + other, lcm(len(one), len(other)), ends=(one, other), arrow=arrow)


def shared_links(platform: Platform, groups: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Resource]:
    """Return the shared links by which each of ``groups`` sends.

    Groups whose devices send by some of the same links have these together. Where microbatches m and n may meet on one
    of them, m = n modulo ``replicas``: as if all that are equal modulo that took one link, which is never less than
    they do. A group inside a unit with one link has 1; a pipeline in every unit has as many as there are units.
    """
    groups = list(groups)
    found: dict[tuple[int, ...], Resource] = {}
    for links in connected({platform.link_of(d) for d in group} for group in groups):
        own = [group for group in groups if platform.link_of(group[0]) in links]
        places: dict[int, list[int]] = {}
        for group in own:
            for place, device in enumerate(group):
                places.setdefault(platform.link_of(device), []).append(place)
        apart = gcd(*map(len, own), *(place - some[0] for some in places.values() for place in some))
        devices = tuple(d for d in range(len(platform)) if platform.link_of(d) in links)
        name = f"link{'s' if len(links) > 1 else ''} of {format_devices(devices)}"
        found |= dict.fromkeys(own, Resource(name, devices, apart))
    return found

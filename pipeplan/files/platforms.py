"""Which platform is in a file? Human units (``16GB``, ``12GB/s``, ``5us``), which come back exactly."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from ..errors import BadInput
from ..problem import Device, Level, Platform
from ..units import exact_bandwidth, exact_bytes, exact_time, parse_bandwidth, parse_bytes, parse_time
from .forms import read_json
from .text import read_text

MOST_DEVICES = 4096  # the tables of what joins any two take a quarter of a gigabyte then


class LevelFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One level of the network, lowest first."""

    count: int
    bandwidth: str
    latency: str | None = None
    links: int | None = None


class DeviceFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What one device has of its own."""

    memory: str | None = None
    speed: float | int | None = None


class PlatformFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Devices and the network that joins them."""

    levels: list[LevelFile]
    memory: str | None = None
    full_duplex: bool = False
    devices: list[DeviceFile] | None = None
    blocking_transfers: bool = False


def read_platform(path: str) -> Platform:
    """Return the platform in a JSON file."""
    return platform_of(read_json(read_text(path), PlatformFile, path), path)


def platform_of(form: PlatformFile, place: str) -> Platform:
    """Return the platform of its file form, its values checked; errors start with ``place``."""
    if not form.levels:
        raise BadInput(f"{place}: $.levels: is empty; a platform has at least one level")
    count = 1
    levels = list[Level]()
    for k, level in enumerate(form.levels):
        here = f"{place}: $.levels[{k}]"
        if not 1 <= level.count <= MOST_DEVICES:
            raise BadInput(f"{here}.count: {level.count} is not between 1 and {MOST_DEVICES}")
        count *= level.count
        latency = parse_time(level.latency, f"{here}.latency") if level.latency is not None else 0
        if level.links is not None and not 1 <= level.links <= MOST_DEVICES:
            raise BadInput(f"{here}.links: {level.links} is not between 1 and {MOST_DEVICES}")
        before = next((i for i, other in enumerate(levels) if other.links is not None), None)
        if level.links is not None and before is not None:
            raise BadInput(f"{here}.links: $.levels[{before}] has links, too; one level may say what is shared")
        bandwidth = parse_bandwidth(level.bandwidth, f"{here}.bandwidth")
        levels.append(Level(level.count, bandwidth, latency, level.links))
    if count > MOST_DEVICES:
        raise BadInput(f"{place}: $.levels: the counts multiply to {count} devices; at most {MOST_DEVICES}")
    entries = form.devices if form.devices is not None else [DeviceFile()] * count
    if len(entries) != count:
        raise BadInput(f"{place}: $.devices: lists {len(entries)} devices; the levels' counts multiply to {count}")
    devices = []
    for d, entry in enumerate(entries):
        here = f"{place}: $.devices[{d}]"
        if entry.memory is None and form.memory is None:
            raise BadInput(f"{place}: device {d} has no memory: neither $.memory nor $.devices[{d}].memory is given")
        memory = (
            parse_bytes(entry.memory, f"{here}.memory")
            if entry.memory is not None
            else parse_bytes(form.memory or "", f"{place}: $.memory")
        )
        given = Fraction(1) if entry.speed is None else Fraction(str(entry.speed))
        speed = given.limit_denominator(1000)  # so that 2/3, written as a decimal, comes back
        if not Fraction(1, 1000) <= given <= 1000 or float(speed) != float(given):
            raise BadInput(
                f"{here}.speed: {entry.speed} is not between 0.001 and 1000 with at most three decimals "
                "(or a fraction of whole numbers up to 1000)"
            )
        devices.append(Device(memory, speed))
    return Platform(tuple(devices), tuple(levels), form.full_duplex, form.blocking_transfers)


def platform_form(platform: Platform) -> PlatformFile:
    """Return the file form of a platform; one ``memory`` when all devices are equal and of speed 1."""
    levels = [
        LevelFile(x.count, exact_bandwidth(x.bandwidth), exact_time(x.latency_ns) if x.latency_ns else None, x.links)
        for x in platform.levels
    ]
    first = platform.devices[0]
    if all(device == first for device in platform.devices) and first.speed == 1:
        return PlatformFile(levels, exact_bytes(first.memory_bytes), platform.full_duplex, None, platform.blocking)
    return PlatformFile(
        levels,
        None,
        platform.full_duplex,
        [DeviceFile(exact_bytes(x.memory_bytes), None if x.speed == 1 else float(x.speed)) for x in platform.devices],
        platform.blocking,
    )

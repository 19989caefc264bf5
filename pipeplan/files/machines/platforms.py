"""Which platform is in a file? Human units (``16GB``, ``12GB/s``, ``5us``), which come back exactly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import msgspec

from ... import units
from ...choices import DEFAULT_BANDWIDTH, DEFAULT_NETWORK
from ...errors import BadInput
from ...names import shown
from ...problem import Chain, Device, LayerTimes, Level, Platform
from ..forms import Count, Text, converted, form, read_json
from ..profile_rules import check_chain
from ..profiles import read_profile
from ..text import read_text
from .accelerators import Accelerator, accelerator, accelerators

LAYER_TIMES = ("forward_ns", "backward_ns", "backward_weight_ns", "optimizer_ns")
MOST_DEVICES = 4096  # the tables of what joins any two take a quarter of a gigabyte then


class LevelFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One level of the network, lowest first."""

    count: int
    bandwidth: str
    latency: str | None = None
    links: int | None = None


class DeviceFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What one device has of its own.

    ``profile`` names one of the platform's ``times``; where it isn't there, it is a profile's file beside this one.
    """

    memory: str | None = None
    speed: float | int | None = None
    profile: Text | None = None


LayerTimesFile = form(
    LayerTimes,
    forward_ns=tuple[Count, ...],
    backward_ns=tuple[Count, ...],
    backward_weight_ns=tuple[Count, ...],
    optimizer_ns=tuple[Count, ...],
)


class PlatformFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Devices and the network that joins them."""

    levels: list[LevelFile]
    memory: str | None = None
    full_duplex: bool = False
    devices: list[DeviceFile] | None = None
    blocking_transfers: bool = False
    times: list[LayerTimesFile] | None = None  # type: ignore[valid-type]  # a form
    reserve: str | None = None
    overhead: str | None = None


def read_platform(path: str, chain: Chain | None = None) -> Platform:
    """Return the platform in a JSON file, to run ``chain`` on; without one no device may have a profile of its own."""
    return platform_of(read_json(read_text(path), PlatformFile, path), path, chain, os.path.dirname(path))


def platform_of(form: PlatformFile, place: str, chain: Chain | None = None, folder: str | None = None) -> Platform:
    """Return the platform of its file form, its values checked; errors start with ``place``.

    Profiles that devices name are those of the form, or else files in ``folder``.
    """
    if not form.levels:
        raise BadInput(f"{place}: $.levels: is empty; a platform has at least one level")
    count = 1
    levels = list[Level]()
    for k, level in enumerate(form.levels):
        here = f"{place}: $.levels[{k}]"
        if not 1 <= level.count <= MOST_DEVICES:
            raise BadInput(f"{here}.count: {level.count} is not between 1 and {MOST_DEVICES}")
        count *= level.count
        latency = units.parse_wait(level.latency, f"{here}.latency") if level.latency is not None else 0
        if level.links is not None and not 1 <= level.links <= MOST_DEVICES:
            raise BadInput(f"{here}.links: {level.links} is not between 1 and {MOST_DEVICES}")
        before = next((i for i, other in enumerate(levels) if other.links is not None), None)
        if level.links is not None and before is not None:
            raise BadInput(f"{here}.links: $.levels[{before}] has links, too; one level may say what is shared")
        bandwidth = units.parse_bandwidth(level.bandwidth, f"{here}.bandwidth")
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
            units.parse_bytes(entry.memory, f"{here}.memory")
            if entry.memory is not None
            else units.parse_bytes(form.memory or "", f"{place}: $.memory")
        )
        given = Fraction(1) if entry.speed is None else Fraction(str(entry.speed))
        speed = given.limit_denominator(1000)  # so that 2/3, written as a decimal, comes back
        if not Fraction(1, 1000) <= given <= 1000 or float(speed) != float(given):
            raise BadInput(
                f"{here}.speed: {entry.speed} is not between 0.001 and 1000 with at most three decimals "
                "(or a fraction of whole numbers up to 1000)"
            )
        devices.append(Device(memory, speed))
    own = _own_times(form, entries, place, chain, folder)
    devices = [replace(device, times=times) for device, times in zip(devices, own, strict=True)]
    overhead = units.parse_wait(form.overhead, f"{place}: $.overhead") if form.overhead is not None else 0
    platform = Platform(tuple(devices), tuple(levels), form.full_duplex, form.blocking_transfers, overhead_ns=overhead)
    return platform if form.reserve is None else reserving(platform, form.reserve, f"{place}: $.reserve")


def grouped(platform: Platform, chain: Chain, place: str) -> Platform:
    """Return the platform of groups that run the layers of ``chain`` together; BadInput where it has none."""
    try:
        return platform.grouped(chain.width, chain.tensor)
    except ValueError as error:
        raise BadInput(f"{place}: tensor degree {chain.variant}: {error}") from None


def reserving(platform: Platform, text: str, place: str) -> Platform:
    """Return the platform of which a size such as ``2GB`` of each GPU is reserved; errors start with ``place``."""
    size, least = units.parse_bytes(text, place), min(device.memory_bytes for device in platform.devices)
    if platform.reserved_bytes:
        raise BadInput(f"{place}: the platform reserves {units.format_bytes(platform.reserved_bytes)} already")
    if size >= least > 0:
        raise BadInput(f"{place}: {units.format_bytes(size)} is all that a GPU of {units.format_bytes(least)} has")
    return platform.reserving(size)


def _own_times(
    form: PlatformFile, entries: Sequence[DeviceFile], place: str, chain: Chain | None, folder: str | None
) -> list[LayerTimes | None]:
    """Return the layer times of each device: those of the profile that it names, else the chain's; None where no device
    names any."""
    if all(entry.profile is None for entry in entries):
        return [None] * len(entries)
    if chain is None:
        raise BadInput(f"{place}: $.devices: devices with profiles of their own are not for this command")
    known: dict[str | None, LayerTimes] = {None: LayerTimes.of(chain.layers, chain.name)}
    for k, given in enumerate(form.times or ()):
        times = converted(given, LayerTimes)
        _check_times(times, chain, f"{place}: $.times[{k}]")
        known[times.name] = times
    for d, entry in enumerate(entries):
        if entry.profile not in known:
            here = f"{place}: $.devices[{d}].profile"
            if folder is None:
                raise BadInput(f"{here}: {shown(entry.profile or '')} is not among $.times")
            known[entry.profile] = _times_in(
                os.path.join(folder, entry.profile or ""), entry.profile or "", chain, here
            )
    return [known[entry.profile] for entry in entries]


def _times_in(path: str, name: str, chain: Chain, here: str) -> LayerTimes:
    """Return the times of a profile of the same layers and microbatch as ``chain``; BadInput says what differs."""
    other = read_profile(path)
    if len(other) != len(chain):
        raise BadInput(f"{here}: {path} has {len(other)} layers; the network's profile has {len(chain)}")
    for i, (one, layer) in enumerate(zip(other.layers, chain.layers, strict=True)):
        if one.name != layer.name:
            raise BadInput(
                f"{here}: layer {i} is {shown(one.name)} in {path} and {shown(layer.name)} in the network's profile"
            )
    if other.microbatch != chain.microbatch:
        raise BadInput(
            f"{here}: {path} is of microbatches of {other.microbatch}, the network's profile of {chain.microbatch}"
        )
    return LayerTimes.of(other.layers, name)


def _check_times(times: LayerTimes, chain: Chain, here: str) -> None:
    for name, column in zip(LAYER_TIMES, times.columns, strict=True):
        if len(column) != len(chain):
            raise BadInput(f"{here}.{name}: has {len(column)} entries; the network has {len(chain)} layers")
    check_chain(chain.timed(times), here)


def platform_form(platform: Platform) -> PlatformFile:
    """Return the file form of a platform; one ``memory`` when all devices are equal and of speed 1."""
    reserve = units.exact_bytes(platform.reserved_bytes) if platform.reserved_bytes else None
    platform = platform.reserving(-platform.reserved_bytes)
    waits = [units.exact_time(x.latency_ns) if x.latency_ns else None for x in platform.levels]
    pairs = zip(platform.levels, waits, strict=True)
    levels = [LevelFile(x.count, units.exact_bandwidth(x.bandwidth), wait, x.links) for x, wait in pairs]
    first = platform.devices[0]
    own = [
        LayerTimesFile(x.name, *x.columns) for x in dict.fromkeys(x.times for x in platform.devices) if x is not None
    ]
    equal = all(device == first for device in platform.devices) and first.speed == 1 and not own
    each = [
        DeviceFile(
            units.exact_bytes(x.memory_bytes),
            None if x.speed == 1 else float(x.speed),
            None if x.times is None else x.times.name,
        )
        for x in platform.devices
    ]
    return PlatformFile(
        levels=levels,
        memory=units.exact_bytes(first.memory_bytes) if equal else None,
        full_duplex=platform.full_duplex,
        devices=None if equal else each,
        blocking_transfers=platform.blocking,
        times=own or None,
        reserve=reserve,
        overhead=units.exact_time(platform.overhead_ns) if platform.overhead_ns else None,
    )


def platform_of_gpus(
    counts: tuple[int, ...],
    mem: str | None,
    gpu: str | None,
    bandwidth: str | None,
    network: str | None,
    latency: str | None,
    chain: Chain,
) -> tuple[Platform, list[str]]:
    """Return the platform of equal GPUs, in servers of ``counts[0]`` where there are several, and what was assumed.

    A ``gpu`` of the table (or FILE.json) gives memory and links where ``mem`` and ``bandwidth`` (inside a server)
    don't; without it and without ``mem`` the device that the profile is of does. ``network`` joins servers.
    """
    if network is not None and len(counts) == 1:
        raise BadInput("--network joins servers; say how many, such as --gpus 2x8")
    named = None if gpu is None else accelerator(gpu)
    assumptions = []
    if named is None and mem is None:
        named = own_device(chain)
        if named is None:
            raise BadInput(
                f"--mem is missing: say the memory of a GPU, such as 16GB, or name one of 'pipeplan list' with --gpu; "
                f"the profile was measured on {shown(chain.device) or 'an unnamed device'}"
            )
        assumptions.append(f"GPUs like the profile's, {named.name}: {units.format_bytes(named.memory_bytes)}")
    memory = named.memory_bytes if mem is None and named is not None else units.parse_bytes(mem or "", "--mem")
    if bandwidth is not None:
        inside = units.parse_bandwidth(bandwidth, "--bandwidth")
    elif named is not None and named.link is not None:
        inside = units.parse_bandwidth(named.link, f"{gpu or named.name}: $.link")
        assumptions.append(
            f"bandwidth {units.format_bandwidth(inside)} between any two GPUs of a server, {named.name}'s links"
        )
    else:
        inside = units.parse_bandwidth(DEFAULT_BANDWIDTH)
        where = "" if len(counts) == 1 else " of a server"
        assumptions.append(f"bandwidth {units.format_bandwidth(inside)} between any two GPUs{where} (PCIe 3 x16)")
    wait = units.parse_wait(latency or "0", "--latency")
    levels = [Level(counts[0], inside, wait)]
    if len(counts) > 1:
        across = units.parse_bandwidth(network or DEFAULT_NETWORK, "--network")
        levels.append(Level(counts[1], across, wait))
        if network is None:
            assumptions.append(
                f"network {units.format_bandwidth(across)} ({DEFAULT_NETWORK}) between two GPUs of two servers"
            )
    total = counts[0] * (counts[1] if len(counts) > 1 else 1)
    return Platform((Device(memory),) * total, tuple(levels)), assumptions


def own_device(chain: Chain) -> Accelerator | None:
    """Return the GPU of the table that a profile is of, None where it is of none."""
    names = sorted(accelerators().values(), key=lambda x: len(x.name), reverse=True)
    return next((x for x in names if chain.device.startswith(x.name)), None)

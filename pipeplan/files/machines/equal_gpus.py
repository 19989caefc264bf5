"""Which platform do so many GPUs of a name make? Memory and links from the table, and in words what was assumed."""

from __future__ import annotations

from ...choices import DEFAULT_BANDWIDTH, DEFAULT_NETWORK
from ...errors import BadInput
from ...names import shown
from ...problem import Chain, Device, Level, Platform
from ...units import format_bandwidth, format_bytes, parse_bandwidth, parse_bytes, parse_wait
from .accelerators import Accelerator, accelerator, accelerators


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
        assumptions.append(f"GPUs like the profile's, {named.name}: {format_bytes(named.memory_bytes)}")
    memory = named.memory_bytes if mem is None and named is not None else parse_bytes(mem or "", "--mem")
    if bandwidth is not None:
        inside = parse_bandwidth(bandwidth, "--bandwidth")
    elif named is not None and named.link is not None:
        inside = parse_bandwidth(named.link, f"{gpu or named.name}: $.link")
        assumptions.append(
            f"bandwidth {format_bandwidth(inside)} between any two GPUs of a server, {named.name}'s links"
        )
    else:
        inside = parse_bandwidth(DEFAULT_BANDWIDTH)
        where = "" if len(counts) == 1 else " of a server"
        assumptions.append(f"bandwidth {format_bandwidth(inside)} between any two GPUs{where} (PCIe 3 x16)")
    wait = parse_wait(latency or "0", "--latency")
    levels = [Level(counts[0], inside, wait)]
    if len(counts) > 1:
        across = parse_bandwidth(network or DEFAULT_NETWORK, "--network")
        levels.append(Level(counts[1], across, wait))
        if network is None:
            assumptions.append(
                f"network {format_bandwidth(across)} ({DEFAULT_NETWORK}) between two GPUs of two servers"
            )
    total = counts[0] * (counts[1] if len(counts) > 1 else 1)
    return Platform((Device(memory),) * total, tuple(levels)), assumptions


def own_device(chain: Chain) -> Accelerator | None:
    """Return the GPU of the table that a profile is of, None where it is of none."""
    names = sorted(accelerators().values(), key=lambda x: len(x.name), reverse=True)
    return next((x for x in names if chain.device.startswith(x.name)), None)

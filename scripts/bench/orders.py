"""Measure the search of all orders of unequal devices: ``python scripts/bench/orders.py``.

Prints for a chain and devices of a few kinds, without and with replicas, the best period with its lower bound and the
CPU seconds: of the search over states that count equal devices, and of searches along up to 400 orders.
"""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

from pipeplan.files.profiles import read_profile
from pipeplan.partition.contiguous.contiguous import smallest_period
from pipeplan.partition.devices import orders
from pipeplan.problem import Chain, Device, Level, Platform, Problem

FOLDER = Path(__file__).parents[2] / "profiles"
PROFILES = ("vgg16-224-b32-v100", "resnet50-1000-b8-v100", "gpt2-medium-b4-a100")
SERVERS = (Level(4, 50 * 10**9), Level(4, 3 * 10**9))
Kinds = tuple[tuple[int, int, str], ...]  # numbers of devices, GB, speeds
ON_ONE_LEVEL: tuple[Kinds, ...] = (
    ((4, 16, "1"), (4, 8, "2")),
    ((8, 16, "1"), (8, 8, "2")),
    ((16, 16, "1"), (8, 32, "5/2")),
    ((4, 16, "1"), (4, 8, "2"), (4, 32, "3/2")),
)


def main() -> None:
    """Print the table."""
    print(f"{'':66s}{'all orders':>30s}{'one after the other':>33s}")
    for profile in PROFILES:
        chain = read_profile(str(FOLDER / f"{profile}.json"))
        for kinds in ON_ONE_LEVEL:
            devices = of(kinds)
            row(chain, describe(kinds), Platform(devices, (Level(len(devices), 12 * 10**9),)))
        two = ON_ONE_LEVEL[1]
        row(chain, f"{describe(two)}, servers of 4", Platform(of(two), SERVERS))
        row(chain, f"{describe(two)}, servers of 2 + 2", Platform(of(two)[::8] * 2 * 4, SERVERS))


def of(kinds: Kinds) -> tuple[Device, ...]:
    """Return the devices, kind by kind."""
    return tuple(Device(size * 10**9, Fraction(speed)) for count, size, speed in kinds for _ in range(count))


def describe(kinds: Kinds) -> str:
    """Return the kinds in words."""
    return " + ".join(f"{count} x {size} GB" for count, size, _ in kinds)


def row(chain: Chain, name: str, platform: Platform) -> None:
    """Print the lines of one platform."""
    for replicas in (False, True):
        problem = Problem(chain, platform, replicas=replicas)
        columns = figures(problem)
        with patch.object(orders, "_EXACT", 0):
            columns += "   " + figures(problem)
        label = f"{chain.name}, {name}{', replicas' if replicas else ''}"
        print(f"{label:66s}{columns}", flush=True)


def figures(problem: Problem) -> str:
    """Return period and bound in ms, and CPU seconds."""
    began = time.process_time()
    found = smallest_period(problem)
    seconds = time.process_time() - began
    if found is None or found.claimed_period_ns is None or found.lower_bound_ns is None:
        return f"{'no plan':>20s}{seconds:10.2f}"
    return f"{found.claimed_period_ns / 1e6:10.3f}{found.lower_bound_ns / 1e6:10.3f}{seconds:10.2f}"


if __name__ == "__main__":
    main()

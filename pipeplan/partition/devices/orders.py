"""In which orders can stages take unequal devices, and which of them are worth a search?

Devices are handed out in one order after the other, in all of them where they are few. Orders that differ in equal
devices alone are one; so are those that differ in whole servers with the same devices. An order keeps the units of
every level together: a server's devices stay neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import factorial, log10
from typing import Any

from ...problem import Device, Platform, Problem
from ..cuts import legal_cuts

Order = tuple[int, ...]  # the device at each position

FEW = 24  # orders that are searched in any case
_MOST = 100  # and at most
_WORK = 2 * 10**8  # cuts squared times devices squared, over all of them


@dataclass(frozen=True)
class Orders:
    """The orders of a platform's devices, ``most`` of which are searched."""

    platform: Platform
    most: int

    @staticmethod
    def of(problem: Problem) -> Orders:
        """Return how the orders of a problem's devices are searched."""
        places = len(legal_cuts(problem)) * len(problem.platform)
        return Orders(problem.platform, max(FEW, min(_MOST, _WORK // max(1, places) ** 2)))

    @property
    def exact(self) -> bool:
        """Whether all of them are searched."""
        return self.count <= self.most

    @cached_property
    def count(self) -> int:
        """How many different orders there are."""
        listed = tuple(range(len(self.platform)))
        return 1 if self.kinds == 1 else _count(self._look(listed, len(self._sizes) - 1))

    @cached_property
    def kinds(self) -> int:
        """How many kinds of devices there are."""
        return len(set(self.platform.devices))

    def sentence(self) -> str | None:
        """Return which orders were searched, in words; None where there is but one."""
        if self.count == 1:
            return None
        count = str(self.count) if self.count < 10**12 else f"about 10^{round(log10(self.count))}"
        kinds = f"{count} orders of {self.kinds} kinds of devices"
        return f"best of all {kinds}" if self.exact else f"best of some of {kinds}, {self.most} at most"

    def first(self, used: Sequence[int] = ()) -> Iterator[Order]:
        """Yield the orders to start from, that of the devices ``used`` so far first; behind them all, if these are few.

        As listed and backwards, by memory and by speed: an order and its reverse differ, as what is in flight falls
        towards the chain's end.
        """
        listed = tuple(range(len(self.platform)))
        if used:
            yield self.along(used)
        yield listed
        devices = self.platform.devices
        keys: list[list[tuple[object, ...]]] = [
            [(x.memory_bytes, x.speed) for x in devices],
            [(x.speed, x.memory_bytes) for x in devices],
            [(x.memory_bytes / x.speed,) for x in devices],
        ]
        for key in keys:
            ranked = sorted(listed, key=lambda d, key=key: (key[d], -d))  # type: ignore[misc]  # numbers
            yield self.along(ranked[::-1])
            yield self.along(ranked)
        yield listed[::-1]
        if self.exact:
            yield from self._every(listed, len(self._sizes) - 1)

    def _every(self, unit: Order, level: int) -> Iterator[Order]:
        """Yield every order of the devices of a unit of ``level``."""
        if level == 0:
            yield unit
        for parts in self._arranged(self._parts(unit, level), level - 1) if level else ():
            for orders in product(*(self._every(part, level - 1) for part in parts)):
                yield tuple(d for part in orders for d in part)

    def _arranged(self, parts: list[Order], level: int) -> Iterator[tuple[Order, ...]]:
        """Yield the arrangements of ``parts`` of ``level``, of which those that look alike are the same."""
        if not parts:
            yield ()
        looks = [self._look(part, level) for part in parts]
        for i, part in enumerate(parts):
            if looks[i] not in looks[:i]:
                yield from ((part, *rest) for rest in self._arranged([*parts[:i], *parts[i + 1 :]], level))

    def _parts(self, unit: Order, level: int) -> list[Order]:
        size = self._sizes[level - 1]
        return [unit[i : i + size] for i in range(0, len(unit), size)]

    def _look(self, unit: Order, level: int) -> Any:
        """Return what units of ``level`` have in common whose orders are the same: kinds of devices, part by part."""
        if level == 0:
            return list(dict.fromkeys(self.platform.devices)).index(self.platform.devices[unit[0]])
        return tuple(sorted(self._look(part, level - 1) for part in self._parts(unit, level)))

    def near(self, order: Order) -> Iterator[Order]:
        """Yield the orders in which two units of one unit have changed places, or one has moved before another."""
        for size, whole in pairwise(self._sizes):
            for start in range(0, len(order), whole):
                units = [order[i : i + size] for i in range(start, start + whole, size)]
                for i in range(len(units)):
                    for j in range(i + 1, len(units)):
                        if self.along_kinds(units[i]) == self.along_kinds(units[j]):
                            continue
                        swapped = [*units[:i], units[j], *units[i + 1 : j], units[i], *units[j + 1 :]]
                        moved = [*units[:i], units[j], *units[i:j], *units[j + 1 :]]
                        for changed in (swapped, moved):
                            yield (*order[:start], *(d for unit in changed for d in unit), *order[start + whole :])

    def along_kinds(self, order: Sequence[int]) -> tuple[Device, ...]:
        """Return the device at each position: what makes two orders the same."""
        return tuple(self.platform.devices[d] for d in order)

    def along(self, used: Sequence[int]) -> Order:
        """Return the order in which the units of every level come as their first devices do in ``used``."""
        at = {d: i for i, d in enumerate(used)}
        firsts: list[dict[int, int]] = []
        for size in self._sizes:
            first: dict[int, int] = {}
            for d in range(len(self.platform)):
                first[d // size] = min(first.get(d // size, len(at)), at.get(d, len(at)))
            firsts.append(first)
        down = list(zip(self._sizes, firsts, strict=True))[::-1]
        return tuple(sorted(range(len(self.platform)), key=lambda d: [(f[d // s], d // s) for s, f in down]))

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return (1, *self.platform.unit_sizes)


def _count(look: Any) -> int:
    """Return how many orders a unit of this look has."""
    if isinstance(look, int):
        return 1
    ways: int = factorial(len(look))
    for part, number in Counter(look).items():
        ways = ways // factorial(number) * _count(part) ** number
    return ways

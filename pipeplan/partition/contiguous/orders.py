"""In which orders can stages take unequal devices, and which of them are worth a search?

A search for contiguous stages hands devices out in one order. Orders that differ in equal devices alone are one; so are
those that differ in whole servers with the same devices. An order keeps the units of every level together (a server's
devices stay neighbours), so each cut and each replicated stage spans the level that it would span in any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import factorial, prod
from typing import Any

from ...plan import Stage
from ...problem import Device, Platform

Order = tuple[int, ...]  # the device at each position

FEW = 24  # orders that are searched in any case
_MOST = 400  # and at most
_WORK = 2 * 10**8  # cuts squared times devices squared, over all of them


@dataclass(frozen=True)
class Orders:
    """The orders of a platform's devices; ``most`` of them are searched, which is ``all`` where there are no more."""

    platform: Platform
    most: int

    @staticmethod
    def of(platform: Platform, cuts: int) -> Orders:
        """Return the orders to search for a chain with so many ``cuts``: all, or fewer where that would take long."""
        return Orders(platform, max(FEW, min(_MOST, _WORK // max(1, cuts * len(platform)) ** 2)))

    @cached_property
    def count(self) -> int:
        """How many different orders there are."""
        return 1 if self.kinds == 1 else _count(self._tree(self._kinds, 0, len(self._sizes) - 1))

    @cached_property
    def kinds(self) -> int:
        """How many kinds of devices there are."""
        return len(set(self.platform.devices))

    @property
    def all(self) -> bool:
        """Whether every order is searched."""
        return self.count <= self.most

    def sentence(self) -> str | None:
        """Return which orders were searched, in words; None where there is but one."""
        if self.count == 1:
            return None
        kinds = f"{self.count} orders of {self.kinds} kinds of devices"
        return f"best of {kinds}" if self.all else f"best of some of {kinds}, {self.most} at most"

    def first(self, used: Sequence[int] = ()) -> Iterator[Order]:
        """Yield the orders to start from, that of the devices ``used`` so far first; all of them where these are few.

        Otherwise as listed and backwards, by memory and by speed: an order and its reverse differ, as what is in
        flight falls towards the chain's end.
        """
        listed = tuple(range(len(self.platform)))
        if self.most == 1 or self.count == 1:
            yield listed
            return
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
        if self.all:
            for shape in _arrangements(self._tree(self._kinds, 0, len(self._sizes) - 1)):
                yield self._with(shape)

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

    def placed(self, stages: Sequence[Stage], order: Order) -> tuple[Stage, ...]:
        """Return stages on positions of ``order`` on their devices."""
        flat = len(self.platform.levels) == 1
        found = []
        for stage in stages:
            devices = tuple(order[d] for d in stage.devices)
            found.append(replace(stage, devices=tuple(sorted(devices)) if flat else devices))
        return tuple(found)

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """The kind of each device, numbered by first use."""
        numbers = {x: i for i, x in enumerate(dict.fromkeys(self.platform.devices))}
        return tuple(numbers[x] for x in self.platform.devices)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return (1, *self.platform.unit_sizes)

    def _tree(self, kinds: Sequence[int], start: int, level: int) -> _Tree:
        """Return the unit of ``level`` (0: a device) at ``start`` as nested tuples down to kinds, equal ones equal."""
        if level == 0:
            return (kinds[start],)
        parts = range(start, start + self._sizes[level], self._sizes[level - 1])
        return ("unit", *sorted((self._tree(kinds, i, level - 1) for i in parts), key=repr))

    def _with(self, kinds: Sequence[int]) -> Order:
        """Return the order of these ``kinds``: each unit is the first that is free with the same devices."""

        def fit(position: int, start: int, level: int) -> list[int]:
            if level == 0:
                return [start]
            step = self._sizes[level - 1]
            free = list(range(start, start + self._sizes[level], step))
            found: list[int] = []
            for i in range(position, position + self._sizes[level], step):
                wanted = self._tree(kinds, i, level - 1)
                unit = next(u for u in free if self._tree(self._kinds, u, level - 1) == wanted)
                free.remove(unit)
                found += fit(i, unit, level - 1)
            return found

        return tuple(fit(0, 0, len(self._sizes) - 1))


_Tree = tuple[Any, ...]  # ("unit", *children), or (kind,) of a device


def _count(tree: _Tree) -> int:
    children = tree[1:]  # none of a device
    kinds = Counter(children)
    ways: int = factorial(len(children)) // prod(factorial(n) for n in kinds.values())
    for child, n in kinds.items():
        ways *= _count(child) ** n
    return ways


def _arrangements(tree: _Tree) -> Iterator[tuple[int, ...]]:
    """Yield the kinds of the devices in every different order."""
    if len(tree) == 1:
        yield tree
        return

    def rest(left: Counter[_Tree]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
            return
        for child in sorted(left, key=repr):
            fewer = left - Counter([child])
            for kinds in _arrangements(child):
                for others in rest(fewer):
                    yield (*kinds, *others)

    yield from rest(Counter(tree[1:]))

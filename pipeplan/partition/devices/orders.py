"""In which orders can stages take unequal devices, and which of them are worth a search?

Where kinds of devices are few, one search looks at all orders (:mod:`.counted_states`). Else devices are handed out in
one order after the other. Orders that differ in equal devices alone are one; so are those that differ in whole servers
with the same devices. An order keeps the units of every level together: a server's devices stay neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import factorial, log10, prod
from typing import Any

from ...problem import Device, Platform, Problem
from ..cuts import legal_cuts

Order = tuple[int, ...]  # the device at each position

FEW = 24  # orders that are searched in any case
_MOST = 400  # and at most
_WORK = 2 * 10**8  # cuts squared times devices squared, over all of them
_EXACT = 10**9  # cuts squared times pairs of states of devices, or times the kinds in each where stages take one
_FEW_CUTS = 48  # fewer count as so many: the states have to be made


@dataclass(frozen=True)
class Orders:
    """The orders of a platform's devices: all are searched at once where that is ``exact``, else ``most`` in turn."""

    platform: Platform
    exact: bool
    most: int

    @staticmethod
    def of(problem: Problem) -> Orders:
        """Return how the orders of a problem's devices are searched."""
        platform, cuts = problem.platform, len(legal_cuts(problem))
        most = max(FEW, min(_MOST, _WORK // max(1, cuts * len(platform)) ** 2))
        kinds = len(set(platform.devices))
        if kinds == 1:
            return Orders(platform, True, most)
        states = most_states(platform)
        pairs = states * (states if problem.replicas else kinds)
        return Orders(platform, pairs * max(cuts, _FEW_CUTS) ** 2 <= _EXACT, most)

    @cached_property
    def count(self) -> int:
        """How many different orders there are."""
        return 1 if self.kinds == 1 else _count(_tree(self.platform))

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
        """Yield the orders to start from, that of the devices ``used`` so far first.

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


_Tree = tuple[Any, ...]  # ("unit", *children), or (kind,) of a device


def _count(tree: _Tree) -> int:
    children = tree[1:]  # none of a device
    kinds = Counter(children)
    ways: int = factorial(len(children)) // prod(factorial(n) for n in kinds.values())
    for child, n in kinds.items():
        ways *= _count(child) ** n
    return ways


def most_states(platform: Platform) -> int:
    """Return how many states (:mod:`.counted_states`) a platform's devices have at most."""
    return _states(_tree(platform))


def _states(tree: _Tree) -> int:
    parts = Counter(tree[1:])
    inside = sum(_states(part) - 2 for part in parts if len(part) > 1)  # neither all nor none of an open one is left
    return prod(n + 1 for n in parts.values()) * (1 + inside)


def _tree(platform: Platform) -> _Tree:
    """Return the platform as nested tuples down to kinds of devices, equal units equal."""
    numbers = {x: i for i, x in enumerate(dict.fromkeys(platform.devices))}
    sizes = (1, *platform.unit_sizes)

    def unit(start: int, level: int) -> _Tree:
        if level == 0:
            return (numbers[platform.devices[start]],)
        parts = range(start, start + sizes[level], sizes[level - 1])
        return ("unit", *sorted((unit(i, level - 1) for i in parts), key=repr))

    return unit(0, len(platform.levels))

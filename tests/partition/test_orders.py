"""Orders of unequal devices: all of them where they are few, and what lies near one."""

from __future__ import annotations

from math import prod

import pytest
from oracles.partition import device_orders

from pipeplan.partition.contiguous.orders import Orders
from pipeplan.problem import Device, Level, Platform


def platform(kinds: str, *counts: int) -> Platform:
    """Return devices of these kinds, by memory, in units of so many at each level."""
    levels = tuple(Level(n, 10**9) for n in counts or (len(kinds),))
    assert prod(level.count for level in levels) == len(kinds)
    return Platform(tuple(Device(100 + ord(kind)) for kind in kinds), levels)


@pytest.mark.parametrize(
    ("kinds", "counts", "expected"),
    [
        ("aaaa", (), 1),
        ("ab", (), 2),
        ("abc", (), 6),
        ("aabb", (), 6),
        ("aabb", (2, 2), 2),  # either server first
        ("abab", (2, 2), 4),  # either device first in both
        ("abcc", (2, 2), 4),
        ("abcd", (2, 2), 8),
        ("aabbaaaa", (2, 2, 2), 4),
    ],
)
def test_there_are_as_many_orders_as_brute_force_finds(kinds: str, counts: tuple[int, ...], expected: int) -> None:
    here = platform(kinds, *counts)
    orders = Orders(here, 1000)
    found = {orders.along_kinds(order) for order in orders.first()}
    assert orders.count == len(found) == expected
    if len(kinds) <= 4:
        assert found == {orders.along_kinds(order) for order in device_orders(here)}
    assert all(sorted(order) == list(range(len(kinds))) for order in orders.first())
    assert orders.all
    assert Orders(here, expected - 1).all is False


def test_near_orders_swap_or_move_two_units_of_one_unit() -> None:
    flat = Orders(platform("abc"), 1000)
    assert set(flat.near((0, 1, 2))) == {(1, 0, 2), (2, 1, 0), (2, 0, 1), (0, 2, 1)}
    assert set(Orders(platform("aab"), 1000).near((0, 1, 2))) == {(2, 1, 0), (2, 0, 1), (0, 2, 1)}
    servers = Orders(platform("abcd", 2, 2), 1000)
    assert set(servers.near((0, 1, 2, 3))) == {(1, 0, 2, 3), (0, 1, 3, 2), (2, 3, 0, 1)}


def test_an_order_along_devices_keeps_servers_together() -> None:
    servers = Orders(platform("abcd", 2, 2), 1000)
    assert servers.along((3, 0, 2, 1)) == (3, 2, 0, 1)
    assert servers.along((1,)) == (1, 0, 2, 3)


def test_the_sentence_says_how_many_orders_were_searched() -> None:
    assert Orders(platform("aaa"), 24).sentence() is None
    assert Orders(platform("abc"), 24).sentence() == "best of 6 orders of 3 kinds of devices"
    assert Orders(platform("abc"), 5).sentence() == "best of some of 6 orders of 3 kinds of devices, 5 at most"

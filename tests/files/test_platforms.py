"""Platforms as JSON: as people write them, as they come back, and what is wrong with one."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from cases.chains import random_platform
from cases.files import assert_refused, written

from pipeplan.errors import BadInput
from pipeplan.files.forms import json_text
from pipeplan.files.platforms import platform_form, platform_of, read_platform, reserving
from pipeplan.problem import Device, Level, Platform


def test_platforms_come_back(tmp_path):
    for seed in range(60):
        rng = random.Random(seed)
        platform = random_platform(
            rng, rng.randint(1, 6), memory=(0, 30), levels=True, latency=True, speeds=True, duplex=True
        )
        if seed % 3 == 0:
            platform = replace(platform.reserving(rng.randint(-9, -1)), reserved_bytes=0).reserving(1)
            platform = replace(platform, blocking=rng.random() < 0.5)
        form = platform_form(platform)
        assert platform_of(form, "here") == platform
        text = json_text(form)
        assert read_platform(written(tmp_path, text)) == platform
        assert json_text(platform_form(read_platform(written(tmp_path, text)))) == text


def test_platform_files_as_people_write_them(tmp_path):
    document = {
        "memory": "16GB",
        "levels": [
            {"count": 2, "bandwidth": "10GB/s", "latency": "5us"},
            {"count": 2, "bandwidth": "10Gbps", "links": 3},
        ],
        "full_duplex": True,
        "devices": [{}, {"memory": "32GiB"}, {"speed": 2}, {"speed": 0.5, "memory": "1.5GB"}],
    }
    assert read_platform(written(tmp_path, document)) == Platform(
        (
            Device(16 * 10**9),
            Device(32 * 2**30),
            Device(16 * 10**9, Fraction(2)),
            Device(1_500_000_000, Fraction(1, 2)),
        ),
        (Level(2, 10 * 10**9, 5000), Level(2, 1_250_000_000, 0, 3)),
        True,
    )


def test_any_fraction_of_small_numbers_is_a_speed_that_comes_back():
    for speed in (
        Fraction(2, 3),
        Fraction(1, 1000),
        Fraction(999, 1000),
        Fraction(355, 113),
        Fraction(1000),
        Fraction(7, 999),
    ):
        platform = Platform((Device(1, speed),), (Level(1, 1),))
        assert platform_of(platform_form(platform), "here") == platform


PLATFORM = {
    "memory": "16GB",
    "levels": [{"count": 2, "bandwidth": "10GB/s"}, {"count": 2, "bandwidth": "10Gbps", "latency": "5us"}],
    "devices": [{}, {"speed": 2}, {}, {"memory": "8GB"}],
}

BAD_PLATFORMS = {
    "all reserved": (("reserve",), "8GB", "$.reserve: 8.00 GB is all that a GPU of 8.00 GB has"),
    "bare reserve": (("reserve",), "8", "$.reserve: '8' has no unit; write 16GB or 16GiB"),
    "text as blocking": (("blocking_transfers",), "no", "expected `bool`, got `str` - at `$.blocking_transfers`"),
    "no levels": (("levels",), ..., "missing required field `levels`"),
    "no links": (("levels", 1, "links"), 0, "$.levels[1].links: 0 is not between 1 and 4096"),
    "links everywhere": (
        ("levels",),
        [{"count": 2, "bandwidth": "1GB/s", "links": 1}] * 2,
        "$.levels[1].links: $.levels[0] has links, too; one level may say what is shared",
    ),
    "half a link": (("levels", 1, "links"), 0.5, "expected `int | null`, got `float` - at `$.levels[1].links`"),
    "empty levels": (("levels",), [], "$.levels: is empty"),
    "count": (("levels", 0, "count"), 0, "$.levels[0].count: 0 is not between 1 and"),
    "negative count": (("levels", 0, "count"), -2, "$.levels[0].count: -2 is not"),
    "bool count": (("levels", 0, "count"), True, "expected `int`, got `bool` - at `$.levels[0].count`"),
    "huge count": (("levels", 1, "count"), 10**30, "$.levels[1].count: 1000000000000000000000000000000 is not between"),
    "huge product": (("levels",), [{"count": 4096, "bandwidth": "1GB/s"}] * 2, "the counts multiply to 16777216"),
    "device missing": (("devices",), [{}] * 3, "$.devices: lists 3 devices; the levels' counts multiply to 4"),
    "no memory": (("memory",), ..., "device 0 has no memory: neither $.memory nor $.devices[0].memory is given"),
    "bare memory": (("memory",), "16", "$.memory: '16' has no unit; write 16GB or 16GiB"),
    "number as memory": (("memory",), 16, "expected `str | null`, got `int` - at `$.memory`"),
    "bandwidth as memory": (("memory",), "16GB/s", "$.memory: 'GB/s' in '16GB/s' is not a known unit"),
    "memory of a device": (("devices", 3, "memory"), "8 cows", "$.devices[3].memory: 'cows' in '8 cows' is not"),
    "size as bandwidth": (("levels", 0, "bandwidth"), "10GB", "levels[0].bandwidth: 'GB' in '10GB' is not a known"),
    "no bandwidth": (("levels", 0, "bandwidth"), "0GB/s", "$.levels[0].bandwidth: '0GB/s' must be positive"),
    "negative bandwidth": (("levels", 0, "bandwidth"), "-1GB/s", "levels[0].bandwidth: '-1GB/s' is not a non-neg"),
    "bare latency": (("levels", 1, "latency"), "5", "$.levels[1].latency: '5' has no unit; write 3.2ms or 5us"),
    "zero speed": (("devices", 1, "speed"), 0, "$.devices[1].speed: 0 is not between 0.001 and 1000"),
    "negative speed": (("devices", 1, "speed"), -1, "$.devices[1].speed: -1 is not between"),
    "huge speed": (("devices", 1, "speed"), 10**40, "is not between 0.001 and 1000"),
    "fine speed": (("devices", 1, "speed"), 0.12345, "$.devices[1].speed: 0.12345 is not between 0.001 and 1000"),
    "text as speed": (("devices", 1, "speed"), "fast", "got `str` - at `$.devices[1].speed`"),
    "unknown key": (("devices", 1, "sped"), 2, "unknown field `sped` - at `$.devices[1]`"),
    "unknown key above": (("bandwidth",), "1GB/s", "unknown field `bandwidth`"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PLATFORMS)
def test_bad_platforms(name, tmp_path):
    assert_refused(read_platform, tmp_path, PLATFORM, BAD_PLATFORMS[name])


def test_what_is_reserved_is_not_for_plans(tmp_path):
    platform = read_platform(written(tmp_path, PLATFORM | {"reserve": "1.5GB"}))
    assert [device.memory_bytes for device in platform.devices] == [14_500_000_000] * 3 + [6_500_000_000]
    assert platform.reserved_bytes == 1_500_000_000
    with pytest.raises(BadInput, match=r"--reserve: the platform reserves 1.50 GB already"):
        reserving(platform, "1GB", "--reserve")

"""Platforms as JSON: as people write them, as they come back, and what is wrong with one."""

import json
import random
import re
from dataclasses import replace
from fractions import Fraction

import pytest
from cases.chains import random_platform
from cases.files import POLICY, assert_refused, small_plan, written

from pipeplan.errors import BadInput
from pipeplan.files.forms import json_text
from pipeplan.files.machines.platforms import platform_form, platform_of, read_platform, reserving
from pipeplan.files.plans import load_plan, plan_text, read_plan
from pipeplan.files.profiles import profile_text
from pipeplan.planner.plan import make_plan
from pipeplan.problem import Device, Level, Platform, Problem


def test_platforms_come_back(tmp_path):
    for seed in range(60):
        rng = random.Random(seed)
        platform = random_platform(
            rng, rng.randint(1, 6), memory=(0, 30), levels=True, latency=True, speeds=True, duplex=True
        )
        if seed % 3 == 0:
            platform = replace(platform.reserving(rng.randint(-9, -1)), reserved_bytes=0).reserving(1)
            platform = replace(platform, blocking=rng.random() < 0.5, overhead_ns=rng.choice((0, 250_000)))
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
    "bare reserve": (("reserve",), "8", "$.reserve: '8' has no unit; write 16GB or 16GiB"),
    "text as blocking": (("blocking_transfers",), "no", "expected `bool`, got `str` - at `$.blocking_transfers`"),
    "no levels": (("levels",), ..., "missing required field `levels`"),
    "half a link": (("levels", 1, "links"), 0.5, "expected `int | null`, got `float` - at `$.levels[1].links`"),
    "negative count": (("levels", 0, "count"), -2, "$.levels[0].count: -2 is not"),
    "bool count": (("levels", 0, "count"), True, "expected `int`, got `bool` - at `$.levels[0].count`"),
    "huge count": (("levels", 1, "count"), 10**30, "$.levels[1].count: 1000000000000000000000000000000 is not between"),
    "huge product": (("levels",), [{"count": 4096, "bandwidth": "1GB/s"}] * 2, "the counts multiply to 16777216"),
    "bare memory": (("memory",), "16", "$.memory: '16' has no unit; write 16GB or 16GiB"),
    "number as memory": (("memory",), 16, "expected `str | null`, got `int` - at `$.memory`"),
    "bandwidth as memory": (("memory",), "16GB/s", "$.memory: 'GB/s' in '16GB/s' is not a known unit"),
    "memory of a device": (("devices", 3, "memory"), "8 cows", "$.devices[3].memory: 'cows' in '8 cows' is not"),
    "size as bandwidth": (("levels", 0, "bandwidth"), "10GB", "levels[0].bandwidth: 'GB' in '10GB' is not a known"),
    "no bandwidth": (("levels", 0, "bandwidth"), "0GB/s", "$.levels[0].bandwidth: '0GB/s' must be positive"),
    "negative bandwidth": (("levels", 0, "bandwidth"), "-1GB/s", "levels[0].bandwidth: '-1GB/s' is not a non-neg"),
    "bare latency": (("levels", 1, "latency"), "5", "$.levels[1].latency: '5' has no unit; write 3.2ms or 5us"),
    "years of overhead": (("overhead",), "9e8s", "$.overhead: '9e8s' is longer than a message takes"),
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


def own_profiles(tmp_path, **changed):
    """Write a platform beside a profile that its second device names; return both and the network's own chain."""
    chain = small_plan().chain
    layers = tuple(replace(x, forward_ns=3 * x.forward_ns + i) for i, x in enumerate(chain.layers))
    (tmp_path / "h100.json").write_text(profile_text(replace(chain, layers=layers, **changed)))
    document = {
        "memory": "16GB",
        "levels": [{"count": 2, "bandwidth": "10GB/s"}],
        "devices": [{}, {"profile": "h100.json", "speed": 2}],
    }
    return chain, layers, written(tmp_path, document)


def test_devices_name_profiles_beside_the_platform_which_a_plan_then_has_by_itself(tmp_path):
    chain, layers, path = own_profiles(tmp_path)
    platform = read_platform(path, chain)
    one, other = platform.devices
    assert one.times.forward_ns == tuple(x.forward_ns for x in chain.layers)
    assert other.times.forward_ns == tuple(x.forward_ns for x in layers)
    assert (one.times.name, other.times.name, other.speed) == ("small", "h100.json", 2)
    (tmp_path / "h100.json").unlink()
    problem = Problem(chain, platform, POLICY, checkpointing="none")
    plan = make_plan(problem, "contiguous").plan
    file = tmp_path / "plan.json"
    file.write_text(plan_text(plan))
    loaded = load_plan(str(file))
    assert loaded.platform == platform
    assert plan_text(loaded) == file.read_text()
    document = json.loads(file.read_text())
    document["platform"]["times"][0]["forward_ns"][0] += 1
    found = read_plan(written(tmp_path, document))[1]
    assert any("lasts" in sentence or "take" in sentence or "gives" in sentence for sentence in found)
    document["platform"]["times"][0]["forward_ns"].pop()
    with pytest.raises(
        BadInput, match=re.escape("$.platform: $.times[0].forward_ns: has 3 entries; the network has 4")
    ):
        read_plan(written(tmp_path, document))
    document["platform"]["times"] = None
    with pytest.raises(BadInput, match=re.escape("$.devices[0].profile: small is not among $.times")):
        read_plan(written(tmp_path, document))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"layers": small_plan().chain.layers[:3]}, "has 3 layers; the network's profile has 4"),
        ({"layers": tuple(replace(x, name=f"x{x.name}") for x in small_plan().chain.layers)}, "layer 0 is xl0 in"),
        ({"microbatch": 2}, "is of microbatches of 2, the network's profile of 8"),
    ],
)
def test_profiles_of_other_layers_are_refused(tmp_path, changed, told):
    chain, _, path = own_profiles(tmp_path)
    (tmp_path / "h100.json").write_text(profile_text(replace(chain, **changed)))
    with pytest.raises(BadInput, match=re.escape("$.devices[1].profile: ") + ".*" + re.escape(told)):
        read_platform(path, chain)
    with pytest.raises(BadInput, match="not for this command"):
        read_platform(path)


def test_what_is_reserved_is_not_for_plans(tmp_path):
    platform = read_platform(written(tmp_path, PLATFORM | {"reserve": "1.5GB"}))
    assert [device.memory_bytes for device in platform.devices] == [14_500_000_000] * 3 + [6_500_000_000]
    assert platform.reserved_bytes == 1_500_000_000
    with pytest.raises(BadInput, match=r"--reserve: the platform reserves 1.50 GB already"):
        reserving(platform, "1GB", "--reserve")

import copy
import io
import json
import os
import random
import re
import stat
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
from cases.chains import PUBLISHED, published, random_chain, random_platform
from cases.plans import random_plan, random_simulated_plan

from pipeplan.check.bounds import any_bound
from pipeplan.check.evaluate import evaluate
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput, InvalidPlan
from pipeplan.files.forms import json_text
from pipeplan.files.plans import load_plan, plan_text, read_plan
from pipeplan.files.platforms import platform_form, platform_of, read_platform
from pipeplan.files.profiles import digest, profile_text, read_profile
from pipeplan.files.schemas import SCHEMAS, schema
from pipeplan.files.text import read_text, write_text
from pipeplan.plan import Allocation, Bound, Plan, Provenance, Schedule, Stage
from pipeplan.problem import Chain, Device, Layer, Level, Platform, Policy, Problem
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star

CHAIN = Chain(
    "small",
    tuple(Layer(f"l{i}", 10 + i, 20 + i, 100, 50, saved_bytes=60, optimizer_ns=3) for i in range(4)),
    40,
    microbatch=8,
    device="test",
    source="by hand",
)
POLICY = Policy("2bw", accumulate=4, optimizer="adam")


def small_plan(weights="2bw"):
    """Two stages on three devices of two kinds, the second recomputed and replicated."""
    policy = replace(POLICY, weights=weights)
    platform = Platform((Device(5000), Device(4000, Fraction(3, 2)), Device(4000)), (Level(3, 12 * 10**9, 2),))
    stages = (Stage(0, 2, (0,)), Stage(2, 4, (1, 2), ((2, 4),)))
    pattern = best_one_f_one_b_star(stage_graph(CHAIN, platform, policy, stages))
    bounds = (any_bound(Problem(CHAIN, platform, policy)), Bound("contiguous", True, "stages", pattern.period_ns))
    schedule = Schedule("flush", 4) if weights == "flush" else Schedule()
    bounds = bounds[:1] if weights == "flush" else bounds
    return Plan(CHAIN, platform, policy, Allocation(stages), pattern, bounds, Provenance("hand"), schedule)


def at(document, path):
    for key in path:
        document = document[key]
    return document


def edited(document, path, value):
    """Return a copy of the JSON with the value at ``path`` replaced, removed (``...``) or changed by a function."""
    document = copy.deepcopy(document)
    *parents, last = path
    place = at(document, parents)
    if value is ...:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    return document


def written(tmp_path, document, name="file.json"):
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


# --- round trips -----------------------------------------------------------------------------------------------------


def test_profiles_come_back_byte_for_byte(tmp_path):
    for seed in range(60):
        rng = random.Random(seed)
        chain = random_chain(
            rng, rng.randint(1, 8), edges=seed % 2 > 0, saved=seed % 3 > 0, optimizer=seed % 5 > 0, tied=seed % 7 == 0
        )
        text = profile_text(chain)
        again = read_profile(written(tmp_path, text))
        assert again == chain
        assert profile_text(again) == text
        assert digest(again) == digest(chain)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_profiles_come_back(name, tmp_path):
    chain = published(name)
    assert read_profile(written(tmp_path, profile_text(chain))) == chain


def test_a_graph_text_is_read_wherever_a_profile_is(tmp_path):
    text = (
        "node1 -- ReLU -- forward_compute_time=0.5, backward_compute_time=0.25, activation_size=8, parameter_size=0\n"
    )
    chain = read_profile(written(tmp_path, text, "net.graph.txt"))
    assert (chain.name, chain.layers[0].forward_ns, chain.layers[0].output_bytes) == ("net", 500_000, 8)


def test_digests_tell_profiles_apart():
    chains = [CHAIN, replace(CHAIN, name="other"), replace(CHAIN, input_bytes=41), replace(CHAIN, edges=())]
    chains.append(replace(CHAIN, layers=(*CHAIN.layers[:3], replace(CHAIN.layers[3], saved_bytes=None))))
    assert len({digest(chain) for chain in chains}) == len(chains)


def test_platforms_come_back(tmp_path):
    for seed in range(60):
        rng = random.Random(seed)
        platform = random_platform(
            rng, rng.randint(1, 6), memory=(0, 30), levels=True, latency=True, speeds=True, duplex=True
        )
        form = platform_form(platform)
        assert platform_of(form, "here") == platform
        text = json_text(form)
        assert read_platform(written(tmp_path, text)) == platform
        assert json_text(platform_form(read_platform(written(tmp_path, text)))) == text


def test_platform_files_as_people_write_them(tmp_path):
    document = {
        "memory": "16GB",
        "levels": [{"count": 2, "bandwidth": "10GB/s", "latency": "5us"}, {"count": 2, "bandwidth": "10Gbps"}],
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
        (Level(2, 10 * 10**9, 5000), Level(2, 1_250_000_000)),
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


def test_plans_come_back_byte_for_byte(tmp_path):
    for seed in range(120):
        plan = random_plan(random.Random(seed))
        text = plan_text(plan)
        again, found = read_plan(written(tmp_path, text))
        assert found == []
        assert again == plan
        assert plan_text(again) == text
        assert load_plan(written(tmp_path, text)) == plan


@pytest.mark.parametrize("kind", ["nf1b", "message-driven"])
def test_plans_without_a_pattern_come_back_byte_for_byte_and_edits_are_noticed(kind, tmp_path):
    path = tmp_path / "plan.json"
    for seed in range(12):
        plan = random_simulated_plan(random.Random(seed), kind)
        text = plan_text(plan)
        path.write_text(text)
        again, found = read_plan(str(path))
        assert found == []
        assert again == plan
        assert plan_text(again) == text
        form = json.loads(text)
        assert form["pattern"] is None
        assert form["schedule"] == {
            "kind": kind,
            "microbatches": plan.policy.accumulate,
            "limit": plan.schedule.limit,
        }
        device = plan.allocation.stages[0].devices[0]
        for name in ("peak_bytes", "weights_bytes", "activation_bytes", "buffer_bytes"):
            edited = json.loads(text)
            edited["devices"][device][name] += 1
            path.write_text(json.dumps(edited))
            _, found = read_plan(str(path))
            assert len(found) == 1
            assert found[0].startswith(f"devices[{device}].{name} is {edited['devices'][device][name]}; the simulated")
        edited = json.loads(text)
        edited["gap"] += 0.5
        path.write_text(json.dumps(edited))
        assert read_plan(str(path))[1][0].startswith("gap is")
        edited = json.loads(text)
        edited["schedule"]["microbatches"] += 1
        path.write_text(json.dumps(edited))
        assert "but the policy updates weights every" in read_plan(str(path))[1][0]
        del edited["schedule"]["limit"]
        path.write_text(json.dumps(edited))
        assert any("schedule.limit is missing" in sentence for sentence in read_plan(str(path))[1])


def test_another_limit_gives_other_figures(tmp_path):
    """A plan whose limit was edited says what its own would be."""
    path = tmp_path / "plan.json"
    noticed = 0
    for seed in range(30):
        form = json.loads(plan_text(random_simulated_plan(random.Random(seed), "nf1b")))
        if form["schedule"]["limit"] < 2:
            continue
        form["schedule"]["limit"] = 1
        path.write_text(json.dumps(form))
        found = read_plan(str(path))[1]
        assert all(re.match(r"(devices\[|gap)", sentence) for sentence in found)
        noticed += bool(found)
    assert noticed > 5


def test_equal_input_gives_equal_bytes_and_keys_keep_their_order():
    text = plan_text(small_plan())
    assert plan_text(small_plan()) == text
    assert list(json.loads(text)) == [
        "format",
        "profile",
        "platform",
        "policy",
        "stages",
        "schedule",
        "pattern",
        "devices",
        "lower_bounds",
        "gap",
        "provenance",
    ]
    later = replace(small_plan(), provenance=Provenance("hand", seconds=1.5))
    assert [a for a, b in zip(text.splitlines(), plan_text(later).splitlines(), strict=True) if a != b] == [
        '  "seconds": 0.0'
    ]


def test_the_order_of_keys_and_white_space_do_not_matter(tmp_path):
    text = plan_text(small_plan())

    def reordered(value):
        if isinstance(value, dict):
            return {key: reordered(value[key]) for key in sorted(value, reverse=True)}
        return [reordered(v) for v in value] if isinstance(value, list) else value

    again = load_plan(written(tmp_path, json.dumps(reordered(json.loads(text)))))
    assert plan_text(again) == text


def test_a_byte_order_mark_is_no_obstacle(tmp_path):
    path = tmp_path / "marked.json"
    path.write_bytes(b"\xef\xbb\xbf" + profile_text(CHAIN).encode())
    assert read_profile(str(path)) == CHAIN


def test_reported_figures_are_those_of_the_model():
    plan = small_plan()
    document = json.loads(plan_text(plan))
    result = evaluate(plan)
    assert [d["peak_bytes"] for d in document["devices"]] == [use.peak_bytes for use in result.devices]
    assert document["gap"] == pytest.approx(plan.pattern.period_ns / plan.lower_bounds[0].period_ns - 1)
    assert document["platform"]["devices"][1] == {"memory": "4KB", "speed": 1.5}


def test_schemas_describe_what_is_written():
    for name in SCHEMAS:
        assert schema(name)["$defs"][SCHEMAS[name].__name__]["additionalProperties"] is False
    fields = schema("plan")["$defs"]["PlanFile"]["required"]
    assert sorted(fields) == sorted(json.loads(plan_text(small_plan())))


# --- bad profiles ----------------------------------------------------------------------------------------------------

PROFILE = json.loads(profile_text(replace(CHAIN, edges=((0, 1), (1, 2), (0, 2), (2, 3)), tied=((0, 3),))))
LAYER = ("layers", 2)

BAD_PROFILES = {
    "version": (("format",), "pipeplan-profile/2", "Invalid enum value 'pipeplan-profile/2' - at `$.format`"),
    "no format": (("format",), ..., "missing required field `format`"),
    "no layers": (("layers",), ..., "missing required field `layers`"),
    "empty layers": (("layers",), [], "small: there are no layers"),
    "unknown key": (("colour",), 1, "unknown field `colour`"),
    "unknown key in a layer": ((*LAYER, "forward_ms"), 1, "unknown field `forward_ms` - at `$.layers[2]`"),
    "missing time": ((*LAYER, "forward_ns"), ..., "missing required field `forward_ns` - at `$.layers[2]`"),
    "negative": ((*LAYER, "forward_ns"), -2, "$.layers[2].forward_ns: -2 is negative"),
    "negative size": ((*LAYER, "output_bytes"), -2, "$.layers[2].output_bytes: -2 is negative"),
    "negative saved": ((*LAYER, "saved_bytes"), -2, "$.layers[2].saved_bytes: -2 is negative"),
    "negative input": (("input_bytes",), -1, "input_bytes: -1 is negative"),
    "float": ((*LAYER, "forward_ns"), 1.5, "expected `int`, got `float` - at `$.layers[2].forward_ns`"),
    "bool": ((*LAYER, "forward_ns"), True, "expected `int`, got `bool` - at `$.layers[2].forward_ns`"),
    "text": ((*LAYER, "weight_bytes"), "4MB", "expected `int`, got `str` - at `$.layers[2].weight_bytes`"),
    "null": ((*LAYER, "weight_bytes"), None, "expected `int`, got `null` - at `$.layers[2].weight_bytes`"),
    "list": ((*LAYER, "weight_bytes"), [1], "expected `int`, got `array` - at `$.layers[2].weight_bytes`"),
    "layers as object": (("layers",), {}, "expected `array`, got `object` - at `$.layers`"),
    "name": ((*LAYER, "name"), 3, "expected `str`, got `int` - at `$.layers[2].name`"),
    "huge": ((*LAYER, "weight_bytes"), 10**30, "$.layers[2].weight_bytes: the layers up to here sum up to"),
    "sums": ((*LAYER, "forward_ns"), 10**15, "$.layers[2].forward_ns: the layers up to here sum up to"),
    "weight part": ((*LAYER, "backward_weight_ns"), 23, "backward_weight_ns: 23 is more than backward_ns, 22"),
    "microbatch": (("microbatch",), 0, "expected `int` >= 1 - at `$.microbatch`"),
    "edge outside": (("edges", 1), [1, 4], "edges[2]: [1, 4] names a layer that is not there; there are 4"),
    "edge back": (("edges", 0), [2, 1], "edges[2]: [2, 1] must name an earlier layer first"),
    "edge to itself": (("edges", 0), [1, 1], "must name an earlier layer first"),
    "edge negative": (("edges", 0), [-1, 1], "edges[0]: [-1, 1] names a layer that is not there"),
    "edge of three": (("edges", 0), [0, 1, 2], "expected `array` of length 2 - at `$.edges[0]`"),
    "tied outside": (("tied", 0), [0, 9], "tied[0]: [0, 9] names a layer that is not there"),
    "tied back": (("tied", 0), [3, 0], "tied[0]: [3, 0] must name an earlier layer first"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PROFILES)
def test_bad_profiles(name, tmp_path):
    path, value, sentence = BAD_PROFILES[name]
    file = written(tmp_path, edited(PROFILE, path, value))
    with pytest.raises(BadInput) as caught:
        read_profile(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert sentence.lower() in str(caught.value).lower()


def test_profiles_without_time(tmp_path):
    idle = edited(PROFILE, ("layers",), lambda layers: [x | {"forward_ns": 0, "backward_ns": 0} for x in layers])
    with pytest.raises(BadInput, match="all forward and backward times are 0"):
        read_profile(written(tmp_path, idle))


BROKEN = {
    "empty": ("", "is empty; a profile is JSON or a graph.txt"),
    "white space": (" \n\t", "is empty"),
    "cut off": (profile_text(CHAIN)[:200], "input data was truncated"),
    "brace": ("{", "input data was truncated"),
    "list": ("[1, 2]", "expected `object`, got `array`"),
    "comma": ('{"format": "pipeplan-profile/1",}', "JSON is malformed"),
    "comment": (profile_text(CHAIN) + "// no", "JSON is malformed: trailing characters"),
    "NaN": (json.dumps(edited(PROFILE, ("input_bytes",), float("nan"))), "JSON is malformed"),
    "Infinity": (json.dumps(edited(PROFILE, ("input_bytes",), float("inf"))), "JSON is malformed"),
    "infinite": (json.dumps(PROFILE).replace('"input_bytes": 40', '"input_bytes": 1e999'), "out of range"),
    "digits": (json.dumps(PROFILE).replace('"input_bytes": 40', '"input_bytes": ' + "9" * 5000), "out of range"),
    "forty": (json.dumps(PROFILE).replace('"input_bytes": 40', '"input_bytes": ' + "9" * 40), "more than 1e15"),
    "deep": ('{"format": ' + "[" * 10**5, "expected"),
    "prose": ("hello", "is not a node"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name, tmp_path):
    text, sentence = BROKEN[name]
    with pytest.raises(BadInput, match=sentence) as caught:
        read_profile(written(tmp_path, text))
    assert str(tmp_path) in str(caught.value)


def test_deep_nesting_inside_a_free_field_is_refused(tmp_path):
    text = plan_text(small_plan()).replace('"options": {}', '"options": {"a": ' + "[" * 10**5 + "]" * 10**5 + "}")
    with pytest.raises(BadInput, match="nested too deeply"):
        read_plan(written(tmp_path, text))


# --- bad platforms ---------------------------------------------------------------------------------------------------

PLATFORM = {
    "memory": "16GB",
    "levels": [{"count": 2, "bandwidth": "10GB/s"}, {"count": 2, "bandwidth": "10Gbps", "latency": "5us"}],
    "devices": [{}, {"speed": 2}, {}, {"memory": "8GB"}],
}

BAD_PLATFORMS = {
    "no levels": (("levels",), ..., "missing required field `levels`"),
    "empty levels": (("levels",), [], "$.levels: is empty"),
    "count": (("levels", 0, "count"), 0, "$.levels[0].count: 0 is not between 1 and"),
    "negative count": (("levels", 0, "count"), -2, "$.levels[0].count: -2 is not"),
    "bool count": (("levels", 0, "count"), True, "expected `int`, got `bool` - at `$.levels[0].count`"),
    "huge count": (("levels", 1, "count"), 10**30, "$.levels[1].count: 1000000000000000000000000000000 is not between"),
    "huge product": (("levels",), [{"count": 2**20, "bandwidth": "1GB/s"}] * 2, "the counts multiply to 1099511627776"),
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
    path, value, sentence = BAD_PLATFORMS[name]
    file = written(tmp_path, edited(PLATFORM, path, value))
    with pytest.raises(BadInput) as caught:
        read_platform(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert sentence.lower() in str(caught.value).lower()


# --- plans edited by hand --------------------------------------------------------------------------------------------


def more(value):
    return value + 1


# what no longer is a plan at all
BAD_PLANS = {
    "version": (("format",), "pipeplan-plan/0", "at `$.format`"),
    "missing pattern": (("pattern",), ..., "missing required field `pattern`"),
    "missing digest": (("profile", "digest"), ..., "missing required field `digest` - at `$.profile`"),
    "missing checkpoint": (("stages", 0, "checkpoint"), ..., "missing required field `checkpoint` - at `$.stages[0]`"),
    "unknown key": (("stages", 1, "replicas"), 2, "unknown field `replicas` - at `$.stages[1]`"),
    "unknown key in profile": (("profile", "layers", 0, "x"), 2, "unknown field `x` - at `$.profile.layers[0]`"),
    "accumulate 0": (("policy", "accumulate"), 0, "expected `int` >= 1 - at `$.policy.accumulate`"),
    "accumulate null": (("policy", "accumulate"), None, "expected `int`, got `null` - at `$.policy.accumulate`"),
    "bucket": (("policy", "bucket_parameters"), 10**30, "at `$.policy.bucket_parameters`"),
    "policy": (("policy", "weights"), "3bw", "invalid enum value '3bw' - at `$.policy.weights`"),
    "optimizer": (("policy", "optimizer"), "adamw", "invalid enum value 'adamw' - at `$.policy.optimizer`"),
    "kind of schedule": (("schedule", "kind"), "gpipe", "invalid enum value 'gpipe' - at `$.schedule.kind`"),
    "kind of operation": (("pattern", "operations", 0, "kind"), "W", "at `$.pattern.operations[0].kind`"),
    "start as text": (("pattern", "operations", 0, "start_ns"), "0", "at `$.pattern.operations[0].start_ns`"),
    "start as float": (("pattern", "operations", 0, "start_ns"), 0.5, "at `$.pattern.operations[0].start_ns`"),
    "endless start": (("pattern", "operations", 5, "start_ns"), 10**400, "at `$.pattern.operations[5].start_ns`"),
    "endless period": (("pattern", "period_ns"), 10**30, "at `$.pattern.period_ns`"),
    "bound 0": (("lower_bounds", 0, "period_ns"), 0, "expected `int` >= 1 - at `$.lower_bounds[0].period_ns`"),
    "bound class": (("lower_bounds", 0, "class"), "all", "invalid enum value 'all' - at `$.lower_bounds[0].class`"),
    "negative time": (("profile", "layers", 1, "forward_ns"), -1, "$.profile: $.layers[1].forward_ns: -1 is negative"),
    "memory missing": (("platform", "devices", 0), {}, "$.platform: device 0 has no memory"),
    "device count": (("platform", "levels", 0, "count"), 4, "lists 3 devices; the levels' counts multiply to 4"),
    "devices as number": (("stages", 0, "devices"), 0, "expected `array`, got `int` - at `$.stages[0].devices`"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PLANS)
def test_files_that_are_no_plan(name, tmp_path):
    path, value, sentence = BAD_PLANS[name]
    file = written(tmp_path, edited(json.loads(plan_text(small_plan())), path, value))
    with pytest.raises(BadInput) as caught:
        read_plan(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert sentence.lower() in str(caught.value).lower()


# what is a plan, but not a valid one or not with these figures
EDITED = {
    "memory_bytes": (("devices", 1, "memory_bytes"), more, "memory_bytes is 4001; the stages and starts give 4000"),
    "peak_bytes": (("devices", 0, "peak_bytes"), more, "devices[0].peak_bytes is"),
    "weights_bytes": (("devices", 0, "weights_bytes"), more, "devices[0].weights_bytes is"),
    "activation_bytes": (("devices", 2, "activation_bytes"), more, "devices[2].activation_bytes is"),
    "buffer_bytes": (("devices", 2, "buffer_bytes"), 0, "devices[2].buffer_bytes is 0; the stages and starts give 100"),
    "in_flight": (("devices", 0, "in_flight"), [7], "devices[0].in_flight is [7]; the stages and starts give ["),
    "device left out": (("devices",), lambda d: d[:2], "devices has 2 entries; the platform has 3"),
    "device added": (("devices",), lambda d: [*d, d[0]], "devices has 4 entries; the platform has 3"),
    "gap": (("gap",), 0.0, "gap is 0.0; the period and the lower bound give"),
    "digest": (("profile", "digest"), "0" * 64, "profile.digest is 000000000000..., its layers give"),
    "name": (("profile", "name"), "other", "profile.digest is"),
    "layer": (("profile", "layers", 1, "forward_ns"), 12, "F of stage 0 lasts 21 ns; its layers take 22 ns"),
    "layer's weights": (("profile", "layers", 1, "weight_bytes"), 101, "profile.digest is"),
    "no pattern": (("pattern",), None, "the plan has no pattern"),
    "early start": (("pattern", "operations", 2, "start_ns"), 0, "F of stage 1 starts at 0 ns, before SEND_F"),
    "negative start": (("pattern", "operations", 0, "start_ns"), -5, "F of stage 0 starts at -5 ns, before time 0"),
    "very negative start": (("pattern", "operations", 0, "start_ns"), -(10**40), "before time 0"),
    "duration": (("pattern", "operations", 0, "duration_ns"), 1, "F of stage 0 lasts 1 ns; its layers take 21 ns"),
    "period": (("pattern", "period_ns"), 30, "device 0 is busy 64 ns in each of its periods of 30 ns"),
    "period 0": (("pattern", "period_ns"), 0, "the period is 0 ns; it must be at least 1"),
    "operation left out": (("pattern", "operations"), lambda o: o[:-1], "has 5 operations; the stages need 6"),
    "no operations": (("pattern", "operations"), [], "the pattern has 0 operations; the stages need 6"),
    "order": (("pattern", "operations"), lambda o: o[::-1], "operation 0 is B of stage 0; the path has F of stage 0"),
    "accumulate": (("policy", "accumulate"), 1, None),
    "memory": (("platform", "devices", 0, "memory"), "1KB", "device 0 needs"),
    "devices overlap": (("stages", 1, "devices"), [0, 1], "device groups [0] and [0, 1] overlap"),
    "device outside": (("stages", 1, "devices"), [1, 3], "stage 1 uses device 3; the platform has devices 0 to 2"),
    "huge device": (("stages", 1, "devices"), [1, 10**30], f"stage 1 uses device {10**30}"),
    "replica left out": (("stages", 1, "devices"), [1], "of stage 1"),
    "not recomputed": (("stages", 1, "checkpoint"), None, "B of stage 1 lasts"),
    "other segment": (("stages", 1, "checkpoint"), [[1, 4]], "stage 1 recomputes layers [1, 4)"),
    "cut moved": (("stages", 0, "stop"), 1, "stage 1 starts at layer 2; the layers before it end at 1"),
    "start far out": (("stages", 0, "start"), -(10**6), "stage 0 starts at layer -1000000"),
    "no stages": (("stages",), [], "the plan has no stages"),
    "bound raised": (("lower_bounds", 0, "period_ns"), more, "ns of class any is more than can be derived"),
    "bound above": (("lower_bounds", 0, "period_ns"), 10**6, "1000000 ns for class any is above the period"),
    "own bound above": (("lower_bounds", 1, "period_ns"), more, "for class contiguous is above the period"),
    "second bound": (("lower_bounds", 1, "class"), "any", "of class any is more than can be derived"),
    "bounds left out": (("lower_bounds",), [], "lower_bounds quotes none of class any"),
    "bound of other plans": (("lower_bounds", 0, "replicas"), False, "for plans without replicas; this one has some"),
    "drained": (("schedule",), {"kind": "flush"}, "the schedule drains every mini-batch, which is for weights flush"),
    "endless flush": (("policy", "weights"), "flush", "weights flush drain the pipeline after every mini-batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITED)
def test_edited_plans(name, tmp_path):
    path, value, sentence = EDITED[name]
    document = json.loads(plan_text(small_plan()))
    assert read_plan(written(tmp_path, document))[1] == []
    file = written(tmp_path, edited(document, path, value))
    _, found = read_plan(file)
    assert found
    assert sentence is None or any(sentence in s for s in found), found
    with pytest.raises(InvalidPlan) as caught:
        load_plan(file)
    assert caught.value.violations == [f"{file}: {s}" for s in found]


def test_an_accumulate_that_is_too_small_is_refused(tmp_path):
    document = json.loads(plan_text(replace(small_plan(), chain=CHAIN)))
    document = edited(document, ("policy", "accumulate"), 2)
    for layer in document["profile"]["layers"]:
        layer.pop("optimizer_ns")
    # without optimizer times nothing but the rule of 2bw depends on accumulate
    _, found = read_plan(written(tmp_path, document))
    assert any("lasts" in s for s in found)
    plan = small_plan()
    free = replace(plan.chain, layers=tuple(replace(x, optimizer_ns=0, weight_bytes=0) for x in plan.chain.layers))
    graph = stage_graph(free, plan.platform, plan.policy, plan.allocation.stages)
    plan = replace(plan, chain=free, pattern=best_one_f_one_b_star(graph))
    plan = replace(plan, lower_bounds=(any_bound(Problem(free, plan.platform, plan.policy)),))
    document = edited(json.loads(plan_text(plan)), ("policy", "accumulate"), 2)
    found = read_plan(written(tmp_path, document))[1]
    assert any("2bw accumulates 2 microbatches per update, but 3 are in flight" in s for s in found), found


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("schedule", "microbatches"), ..., "schedule.microbatches is missing"),
        (("schedule", "microbatches"), 5, "mini-batches of 5 microbatches, but the policy updates weights every 4"),
        (("lower_bounds", 0, "period_ns"), more, "of class any is more than can be derived"),
        (("gap",), more, "gap is"),
    ],
)
def test_edited_drained_plans(path, value, sentence, tmp_path):
    document = json.loads(plan_text(small_plan("flush")))
    assert read_plan(written(tmp_path, document))[1] == []
    _, found = read_plan(written(tmp_path, edited(document, path, value)))
    assert any(sentence in s for s in found), found


def test_whatever_single_number_of_a_plan_is_changed_is_noticed(tmp_path):
    """Every number that must follow from others: raise each one by 1 and expect a sentence or BadInput."""
    document = json.loads(plan_text(small_plan()))
    free = {  # what a plan says of itself, or leaves as good as before
        ("provenance", "seconds"),
        ("policy", "bucket_parameters"),
        ("policy", "accumulate"),
        ("platform", "devices", 1, "speed"),
    }
    numbers = list(leaves(document, ()))
    assert len(numbers) >= 80
    for path in numbers:
        if path in free or path[-1] == "start_ns":  # a start is a decision; another may be as good
            continue
        try:
            _, found = read_plan(written(tmp_path, edited(document, path, more)))
        except BadInput:
            continue
        assert found, path


def leaves(value, path):
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def test_violations_are_values_and_a_bad_plan_can_be_shown(tmp_path):
    document = edited(json.loads(plan_text(small_plan())), ("pattern", "operations", 2, "start_ns"), 0)
    plan, found = read_plan(written(tmp_path, document))
    assert plan.pattern.operations[2].start_ns == 0
    assert all(isinstance(s, str) for s in found)


# --- reading and writing ---------------------------------------------------------------------------------------------


def test_what_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"nowhere.json: cannot be read: No such file"):
        read_text(str(tmp_path / "nowhere.json"))
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        read_text(str(tmp_path))
    (tmp_path / "latin").write_bytes(b'{"name": "\xe9"}')
    with pytest.raises(BadInput, match="cannot be read: it is not UTF-8 text"):
        read_text(str(tmp_path / "latin"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xe9"), encoding="utf-8", errors="surrogateescape"))
    with pytest.raises(BadInput, match="-: cannot be read: it is not UTF-8 text"):
        read_text("-")
    monkeypatch.setattr(sys, "stdin", io.StringIO("plain"))
    assert read_text("-") == "plain"


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_writing_replaces_the_whole_file(tmp_path):
    target = tmp_path / "plan.json"
    write_text(str(target), "old text that is longer")
    write_text(str(target), "new")
    assert target.read_text() == "new"
    assert entries(tmp_path) == ["plan.json"]
    mask = os.umask(0o027)
    try:
        write_text(str(target), "again")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_writing_to_standard_output(capsys):
    write_text("-", "text\n")
    assert capsys.readouterr().out == "text\n"


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_whole_and_nothing_behind(step, error, tmp_path, monkeypatch):
    target = tmp_path / "plan.json"
    target.write_text("old")

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(BadInput if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        write_text(str(target), "new")
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert str(caught.value) == f"{target}: cannot be written: No space left on device"
    assert target.read_text() == "old"
    assert entries(tmp_path) == ["plan.json"]


def test_what_cannot_be_written(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"plan.json: cannot be written: No such file"):
        write_text(str(tmp_path / "no" / "plan.json"), "text")
    with pytest.raises(BadInput, match="cannot be written: Is a directory"):
        write_text(str(tmp_path), "text")
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="cannot be written: Not a directory"):
        write_text(str(tmp_path / "file" / "plan.json"), "text")

    def refuse(**kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(BadInput, match="cannot be written: Permission denied"):
        write_text(str(tmp_path / "plan.json"), "text")
    assert entries(tmp_path) == ["file"]


def test_links_are_followed_and_pipes_are_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    real = tmp_path / "folder" / "real.json"
    real.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(real)
    write_text(str(link), "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(str(pipe), "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert entries(tmp_path) == ["folder", "link.json", "pipe"]

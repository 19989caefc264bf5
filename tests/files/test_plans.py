"""Plans as JSON: they come back byte for byte, and every edit of what follows from the rest is noticed."""

import json
import random
import re
from dataclasses import asdict, replace

import pytest
from cases.files import CHAIN, edited, more, small_plan, written
from cases.plans import graph_of, random_plan, random_simulated_plan

from pipeplan.check.bounds import any_bound
from pipeplan.check.evaluate import evaluate
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.errors import BadInput, InvalidPlan
from pipeplan.files.plans import SCHEMAS, load_plan, plan_text, read_plan, schema
from pipeplan.plan import Provenance
from pipeplan.problem import Problem
from pipeplan.schedule.periodic.one_f_one_b_star import best_one_f_one_b_star


def test_plans_come_back_byte_for_byte(tmp_path):
    for seed in range(50):
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
        assert form["schedule"] == {"kind": kind, "microbatches": plan.policy.accumulate, "limit": plan.schedule.limit}
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


def test_who_shares_the_optimizers_state_is_said_and_what_that_takes_is_counted_anew(tmp_path):
    plan = replace(small_plan(), chain=replace(CHAIN, layers=tuple(replace(x, optimizer_ns=0) for x in CHAIN.layers)))
    plan = replace(plan, pattern=best_one_f_one_b_star(graph_of(plan)))
    policy = replace(plan.policy, zero=1)
    plan, shared = (
        replace(x, lower_bounds=(any_bound(Problem(x.chain, x.platform, x.policy)),))
        for x in (plan, replace(plan, policy=policy))
    )
    document = json.loads(plan_text(shared))
    assert document["policy"]["zero"] == 1
    assert "pipelines" not in document["policy"]
    assert read_plan(written(tmp_path, document)) == (shared, [])
    own = [use["weights_bytes"] for use in json.loads(plan_text(plan))["devices"]]
    less = 2 * 200 // 2  # half of Adam's state for 200 bytes of weights
    assert [use["weights_bytes"] for use in document["devices"]] == [own[0], own[1] - less, own[2] - less]
    found = read_plan(written(tmp_path, edited(document, ("policy", "zero"), 0)))[1]
    assert f"devices[1].weights_bytes is {own[1] - less}; the stages and starts give {own[1]}" in found
    with pytest.raises(BadInput, match=r"\$\.policy\.zero"):
        read_plan(written(tmp_path, edited(document, ("policy", "zero"), 4)))


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
        assert all(re.match(r"(devices\[|delays|gap)", sentence) for sentence in found)
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
        "samples_per_update",
        "pattern",
        "groups",
        "delays",
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


def test_reported_figures_are_those_of_the_model():
    plan = small_plan()
    document = json.loads(plan_text(plan))
    result = evaluate(plan)
    assert [d["peak_bytes"] for d in document["devices"]] == [use.peak_bytes for use in result.devices]
    assert document["gap"] == pytest.approx(plan.pattern.period_ns / plan.lower_bounds[0].period_ns - 1)
    assert document["platform"]["devices"][1] == {"memory": "4KB", "speed": 1.5}


def test_schemas_describe_what_is_written():
    for form in SCHEMAS.values():
        assert schema(form)["$defs"][form.__name__]["additionalProperties"] is False
    fields = schema(SCHEMAS["plan"])["$defs"]["PlanFile"]["required"]
    assert sorted(fields) == sorted(json.loads(plan_text(small_plan())))


def test_groups_are_written_and_checked(tmp_path):
    plan = small_plan()
    document = json.loads(plan_text(plan))
    expected = [asdict(group) | {"shifts": list(group.shifts)} for group in evaluate(plan).groups]
    assert document["groups"] == expected
    document["groups"][1]["number"] += 1
    _, found = read_plan(written(tmp_path, json.dumps(document)))
    assert len(found) == 1
    assert found[0].startswith('groups[1] is {"kind":')


def test_deep_nesting_inside_a_free_field_is_refused(tmp_path):
    text = plan_text(small_plan()).replace('"options": {}', '"options": {"a": ' + "[" * 10**5 + "]" * 10**5 + "}")
    with pytest.raises(BadInput, match="nested too deeply"):
        read_plan(written(tmp_path, text))


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
    "kind of schedule": (("schedule", "kind"), "gpipes", "invalid enum value 'gpipes' - at `$.schedule.kind`"),
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


def test_files_of_other_versions_are_refused_in_one_sentence(tmp_path):
    """Nothing was released yet, so nothing but what is written today is read."""
    for path in (
        ("delays",),
        ("groups",),
        ("samples_per_update",),
        ("policy", "clip"),
        ("lower_bounds", 0, "schedule"),
    ):
        file = written(tmp_path, edited(json.loads(plan_text(small_plan())), path, ...))
        with pytest.raises(BadInput, match=f"{file}: object missing required field `{path[-1]}`"):
            read_plan(file)


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

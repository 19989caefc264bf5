"""Traces of runs: written, read back, compared with their plan, and turned into profiles."""

import json
from dataclasses import replace

import msgspec
import pytest
from cases.files import edited
from cases.measured import replayed, script_of

from pipeplan.cost.time_model import Passes
from pipeplan.errors import BadInput
from pipeplan.plan import Schedule
from pipeplan.problem import Policy
from pipeplan.report.tables.differences import comparison, print_comparison
from pipeplan.report.traces import measured_trace
from pipeplan.runtime.measure.report import TransferTime, make_report
from pipeplan.runtime.measure.times import OpTime
from pipeplan.runtime.measure.trace_file import (
    check_same_plan,
    measured_of,
    read_measured,
    read_operations,
    recalibrated,
)


def run_of(factor, update=0, transfers=None, about=({}, {})):
    """A plan with 50 bytes across its cut, and the report of a run that took ``factor`` times as long."""
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 20, output=50, about=about)
    measurements = replayed(script, factor)
    updates = range(10**9, 10**9 + 20)  # after everything else
    if update:
        measurements = [
            replace(x, times=(*x.times, *(OpTime("UPDATE", x.rank, v, v * update, (v + 1) * update) for v in updates)))
            for x in measurements
        ]
    found = tuple(TransferTime(*edge, 1, ns, 1) for edge, ns in sorted((transfers or {}).items()))
    return script.plan, replace(make_report(script, measurements), transfers=found)


def test_a_trace_is_read_back():
    plan, report = run_of(3, transfers={("F", 0): 70, ("B", 1): 80})
    run = read_measured("trace.json", measured_trace(plan, report))
    assert run == measured_of(plan, report)
    assert [(x.forward_ns, x.backward_ns) for x in run.stages] == [(300, 600)] * 2
    assert [(x.kind, x.stage, x.measured_ns) for x in run.transfers] == [("B", 1, 80), ("F", 0, 70)]
    check_same_plan(plan, run, "trace.json")


def test_operations_are_read_back_at_their_times():
    plan, report = run_of(2)
    origin = min(t.start_ns for times in report.times for t in times)
    wanted = {
        x.device: tuple(replace(t, start_ns=t.start_ns - origin, end_ns=t.end_ns - origin) for t in times)
        for x, times in zip(report.activations, report.times, strict=True)
    }
    assert read_operations(plan, "t", measured_trace(plan, report)) == wanted


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("cat",), "G", r"^t: \$.traceEvents\[\d+\].cat: is 'G', which no operation"),
        (("args", "device"), None, "of an earlier version"),
        (("args", "device"), 7, "device: is 7, which the plan does not use"),
        (("args", "stage"), 2, "stage: is 2; the plan has 2 stages"),
        (("ts",), 1e300, r"<= .* - at .*ts"),
    ],
)
def test_operations_that_the_plan_does_not_have_are_bad_input(place, value, words):
    plan, report = run_of(1)
    trace = json.loads(measured_trace(plan, report))
    at = next(i for i, x in enumerate(trace["traceEvents"]) if x["ph"] == "X")
    with pytest.raises(BadInput, match=words):
        read_operations(plan, "t", json.dumps(edited(trace, ("traceEvents", at, *place), value)))


def test_the_comparison_names_every_operation():
    plan, report = run_of(3, update=40, transfers={("F", 0): 100, ("B", 1): 100})
    figures = comparison(plan, measured_of(plan, report))
    rows = {(x["kind"], x["stage"]): (x["planned_ns"], x["measured_ns"], x["ratio"]) for x in figures["operations"]}
    assert rows == {
        **{("F", s): (100, 300, 3.0) for s in (0, 1)}, **{("B", s): (200, 600, 3.0) for s in (0, 1)},
        **{("update", s): (0, 40, None) for s in (0, 1)}, ("SEND_F", 0): (50, 100, 2.0), ("SEND_B", 1): (50, 100, 2.0),
    }  # fmt: skip
    assert figures["period"]["planned_ns"] == plan.pattern.period_ns
    assert figures["period"]["measured_ns"] == report.measured_period_ns
    assert [x["measured_activation_bytes"] for x in figures["devices"]] == [10, 20]


@pytest.mark.parametrize("weights", ["2bw", "flush"])
def test_the_comparison_takes_the_share_of_the_update_off_planned_backwards_that_have_one(weights):
    """Steps of 800 for every 4 microbatches: 200 in each backward, none where they come behind a batch."""
    policy, schedule = Policy(weights, accumulate=4), Schedule("flush", 4) if weights == "flush" else Schedule()
    script = script_of(policy, schedule, 5, times=((100, 400), (100, 400)), optimizer_ns=800)
    report = make_report(script, replayed(script, 1, update=800))
    figures = comparison(script.plan, measured_of(script.plan, report))
    rows = {(x["kind"], x["stage"]): x["planned_ns"] for x in figures["operations"]}
    assert rows == {key: ns for s in (0, 1) for key, ns in ((("F", s), 100), (("B", s), 400), (("update", s), 800))}


def test_the_comparison_has_reading_and_overhead_beside_passes_as_the_report_has():
    plan, report = run_of(1, about=({"reading_ns": 30}, {"overhead_ns": 10}))
    figures = comparison(plan, measured_of(plan, report))
    rows = {(x["kind"], x["stage"]): x["planned_ns"] for x in figures["operations"]}
    assert rows == {
        (kind, s): ns
        for s, x in enumerate(report.stages)
        for kind, ns in (
            ("F", x.planned_forward_ns), ("B", x.planned_backward_ns), ("update", 0), ("reading", 30), ("messages", 20),
        )
    }  # fmt: skip
    assert rows["F", 0] == 100 - 30


def test_the_comparison_is_printed(capsys):
    plan, report = run_of(3)
    print_comparison(plan, measured_of(plan, report), width=100)
    out = capsys.readouterr().out
    ratio = report.measured_period_ns / plan.pattern.period_ns
    assert 2 < ratio <= 3  # three times the times, and messages in no pattern's order
    assert f"measured, {ratio:.2f} x planned" in out
    assert "GPU 1: activations at most" in out


@pytest.mark.parametrize("factor", [1, 3])
def test_a_recalibrated_profile_has_the_measured_times(factor):
    plan, report = run_of(factor, update=40)
    chain = recalibrated(plan, measured_of(plan, report), "t")
    policy = replace(plan.policy, accumulate=10**6)  # so that nearly nothing of the update is charged
    for stage in plan.allocation.stages:
        assert Passes(chain, Policy(), stage.start, stage.stop).forward_ns == 100 * factor
        assert Passes(chain, policy, stage.start, stage.stop).backward_ns() == 200 * factor + 1
        assert chain.sums.optimizer_ns[stage.stop] - chain.sums.optimizer_ns[stage.start] == 40
    assert [x.saved_bytes for x in chain.layers] == [x.saved_bytes for x in plan.chain.layers]


def test_a_recalibrated_profile_has_the_measured_reading():
    plan, report = run_of(2, about=({"reading_ns": 30}, {}))
    first, last = report.stages
    stages = replace(first, forward_ns=150, data_ns=50), replace(last, forward_ns=140, data_ns=40)
    chain = recalibrated(plan, measured_of(plan, replace(report, stages=stages)), "t")
    assert [x.forward_ns for x in chain.layers] == [200, 180]
    assert chain.reading_ns == 40


def test_layers_share_a_stages_time_and_recomputation_is_taken_off():
    plan, report = run_of(1)
    layers = plan.chain.layers
    layers = [replace(layers[0], forward_ns=30, backward_ns=0), replace(layers[0], forward_ns=60, backward_ns=0),
              layers[1]]  # fmt: skip
    one, other = plan.allocation.stages
    stages = replace(one, stop=2, checkpoint=((0, 2),)), replace(other, start=2, stop=3)
    changed = replace(
        plan, chain=replace(plan.chain, layers=tuple(layers)), allocation=replace(plan.allocation, stages=stages)
    )
    chain = recalibrated(changed, measured_of(plan, report), "t")
    assert [x.forward_ns for x in chain.layers] == [33, 67, 100]
    assert [x.backward_ns for x in chain.layers] == [50, 50, 200]  # 200 less 100 of recomputation, evenly


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:100], "^t: input data was truncated"),
        (lambda text: text.replace("pipeplan-measured/2", "pipeplan-measured/9"), "'pipeplan-measured/9'"),
        (lambda text: text.replace('"update_ns"', '"other"'), r"field `.*` - at `\$.otherData.stages\[0\]`"),
        (
            lambda text: text.replace('"forward_ns": ', '"forward_ns": -'),
            r">= 0 - at `\$.otherData.stages\[0\].forward_ns`",
        ),
        (lambda text: text.replace('"backward_ns": ', '"backward_ns": 9999999999999'), r"<= 10+ - at .*backward_ns`"),
        (
            lambda text: text.replace('"update_ns": 0', '"update_ns": "0"'),
            r"expected `int`, got `str` - at `.*update_ns`",
        ),
        (lambda text: text.replace('"measured_period_ns": ', '"measured_period_ns": 1e999, "a": '), "out of range"),
        (lambda text: text.replace('"measured_period_ns": ', '"measured_period_ns": NaN, "a": '), "malformed"),
        (lambda text: text.replace('"measured_period_ns": ', '"measured_period_ns": -'), ">= 0.0 - at .*period_ns`"),
    ],
)
def test_a_trace_with_a_wrong_figure_is_bad_input_that_names_the_place(change, words):
    plan, report = run_of(1)
    with pytest.raises(BadInput, match=words):
        read_measured("t", change(measured_trace(plan, report)))


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": [{"name": "a", "ph": "X", "ts": 1, "dur": 2, "pid": 1, "tid": 1}], "displayTimeUnit": "ns"}',
        '[{"name": "a", "ph": "B", "ts": 1, "pid": 1, "tid": 1},',  # they may break off
        '{"traceEvents": [], "otherData": {"version": "My Application v1.0"}}',
        '{"traceEvents": [], "otherData": "text"}',
        '{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [{"ph": "X", "name": "aten::add"}]}',
    ],
)
def test_the_trace_of_another_tool_is_told_from_that_of_a_run(text):
    with pytest.raises(BadInput, match=r"^t: is not the trace of a run"):
        read_measured("t", text)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"format": "pipeplan-profile/1", "name": "otherData"}', "node1 -- ReLU -- "]
)
def test_what_is_no_trace_is_left_to_others(text):
    assert read_measured("t", text) is None


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("stages", 1, "stage"), 0, r"^t: \$.otherData.stages\[1\].stage: is 0 where 1 comes next"),
        (("stages", 1), ..., r"stages: lists 1; the plan has 2"),
        (("transfers", 0, "stage"), 2, r"transfers\[0\].stage: is 2; the plan has 2 stages"),
        (("devices", 1, "device"), 2, r"devices\[1\].device: is 2, which the plan does not use"),
    ],
)
def test_figures_of_what_the_plan_does_not_have_are_bad_input(place, value, words):
    plan, report = run_of(1, transfers={("F", 0): 1})
    trace = edited(json.loads(measured_trace(plan, report)), ("otherData", *place), value)
    with pytest.raises(BadInput, match=words):
        check_same_plan(plan, read_measured("t", json.dumps(trace)), "t")


def test_times_that_make_no_profile_are_not_written():
    plan, report = run_of(1)
    run = measured_of(plan, report)
    for ns, words in (
        (0, "all forward and backward times are 0"),
        (10**15, r"layers\[1\].forward_ns: the layers up to"),
    ):
        times = [msgspec.structs.replace(stage, forward_ns=ns, backward_ns=ns) for stage in run.stages]
        with pytest.raises(BadInput, match=f"^t: makes no profile: .*{words}"):
            recalibrated(plan, msgspec.structs.replace(run, stages=tuple(times)), "t")


def test_the_run_of_another_plan_is_bad_input():
    plan, report = run_of(1)
    run = measured_of(plan, report)
    other = replace(plan, chain=replace(plan.chain, name="other"))
    with pytest.raises(BadInput, match="profile: is another"):
        check_same_plan(other, run, "trace.json")
    one, two = plan.allocation.stages
    swapped = replace(plan.allocation, stages=(replace(one, devices=(1,)), replace(two, devices=(0,))))
    with pytest.raises(BadInput, match="other stages or devices"):
        check_same_plan(replace(plan, allocation=swapped), run, "trace.json")

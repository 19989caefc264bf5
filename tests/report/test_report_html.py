"""The HTML report: what it says, that it needs nothing else, and that it works in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from cases.chains import published
from cases.files import edited
from cases.measured import replayed, script_of
from cases.plans import straight

from pipeplan.check.bounds import any_bound
from pipeplan.files.plans import plan_text
from pipeplan.plan import Schedule
from pipeplan.planner.plan import STATED, make_plan
from pipeplan.planner.simulated.simulation import Refused, compare_schedules, simulate_plan
from pipeplan.problem import Platform, Policy, Problem
from pipeplan.report.page.html import MOST_OPERATIONS, Measured, microbatches_shown, report_html
from pipeplan.report.traces import measured_trace
from pipeplan.runtime.measure.report import make_report
from pipeplan.runtime.measure.trace_file import read_measured, read_operations
from pipeplan.units import format_ns
from scripts.checks import pictures


def data_of(page):
    """What the page's script draws."""
    return json.JSONDecoder().raw_decode(page.partition("const DATA = ")[2])[0]


def run_of(policy, factor, microbatches=None):
    """A plan's simulation, and its run as it reads back from a trace, ``factor`` times as slow."""
    script = script_of(policy, Schedule(), 20, output=50)
    text = measured_trace(script.plan, make_report(script, replayed(script, factor, update=30)))
    measured = Measured(read_measured("t", text), read_operations(script.plan, "t", text))
    return simulate_plan(script.plan, microbatches), measured


@pytest.fixture(scope="module")
def report_of_a_run():
    return run_of(Policy("2bw", accumulate=2), 3)


class Page(HTMLParser):
    """Tags and text of a page, with every tag closed that must be."""

    EMPTY = frozenset({"meta", "input", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)

    def of(self, tag, kind=None):
        return [a for t, a in self.tags if t == tag and (kind is None or kind in (a.get("class") or "").split())]


@pytest.fixture(scope="module")
def page():
    return report_html(simulate_plan(straight(), 12))


def test_the_page_is_well_formed_and_needs_nothing_else(page):
    parsed = Page(page)
    assert parsed.open == []
    assert not re.search(r"https?:|<link|src=|@import|url\(", page)


def test_replicas_of_a_stage_stand_as_one_on_many_gpus():
    """128 GPUs on a screen: a row and a chart of memory for each stage, of which a click opens the others."""
    plan = make_plan(
        Problem(published("alexnet"), Platform.flat(20, 10**11), Policy("2bw", accumulate=80)),
        STATED,
        {"split": f"4,{len(published('alexnet')) - 4}", "replicas": "12,8"},
    ).plan
    page = report_html(simulate_plan(plan, 80))
    rows = data_of(page)["charts"]["run"]["rows"]
    assert [head for _, link, head in rows if not link] == [0] * 12 + [12] * 8
    assert all(head == i for i, (_, link, head) in enumerate(rows) if link)
    assert page.count(">GPU 0-11 x12<") == page.count(">GPU 12-19 x8<") == 2  # of the period and of the run
    assert sorted(data_of(page)["memory"]) == ["0", "12"]
    assert "<figcaption>GPU 0-11 x12: peak " in page
    assert ">stages<" not in page
    few = report_html(simulate_plan(straight(), 12))
    assert "data-one=" not in few


def test_the_gap_is_drawn_and_twins_of_schedules_stand_in_one_row():
    plan = straight()
    runs, refused = compare_schedules(plan, ["gpipe", "1f1b"], 8)
    twin = replace(runs[1], schedule="zb1p")
    page = report_html(simulate_plan(plan, 8), [*runs, twin], refused)
    assert f">{runs[1].schedule}, zb1p<" in page
    assert page.count("<h3>") == 2
    assert page.count('class="gap"') == sum(x.period_ns < plan.pattern.period_ns for x in plan.lower_bounds)


def test_the_page_has_every_operation_stage_and_device(page):
    parsed, charts = Page(page), data_of(page)["charts"]
    run = simulate_plan(straight(), 12).timeline
    steps = [
        (work.kind, work.stage, step.microbatch, run.begin_ns(step), run.length_ns(step))
        for lane in run.program.lanes
        for step in lane.steps
        if (work := run.program.operations[step.position])
    ]
    assert sorted(tuple(op[1:6]) for op in charts["run"]["ops"]) == sorted(steps)  # of links too
    assert sum(link for _, link, _ in charts["run"]["rows"]) == 3
    assert len([op for op in charts["pattern"]["ops"] if op[1] == "F"]) >= 4
    assert [a["id"] for a in parsed.of("div", "chart")] == ["pattern", "run"]
    assert len(parsed.of("svg")) == 4
    text = " ".join(parsed.words)
    assert "Memory over the run" in text
    assert "GPU 3: peak" in text
    assert "recompute" in text


def test_same_input_same_bytes(page):
    assert report_html(simulate_plan(straight(), 12)) == page


def test_memory_over_the_limit_is_marked():
    over = report_html(simulate_plan(straight(), 200, "gpipe"))
    assert 'class="over"' not in over
    small = replace(straight(), platform=Platform.flat(4, 100, 10**9))
    assert 'class="over"' in report_html(simulate_plan(small, 200, "gpipe"))
    full = max(use.peak_bytes for use in simulate_plan(straight(), 12).uses)
    exact = replace(straight(), platform=Platform.flat(4, full, 10**9))
    assert 'class="over"' not in report_html(simulate_plan(exact, 12))


def test_memory_that_is_far_off_leaves_room_for_what_is_held_and_none_held_is_drawn_too():
    def top_of(plan):
        """Where the highest edge of what is held is, of 1000 from the top."""
        page = report_html(simulate_plan(plan, 12))
        return min(
            float(y) for path in re.findall(r'class="held" d="([^"]*)"', page) for y in re.findall(r" (\S+?)[LZ]", path)
        )

    plan = straight()
    assert top_of(plan) < 100
    nothing = tuple(replace(x, weight_bytes=0, output_bytes=0, saved_bytes=0, saves=None) for x in plan.chain.layers)
    assert top_of(replace(plan, chain=replace(plan.chain, layers=nothing, input_bytes=0))) == 1000


def test_a_page_never_has_too_many_operations():
    assert microbatches_shown(straight(), 12) == 12
    assert microbatches_shown(straight(), 10**6) * 2 * 4 <= MOST_OPERATIONS
    assert microbatches_shown(straight(), 10**6, 4, 10) == MOST_OPERATIONS // (2 * 4 * 10) // 4 * 4


def test_what_is_measured_stands_under_what_was_planned(report_of_a_run):
    simulation, measured = report_of_a_run
    page = report_html(simulation, measured=measured)
    planned, trained = (data_of(page)["charts"][name] for name in ("run", "measured"))
    assert planned["group"] == trained["group"]
    assert [row for row, link, _ in trained["rows"] if not link] == [
        row for row, link, _ in planned["rows"] if not link
    ]
    for kind in ("F", "B"):
        wanted = sorted([op[2:] for op in planned["ops"] if op[1] == kind and op[3] < 6])
        found = sorted([op[2:] for op in trained["ops"] if op[1] == kind and op[3] < 6])
        assert [x[:2] for x in found] == [x[:2] for x in wanted]  # stage and microbatch
        assert {x[3] for x in found} == {3 * x[3] for x in wanted}  # thrice as slow
    assert not [op for op in trained["ops"] if op[1].startswith("WAIT")]
    ratio = measured.figures.measured_period_ns / simulation.plan.pattern.period_ns
    assert f"Measured: {format_ns(trained['end'])} in all" in page
    assert f"{ratio:.2f} x planned" in page


def test_the_second_mini_batch_is_shown_of_a_run_that_drains():
    simulation, measured = run_of(Policy("flush", accumulate=4), 2, 4)
    chart = data_of(report_html(simulation, measured=measured))["charts"]["measured"]
    assert {op[3] for op in chart["ops"] if op[1] == "F"} == {0, 1, 2, 3}
    assert {op[3] for op in chart["ops"] if op[1] == "UPDATE"} == {2}
    assert min(op[4] for op in chart["ops"]) == 0


def test_schedules_stand_side_by_side_on_one_axis():
    runs, refused = compare_schedules(straight(), ["pattern", "gpipe", "zbv"], 8)
    page = report_html(simulate_plan(straight(), 8), runs, [*refused, Refused("nf1b", "it <cannot>")])
    charts = data_of(page)["charts"]
    assert set(charts) == {"pattern", "run", "run-gpipe", "run-zbv"}
    assert {charts[name]["group"] for name in charts if name != "pattern"} == {"run"}
    parsed = Page(page)
    assert [a["id"] for a in parsed.of("table")] == ["stages", "schedules"]
    assert "nf1b: not possible: it <cannot>" in parsed.words
    assert sum(op[1] == "W" for op in charts["run-zbv"]["ops"]) == 8 * 8


def test_no_name_ends_the_script():
    plan = straight()
    evil = "</script><script>alert(1)</script>"
    plan = replace(plan, chain=replace(plan.chain, name=evil))
    page = report_html(simulate_plan(plan, 8))
    assert page.count("<script>") == 1
    assert page.count("</script>") == 1


@pytest.mark.skipif(pictures.CHROMIUM is None, reason="no Chromium here")
def test_every_chart_answers_in_a_browser_at_2_8_32_and_128_gpus_and_on_a_phone(report_of_a_run, tmp_path):
    """Ticks, numbers, wheel, drag, pointing and links of every chart, offline; and there is something to be seen."""
    simulation, measured = report_of_a_run
    two = report_html(simulation, measured=measured)
    problem = Problem(published("alexnet"), Platform.flat(128, 10**11), Policy("2bw", accumulate=140))
    replicas = {"split": f"4,{len(problem.chain) - 4}", "replicas": "70,58"}
    replicated = report_html(simulate_plan(make_plan(problem, STATED, replicas).plan, 140))
    platform = Platform.flat(32, 16 * 10**9)
    plan = make_plan(Problem(published("densenet121"), platform, Policy("2bw")), "balance").plan
    assert len(plan.allocation.stages) > 16
    many = report_html(simulate_plan(plan, microbatches_shown(plan, 40)))
    eight = make_plan(Problem(published("vgg16"), Platform.flat(8, 16 * 10**9), Policy("flush")), "balance").plan
    runs, _ = compare_schedules(eight, ["gpipe", "zbv"], 8)
    picture = tmp_path / "pages.png"
    pages = {
        "2 phone": (two, pictures.PHONE, 900),
        "8": (report_html(simulate_plan(eight, 8), runs), 900, 900),
        "128": (replicated, pictures.SCREEN, 900),
        "32": (many, pictures.SCREEN, 900),
        "32 phone": (many, pictures.PHONE, 900),
    }
    found = pictures.look(pages, picture)
    assert {name: page["lacking"] for name, page in found.items()} == {name: [] for name in pages}
    assert found["2 phone"]["charts"] == ["pattern", "run", "measured"]
    assert found["8"]["charts"][-2:] == [f"run-{x.schedule}" for x in runs]
    from matplotlib.image import imread

    pixels = imread(picture)
    assert pixels.shape[1] == sum(width for _, width, _ in pages.values())
    assert (abs(pixels[:, :, 0] - pixels[:, :, 2]) > 0.2).mean() > 0.01  # blue, green and yellow boxes


def test_the_command(pipeplan, tmp_path, monkeypatch):
    from pipeplan.files.profiles import profile_text

    profile, plan, out = tmp_path / "p.json", tmp_path / "plan.json", tmp_path / "report.html"
    profile.write_text(profile_text(straight().chain))
    pipeplan("plan", str(profile), "--gpus", "4", "--mem", "16GB", "--algorithm", "balance", "-o", str(plan))
    assert pipeplan("report", str(plan), "-o", str(out))[0] == 0
    assert out.read_text().startswith("<!doctype html>")
    monkeypatch.setattr("pipeplan.report.page.html.MOST_OPERATIONS", 800)
    code, text, err = pipeplan("report", str(plan), "-o", "-", "--schedule", "zbv", "--microbatches", "5000")
    assert code == 0
    assert "weight gradient" in text
    assert "the page shows 100 of 5000 microbatches" in err
    assert pipeplan("report", str(plan), "-o", str(out), "--schedule", "nothing")[0] == 2
    code, text, err = pipeplan("report", str(plan), "-o", "-", "--schedule", "nf1b", "--schedule", "zbv")
    assert code == 0, err
    charts = data_of(text)["charts"]
    assert {"run", "run-nf1b", "run-zbv"} < set(charts)


def test_the_command_takes_the_trace_of_a_run_by_the_plan(pipeplan, tmp_path):
    script = script_of(Policy("2bw", accumulate=2), Schedule(), 20, output=50)
    problem = Problem(script.plan.chain, script.plan.platform, script.plan.policy)
    trace = json.loads(measured_trace(script.plan, make_report(script, replayed(script, 1))))
    plan, file, other = (tmp_path / name for name in ("plan.json", "trace.json", "other.json"))
    plan.write_text(plan_text(replace(script.plan, lower_bounds=(any_bound(problem),))))
    file.write_text(json.dumps(trace))
    code, text, err = pipeplan("report", str(plan), "--trace", str(file), "-o", "-")
    assert code == 0, err
    assert "measured" in data_of(text)["charts"]
    other.write_text(json.dumps(edited(trace, ("otherData", "profile"), "0" * 64)))
    for place, schedule, words in [(other, [], "profile: is another"), (plan, [], "is not the trace of a run"),
                                   (file, ["--schedule", "gpipe"], "not of gpipe")]:  # fmt: skip
        code, _, err = pipeplan("report", str(plan), "--trace", str(place), *schedule, "-o", "-")
        assert (code, err.count("\n") <= 4) == (2, True), err
        assert words in err

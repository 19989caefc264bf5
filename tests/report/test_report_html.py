"""The HTML report: what it says, that it needs nothing else, and that it works in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from cases.chains import published
from cases.patience import SECONDS
from cases.plans import straight

from pipeplan.files.plans import plan_text
from pipeplan.planner.plan import make_plan
from pipeplan.planner.simulation import simulate_plan
from pipeplan.problem import Platform, Policy, Problem
from pipeplan.report.html import MOST_OPERATIONS, microbatches_shown, report_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Tags and text of a page, with every tag closed that must be."""

    EMPTY = frozenset({"meta", "input", "br", "rect", "path", "line"})

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


def test_the_page_has_every_operation_stage_and_device(page):
    parsed = Page(page)
    run = simulate_plan(straight(), 12).timeline
    on_devices = sum(len(lane.steps) for lane in run.program.lanes if lane.device is not None)
    assert len(parsed.of("rect", "op")) >= on_devices + 4 * 2
    names = [a["data-op"] for a in parsed.of("rect", "op")]
    assert "F,0,11," in " ".join(names)
    assert len(parsed.of("svg")) == 2 + 4
    text = " ".join(parsed.words)
    assert "Memory over the run" in text
    assert "GPU 3: peak" in text
    assert "recompute" in text


def test_same_input_same_bytes(page):
    assert report_html(simulate_plan(straight(), 12)) == page


def test_memory_over_the_limit_is_marked():
    over = report_html(simulate_plan(straight(), 200, "gpipe"))
    assert 'class="over"' not in over
    from dataclasses import replace

    small = replace(straight(), platform=Platform.flat(4, 100, 10**9))
    assert 'class="over"' in report_html(simulate_plan(small, 200, "gpipe"))


def test_a_page_never_has_too_many_operations():
    assert microbatches_shown(straight(), 12) == 12
    assert microbatches_shown(straight(), 10**6) * 2 * 4 <= MOST_OPERATIONS


def browser(page, *extra):
    """The page after its script ran, as headless Chromium sees it."""
    found = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *extra, page],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert found.returncode == 0, found.stderr[-1000:]
    return found


HOVER = """<script>
const bar = document.querySelector('#pattern rect.op');
const box = bar.getBoundingClientRect();
const at = {bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + box.height / 2};
bar.dispatchEvent(new MouseEvent('mousemove', at));
document.body.dataset.bar = document.getElementById('tip').textContent;
const memory = document.querySelector('svg[data-device="1"]');
const frame = memory.getBoundingClientRect();
memory.dispatchEvent(new MouseEvent('mousemove',
  {bubbles: true, clientX: frame.left + frame.width / 2, clientY: frame.top + 5}));
document.body.dataset.memory = document.getElementById('tip').textContent;
document.body.dataset.wide = box.width > 20;
const slider = document.querySelector('input[data-zoom]');
slider.value = 4; slider.dispatchEvent(new Event('input'));
document.body.dataset.zoomed = document.getElementById('run').style.width;
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_hover_and_zoom_work_offline_in_a_browser(tmp_path):
    run = simulate_plan(straight(), 12)
    file = tmp_path / "report.html"
    file.write_text(report_html(run).replace("</body>", HOVER))
    offline = ("--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom")
    dom = browser(f"file://{file}", *offline).stdout
    body = dict(Page(re.search(r"<body[^>]*>", dom)[0]).tags[0][1])
    assert body["data-ready"] == "yes"
    assert re.fullmatch(
        r"forward of microbatch 0, stage 0\nGPU 0\n0\.000 ms to 0\.000 ms \(0\.000 ms\)", body["data-bar"]
    )
    assert re.match(r"GPU 1 at 0\.000 ms\n0\.000 GB of 1\.000 GB", body["data-memory"])
    assert body["data-wide"] == "true"
    assert body["data-zoomed"] == "400%"
    assert "Error" not in dom


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("devices", [4, 32])
def test_screenshots_of_a_published_profile_are_not_empty(tmp_path, devices):
    plan = make_plan(
        Problem(published("densenet121"), Platform.flat(devices, 16 * 10**9), Policy("2bw")), "balance"
    ).plan
    assert plan_text(plan)
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(report_html(simulate_plan(plan, microbatches_shown(plan, 40))))
    browser(f"file://{file}", "--window-size=1500,2400", f"--screenshot={picture}")
    from matplotlib.image import imread

    pixels = imread(picture)
    assert pixels.shape[:2] == (2400, 1500)
    charts = (abs(pixels[:, :, 0] - pixels[:, :, 2]) > 0.2).mean()  # blue, green and yellow bars
    assert charts > 0.02


def test_the_command(pipeplan, tmp_path):
    from pipeplan.files.profiles import profile_text

    profile, plan, out = tmp_path / "p.json", tmp_path / "plan.json", tmp_path / "report.html"
    profile.write_text(profile_text(straight().chain))
    pipeplan("plan", str(profile), "--gpus", "4", "--mem", "16GB", "--algorithm", "balance", "-o", str(plan))
    assert pipeplan("report", str(plan), "-o", str(out))[0] == 0
    assert out.read_text().startswith("<!doctype html>")
    code, text, err = pipeplan("report", str(plan), "-o", "-", "--schedule", "zbv", "--microbatches", "2000")
    assert code == 0
    assert "weight gradient" in text
    assert "the page shows 1000 of 2000 microbatches" in err
    assert pipeplan("report", str(plan), "-o", str(out), "--schedule", "nothing")[0] == 2

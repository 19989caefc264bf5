"""Look at HTML reports in a real browser: python scripts/checks/pictures.py FOLDER [--trace PLAN TRACE]

Makes reports of plans for 2, 8, 32 and 128 GPUs, of a schedule that drains, of all schedules side by side and, with
--trace, of a run under its plan. Opens each as wide as a screen and as a phone, points, turns the wheel and drags in
all their charts, says what doesn't answer, and leaves a picture of each page in FOLDER, light or, with --dark, dark.
Needs Chromium (apt install chromium).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREEN, PHONE = 1300, 390  # pixels wide
SECONDS = 300
PROFILES = Path(__file__).parents[2] / "profiles"
PAGES = {
    "2": ("gpt-tiny-b8-cpu", "--gpus 2 --mem 1GB --algorithm balance", ""),
    "8": ("gpt2-small-b4-a100", "--gpus 8 --mem 40GB --algorithm balance --bandwidth 300GB/s", ""),
    "8-flush": (
        "gpt2-small-b4-a100",
        "--gpus 8 --mem 40GB --algorithm balance --bandwidth 300GB/s --weights flush",
        "",
    ),
    "8-all": ("gpt2-small-b4-a100", "--gpus 8 --mem 40GB --algorithm balance --bandwidth 300GB/s", "--schedule all"),
    "128": ("gpt2-xl-b4-a100", "--gpus 128 --mem 40GB --split 13,13,13,13 --replicas 38,30,30,30", ""),
    "32": ("gpt2-xl-b4-a100", "--gpus 32 --mem 40GB --algorithm balance --bandwidth 300GB/s", ""),
}

# What the page finds out about itself, told to the page around it.
PROBE = """<script>
const lacking = [];
const want = (true_, what) => { if (!true_) lacking.push(what); };
const fire = (to, kind, at, more) =>
  to.dispatchEvent(new kind(more.type, { bubbles: true, cancelable: true, ...at, ...more }));
const point = (chart, op, type = 'pointermove', by = 0) => {
  const at = chart.place(op);
  fire(chart.canvas, PointerEvent, { clientX: at.clientX + by, clientY: at.clientY }, { type, pointerId: 7 });
};
const pixel = (chart, op) => {
  const at = chart.place(op), box = chart.canvas.getBoundingClientRect(), scale = devicePixelRatio;
  const left = Math.max(0, chart.x(op[4])), x = Math.min(at.clientX - box.left, left + 3), y = at.clientY - box.top - 6;
  return chart.canvas.getContext('2d').getImageData(x * scale, y * scale, 1, 1).data[3];
};
window.onerror = message => { lacking.push(message); };
window.onunhandledrejection = event => { lacking.push(String(event.reason)); };
window.onload = () => {
  want(document.body.dataset.ready === 'yes', 'the script came to its end');
  want(document.documentElement.scrollWidth <= innerWidth, 'the page is no wider than the window');
  for (const [name, chart] of Object.entries(charts)) {
    const say = what => name + ': ' + what, { group, canvas, data } = chart, whole = group.to - group.from;
    chart.draw();
    want(chart.width > innerWidth / 3, say('the chart has room'));
    const steps = chart.ticks.slice(1).map(([at], i) => at - chart.ticks[i][0]);
    want(chart.ticks.length > 1 && new Set(steps).size === 1 && /^[125]0*$/.test(steps[0]), say('ticks are round'));
    const seen = data.ops.filter(op => chart.shown.includes(op[0]) && op[1] === 'F');
    const inner = seen.filter(op => op[4] >= data.start && op[4] + op[5] <= data.end);
    const op = inner[Math.floor(inner.length / 2)];
    for (let i = 0; i < 40 && op[5] / (group.to - group.from) * chart.width < 60; i++) {
      scrolled = -1e9;
      fire(canvas, WheelEvent, chart.place(op), { type: 'wheel', deltaY: -100 });
    }
    want(group.to - group.from < whole || op[5] / whole * chart.width >= 60, say('the wheel zooms'));
    chart.draw();
    want(group.from <= op[4] + op[5] && op[4] <= group.to, say('zooming keeps what is pointed at'));
    want(chart.labels.includes(String(op[3])), say('a box with room has its number'));
    const other = chart.rows[op[0]].find(x => x[3] !== op[3] && x[4] + x[5] > group.from && x[4] < group.to &&
      PASSES.has(x[1]) && !chart.of(x, op[3]) && chart.x(x[4] + x[5]) - chart.x(Math.max(x[4], group.from)) > 6);
    point(chart, op);
    group.charts.forEach(each => each.draw());
    const said = `forward of microbatch ${op[3]}, stage ${op[2]}\\n${data.rows[op[0]][0]}\\n`;
    want(tip.textContent.startsWith(said), say('pointing says what it is, and where'));
    want(group.microbatch === op[3] && pixel(chart, op) === 255, say('the microbatch stands out'));
    if (other) want(pixel(chart, other) < 100, say('others step back'));
    if (group.to - group.from < whole * 0.8) {
      const from = group.from, way = group.from > group.first + whole / 100 ? 40 : -40;
      point(chart, op, 'pointerdown');
      point(chart, op, 'pointermove', way);
      const moved = (from - group.from) / (group.to - group.from) * chart.width;
      point(chart, op, 'pointerup', way);
      want(Math.abs(moved - way) < 1 || group.from === group.first || group.to === group.last, say('dragging moves'));
    }
    fire(canvas, PointerEvent, {}, { type: 'pointerleave' });
    want(group.microbatch === null && tip.style.display === 'none', say('leaving ends it'));
    fire(canvas, MouseEvent, {}, { type: 'dblclick' });
    want(group.from === group.first && group.to === group.last, say('a double click shows all'));
    const folded = chart.names.findIndex(name => name.dataset.one);
    if (folded >= 0) {
      const before = chart.shown.length, more = data.rows.filter(row => row[2] === folded).length - 1;
      chart.names[folded].click();
      want(chart.shown.length === before + more, say('a click opens replicas'));
      chart.names[folded].click();
      want(chart.shown.length === before, say('another closes them'));
    }
    const links = document.querySelector(`input[data-links="${data.group}"]`);
    if (links) {
      const before = canvas.clientHeight, rows = data.rows.filter(row => row[1]).length;
      links.click();
      want(canvas.clientHeight === before + rows * ROW * (links.checked ? 1 : -1), say('links come and go'));
      links.click();
    }
  }
  for (const svg of document.querySelectorAll('svg[data-device]')) {
    const box = svg.getBoundingClientRect();
    fire(svg, PointerEvent, { clientX: box.left + box.width / 2, clientY: box.top + 5 }, { type: 'pointermove' });
    want(tip.textContent.startsWith('GPU ' + svg.dataset.device + ' at '), 'memory of GPU ' + svg.dataset.device);
  }
  hide();
  const first = charts.run.rows[0].filter(op => op[1] === 'F')[VIEW];
  if (first) {
    charts.run.group.look(first[4], first[4] + 20 * first[5]);
    charts.run.group.point(first[3]);
    drawAll();
  }
  parent.postMessage({ page: NAME, lacking, charts: Object.keys(charts) }, '*');
};
</script></body>"""
FRAMES = """<!doctype html><body style="margin:0"><script>
const found = {};
onmessage = event => { found[event.data.page] = event.data; document.body.dataset.found = JSON.stringify(found); };
</script>"""


def look(
    pages: dict[str, tuple[str, int, int]], picture: Path | None = None, view: int = -1, dark: bool = False
) -> dict[str, dict[str, Any]]:
    """Return what each page, (text, width, height in pixels) by name, lacks in a browser, and the charts that it has.

    They stand beside each other in ``picture``, zoomed to the GPU's forward number ``view`` unless that is -1.
    """
    assert CHROMIUM is not None, "there is no Chromium here"
    with TemporaryDirectory() as folder:
        frames = ""
        for i, (name, (text, width, height)) in enumerate(pages.items()):
            probe = PROBE.replace("NAME", json.dumps(name)).replace("VIEW", str(view))
            (Path(folder) / f"{i}.html").write_text(text.replace("</body>", probe))
            frames += f'<iframe src="{i}.html" style="width:{width}px;height:{height}px;border:0"></iframe>'
        (Path(folder) / "all.html").write_text(FRAMES + frames)
        wide, high = sum(width for _, width, _ in pages.values()), max(height for _, _, height in pages.values())
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom",
                "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000",
                f"--user-data-dir={folder}/user", f"--window-size={wide},{high}",
                *(["--blink-settings=preferredColorScheme=0"] if dark else []),
                *([] if picture is None else [f"--screenshot={picture}"]),
                (Path(folder) / "all.html").as_uri(),
            ],
            capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    told = re.search(r'data-found="([^"]*)"', done.stdout)
    assert told is not None, f"no page told what it found: {done.stderr[-1000:]}"
    found: dict[str, dict[str, Any]] = json.loads(unescape(told[1]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trace", nargs=2, metavar=("PLAN", "TRACE"))
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str] = {}
    for name, (profile, planned, reported) in PAGES.items():
        plan = options.folder / f"{name}.json"
        pipeplan("plan", str(PROFILES / f"{profile}.json"), *planned.split(), "-o", str(plan))
        texts[name] = pipeplan("report", str(plan), *reported.split(), "-o", "-")
    if options.trace:
        plan, trace = options.trace
        texts["measured"] = pipeplan("report", plan, "--trace", trace, "-o", "-")
    lacking = 0
    for name, text in texts.items():
        (options.folder / f"{name}.html").write_text(text)
        pages = {"screen": (text, SCREEN, 2400), "phone": (text, PHONE, 2400)}
        for where, found in look(pages, options.folder / f"{name}.png", 4, options.dark).items():
            said = "; lacking: ".join(found["lacking"]) or f"all {len(found['charts'])} charts answer"
            print(f"{name} on a {where}: {said}")
            lacking += len(found["lacking"])
    return 1 if lacking else 0


def pipeplan(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pipeplan", *arguments], capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        raise SystemExit(f"pipeplan {' '.join(arguments)}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

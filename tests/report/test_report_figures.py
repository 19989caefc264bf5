"""Pictures: patterns and runs as SVG and PNG."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import matplotlib as mpl
import numpy as np
import pytest
from cases.kept import check_kept
from cases.plans import straight
from matplotlib.colors import to_hex

from pipeplan.errors import BadInput
from pipeplan.plan import Schedule
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.problem import Platform, Policy
from pipeplan.report.gantt import MOST_BARS, save_pattern, save_timeline

KEPT = Path(__file__).parent / "printed" / "pictures.txt"


def test_a_pattern_as_svg_names_rows_and_operations_and_is_the_same_again(tmp_path):
    texts = []
    for name in ("a.svg", "b.svg"):
        save_pattern(straight(), str(tmp_path / name))
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    for word in ("GPU 0", "GPU 3", "link 0 - 1", "F0", "forward", "gradient sent", "ms"):
        assert f">{word}</text>" in texts[0]


def test_a_run_as_png_is_large_enough_to_read(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "run.png"
    save_timeline(simulate_plan(straight(), 12, "zbv"), str(path))
    pixels = imread(path)
    assert pixels.shape[1] == 2080
    assert pixels.shape[0] >= 400
    assert pixels[:, :, :3].std() > 0.05


def pictures():
    """Return what pictures show, in words and sums of figures: of patterns, and of runs on few and many GPUs."""
    from matplotlib.figure import Figure

    drained = replace(straight(), pattern=None, schedule=Schedule("1f1b", 6), policy=Policy("flush", 6))
    many = straight(layers=17, devices=17)
    short = replace(many, platform=Platform.flat(17, many.platform.devices[0].memory_bytes // 10**4, 10**9))
    drawn = {
        "pattern.svg": (save_pattern, straight()),
        "drained.PDF": (save_pattern, drained),
        "zbv.png": (save_timeline, simulate_plan(straight(), 12, "zbv")),
        "1f1b.svg": (save_timeline, simulate_plan(straight(), 300, "1f1b")),
        "many.svg": (save_timeline, simulate_plan(short, 4)),
    }
    lines = []

    def save(figure, file, **options):
        lines.extend((f"{figure.get_size_inches().round(3)} {options}", f"{mpl.rcParams['svg.hashsalt']}"))
        for axes in figure.axes:
            lines.extend(shown(axes))

    with mock.patch.object(Figure, "savefig", save), TemporaryDirectory() as folder:
        for name, (draw, what) in drawn.items():
            lines.append(f"$ {name}")
            draw(what, f"{folder}/{name}")
    return "\n".join(lines) + "\n"


def shown(axes):
    """Yield lines about what is drawn on ``axes``."""
    ticks = [x.get_text() for x in axes.get_yticklabels()] if axes.get_title(loc="left") or axes.images else "its own"
    yield f"{axes.get_title(loc='left')} | {axes.get_xlabel()} | {axes.get_ylabel()} | {ticks}"
    spines = [name for name, x in axes.spines.items() if x.get_visible()]
    yield f"{figures(axes.get_xlim())} {figures(axes.get_ylim())} {spines}"
    texts = [f"{x.get_text()} {figures(x.get_position())}" for x in axes.texts]
    sizes = [x.get_fontsize() for x in (axes.title, axes._left_title, *axes.get_yticklabels(), *axes.texts)]
    yield f"{len(texts)} labels, {texts[:2]} to {texts[-2:]}, sizes {figures(sorted(set(sizes)))}"
    for x in axes.collections:
        if x.get_label()[0] != "_":  # which are of the colours' own
            corners = np.array([path.vertices[:4] for path in x.get_paths()])
            yield f"{x.get_label()} {to_hex(x.get_facecolor()[0])} {x.get_linewidth()[0]}"
            yield f"  {len(corners)} bars, the first {figures(corners[0])}, sum {figures(corners.sum(0))}"
    for x in axes.lines:
        yield f"{x.get_label()} {x.get_drawstyle()} {[figures((y[0], y[-1], sum(y))) for y in x.get_data()]}"
    for x in axes.images:
        yield f"{x.get_array().shape} {figures(x.get_extent())} {x.get_clim()} {to_hex(x.get_cmap()(2.0))}"
        yield f"  {figures(x.get_array().sum(1))}"
    if (legend := axes.get_legend()) is not None:
        texts = [f"{x.get_text()} {x.get_fontsize()}" for x in legend.get_texts()]
        yield f"legend {texts} {legend.get_frame_on()}"


def figures(values):
    return " ".join(f"{x:.5g}" for x in np.ravel(values))


def test_pictures_show_what_is_kept():
    check_kept(pictures(), KEPT)


def test_bad_files_and_too_many_operations_are_refused(tmp_path):
    run = simulate_plan(straight(), 4)
    with pytest.raises(BadInput, match=r"run\.gif: a picture is one of \.svg, \.png, \.pdf"):
        save_timeline(run, str(tmp_path / "run.gif"))
    with pytest.raises(BadInput, match="cannot be written"):
        save_pattern(straight(), str(tmp_path / "nowhere" / "p.svg"))
    with pytest.raises(BadInput, match=f"at most {MOST_BARS} operations"):
        save_timeline(simulate_plan(straight(), MOST_BARS // 8 + 1), str(tmp_path / "run.png"))


def test_the_commands_draw(pipeplan, tmp_path):
    from pipeplan.files.profiles import profile_text

    profile, plan = tmp_path / "p.json", tmp_path / "plan.json"
    profile.write_text(profile_text(straight().chain))
    pipeplan("plan", str(profile), "--gpus", "4", "--mem", "16GB", "--algorithm", "balance", "-o", str(plan))
    assert pipeplan("show", str(plan), "-o", str(tmp_path / "pattern.svg"))[0] == 0
    assert pipeplan("simulate", str(plan), "--schedule", "gpipe", "-o", str(tmp_path / "run.svg"))[0] == 0
    assert "gpipe" in (tmp_path / "run.svg").read_text()
    assert "one period" in (tmp_path / "pattern.svg").read_text()

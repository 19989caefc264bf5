"""Pictures: patterns and runs as SVG and PNG."""

from __future__ import annotations

import pytest
from cases.plans import straight

from pipeplan.errors import BadInput
from pipeplan.planner.simulated.simulation import simulate_plan
from pipeplan.report.gantt import MOST_BARS, save_pattern, save_timeline


def test_a_pattern_as_svg_names_rows_and_operations_and_is_the_same_again(tmp_path):
    texts = []
    for name in ("a.svg", "b.svg"):
        save_pattern(straight(), str(tmp_path / name))
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    for word in ("GPU 0", "GPU 3", "link 0 - 1", "F0", "forward", "gradient sent", "ms"):
        assert f">{word}</text>" in texts[0]


@pytest.mark.parametrize("schedule", ["pattern", "zbv", "1f1b"])
def test_a_run_as_png_is_large_enough_to_read(tmp_path, schedule):
    from matplotlib.image import imread

    path = tmp_path / "run.png"
    save_timeline(simulate_plan(straight(), 12, schedule), str(path))
    pixels = imread(path)
    assert pixels.shape[1] == 2080
    assert pixels.shape[0] >= 400
    assert pixels[:, :, :3].std() > 0.05


def test_many_devices_show_memory_as_coloured_rows(tmp_path):
    save_timeline(simulate_plan(straight(layers=12, devices=12), 6), str(tmp_path / "run.svg"))
    text = (tmp_path / "run.svg").read_text()
    assert "% of its memory" in text
    save_timeline(simulate_plan(straight(), 6), str(tmp_path / "few.svg"))
    assert "% of its memory" not in (tmp_path / "few.svg").read_text()


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

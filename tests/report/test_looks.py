"""Tables fit their widths: names give way; no number is cut, and no column broken off."""

import re

import pytest

import pipeplan as pp
from pipeplan.problem import Chain, Layer
from pipeplan.report.looks import Name, console, make_table, print_fitted
from pipeplan.report.tables.plan import short_names

PROFILE = "profiles/resnet50-1000-b8-v100.json"
NUMBERS = re.compile(r"\d+\.\d+")


def printed(capsys, width):
    table = make_table("layer", "forward", "backward", left=("layer",), names=("layer",), caption="in ms")
    table.add_row(Name.of("encoder.layers.11.attention.output"), "1234.56", "7890.12")
    table.add_row(Name.of("head"), "1.00", "2.00")
    print_fitted(console(width), table)
    return capsys.readouterr().out.splitlines()


def test_a_wide_terminal_shows_whole_names(capsys):
    assert printed(capsys, 100)[1].startswith("encoder.layers.11.attention.output")


def test_a_narrower_one_cuts_them_in_the_middle(capsys):
    lines = printed(capsys, 34)
    assert re.match(r"enc\w*….*output +1234\.56 +7890\.12", lines[1])
    assert max(map(len, lines)) <= 34


def test_what_is_not_marked_has_no_colour(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console(40).print("12 [bold] :smile:")
    assert capsys.readouterr().out == "12 [bold] :smile:\n"


def test_what_is_piped_has_120_columns_unless_others_are_asked_for(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert (console().width, console(90).width) == (70, 90)
    monkeypatch.delenv("COLUMNS")
    assert console().width == 120


def test_no_terminal_is_so_narrow_that_a_column_is_broken_off(capsys):
    lines = printed(capsys, 20)
    assert [line.split() for line in lines if "head" in line] == [["head", "1.00", "2.00"]]
    assert lines[-1].strip() == "in ms"


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_plans_numbers_are_all_there_at_any_width(width, capsys):
    found = pp.plan(PROFILE, gpus=4, mem="40GB", split="4,5,5,5", recompute="all")
    capsys.readouterr()
    found.show(width)
    lines = capsys.readouterr().out.splitlines()
    (begin,) = (i for i, line in enumerate(lines) if line.startswith("stage"))
    assert lines[begin].split()[-1] == "peak"  # all GPUs are alike: the caption says of what
    table = lines[begin - 1 :]
    assert max(len(line.rstrip()) for line in table) <= width
    assert not any("…" in line for line in table)
    wanted = {f"{ns / 1e6:.2f}" for x in found.stages for ns in (x.forward_ns, x.backward_ns)}
    assert {*wanted, "40.00"} <= set(NUMBERS.findall("\n".join(table)))


@pytest.mark.parametrize(
    ("width", "said"), [(80, "3-5 h.0.mlp..h.1.attn "), (120, "3-5 h.0.mlp..h.1.attn.c_proj"), (66, "3-5 h.0..h.1 ")]
)
def test_names_end_at_dots_where_there_is_less_room(width, said, capsys):
    parts = ["wte", *(f"h.{i}.{part}" for i in range(3) for part in ("ln_1", "attn.c_proj", "mlp"))]
    layers = [Layer(f"transformer.{name}", 10**6, 10**6, 10**6, 10**6) for name in parts]
    chain = Chain("gpt", (*layers, Layer("lm_head", 10**6, 10**6, 10**6, 0)), 10**6)
    assert short_names(chain) == [*parts, "lm_head"]
    pp.plan(chain, gpus=4, mem="40GB", split="3,3,3,2", granularity="node").show(width)
    assert said in capsys.readouterr().out


def test_memory_that_dwarfs_the_peaks_has_its_own_unit(tmp_path, capsys):
    from cases.even_profile import PROFILE as EVEN
    from cases.files import written

    pp.plan(written(tmp_path, EVEN, "even.json"), gpus=2, mem="40GB", split="4,4").show(120)
    assert "40 GB" in capsys.readouterr().out.splitlines()[-1]


def test_a_drained_plans_period_and_beat_are_two_words(capsys):
    from pipeplan.report.tables.simulations import print_pattern, print_simulation

    found = pp.plan(PROFILE, gpus=2, mem="40GB", split="9,10", weights="flush", accumulate=8)
    print_simulation(found.simulate(), 120)
    out = capsys.readouterr().out
    period = f"{found.period_ns / 1e6:.3f} ms"
    assert f"period   {period} per microbatch, filled and drained, {period} planned" in out
    assert "beat     " in out
    print_pattern(found.plan, 120)
    out = capsys.readouterr().out
    assert f"period {period} per microbatch" in out
    assert re.search(r"one beat of \d+\.\d{3} ms", out)

"""Tables fit their widths: names give way in their middle, then columns go below; numbers are never cut."""

import re

import pytest

import pipeplan as pp
from pipeplan.report.looks import Name, console, make_table, print_fitted

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


def test_a_narrow_one_puts_columns_below(capsys):
    lines = printed(capsys, 20)
    assert [line.split()[-1] for line in lines if "head" in line] == ["1.00", "2.00"]
    assert sum("…" in line for line in lines) == 2
    assert lines[-1].strip() == "in ms"
    assert max(map(len, lines)) <= 20


@pytest.mark.parametrize("width", [50, 80, 120, 200])
def test_a_plans_numbers_are_all_there_at_any_width(width, capsys):
    found = pp.plan(PROFILE, gpus=4, mem="40GB", split="4,5,5,5", recompute="all")
    capsys.readouterr()
    found.show(width)
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("stage"))
    table = lines[begin - 1 :]
    assert max(len(line.rstrip()) for line in table) <= width
    assert not any("…" in line for line in table)
    wanted = {f"{ns / 1e6:.2f}" for x in found.stages for ns in (x.forward_ns, x.backward_ns)}
    assert {*wanted, "40.00"} <= set(NUMBERS.findall("\n".join(table)))


def test_memory_that_dwarfs_the_peaks_has_its_own_unit(tmp_path, capsys):
    from cases.even_profile import PROFILE as EVEN
    from cases.files import written

    pp.plan(written(tmp_path, EVEN, "even.json"), gpus=2, mem="40GB", split="4,4").show(120)
    assert "40 GB" in capsys.readouterr().out.splitlines()[-3]


def test_a_drained_plans_period_and_beat_are_two_words(capsys):
    from pipeplan.report.simulations import print_pattern, print_simulation

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

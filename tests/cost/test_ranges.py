"""Ranges of estimates beside what was published."""

from functools import cache

from pipeplan.files.machines.accelerators import WITHIN
from scripts.checks.published.ranges import left_out, ratios, usual

rows = cache(ratios)


def test_what_other_sources_show_holds_nine_of_ten_rows():
    shares = left_out(rows())
    assert len(shares) > 5
    assert {source: share for source, share in shares.items() if share < 0.9} == {}


def test_estimates_say_what_all_rows_show():
    assert {has: (round(low, 2), round(high, 2)) for has, (low, high) in usual(rows()).items()} == WITHIN
    held = [row.within(*WITHIN[row.convolutions]) for row in rows()]
    assert sum(held) >= 0.9 * len(rows())

"""Ranges of estimates beside what was published."""

import pytest

from pipeplan.files.machines.accelerators import WITHIN
from scripts.checks.published.ranges import left_out, ratios, usual

ROWS = ratios()
SHARES = left_out(ROWS)


@pytest.mark.parametrize("source", SHARES)
def test_what_other_sources_show_holds_nine_of_ten_rows(source):
    assert SHARES[source] >= 0.9


def test_estimates_say_what_all_rows_show():
    assert {has: (round(low, 2), round(high, 2)) for has, (low, high) in usual(ROWS).items()} == WITHIN
    held = [row.within(*WITHIN[row.convolutions]) for row in ROWS]
    assert sum(held) >= 0.9 * len(ROWS)

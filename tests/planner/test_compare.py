"""Rows of a comparison of algorithms: their best, and GPipe's figure by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.errors import Infeasible
from pipeplan.planner.plan import make_plan
from pipeplan.planner.what_if.compare import OnePlatform, Reached, compare, gpipe_period_ns
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem


def pair(memory: int) -> Problem:
    """Two equal layers of F 10 and B 20 that save 100 bytes each, for two GPUs and 8 microbatches between updates."""
    layers = (Layer("a", 10, 20, 0, 0, saved_bytes=100),) * 2
    return Problem(Chain("pair", layers, 0), Platform.flat(2, memory, 10**9), Policy(accumulate=8))


def test_the_best_of_a_row_is_its_shortest_period() -> None:
    cells = tuple(Reached("one", period, None, 0.0) for period in (7, None, 5))
    assert OnePlatform(2, 100, 8, 8, 1, cells).best_ns == 5
    assert OnePlatform(2, 100, 8, 8, 1, cells[1:2]).best_ns is None


def test_gpipe_drains_a_mini_batch_and_recomputes_only_where_it_must() -> None:
    assert gpipe_period_ns(pair(800), 8) == 34  # (8 + 1) * 30 ns for 8 microbatches
    assert gpipe_period_ns(pair(799), 8) == 45  # (8 + 1) * 40
    assert gpipe_period_ns(replace(pair(799), checkpointing="none"), 8) is None
    assert gpipe_period_ns(pair(10**15), 10**7) is None  # of more steps than are simulated


def test_nobody_finds_out_why_a_cell_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row says that nothing fits, not why, which may take longer than the search."""
    asked = list[str]()
    monkeypatch.setattr("pipeplan.planner.plan._why_none", lambda _, algorithm: asked.append(algorithm) or "")
    (row,) = compare(pair(1), [2], [50], ["contiguous", "auto"], clock=lambda: 0.0, effort="high")
    assert ([cell.period_ns for cell in row.cells], asked) == ([None, None], [])
    with pytest.raises(Infeasible):
        make_plan(pair(50), "contiguous")
    assert asked == ["contiguous"]


def test_each_platform_has_a_row_with_a_cell_for_each_algorithm() -> None:
    ticks = iter(range(100))
    rows = list(compare(pair(1), [1, 2], [50, 800], ["gpipe", "balance"], clock=lambda: float(next(ticks))))
    assert [(row.gpus, row.memory_bytes) for row in rows] == [(1, 50), (1, 800), (2, 50), (2, 800)]
    assert [[cell.period_ns for cell in row.cells] for row in rows][::2] == [[None, None]] * 2
    assert [cell.period_ns for cell in rows[3].cells] == [34, 30]
    assert [cell.algorithm for cell in rows[3].cells] == ["gpipe", "balance"]
    assert [(row.update_microbatches, row.update_samples) for row in rows] == [(8, 8)] * 4
    assert {cell.seconds for row in rows for cell in row.cells} == {1.0}
    assert not any(cell.data_parallel for row in rows for cell in row.cells)
    assert next(compare(pair(800), [2], [800], ["data-parallel"], clock=lambda: 0.0)).cells[0].data_parallel
    assert (rows[3].bound_ns, rows[3].best_ns) == (30, 30)

"""Two profiles layer by layer: which layers belong together, and whether their times rank alike."""

from __future__ import annotations

import pytest

from pipeplan.problem import Chain, Layer
from pipeplan.report.tables.differences import difference_figures, paired_layers, rank_correlation


def chain(times: list[int], names: str) -> Chain:
    layers = tuple(Layer(name, time, 2 * time, 1000, 100) for name, time in zip(names, times, strict=True))
    return Chain("network", layers, 100)


def test_a_pair_says_what_moved() -> None:
    pairs = paired_layers(chain([1, 3], "ab"), chain([1, 1], "ab"))
    assert [pair.differs for pair in pairs] == [False, True]
    assert [pair.share_change for pair in pairs] == [0.25, -0.25]
    assert [pair.saved_bytes for pair in pairs] == [(100, 100), (100, 100)]
    lone = paired_layers(chain([1], "a"), chain([1, 1], "ay"))[1]
    assert (lone.differs, lone.share_change, lone.saved_bytes) == (True, None, (None, 100))


def test_layers_are_matched_by_name_in_order() -> None:
    pairs = paired_layers(chain([1, 2, 3, 4], "abcd"), chain([2, 9, 3, 4], "axcd"))
    assert [(p.name, p.indices) for p in pairs] == [("a", (0, 0)), ("b", (1, 1)), ("c", (2, 2)), ("d", (3, 3))]
    assert [p.time_ratio for p in pairs] == [2.0, 4.5, 1.0, 1.0]


def test_inserted_and_missing_layers_stand_alone() -> None:
    pairs = paired_layers(chain([1, 2, 3], "abc"), chain([1, 5, 2, 3], "aybc"))
    assert [p.indices for p in pairs] == [(0, 0), (None, 1), (1, 2), (2, 3)]
    assert [p.time_ratio for p in pairs] == [1.0, None, 1.0, 1.0]
    back = paired_layers(chain([1, 5, 2, 3], "aybc"), chain([1, 2, 3], "abc"))
    assert [p.indices for p in back] == [(0, 0), (1, None), (2, 1), (3, 2)]


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 31]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)
    # ranks 1 2.5 2.5 4 against 1 3 2 4: covariance 4.5 over the root of 4.5 * 5
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert rank_correlation([1, 1], [1, 2]) == 1.0, "no order to agree or disagree with"
    one, two = (chain([1], "a"), chain([2], "a")), (chain([0, 1], "ab"), chain([1, 2], "ab"))
    figures = [difference_figures(*x, paired_layers(*x), None, None) for x in (one, two)]
    assert [x["rank_correlation"] for x in figures] == [None, pytest.approx(1.0)]
    assert [x.time_ratio for x in paired_layers(*two)] == [None, 2.0]

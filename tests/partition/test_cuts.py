from dataclasses import replace

import numpy as np

from pipeplan.partition.cuts import spread_cuts
from pipeplan.problem import Chain, Layer, Platform, Policy, Problem


def spread(bins, checkpointing, transfers=None):
    """The cuts chosen in 60 layers that take equally long; the last 20 alone keep something for their backward."""
    layers = [Layer(f"l{i}", 10, 20, 100, transfers[i] if transfers else 1, 1000 * (i >= 40)) for i in range(60)]
    problem = Problem(Chain("made", tuple(layers), 1), Platform.flat(2, 10**9, 10**9), Policy())
    return spread_cuts(replace(problem, checkpointing=checkpointing), np.arange(61), bins)


def test_cuts_are_spread_over_time_and_for_segments_over_what_is_saved_too():
    by_time, by_both = spread(20, "stages").tolist(), spread(20, "segments").tolist()
    assert {0, 60} <= set(by_time) & set(by_both)
    assert max(np.diff(by_time)) <= 6
    assert sum(cut > 40 for cut in by_both) > sum(cut > 40 for cut in by_time) + 3


def test_of_the_cuts_of_one_bin_the_smallest_transfer_is_chosen():
    chosen = spread(20, "stages", [1 if i % 3 == 1 else 10**6 for i in range(60)])
    assert all(cut % 3 == 2 for cut in chosen.tolist()[1:-2])


def test_few_cuts_are_not_spread():
    assert spread(46, "stages") is None
    assert len(spread(45, "stages")) <= 46

from __future__ import annotations

import random

import numpy as np
import pytest
from cases.chains import random_chain
from cases.contiguous import assert_attains
from oracles.partition import checkpoints

from pipeplan.check.bounds import any_bound
from pipeplan.cost import memory_model
from pipeplan.deadline import NEVER
from pipeplan.partition.contiguous.contiguous import contiguous
from pipeplan.partition.recompute.priced import Terms, first_terms, nearby, priced_labels
from pipeplan.problem import Chain, Layer, Platform, Problem

FREE = 2**60


@pytest.mark.parametrize("seed", range(40))
def test_labels_are_the_cheapest_at_their_price_and_hold_what_they_say(seed: int) -> None:
    """To the chain's end nothing is cheaper than the label of each price; elsewhere numbers are never too small."""
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(2, 6), edges=seed % 2 == 0, saved=seed % 3 > 0, zero_times=True)
    count = len(chain)
    problem = Problem(chain, Platform.flat(1, 1), checkpointing="segments")
    cuts = np.arange(count + 1)
    caps = np.where(cuts > cuts[:, None], FREE, -1)
    terms = (*(Terms(price, FREE) for price in (0.0, 0.3, 1.0, 4.0)), Terms(1.0, 20))
    found = priced_labels(chain, terms, cuts, caps, caps, NEVER)
    for start in range(count):
        labels = found[start]
        assert len(labels.position) == 1 + len(terms) * (count - start)
        for i in range(1, len(labels.position)):
            figures = memory_model.activations(chain, start, int(labels.position[i]), labels.ranges(i))
            assert figures[0] <= labels.kept[i]
            assert figures[1] <= labels.peak[i]
            assert figures[2] == labels.cost[i]
            assert labels.way[i] in labels.on_terms(int(labels.position[i]), int(labels.cost[i]))
    every = [memory_model.activations(chain, 0, count, ranges) for ranges in checkpoints(problem, 0, count)]
    whole = found[0]
    for i in np.flatnonzero(whole.position == count).tolist():
        price, most = terms[whole.way[i]]
        if most == FREE:
            least = min(cost + price * kept for kept, _, cost in every)
            assert whole.cost[i] + price * whole.kept[i] == pytest.approx(least)
        segments = whole.ranges(i)
        assert all(memory_model.segment(chain, *segment)[1] <= most for segment in segments)


def test_caps_leave_out_what_is_above_them() -> None:
    chain = random_chain(random.Random(5), 6, saved=True)
    cuts = np.array([0, 2, 3, 6])
    free = np.where(np.arange(4) > np.arange(4)[:, None], FREE, -1)
    terms = first_terms(chain, 1000)
    every = priced_labels(chain, terms, cuts, free, free, NEVER)
    cost, peak = (np.where(free > 0, most, -1) for most in (4, 40))
    some = priced_labels(chain, terms, cuts, cost, peak, NEVER)
    for cut in (0, 2, 3):
        rows = [set(zip(x.position, x.kept, x.peak, x.cost, x.way, strict=True)) for x in (every[cut], some[cut])]
        assert rows[1] == {x for x in rows[0] if x[3] <= 4 and x[2] <= 40}
        assert 1 < len(rows[1]) < len(rows[0])


def test_more_terms_in_use_are_varied_less() -> None:
    few = nearby([Terms(1.0, 100)])
    assert {x.most for x in few} == {0, 75, 100, 150}
    assert min(x.price for x in few[1:]) == pytest.approx(2**-0.5)
    many = [Terms(2.0**step, 100) for step in range(30)]
    assert {*many} <= {*nearby(many)}
    assert len(nearby(many)) <= 91
    assert nearby([]) == ()


def test_a_long_chain_is_cut_and_recomputed_anywhere() -> None:
    """510 layers on GPUs that hold a third of what they keep: near the bound on all plans, as no coarse split is."""
    rng = random.Random(3)
    figures = ((1, 30), (2, 60), (0, 9), (1, 20), (10, 90))
    layers = tuple(Layer(f"layer{i}", *(rng.randint(*span) for span in figures)) for i in range(510))
    chain, platform = Chain("long", layers, 10), Platform.flat(4, 14000, 10**9)
    problem = Problem(chain, platform, replicas=False, checkpointing="segments")
    found = next(contiguous(problem))
    assert_attains(problem, found)
    assert found.claimed_period_ns is not None
    assert found.claimed_period_ns < 1.07 * any_bound(problem).period_ns
    assert sum(len(stage.checkpoint) for stage in found.stages) > 20

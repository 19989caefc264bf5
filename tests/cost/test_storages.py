import random

import numpy as np
import pytest
from cases.chains import random_chain

from pipeplan.cost.saved import storages


def chains(count, **options):
    for seed in range(count):
        rng = random.Random(seed)
        yield random_chain(rng, rng.randint(1, 8), **options)


def ranges(chain):
    return [(i, j) for i in range(len(chain) + 1) for j in range(i, len(chain) + 1)]


@pytest.mark.parametrize("edges", [False, True])
def test_totals_are_what_ranges_from_the_first_layer_keep(edges):
    for chain in chains(150, edges=edges, saved=True):
        kept = storages(chain)
        with np.errstate(all="raise"):
            assert kept.totals.tolist() == [
                int(kept.inner(0, i) + kept.of_input(0, i)) for i in range(len(chain) + 1)
            ]  # fmt: skip


def test_what_enters_and_leaves_is_kept_where_a_layer_of_the_range_keeps_its_storage():
    far = 0
    for chain in chains(300, saved=True):
        kept = storages(chain)
        facts = kept.facts
        root = facts.roots(0)
        keepers = [{root[t] for t in tensors} for tensors in facts.kept]
        for start, stop in ranges(chain):
            inside = range(start, stop)
            assert bool(kept.keeps_input(start, stop)) == any(root[start] in keepers[layer] for layer in inside)
            assert bool(kept.keeps_output(start, stop)) == any(root[stop] in keepers[layer] for layer in inside)
            last = [layer for layer in inside if root[stop] in keepers[layer]]
            far += bool(last) and last[-1] < stop - 1  # behind it views, which keep nothing
    assert far > 10


@pytest.mark.parametrize("edges", [False, True])
def test_no_cut_keeps_less_than_the_layers_are_the_first_to_keep(edges):
    exact = 0
    for chain in chains(150, edges=edges, saved=True):
        kept, least = storages(chain), sum(storages(chain).least_first)
        for start in range(1, len(chain)):
            parts = [(0, start), (start, len(chain))]
            held = sum(int(kept.inner(i, j) + kept.of_input(i, j)) for i, j in parts)
            assert held >= least
            exact += held == least
        whole = int(kept.totals[-1])
        assert whole >= least
        exact += whole == least
    assert exact > 100

"""Splits of tables of stages, against all splits of small ones."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np

from pipeplan.integers import NEVER
from pipeplan.partition.tables.split_paths import first_split, least_longest, shortest_split


def test_splits_of_random_tables_are_those_of_all_splits():
    rng, none = random.Random(2), 0
    for _ in range(80):
        stages, cuts = rng.randint(1, 4), rng.randint(5, 7)
        draw = [
            [[rng.choice([NEVER, rng.randint(1, 9)]) for _ in range(cuts)] for _ in range(cuts)] for _ in range(stages)
        ]
        tables = [np.where(np.triu(np.ones((cuts, cuts)), 1) > 0, np.array(table), NEVER) for table in draw]
        every = [(0, *inner, cuts - 1) for inner in combinations(range(1, cuts - 1), stages - 1)]
        costs = {
            split: [int(table[i, j]) for table, (i, j) in zip(tables, pairwise(split), strict=True)] for split in every
        }
        able = {split: cost for split, cost in costs.items() if max(cost) < NEVER}
        if not able:
            none += 1
            assert first_split(tables, True) is first_split(tables, False) is least_longest(tables) is None
            assert shortest_split(tables, []) is None
            continue
        assert first_split(tables, True) == max(able)
        assert first_split(tables, False) == min(able)
        assert least_longest(tables) == min(map(max, able.values()))
        assert min(map(sum, able.values())) == sum(able[shortest_split(tables, [])])
    assert 0 < none < 60

"""What stages miss of a period is nothing just where the bound by groups and sums that are waited for allow it."""

import random
from collections import Counter
from dataclasses import replace

from cases.chains import random_problem

from pipeplan.cost.group_bound import group_bound, may_reach
from pipeplan.cost.stage_graph import stage_graph
from pipeplan.partition.moves.misfits import Misfits
from pipeplan.plan import Stage
from pipeplan.schedule.update_sums import waiting_floor_ns


def test_misses_nothing_just_where_the_bound_allows_the_period():
    seen = Counter()
    for seed in range(80):
        rng = random.Random(seed)
        layers, devices = rng.randint(3, 7), rng.randint(2, 5)
        problem = random_problem(
            rng, layers, devices, weights=("2bw", "stash", "latest"), edges=rng.random() < 0.3, saved=True,
            levels=True, latency=True, speeds=True, duplex=True,
        )  # fmt: skip
        policy = replace(problem.policy, vertical_sync=problem.policy.weights == "stash" and rng.random() < 0.5)
        problem = replace(problem, policy=policy)
        groups = [(0, 1), *((d,) for d in range(2, devices))] if rng.random() < 0.5 else [(d,) for d in range(devices)]
        misfits = Misfits(problem)
        for _ in range(2):  # the second time it knows what such stages cost elsewhere
            stages = tuple(
                Stage(i, i + 1, rng.choice(groups), ((i, i + 1),) if rng.random() < 0.4 else ()) for i in range(layers)
            )
            graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
            least = group_bound(graph) or graph.path_ns
            for period in (least, least - 1, graph.period_floor_ns, graph.path_ns):
                missing = misfits.of(stages, max(1, period))
                waits = not policy.updates_together and waiting_floor_ns(graph) > max(1, period)
                assert (missing == 0) == (may_reach(graph, max(1, period)) and not waits), (seed, period)
                assert min(misfits.of(stages, max(1, period), 0.01), 0.01) == min(missing, 0.01)
                seen[missing == 0] += 1
    assert min(seen.values()) >= 100

"""Tiny problems of all kinds whose memory mostly binds, for bounds to be held against brute force."""

from __future__ import annotations

import random
from dataclasses import replace

from cases.chains import random_problem

from pipeplan.cost.saved import storages
from pipeplan.problem import Problem


def instance(seed: int, most_layers: int = 4) -> Problem:
    """Return a problem of 2 to ``most_layers`` layers on 2 or 3 devices; the kinds take turns."""
    rng = random.Random(seed)
    problem = random_problem(
        rng,
        rng.randint(2, most_layers),
        rng.randint(2, 3) if seed % 7 else 4,
        weights=("2bw", "2bw", "stash"),
        checkpointing=("none", "stages", "segments")[seed % 3],
        replicas=seed % 2 == 0,
        edges=seed % 5 == 0,
        saved=seed % 4 > 1,
        optimizer=seed % 6 == 5,
        levels=seed % 7 == 0,
        latency=seed % 11 == 0,
        speeds=seed % 5 > 2,
        duplex=seed % 3 == 1,
    )
    chain = problem.chain
    if seed % 4 != 3:  # activations count more than weights
        layers = tuple(replace(x, weight_bytes=x.weight_bytes // 4) for x in chain.layers)
        chain = replace(chain, layers=layers)
    if seed % 5 == 2:  # passes work with memory of their own
        chain = replace(chain, layers=tuple(replace(x, working_bytes=rng.randint(0, 6)) for x in chain.layers))
    need = 3 * int(chain.sums.weight_bytes[-1]) + int(storages(chain).totals[-1])
    shares = (2, 3, 4, 6, 9) if seed % 5 > 2 else (rng.choice((2, 3, 4, 5, 6, 9)),)
    devices = tuple(replace(x, memory_bytes=max(8, need * rng.choice(shares) // 6)) for x in problem.platform.devices)
    platform = replace(problem.platform, devices=devices, blocking=seed % 13 == 0, overhead_ns=seed % 11 // 8)
    policy = problem.policy
    if seed % 6 == 5:
        policy = replace(policy, accumulate=rng.choice((4, 16)), optimizer="adam", zero=1)
    return replace(problem, chain=chain, platform=platform, policy=policy)

"""Small random networks whose layers may stand in several orders, and all these orders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from cases.chains import random_chain, saying_what_is_saved
from oracles.partition import contiguous_optimum

from pipeplan.cost.saved import saved_bytes
from pipeplan.planner.layer_orders import several_orders
from pipeplan.problem import Chain, Device, Platform, Policy, Problem


def random_dag(rng: random.Random, layers: int, saved: bool = False, optimizer: bool = False) -> Chain:
    """Return a network in which every layer reads up to two of the ones before, or the input, and some are views."""
    chain = random_chain(rng, layers, saved=saved, optimizer=optimizer)
    edges = [(i, j) for j in range(1, layers) for i in rng.sample(range(j), min(j, rng.choice((0, 1, 1, 2))))]
    layers = tuple(replace(x, saves=None, view_of=None, storage_bytes=None) for x in chain.layers)
    chain = replace(chain, layers=layers, edges=tuple(sorted(edges)))
    return saying_what_is_saved(rng, chain) if saved else chain


def with_idle_layers(rng: random.Random, chain: Chain) -> Chain:
    """Return ``chain`` in which some layers take no time and have no weights, and some of these no output."""
    layers = []
    for i, layer in enumerate(chain.layers):
        if 0 < i < len(chain) - 1 and rng.random() < 0.5:
            size = rng.choice((0, layer.output_bytes))
            layer = replace(layer, forward_ns=0, backward_ns=0, weight_bytes=0, optimizer_ns=0, output_bytes=size)
            layer = replace(layer, saved_bytes=None, saves=None, view_of=None, storage_bytes=None)
        layers.append(layer)
    return replace(chain, layers=tuple(layers))


def free_problem(seed: int, layers: int = 5) -> Problem | None:
    """Return a problem whose layers may stand in several orders and whose memory sometimes binds; None for some.

    In some there are layers that take no time, in some unequal devices.
    """
    rng = random.Random(seed)
    chain = random_dag(rng, layers, saved=seed % 3 == 0, optimizer=seed % 4 == 0)
    if seed % 5 > 2:
        chain = with_idle_layers(random.Random(seed + 10**6), chain)
    held = 3 * int(chain.sums.weight_bytes[-1]) + int(saved_bytes(chain, 0, layers))
    devices = rng.choice((2, 3))
    platform = Platform.flat(devices, int(held * rng.choice((0.5, 0.7, 1, 3))), rng.choice((10**9, 3 * 10**9)))
    if seed % 7 > 4:
        platform = _unequal(random.Random(seed + 10**6), platform)
    policy = Policy(rng.choice(("2bw", "2bw", "stash", "flush")), rng.choice((1, 2)))
    replicas, checkpointing = rng.random() < 0.2, rng.choice(("none", "stages", "segments"))
    return Problem(chain, platform, policy, replicas, checkpointing) if several_orders(chain) else None


def _unequal(rng: random.Random, platform: Platform) -> Platform:
    """Return ``platform`` whose devices have several speeds and memories."""
    speeds, shares = (Fraction(1), Fraction(3, 2)), (Fraction(1), Fraction(2, 3))
    devices = (Device(int(x.memory_bytes * rng.choice(shares)), rng.choice(speeds)) for x in platform.devices)
    return replace(platform, devices=tuple(devices))


def best_of_all_orders(problem: Problem) -> int | None:
    """Return the shortest period of contiguous stages in any order of the layers, by brute force."""
    best = None
    for order in all_orders(problem.chain):
        found = contiguous_optimum(replace(problem, chain=problem.chain.reordered(order)))
        if found is not None and (best is None or found[0] < best):
            best = found[0]
    return best


def all_orders(chain: Chain) -> Iterator[tuple[int, ...]]:
    """Yield every order of the layers in which each stands behind what it reads, and the last one stays last."""
    reads = [{i for i, j in chain.edges if j == layer} for layer in range(len(chain))]

    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(chain) - 1:
            yield (*order, len(chain) - 1)
            return
        for layer in range(len(chain) - 1):
            if layer not in order and reads[layer] <= set(order):
                yield from extend((*order, layer))

    yield from extend(())

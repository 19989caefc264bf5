"""How short can a period be where each stage chooses among variants of its layers, each on groups of GPUs? By averages.

A layer takes a time of all GPUs of its group, ``w (f + b)``, and bytes of each, held as in :mod:`.runs`. All GPUs
together have so much time and so many bytes in a period, so at any price of a byte the layers, each as its cheapest
variant, stored or recomputed, must not cost more than both are worth. That is a Lagrange bound: every price gives one.
"""

from __future__ import annotations

from functools import lru_cache
from math import floor

import numpy as np

from ...cost import memory_model, relaxations, time_model
from ...cost.saved import first_saved
from ...integers import ceil_div
from ...problem import Problem
from .averages import load_bound
from .facts import Floats
from .strong import Part, Proved

PRICES = 2.0 ** np.arange(-6, 17)  # of the bytes of a GPU, in units of its time
ROUNDING = 1e-9
_FINE = 64  # parts of a byte, to which what layers hold is rounded


@lru_cache(maxsize=16)
def choosing_proof(problem: Problem) -> Proved:
    """Return the best of the bounds by work, by the largest layer and by what is held; remembered."""
    found: list[tuple[int, Part]] = [
        (max(1, load_bound(relaxations.relative(problem))), "work"),
        (_layer_bound(problem), "layer"),
    ]
    low, part = max(found, key=lambda one: one[0])
    held = _held_bound(problem, low)
    return Proved(low, part, True) if held is None else Proved(max(low, held), "averages" if held > low else part)


def _layer_bound(problem: Problem) -> int:
    """Return the time of the largest layer in its quickest variant, shared by all groups where replicas are allowed."""
    of_layers = (
        min(
            ceil_div(time_model.scaled(x.forward_ns + x.backward_ns, p.platform.devices[0].speed), p.most_replicas)
            for x, p in zip(own, problem.uniform, strict=True)
        )
        for own in zip(*(p.chain.layers for p in problem.uniform), strict=True)
    )
    return int(max(of_layers))


def _held_bound(problem: Problem, low: int) -> int | None:
    """Return a period of ``low`` ns or more below which time and bytes don't suffice at some price of a byte; None
    where bytes don't at any period."""
    platform = problem.platform
    memory = platform.devices[0].memory_bytes
    time, held, fixed = _menu(problem)
    if float(fixed.min(axis=0).sum()) - len(problem.chain) > memory * len(platform):
        return None
    prices = (PRICES / max(1, memory))[:, None, None]

    def short(period: float) -> bool:
        cost = (time + prices * (held + period * fixed)).min(axis=1).sum(axis=1)
        worth = period * len(platform) * (1 + prices[:, 0, 0] * (memory + 1))
        return bool((cost * (1 - ROUNDING) > worth * (1 + ROUNDING)).any())

    above, below = float(low), float(low)
    while short(above) and above < 1e18:
        below, above = above, 2 * above
    while above - below > max(1.0, below * 1e-6):
        middle = (above + below) / 2
        below, above = (middle, above) if short(middle) else (below, middle)
    return max(low, floor(below))


def _menu(problem: Problem) -> tuple[Floats, Floats, Floats]:
    """Return for every way to run each layer, shape (ways, L), the ns of all GPUs that it takes, bytes times ns that it
    holds, and bytes that it holds always, of one copy of its weights."""
    policy, rows = problem.policy, []
    passes = relaxations.extreme(problem.chain, min).sums
    total = passes.forward_ns + passes.backward_ns
    if policy.drains:  # some schedules leave the gradients of weights for later
        total = total - passes.backward_weight_ns
    life = (total[-1] - total[:-1]).astype(np.float64)
    for own in problem.uniform:
        chain, width, speed = own.chain, own.chain.tensor, float(own.platform.devices[0].speed)
        layers = chain.layers
        forward, backward = (
            np.array([getattr(x, name) for x in layers], float) for name in ("forward_ns", "backward_ns")
        )
        late = np.array([x.weight_part_ns for x in layers], float) * policy.drains
        sizes, fixed = np.array(first_saved(chain), float), np.array([_copy(own, x) for x in range(len(chain))], float)
        rows.append((width * (forward + backward) / speed, width * sizes * life / speed, width * fixed))
        if problem.checkpointing != "none":
            again = width * sizes * (backward - late) / speed
            rows.append((width * (2 * forward + backward) / speed, np.minimum(again, rows[-1][1]), width * fixed))
    time, held, fixed_bytes = (np.stack(x) for x in zip(*rows, strict=True))
    return time, held, fixed_bytes


def _copy(problem: Problem, layer: int) -> float:
    """Return the bytes of a layer's weights, gradient and state on all replicas together, at least."""
    policy, own = problem.policy, problem.chain.layers[layer]
    size, count = _FINE * own.weight_bytes, _FINE * own.parameter_count
    if policy.offload:  # a bucket of the state is on the device at a time, whatever it is of
        return int(memory_model.gradient_bytes(policy, size, count)) / _FINE
    return int(memory_model.weights_bytes(policy, size, count, 1)) / _FINE

"""Do the activations, averaged over time, fit into all devices together at a given period?

Over one period every layer's tensors are held for its life by one microbatch, and what is fixed in a run for all of it,
on each of its devices: the sum over all runs is at most the period times all memory. What is recomputed is held for
its backward alone, and its forward is paid with idle time, of which there is no more than the devices' work leaves. A
Lagrange multiplier prices that, so that each layer decides by itself and the cheapest way to cut the chain into runs
is a shortest path from the last cut to the first; each cut adds the way over it to the lives of all layers before.
Paths are told apart by that sum, as far as it matters. ALGORITHMS section 11.3, condition 5.
"""

from __future__ import annotations

import numpy as np

from ...integers import Ints
from .facts import Facts, Floats
from .runs import ROUNDING, Runs, recomputations

GROUPS = 12  # of paths by the time that their cuts add
SEARCHED = 4  # steps towards the best price


def pooled_excess(facts: Facts, runs: Runs, tau: int, price: float, forward: Floats) -> float:
    """Return by how much what is held in a period of ``tau`` ticks exceeds all memory, in bytes, at least.

    ``price`` is in bytes, per tick of recomputation, which takes each layer ``forward`` ticks.
    """
    platform = facts.problem.platform
    count, memory = facts.count, sum(device.memory_bytes for device in platform.devices)
    fastest = max(device.speed for device in platform.devices)
    idle = float(sum(device.speed for device in platform.devices) / fastest) * tau - float(facts.behind[0])
    fixed = cheapest(facts, runs, facts.fixed_alone) * float(tau)
    recomputed = facts.while_recomputed * facts.backward
    dropped = recomputed + price * forward if facts.recomputes else np.full(count, np.inf)
    dropped = np.where(np.isnan(dropped), np.inf, dropped)
    beyond = np.maximum(facts.while_recomputed - facts.input_kept, 0) * facts.backward + price * facts.forward
    costs = np.full((count + 1, GROUPS), np.inf)
    added = np.full((count + 1, GROUPS), np.inf)
    costs[count, 0] = added[count, 0] = 0
    widest = max(1.0, 2.0 * max(0, runs.delay[0] - int(facts.behind[0])) + float(facts.hop.max()))
    for end in range(count, 0, -1):
        groups = np.flatnonzero(np.isfinite(costs[end]))
        if not len(groups) or not np.isfinite(fixed[:end, end]).any():
            continue
        more = added[end, groups] + float(facts.hop[end])
        life = np.maximum(facts.behind[:end] + more[:, None], runs.lives[end])
        layers = np.minimum(facts.kept[:end] * life, dropped[:end])
        first = facts.first_kept[:end] * life
        if facts.recomputes:
            first = np.minimum(first, facts.input_kept[:end] * life + beyond[:end])
        total = np.cumsum(layers[:, ::-1], axis=1)[:, ::-1] - layers + first
        found = costs[end, groups][:, None] + fixed[:end, end] + total
        into = np.minimum(GROUPS - 1, (more * GROUPS / widest)).astype(int)
        for row, group in enumerate(into.tolist()):
            better = np.isfinite(found[row])
            np.minimum(costs[:end, group], found[row], out=costs[:end, group])
            added[:end, group] = np.where(better, np.minimum(added[:end, group], more[row]), added[:end, group])
    least = float(costs[0].min()) * (1 - ROUNDING) - price * idle * (1 + ROUNDING)
    return least / tau - memory * (1 + ROUNDING)


def cheapest(facts: Facts, runs: Runs, held: Floats | Ints) -> Floats:
    """Return what runs take of ``held``, (R, L + 1, L + 1), on all their devices; infinite where none can be."""
    replicas = np.array([spread.low for spread in facts.spreads], dtype=np.float64)
    return np.asarray(np.where(runs.possible, replicas[:, None, None] * held, np.inf).min(axis=0))


def too_much(facts: Facts, runs: Runs, tau: int, price: float) -> bool:
    """Whether more is held than fits, at some price of recomputation: first ``price``, then what exceeds more."""
    if not facts.recomputes:
        return pooled_excess(facts, runs, tau, 0.0, facts.forward.astype(np.float64)) > 0
    menus = recomputations(facts)

    def excess(price: float) -> float:
        return max(pooled_excess(facts, runs, tau, price, forward) for forward in menus)

    best, factor = excess(price), 4.0
    for _ in range(SEARCHED):
        if best > 0:
            return True
        for other in (price * factor, price / factor):
            found = excess(other)
            if found > best:
                best, price = found, other
                break
        else:
            factor = factor**0.5
    return best > 0

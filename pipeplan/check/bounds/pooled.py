"""Do the activations, averaged over time, fit into all devices together at a given period?

Over one period every layer's tensors are held for its life by one microbatch, and what is fixed in a run for all of it,
on each of its devices: the sum over all runs is at most the period times all memory. A recomputed segment holds its
input for its life, what its layers keep only from their forward's repetition to their backward, and costs their
forwards, which idle time pays, of which there is no more than the devices' work leaves. A Lagrange multiplier prices
that, so that the cheapest segments of every run follow from the chain alone (:class:`Segments`), and the cheapest
way to cut it into runs is a shortest path from the last cut to the first; each cut adds the way over it to the lives of
all layers before. Paths are told apart by that sum, as far as it matters. ALGORITHMS section 11.3, condition 5, with
segments instead of single layers.
"""

from __future__ import annotations

import numpy as np

from ...integers import NEVER, Ints
from .facts import Facts, Floats
from .runs import ROUNDING, Runs

GROUPS = 12  # of paths by the time that their cuts add
STEPS = 12  # by which the price of recomputation may be doubled or halved
ADDED = (0, *(2.0**power for power in range(-7, 5)))  # to lives, in units of all work: tables are made for these


class Segments:
    """What the activations of runs cost at least by prices of recomputation, whatever is recomputed.

    Tables ``[first, end]`` of bytes times ticks held in every period, and bytes times ticks paid.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.added = np.array(ADDED) * float(facts.behind[0])
        self._known: dict[tuple[int | None, int], Floats] = {}
        worth = facts.kept.astype(np.float64) * facts.behind[:-1] / np.maximum(facts.forward, 1)
        some = (facts.forward > 0) & (facts.kept > 0)
        self._price = float(np.median(worth[some])) if some.any() else 1.0

    def price(self, step: int | None) -> float:
        """Return the price of a step, in bytes: per tick of recomputation, what is held for ticks. None for nothing."""
        return 0.0 if step is None else self._price * 2.0**step

    def costs(self, step: int | None, added: Floats) -> Floats:
        """Return the tables' columns for lives that are longer by ``added`` ticks, (len(added), L + 1, L + 1)."""
        places = np.searchsorted(self.added, added, side="right") - 1
        return np.stack([self._table(step, int(place)) for place in places])

    def _table(self, step: int | None, place: int) -> Floats:
        if (step, place) not in self._known:
            self._known[step, place] = self._made(self.price(step), self.added[place])
        return self._known[step, place]

    def _made(self, price: float, added: float) -> Floats:
        facts, count = self.facts, self.facts.count
        life = facts.path_behind[:-1] + added
        inside = np.full((count + 1, count + 1), np.inf)  # behind other parts of the run
        first = inside.copy()
        inside[count, count] = 0
        for i in range(count - 1, -1, -1):
            inside[i, i] = 0
            best = np.full(count + 1, np.inf)
            if facts.recomputes:
                segments = self._segments(i, price) + facts.input_kept[i] * life[i]
                best = (segments[:, None] + inside[i + 1 :]).min(axis=0)
            inside[i, i + 1 :] = np.minimum(best, facts.kept[i] * life[i] + inside[i + 1])[i + 1 :]
            first[i, i + 1 :] = np.minimum(best, facts.first_kept[i] * life[i] + inside[i + 1])[i + 1 :]
        return first

    def _segments(self, start: int, price: float) -> Floats:
        """Return what recomputed segments from layer ``start`` on cost beside their input, by where they end."""
        facts = self.facts
        kept = facts.while_recomputed[start, start:].astype(np.float64)
        behind = facts.path_behind[start:].astype(np.float64)
        held = np.cumsum(kept * behind[:-1]) - np.cumsum(kept) * behind[1:]
        return np.asarray(np.maximum(held, 0) * (1 - ROUNDING) + price * np.cumsum(facts.forward[start:]))


def pooled_excess(segments: Segments, runs: Runs, tau: int, step: int) -> float:
    """Return by how much what is held in a period of ``tau`` ticks exceeds all memory, in bytes, at least."""
    facts = segments.facts
    platform, count = facts.problem.platform, facts.count
    memory = sum(device.memory_bytes for device in platform.devices)
    fastest = max(device.speed for device in platform.devices)
    idle = float(sum(device.speed for device in platform.devices) / fastest) * tau - float(facts.behind[0])
    fixed = cheapest(facts, runs, facts.fixed_alone) * float(tau)
    again = np.where(runs.possible, facts.recomputed, NEVER).min(axis=0) * (1 - ROUNDING)
    costs = np.full((count + 1, GROUPS), np.inf)
    added = np.full((count + 1, GROUPS), np.inf)
    costs[count, 0] = added[count, 0] = 0
    widest = max(1.0, 2.0 * max(0, runs.delay[0] - int(facts.path_behind[0])) + float(facts.hop.max()))
    for end in range(count, 0, -1):
        groups = np.flatnonzero(np.isfinite(costs[end]))
        if not len(groups) or runs.turning[end] >= NEVER:
            continue
        more = np.maximum(added[end, groups] + float(facts.hop[end]), runs.turning[end] - int(facts.path_behind[end]))
        held = segments.costs(step, more)[:, :end, end]
        if facts.recomputes:
            for lower in (None, step - 2):
                least = segments.costs(lower, more)[:, :end, end]
                held = np.maximum(held, least + (segments.price(step) - segments.price(lower)) * again[:end, end])
        found = costs[end, groups][:, None] + fixed[:end, end] + held
        into = np.minimum(GROUPS - 1, more * GROUPS / widest).astype(int)
        for row, group in enumerate(into.tolist()):
            better = np.isfinite(found[row])
            np.minimum(costs[:end, group], found[row], out=costs[:end, group])
            added[:end, group] = np.where(better, np.minimum(added[:end, group], more[row]), added[:end, group])
    paid = segments.price(step) * idle * (1 + ROUNDING) if facts.recomputes else 0.0
    return (float(costs[0].min()) * (1 - ROUNDING) - paid) / tau - memory * (1 + ROUNDING)


def cheapest(facts: Facts, runs: Runs, held: Floats | Ints) -> Floats:
    """Return what runs take of ``held``, (R, L + 1, L + 1), on all their devices; infinite where none can be."""
    replicas = np.array([spread.low for spread in facts.spreads], dtype=np.float64)
    return np.asarray(np.where(runs.possible, replicas[:, None, None] * held, np.inf).min(axis=0))


def too_much(segments: Segments, runs: Runs, tau: int) -> bool:
    """Whether more is held than fits, at some price of recomputation; the excess is concave in the price."""
    best, step = pooled_excess(segments, runs, tau, 0), 0
    if best > 0 or not segments.facts.recomputes:
        return best > 0
    stride = 4
    while stride:
        for other in (step + stride, step - stride):
            if abs(other) > STEPS:
                continue
            found = pooled_excess(segments, runs, tau, other)
            if found > 0:
                return True
            if found > best:
                best, step = found, other
                break
        else:
            stride //= 2
    return False

"""How short can a period of a long chain be, by all that is held over time, where what is recomputed is in segments?

For chains whose tables of runs would be too large (``pooled`` has those). Weights count once, or on as many devices as
one stage has; the layers are taken as one run without ends, which every cutting into runs costs at least. A stored
layer holds what it keeps for its life, a recomputed segment its input, and what its layers keep from their forward's
repetition to their backward. For any price of recomputation the cheapest choice is a shortest path over the layers;
what all devices' idle time pays at that price, and all their memory, bound the period.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from ...integers import Ints
from .averages import Case, cases
from .facts import Facts, Floats
from .runs import ROUNDING

PIECE = 64  # layers; of longer segments, what is held from one such piece to the next is left out
PRICES = 12  # that are tried first, each four times the one before
FINER = 4  # times that prices are tried between those around the best


def long_bound(facts: Facts) -> int:
    """Return a period (ns) below which no plan is, for chains of any length; 0 where nothing may be recomputed."""
    if not facts.recomputes:
        return 0
    choices, fastest = Choices(facts), max(device.speed for device in facts.problem.platform.devices)
    possible = [case for case in cases(facts.problem) if case.room_bytes >= 0]
    if not possible:
        return 0
    rooms = np.array([case.room_bytes for case in possible], dtype=np.float64)
    speeds = np.array([float(case.speed / fastest) for case in possible])
    least = np.array([_alone(facts, case, float(speed)) for case, speed in zip(possible, speeds, strict=True)])

    def tried(price: float) -> Floats:
        return (choices.cost(price) + price * float(facts.behind[0])) / (rooms + price * speeds)

    prices = [choices.usual * 4.0 ** (place - PRICES // 2) for place in range(PRICES)]
    found = [tried(price) for price in prices]
    for finer in range(FINER):
        best = np.argmax(found, axis=0)  # the price of each case's longest period
        binding = int(np.argmin(np.maximum(np.max(found, axis=0), least)))
        around = prices[int(best[binding])]
        for power in (-(0.5 ** (finer + 1)), 0.5 ** (finer + 1)):
            prices.append(around * 4.0**power)
            found.append(tried(prices[-1]))
    ticks = float(np.maximum(np.max(found, axis=0), least).min()) * (1 - ROUNDING)
    return ceil(ticks / facts.ticks)


def _alone(facts: Facts, case: Case, speed: float) -> float:
    """Return the least period (ticks) of a case by its work and sums alone."""
    return max(float(facts.behind[0]) / speed, float(case.floor_ns * facts.ticks))


class Choices:
    """What the activations of a whole chain cost at least, whatever is recomputed, by prices of recomputation."""

    def __init__(self, facts: Facts) -> None:
        count, self._piece = facts.count, min(PIECE, facts.count)
        life = facts.path_behind.astype(np.float64)
        self._forward = facts.forward_before.astype(np.float64)
        self._stored = np.minimum(facts.kept, facts.first_kept) * life[:-1]
        self._input = facts.input_kept * life[:-1]
        self._transient = _transients(facts.least_recomputed, life, self._piece)
        worth = self._stored / np.maximum(facts.forward, 1)
        some = (facts.forward > 0) & (self._stored > 0)
        self.usual = float(np.median(worth[some])) if some.any() else 1.0  # bytes: a price that matters
        self._count = count

    def cost(self, price: float) -> float:
        """Return bytes times ticks held in every period, and paid at ``price`` bytes for a tick of recomputation."""
        count, piece, paid = self._count, self._piece, price * self._forward
        ahead = np.full(count + 1 + piece, np.inf)  # of layers[i:] that begin with no segment, with all paid before
        inside = np.full(count + 1 + piece, np.inf)  # the same where a segment goes on
        ahead[count] = paid[count]
        for i in range(count - 1, -1, -1):
            ends = float((self._transient[i] + ahead[i + 1 : i + 1 + piece]).min())
            inside[i] = min(ends, float(self._transient[i, -1] + inside[i + piece]))
            stored = self._stored[i] + ahead[i + 1] - (paid[i + 1] - paid[i])
            ahead[i] = min(stored, self._input[i] + inside[i])
        return float(ahead[0])


def _transients(kept: Ints, life: Floats, piece: int) -> Floats:
    """Return what the layers of segments of 1, 2, .. ``piece`` layers hold beside their input, (L, piece)."""
    count = len(kept)
    sizes = np.concatenate([[0.0], np.cumsum(kept.astype(np.float64))])
    weighted = np.concatenate([[0.0], np.cumsum(kept * life[:-1])])
    ends = np.minimum(np.arange(count)[:, None] + 1 + np.arange(piece), count)
    held = weighted[ends] - weighted[:-1, None] - (sizes[ends] - sizes[:-1, None]) * life[ends]
    return np.asarray(np.maximum(held, 0.0))

"""Which runs of layers can one group of devices have at a given period, on how few, and how long must they hold what?

The conditions of one run, ``layers[j:k]`` on r devices at period T, each necessary:

1. its work takes at most r T;
2. the all-reduce of its gradient takes at most T;
3. a device holds its weights, two buffers for either side of each end that is a cut, and the least that one microbatch
   needs at its worst instant, whatever is recomputed;
4. when the run's first forward starts, ceil(life / (r T)) microbatches are inside its first layer, at least
   floor(life / (r T)) inside each other one, and what they keep has to fit, less what recomputation in the time
   that the run's work leaves can take off.

A layer's *life* is the time from its forward to the end of its backward: the work of all layers from it on, and the way
over the cuts behind, both as in 1F1B* (what doesn't fit into a period waits for the next). Runs are looked at from
the last to the first, so the least of what lies behind a cut is known. ALGORITHMS section 11.3, conditions 1 to 4.

Of a run's layers q and i, its last, one device does all. Let microbatches m and m' follow each other by n of its
periods. Either (a) F_i of m' begins before B_q of m ends, or (b) not, but F_q of m' begins before B_i of m ends, or
(c) between that B_i and this F_i the device does B_i to B_q of m and F_q to F_i of m', and n periods are at least
life_i and the work of the layers from q to before i. Where they aren't,

5. at some instant n + 1 microbatches are inside q and the layers before it and one inside i (a: when F_i of m' begins;
   b: when F_q of m' or F_i of m does, whichever is later), and both have to fit;
6. the life of q is at least (a) n periods, the forwards from q to i, and B_q, or (b) what the layers would take at
   once, and all their backwards once more, which m' waits for.

And do the activations, averaged over time, fit into all devices together? Over one period every layer's tensors are
held for its life by one microbatch, and what is fixed in a run for all of it, on each of its devices: the sum over all
runs is at most the period times all memory. A recomputed segment holds its input for its life, what its layers keep
only from their forward's repetition to their backward, and costs their forwards, which idle time pays, of which there
is no more than the devices' work leaves. A Lagrange multiplier prices that, so that the cheapest segments of every run
follow from the chain alone (:class:`Segments`), and the cheapest way to cut it into runs is a shortest path from the
last cut to the first; each cut adds the way over it to the lives of all layers before. Paths are told apart by that
sum, as far as it matters. ALGORITHMS section 11.3, condition 5, with segments instead of single layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...integers import NEVER, Ints, ceil_div, extend
from .facts import Facts, Floats

ROUNDING = 1e-9  # relative, of sums of products in floating point
LONGEST = 2**50  # ticks of a period, with replicas far below 2**63
LEVELS = 6  # numbers of microbatches inside a layer that are looked at, of all


@dataclass(frozen=True)
class Runs:
    """What :func:`runs_at` finds; tables ``[first, end]`` by the facts' ``spreads``, (R, L + 1, L + 1).

    ``possible``; ``always``, bytes of a device that the run takes at every instant; ``spare``, bytes that it takes
    more at some; ``at_once``, bytes that it takes when its device starts the last of all its layers' forwards, where
    the same microbatch is inside all others. ``delay``, (L + 1,): least ticks from when a microbatch reaches a cut
    until it comes back there, NEVER where no runs lead; ``turning`` the same from when a run ends before the cut, with
    the way over it.
    """

    possible: npt.NDArray[np.bool_]
    always: Ints
    spare: Ints
    at_once: Ints
    delay: list[int]
    turning: list[int]

    @property
    def complete(self) -> bool:
        """Whether the chain can be cut into possible runs."""
        return self.delay[0] < NEVER


def runs_at(facts: Facts, period: int | None) -> Runs:
    """Return the runs that are possible at ``period`` ns; None: at periods so long that only memory matters."""
    count, spreads = facts.count, facts.spreads
    tau = NEVER if period is None else period * facts.ticks
    devices = np.array([spread.high for spread in spreads], dtype=np.float64)
    steps = np.array([spread.high * min(tau, LONGEST) for spread in spreads], dtype=np.int64)  # of one replica, ticks
    possible = np.zeros((len(spreads), count + 1, count + 1), dtype=np.bool_)
    always, spare, at_once = (np.zeros(possible.shape, dtype=np.int64) for _ in range(3))
    delay = [NEVER] * count + [0]
    before_cut = [NEVER] * (count + 1)
    prices, again = _price_levels(facts, int(devices[-1]) * 4), facts.recomputed
    for end in range(count, 0, -1):
        turning = _before_cut(facts, end, delay[end], tau)
        if turning is None:
            continue
        before_cut[end] = turning
        life = _lives(facts, end, turning, tau)
        load = facts.behind[:end] - facts.behind[end] + facts.blocked[:end] + facts.blocked[end]
        idle = devices[:, None] * float(tau) - load
        fixed, memory, peak = facts.fixed[:, :end, end], facts.memories[:, None], facts.least_peak[:end, end]
        fits = (idle >= again[:, :end, end]) & (fixed + peak <= memory)
        inside, more = np.zeros(fits.shape, dtype=np.int64), np.broadcast_to(peak, fits.shape)
        lasting = inside
        if period is not None:
            fits &= facts.sync_ns[:, :end, end] <= period
        if period is not None and facts.periodic:
            inside = life // steps[:, None]
            lasting, more = _inside(facts, end, life, steps, idle, prices)
            fits &= fixed + lasting + more <= memory
        possible[:, :end, end] = fits
        always[:, :end, end] = facts.fixed_alone[:, :end, end] + lasting
        spare[:, :end, end] = more
        at_once[:, :end, end] = facts.fixed_alone[:, :end, end] + _held(facts, np.maximum(inside, 1), idle, prices)
        for start in np.flatnonzero(fits.any(axis=0)).tolist():
            delay[start] = min(delay[start], int(life[start]))
    return Runs(possible, always, spare, at_once, delay, before_cut)


def _inside(facts: Facts, end: int, life: Ints, steps: Ints, idle: Floats, prices: Floats) -> tuple[Ints, Ints]:
    """Return what activations of the runs up to ``end`` take at every instant, and what they take more at some.

    That is when the first forward starts, or when a microbatch comes to a layer, beside those inside each other one.
    """
    first = _first(facts)[:end]
    inside, most = life // steps[:, None], ceil_div(life, steps[:, None])
    lasting = _held(facts, inside, idle, prices)
    more = (most - inside) * first
    at_once = life[-1] + facts.path_behind[:end] - facts.path_behind[end - 1]
    beside_one = _arrivals(np.maximum(inside, 1), ceil_div(at_once, steps[:, None]))
    for there in (*_arrivals(inside, most), *beside_one):
        more = np.maximum(more, _held(facts, there, idle, prices) - lasting)
    return lasting, more


def _arrivals(inside: Ints, most: Ints) -> Iterator[Ints]:
    """Yield how many microbatches are inside each layer of a run at least at some instants: ``inside`` at all.

    At one as many as ``most`` says are inside a layer and those before it. Of layers with equally many the last counts.
    """
    highest = int(most.max(initial=0))
    levels = range(1, highest + 1) if highest <= LEVELS else np.linspace(1, highest, LEVELS).astype(int).tolist()
    for level in levels:
        yield np.where(most >= level, np.maximum(level, inside), inside)


def _before_cut(facts: Facts, end: int, delay: int, tau: int) -> int | None:
    """Return the delay before the way over the cut at ``end``, None where there is none."""
    hop = int(facts.hop[end])
    if delay >= NEVER or facts.link_load[end] > tau:
        return None
    if facts.waits and facts.links_wait and hop:
        return extend(delay, hop, tau)
    return delay + hop


def _lives(facts: Facts, end: int, delay: int, tau: int) -> Ints:
    if not facts.waits:
        plain: Ints = delay + facts.path_behind[:end] - facts.path_behind[end]
        return plain
    found = np.zeros(end, dtype=np.int64)
    forward = (facts.forward_before[1 : end + 1] - facts.forward_before[:end]).tolist()
    work = (facts.behind[:end] - facts.behind[1 : end + 1]).tolist()
    there = back = 0  # through the layers of the run from this one to the last
    for layer in range(end - 1, -1, -1):
        if work[layer] > tau:
            found[: layer + 1] = delay + facts.behind[: layer + 1] - facts.behind[layer + 1]  # no run has it
            break
        delay = extend(delay, work[layer], tau)
        own = work[layer] - forward[layer]
        if layer < end - 1:
            plain_life = int(found[-1]) + there + back - work[-1] + work[layer]
            there, back = there + forward[layer], back + own
            periods = ceil_div(plain_life, tau) - 1
            if periods:
                delay = max(delay, min(periods * tau + there + own, plain_life + back))
        else:
            there, back = forward[layer], own
        found[layer] = delay
    return found


def _price_levels(facts: Facts, most: int) -> Floats:
    """Return prices of recomputation, bytes per tick, at which what it takes off may be bounded: any are valid."""
    if not facts.recomputes:
        return np.full(1, np.inf)
    worth = facts.kept[facts.forward > 0] / facts.forward[facts.forward > 0]
    worth = worth[worth > 0]
    if not len(worth):
        return np.ones(1)
    low, high = float(np.quantile(worth, 0.1)), float(worth.max()) * most
    return np.geomspace(low, max(high, 2 * low), 9)


def _first(facts: Facts) -> Ints:
    return np.minimum(facts.first_kept, facts.input_kept) if facts.recomputes else facts.first_kept


def _held(facts: Facts, inside: Ints, idle: Floats, prices: Floats) -> Ints:
    """Return what all layers of each run keep at least when ``inside`` microbatches are inside each."""
    return inside * _first(facts)[: inside.shape[1]] + _least_held(facts, inside, idle, prices)


def _least_held(facts: Facts, inside: Ints, idle: Floats, prices: Floats) -> Ints:
    """Return what the layers of each run keep at least, its first one beside its input, when ``inside`` microbatches
    are inside each.

    Recomputing layer i costs its forward, of the run's ``idle`` time. For any price of that time the least of what is
    kept or paid, less the price of all of it, is a bound.
    """
    size = inside.shape[1]
    held = inside * facts.kept[:size]
    if not facts.recomputes:
        return _behind(held)
    again = prices[None, :, None] * facts.forward[:size]
    paid = _behind(np.minimum(held[:, None, :], again))
    whole = np.where(facts.forward[:size] > idle[:, None, :], np.inf, again)  # every microbatch again, or none
    paid += np.minimum((inside * (facts.first_kept - _first(facts))[:size])[:, None, :], whole)
    best = (paid - prices[None, :, None] * idle[:, None, :]).max(axis=1)
    found: Ints = (np.maximum(best, 0) * (1 - ROUNDING)).astype(np.int64)
    return found


def _behind(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the sums of all behind each place, along the last axis."""
    total = np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]
    found = np.zeros_like(values)
    found[..., :-1] = total[..., 1:]
    return found


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

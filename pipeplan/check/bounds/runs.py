"""Which runs of layers can one group of devices have at a given period, on how few, and how long must they hold what?

The conditions of one run, ``layers[j:k]`` on r devices at period T, each necessary:

1. its work takes at most r T;
2. the all-reduce of its gradient takes at most T;
3. a device holds its weights, two buffers for either side of each end that is a cut, and the least that one microbatch
   needs at its worst instant, whatever is recomputed;
4. when the run's first forward starts, ceil(life / (r T)) microbatches are inside its first layer, at least
   floor(life / (r T)) inside each other one, and what they keep has to fit: of recomputed segments their inputs, where
   the time that the run's work leaves suffices for all their forwards. For any price of that time a dynamic program
   finds the least of what is kept or paid; what exceeds the memory, over the price, is time that the run needs.

A layer's *life* is the time from its forward to the end of its backward: the work of all layers from it on, and the way
over the cuts behind, both as in 1F1B* (what doesn't fit into a period waits for the next), and what whole runs must
recompute. Runs are looked at from the last to the first, so the least of what lies behind a cut is known. ALGORITHMS
section 11.3, conditions 1 to 4.

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

import numpy as np
import numpy.typing as npt

from ...integers import NEVER, Ints, ceil_div, extend
from .facts import Facts, Floats

ROUNDING = 1e-9  # relative, of sums of products in floating point
LONGEST = 2**50  # ticks of a period, with replicas far below 2**63
FREE = 2.0**-60  # bytes per tick
LEVELS = 6  # numbers of microbatches inside a layer that are looked at, of all


@dataclass(frozen=True)
class Runs:
    """What :func:`runs_at` finds; tables ``[first, end]`` by the facts' ``spreads``, (R, L + 1, L + 1).

    ``possible``; ``again``, ticks of recomputation for a microbatch, at least; ``always``, bytes of a device that the
    run takes at every instant; ``spare``, bytes that it takes more at some; ``at_once``, bytes that it takes when its
    device starts the last of all its layers' forwards, where the same microbatch is inside all others.
    ``delay``, (L + 1,): least ticks from when a microbatch reaches a cut until it comes back there, NEVER where no runs
    lead; ``turning`` the same from when a run ends before the cut, with the way over it.
    """

    possible: npt.NDArray[np.bool_]
    again: Floats
    always: Floats
    spare: Floats
    at_once: Floats
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
    prices = _price_levels(facts, int(devices[-1]) * 4)
    shape = (len(spreads), count + 1, count + 1)
    possible, again = np.zeros(shape, dtype=np.bool_), np.array(facts.recomputed, dtype=np.float64)
    always, spare, at_once = (np.zeros(shape) for _ in range(3))
    delay, before_cut = [NEVER] * count + [0], [NEVER] * (count + 1)
    memory, counted = facts.memories[:, None], period is not None and facts.periodic
    for end in range(count, 0, -1):
        turning = _before_cut(facts, end, delay[end], tau)
        if turning is None:
            continue
        before_cut[end] = turning
        life = _lives(facts, end, turning, tau)
        load = facts.behind[:end] - facts.behind[end] + facts.blocked[:end] + facts.blocked[end]
        idle = devices[:, None] * float(tau) - load
        fixed, peak, alone = facts.fixed[:, :end, end], facts.least_peak[:end, end], facts.fixed_alone[:, :end, end]
        found = _priced(facts, _counts(facts, end, life, steps[:, None], counted), prices[:, None, None], idle)
        least = ((fixed + found - memory) / prices[:, None, None, None]).max(axis=(0, 1))
        again[:, :end, end] = np.maximum(again[:, :end, end], least)
        fits = (again[:, :end, end] * (1 - ROUNDING) <= idle) & (fixed + peak <= memory)
        if period is not None:
            fits &= facts.sync_ns[:, :end, end] <= period
        possible[:, :end, end] = fits
        held = np.maximum((found - prices[:, None, None, None] * idle).max(axis=0), 0)
        always[:, :end, end] = alone + held[0]
        spare[:, :end, end] = np.maximum(held.max(axis=0), peak) - held[0]
        at_once[:, :end, end] = alone + held[1]
        if counted:  # a microbatch waits for what is recomputed of it
            least = np.where(fits, again[:, :end, end], np.inf).min(axis=0) * (1 - ROUNDING)
            path = turning + facts.path_behind[:end] - facts.path_behind[end]
            life = np.maximum(life, path + np.where(least < NEVER, least, 0).astype(np.int64))
        for start in np.flatnonzero(fits.any(axis=0)).tolist():
            delay[start] = min(delay[start], int(life[start]))
    return Runs(possible, again, always, spare, at_once, delay, before_cut)


def _counts(facts: Facts, end: int, life: Ints, steps: Ints, counted: bool) -> list[tuple[Ints, Ints]]:
    """Return how many microbatches are inside each layer of runs at least, and inside a run's first one: at all
    instants, when a device starts the last of its forwards, when a run's first forward starts, when a microbatch comes
    to a layer, and when it does so in a run of which it has all layers."""
    inside = life // steps if counted else 0 * (life + steps)
    once = np.maximum(inside, 1)
    found = [(inside, inside), (once, once)]
    if counted:
        most = ceil_div(life, steps)
        at_once = ceil_div(life[..., -1:] + facts.path_behind[:end] - facts.path_behind[end - 1], steps)
        found.append((inside, most))
        found += [(x, x) for x in (*_arrivals(inside, most), *_arrivals(once, at_once))]
    return found


def _priced(facts: Facts, counts: list[tuple[Ints, Ints]], price: Floats, idle: Floats) -> Floats:
    """Return what runs keep of each of ``counts`` and pay to recompute the rest at least, bytes, (P, N, R, end).

    ``price``, (P, 1, 1), is paid for the forwards of all layers of a segment, which keeps its input alone.
    """
    within, first = (np.stack(x).astype(np.float64) for x in zip(*counts, strict=True))
    if not facts.recomputes:
        size = within.shape[-1]
        held = within * facts.kept[:size]
        behind = np.cumsum(held[..., ::-1], axis=-1)[..., ::-1] - held
        return np.asarray(behind + facts.first_kept[:size] * first)[None]
    found = np.zeros((len(price), *within.shape))
    best, behind = np.full(found.shape[:-1], np.inf), np.zeros(found.shape[:-1])
    for i in range(within.shape[-1] - 1, -1, -1):
        best = np.minimum(best, behind) + price * float(facts.forward[i])
        once = np.where(facts.forward[i] > idle[:, i], np.inf, best)  # every microbatch, or none
        sizes = facts.kept[i], facts.first_kept[i], facts.input_kept[i]
        some, begun = within[..., i], first[..., i]
        found[..., i] = np.minimum(behind + sizes[1] * begun, once + sizes[2] * begun)
        behind = np.minimum(behind + sizes[0] * some, once + sizes[2] * some)
    return found * (1 - ROUNDING)


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
    """Return prices of recomputation, bytes per tick, at which what it takes off may be bounded: any are valid. The
    first is as good as none."""
    worth = facts.kept[facts.forward > 0] / facts.forward[facts.forward > 0]
    worth = worth[worth > 0]
    if not facts.recomputes or not len(worth):
        return np.array([FREE])
    low, high = float(np.quantile(worth, 0.1)), float(worth.max()) * most
    return np.concatenate([[FREE], np.geomspace(low, max(high, 2 * low), 9)])


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

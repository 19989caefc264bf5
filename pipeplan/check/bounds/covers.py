"""Can sets of runs that each fit on one group of devices cover the chain between them, at a given period?

A group of devices has a set of runs. They fit if its work suffices for all of theirs, and its memory for all that they
hold together, by either of two *views*: at every instant what all runs take then, and at one instant of each run what
that one takes more; and averaged over time, or in periods of any length when the last of the group's forwards starts,
and the same microbatch is inside all its layers. Let every layer have a *price*. If no groups whose replicas add up to
the number of devices have sets that are worth as much as all layers, these can't be covered, whatever the prices are.
So prices needn't be right, only good: a linear program sets them, by the sets that were worth most so far (Dantzig and
Wolfe's decomposition, the integers of it relaxed). The set that is worth most is a dynamic program over runs from the
last to the first, work and memory counted in cells and rounded down.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ...cost import relaxations
from ...integers import NEVER, Ints
from ...problem import Problem
from .facts import Facts, Floats
from .runs import ROUNDING, Runs, Segments, runs_at

MOST_COVERED = 128  # layers
CELLS = 64  # of work, and of memory
ROUNDS = 60  # of prices, at most
WORK = 30_000  # of rounds, in runs
HOPELESS = 1.02  # devices that all known sets leave to do, over those there are
CENTRE = 0.6  # how much of the best prices so far goes into the next
NOTHING = -1e300


@dataclass(frozen=True)
class View:
    """What runs take of a device's memory: ``held`` adds up, and with ``held`` of all behind it each run takes ``top``.

    Shares of the memory, tables ``[first, end]`` by the facts' ``spreads``.
    """

    held: Floats
    top: Floats


def views(facts: Facts, runs: Runs, segments: Segments, tau: int | None) -> list[View]:
    """Return conditions of what is held in periods of ``tau`` ticks."""
    memory = facts.memories[:, None, None].astype(np.float64)
    found = runs.at_once / memory
    if tau is not None and facts.periodic:
        found = averages(facts, runs, segments, tau)
    return [View(runs.always / memory, (runs.always + runs.spare) / memory), View(found, found)]


def work_of(facts: Facts) -> Ints:
    """Return the ticks of work of each run, without recomputation; table ``[first, end]``."""
    found: Ints = (facts.behind + facts.blocked)[:, None] - (facts.behind - facts.blocked)[None, :]
    return found


def averages(facts: Facts, runs: Runs, segments: Segments, tau: int) -> Floats:
    """Return what runs take of a device's memory and time on average, where a price joins the two if they recompute."""
    count, price = facts.count, segments.price(0) if facts.recomputes else 0.0
    behind = facts.behind.astype(np.float64)
    places = np.zeros((count + 1, count + 1))
    for end in range(1, count + 1):
        if runs.turning[end] < NEVER:
            added = max(0, runs.turning[end] - int(facts.path_behind[end]))
            step = 0 if facts.recomputes else None
            places[:, end] = segments.costs(step, np.array([float(added)]))[0][:, end]
    places += price * (behind[:, None] - behind[None, :])
    found = []
    for k, spread in enumerate(facts.spreads):
        long = float(tau) * spread.high
        room = (float(facts.memories[k]) + price) * long
        found.append((facts.fixed_alone[k] * long + places) / room * (1 - ROUNDING))
    return np.stack(found)


class Sets:
    """The sets of runs of groups with one number of replicas, in one view."""

    def __init__(self, possible: npt.NDArray[np.bool_], work: Floats, view: View, k: int) -> None:
        self.count = len(possible) - 1
        held, top = (np.maximum(x[k], 0) * (1 - ROUNDING) for x in (view.held, view.top))
        work = work * (1 - ROUNDING)
        fits = possible & (top <= 1) & (work <= 1)
        cells = [np.where(fits, x, 0) * CELLS for x in (work, held)]
        rooms = [np.where(fits, 1 - x, 0) * CELLS for x in (work, top)]  # for the runs behind
        table = np.floor(np.stack([*cells, *rooms]) + ROUNDING).astype(int)
        self.rows = [
            [(end, *table[:, a, end].tolist()) for end in np.flatnonzero(fits[a]).tolist()] for a in range(self.count)
        ]

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return sum(map(len, self.rows))

    def has(self, layer: int) -> bool:
        """Whether a layer may be a run by itself."""
        return any(end == layer + 1 for end, *_ in self.rows[layer])

    def dearest(self, worth: Floats) -> tuple[float, list[tuple[int, int]]]:
        """Return what the set that is worth most is worth, and its runs; ``worth`` is a table ``[first, end]``."""
        size = CELLS + 1
        ends = self.count, self.count - 1
        behind = {end: np.full((size, size), NOTHING) for end in ends}  # best of sets behind it
        reach = dict.fromkeys(ends, (0, 0))  # cells of those, and beyond it nothing
        starting: dict[int, Floats] = {}
        spare = np.empty((size, size))
        for a in range(self.count - 1, -1, -1):
            into, gains, (tall, wide) = np.full((size, size), NOTHING), worth[a].tolist(), reach[a]
            for end, busy, held, idle, room in self.rows[a]:
                into[busy, held] = max(into[busy, held], gains[end])
                tall, wide = max(tall, busy + 1), max(wide, held + 1)
                times, rows = min(size - busy, idle + 1, reach[end][0]), min(size - held, room + 1, reach[end][1])
                if times and rows:
                    cells = into[busy : busy + times, held : held + rows]
                    sums = np.add(behind[end][:times, :rows], gains[end], out=spare[:times, :rows])
                    np.maximum(cells, sums, out=cells)
                    tall, wide = max(tall, busy + times), max(wide, held + rows)
            starting[a] = into
            behind[a - 1], reach[a - 1] = np.maximum(behind[a], into), (tall, wide)
        best = behind[-1]
        place = int(best.argmax())
        if best.flat[place] <= 0:
            return 0.0, []
        return float(best.flat[place]), self._traced(worth, starting, behind, divmod(place, size))

    def _traced(
        self, worth: Floats, starting: dict[int, Floats], behind: dict[int, Floats], place: tuple[int, int]
    ) -> list[tuple[int, int]]:
        x, y = place
        value, before, found = behind[-1][x, y], 0, list[tuple[int, int]]()
        while True:
            first = next(a for a in range(before, self.count) if starting[a][x, y] == value)
            for end, busy, held, idle, room in self.rows[first]:
                if (x, y) == (busy, held) and worth[first, end] == value:
                    return [*found, (first, end)]
                fits = 0 <= x - busy <= idle and 0 <= y - held <= room
                if fits and behind[end][x - busy, y - held] + worth[first, end] == value:
                    found.append((first, end))
                    x, y, before = x - busy, y - held, end + 1
                    value = behind[end][x, y]
                    break


def uncovered(facts: Facts, runs: Runs, segments: Segments, tau: int | None) -> bool:
    """Whether no sets cover the chain in periods of ``tau`` ticks; None: in periods of any length."""
    load = work_of(facts) + runs.again
    work = np.zeros(load.shape)
    if tau is not None:
        work = load / (float(tau) * np.array([spread.high for spread in facts.spreads])[:, None, None])
    return any(
        too_cheap(facts, [Sets(runs.possible[k], work[k], view, k) for k in range(len(work))])
        for view in views(facts, runs, segments, tau)
    )


@lru_cache(maxsize=16)
def all_contiguous(problem: Problem) -> bool:
    """Whether every plan is contiguous, as at no period has any GPU room for two layers; False where it isn't known.
    Remembered, as a search asks and then each proof.

    A group that has two has one run of them, of one stage or more, or two runs: a set of runs that fit together. So if
    the set of most layers has one, by any view, each layer is a stage alone; on one level these keep units together.
    """
    devices, count = len(problem.platform), len(problem.chain)
    if problem.chain.variants or count > min(devices, MOST_COVERED) or len(problem.platform.levels) > 1:
        return False
    facts, place = Facts(relaxations.relative(problem)), np.arange(count + 1.0)
    runs, layers = runs_at(facts, None), place - place[:, None]
    found = views(facts, runs, Segments(facts), None)
    groups = ([Sets(one, 0 * layers, view, k) for view in found] for k, one in enumerate(runs.possible))
    return facts.periodic and all(any(x.dearest(layers)[0] <= 1 for x in some) for some in groups)


def too_cheap(facts: Facts, groups: list[Sets]) -> bool:
    """Whether there are prices at which no groups' sets, by ``spreads``, are worth as much as all layers."""
    count, devices = facts.count, len(facts.problem.platform)
    costs = [spread.low for spread in facts.spreads]
    master = Master([min((c for c, x in zip(costs, groups, strict=True) if x.has(i)), default=1) for i in range(count)])
    centre = prices = (facts.behind[:-1] - facts.behind[1:]) / max(1.0, float(facts.behind[0]))
    best = np.inf
    for _ in range(min(ROUNDS, WORK // max(1, sum(x.runs for x in groups)))):
        total = np.concatenate([[0.0], np.cumsum(prices)])
        worth = []
        for sets, cost in zip(groups, costs, strict=True):
            most, found = sets.dearest(total[None, :] - total[:, None])
            worth.append(most)
            master.add(found, cost)
        if _packed(worth, costs, devices) * (1 + ROUNDING) < total[-1]:
            return True
        ratio = max(one / cost for one, cost in zip(worth, costs, strict=True)) / total[-1] if total[-1] > 0 else np.inf
        if ratio < best:
            best, centre = ratio, prices / (ratio * total[-1])
        optimal = master.prices()
        if float(optimal.sum()) <= devices * HOPELESS:
            return False
        prices = CENTRE * centre + (1 - CENTRE) * optimal
    return False


def _packed(worth: list[float], costs: list[int], devices: int) -> float:
    """Return the most that groups are worth whose replicas add up to at most so many ``devices``."""
    most = [0.0] * (devices + 1)
    for p in range(1, devices + 1):
        fits = [most[p - cost] + one for one, cost in zip(worth, costs, strict=True) if cost <= p]
        most[p] = max(most[p - 1], *fits)
    return most[devices]


class Master:
    """Prices of layers: those at which all together are worth most while no known set is worth more than it costs, the
    devices of its group."""

    def __init__(self, alone: list[int]) -> None:
        self._rows, self._limits = [*np.eye(len(alone))], [*map(float, alone)]

    def add(self, found: list[tuple[int, int]], cost: int) -> None:
        """Note a set of runs."""
        row = np.zeros(len(self._rows[0]))
        for first, end in found:
            row[first:end] = 1.0
        self._rows.append(row)
        self._limits.append(float(cost))

    def prices(self) -> Floats:
        """Return the prices."""
        return _maximum(np.array(self._rows), np.array(self._limits), np.ones(len(self._rows[0])))


def _maximum(rows: Floats, limits: Floats, gains: Floats) -> Floats:
    """Return some x >= 0 with the most ``gains @ x`` where ``rows @ x <= limits``, which are not negative.

    The simplex algorithm; approximate where it takes too many steps.
    """
    height, width = rows.shape
    table = np.zeros((height + 1, width + height + 1))
    table[:-1, :width], table[:-1, width:-1], table[:-1, -1] = rows, np.eye(height), limits
    table[-1, :width] = gains
    basis = np.arange(width, width + height)
    for _ in range(4 * (height + width)):
        column = int(table[-1, :-1].argmax())
        if table[-1, column] <= 1e-9:
            break
        entries = table[:-1, column]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(entries > 1e-9, table[:-1, -1] / entries, np.inf)
        row = int(ratios.argmin())
        if not np.isfinite(ratios[row]):
            break
        table[row] /= table[row, column]
        other = table[:, column].copy()
        other[row] = 0.0
        table -= other[:, None] * table[row]
        basis[row] = column
    found = np.zeros(width + height)
    found[basis] = table[:-1, -1]
    return np.maximum(found[:width], 0.0)

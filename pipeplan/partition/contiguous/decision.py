"""Can contiguous stages meet one given period? A dynamic program from the chain's end that keeps the smallest delays.

The *delay* at a cut is the time from the last forward before it to the first backward before it on the same microbatch:
as long, what lies before the cut has to hold the microbatch. A longer delay never helps: each step of the walk of 1F1B*
(:func:`...integers.extend`) is nondecreasing in it, and so is the number of microbatches in flight. So of all ways to
place the layers behind a cut on the same devices, the one with the smallest delay is as good as any. Two groups of
devices have as many links as the least common multiple of their sizes, so how a transfer lengthens the delay depends on
the group behind the cut, too, and a decision needs one number for each (cut, what is left of the devices, replicas of
the first stage). Exact; ALGORITHMS section 5, ``contiguous``.
"""

from __future__ import annotations

import numpy as np

from ...integers import NEVER, Ints, ceil_div, extend_array
from ...plan import Stage
from ...problem import Way
from ..devices.states import Flags, Step
from ..tables.device_counts import Counts, device_counts
from ..tables.stages import Ranges, SearchTables, carried, largest_synced_gradients, longest_delay

_CHUNK = 2**14  # elements per vectorised step, so that its operands stay in cache


def decide(tables: SearchTables, period: int, least_delay: Ints) -> tuple[Stage, ...] | None:
    """Return stages that have a valid pattern of ``period`` ns, or None: then no contiguous allocation has one.

    Exact over stages between ``tables.cuts`` and what they can take by ``tables.states``. With n cuts, P devices and S
    states (P + 1 of equal devices) O(n^2 S) without replicas and O(n^2 P S) with, times levels and classes of devices;
    far fewer after :func:`device_counts`.
    """
    counts = device_counts(tables, period, least_delay)
    if counts is None:
        return None
    sweep = _Sweep(tables, period, counts)
    return sweep.stages() if sweep.run() else None


class _Sweep:
    """One pass from the last cut to the first.

    ``least[i, u, s, c]`` is the smallest delay over all placements of the layers behind cut i that leave the state u of
    the devices (:mod:`.states`) with a label of level s, whose first stage has ``sizes[c]`` devices. A *column*
    is a way to go on: a cut, and a state that a stage before it finds. For each take and row the tables hold the delay
    seen through the cut's transfers, its group, the group's end, and what the stage may not pass.
    """

    def __init__(self, tables: SearchTables, period: int, counts: Counts) -> None:
        self.tables, self.period, self.counts = tables, period, counts
        problem, self.states = tables.problem, tables.states
        self.left, self.takes, self.sizes = self.states.left, self.states.takes, self.states.sizes
        # in which states something can be taken
        self.useful: list[Flags] = [np.any(take.replicas, axis=0) for take in self.takes]
        self.levels = len(problem.platform.levels)
        self.cap = longest_delay(problem, period)
        size = len(tables.cuts)
        links = np.lcm(self.sizes[:, None], self.sizes[None, :]).tolist()
        self.link_periods = np.array([[min(NEVER - 1, n * period) for n in row] for row in links], dtype=np.int64)
        self.least = np.full((size, len(self.left), self.levels, len(self.sizes)), NEVER, dtype=np.int64)
        self.round_trips = np.stack(
            [[carried(problem, x.round_trips[k], k, period) for k in range(self.levels)] for x in tables.variants]
        )
        self.least_trips, self.most_trips = self.round_trips.min(axis=0), self.round_trips.max(axis=0)
        self.variant = self.states.variant_of
        self.both_ways = np.array([problem.platform.both_ways(level) for level in range(self.levels)])
        self.syncable = self._syncable()
        self.low = np.maximum(counts.before, 0)
        self.high = int(self.left[-1]) - counts.after  # so many devices are left at a cut
        paces = [int(period * speed) for speed in self.states.speeds]  # ns of work in one period
        self.paces = np.array(paces, dtype=np.int64) if paces and paces[-1] < NEVER else None
        self.possible = [self._possible(i) for i in range(size)]
        room = sum(map(len, self.possible))
        self.first_column = np.zeros(size, dtype=np.int64)
        self.columns = 0
        self.cut = np.zeros(room, dtype=np.int64)
        self.state = np.zeros(room, dtype=np.int64)
        shape = (len(self.takes), len(self.takes[0].replicas), room)
        self.delay, self.group, self.end, self.limit = (np.empty(shape, dtype=np.int64) for _ in range(4))
        self.gradient = np.empty(shape, dtype=np.int64) if self.syncable is not None else None

    def _possible(self, i: int) -> Ints:
        """Return the states in which the devices left may be enough for the layers before cut ``i``, and the others for
        those behind."""
        enough = (self.left >= self.low[i]) & (self.left <= self.high[i])
        if self.paces is not None:
            work = self.tables.work
            enough &= self.paces >= work[i]
            enough &= self.paces[-1] - self.paces + 1 >= work[-1] - work[i]  # two numbers were rounded down
        return np.flatnonzero(enough)

    def _syncable(self) -> Ints | None:
        """Return the most gradient bytes by level and replica count, or None where no stage has more."""
        problem = self.tables.problem
        if not problem.replicas:
            return None
        table, most = (
            largest_synced_gradients(problem, self.period),
            max(int(x.gradients.max()) for x in self.tables.variants),
        )
        return None if most <= int(table.min()) else table

    def run(self) -> bool:
        """Fill the tables; return whether the whole chain has a placement."""
        last = len(self.tables.cuts) - 1
        for i in range(last, -1, -1):
            self.tables.problem.deadline.check()
            self.first_column[i] = self.columns
            if len(self.possible[i]):
                if i < last:
                    self._close(i)
                if i > 0:
                    self._open(i)
        return bool((self.least[0] < NEVER).any())

    def _window(self, i: int) -> slice:
        """Return the columns at which a stage from cut ``i`` can stop."""
        return slice(int(self.first_column[self.counts.reach[i]]), self.columns)

    def _close(self, i: int) -> None:
        """Compute the smallest delays at cut ``i`` from all columns within reach."""
        window, labels = self._window(i), self.least[i].copy()
        rows = slice(int(self.low[i]), int(min(self.high[i], self.left[-1] - 1)) + 1)
        if not self.states.in_rows:
            rows = slice(0, 1)
        for number in range(len(self.takes)):
            useful = self.useful[number][self.state[window]]
            if not useful.any():
                continue
            columns = window if useful.all() else window.start + np.flatnonzero(useful)
            order = np.argsort(self.state[columns], kind="stable")
            found, starts = np.unique(self.state[columns][order], return_index=True)
            step = max(1, _CHUNK // len(order))
            for a in range(rows.start, rows.stop, step):
                self.tables.problem.deadline.check()
                some = slice(a, min(a + step, rows.stop))
                values = np.minimum.reduceat(self._delays(i, number, some, columns)[:, order], starts, axis=1)
                self.states.lower(labels, number, some, found, values)
        self.least[i, self.possible[i]] = labels[self.possible[i]]

    def _delays(self, i: int, take: int, rows: slice, columns: slice | Ints) -> Ints:
        """Return the delay before each stage from cut ``i`` to a column's cut, NEVER where the stage cannot be."""
        options, stops = self.tables.classes[self.takes[take].floor].options, self.cut[columns]
        replicas = self.takes[take].replicas[rows][:, self.state[columns]] if options.by_replicas else stops
        work = options.work(i, stops, replicas)
        group, delay, end = (table[take][rows, columns] for table in (self.group, self.delay, self.end))
        stay = work(group)
        stay += delay
        opened = work(group + 1)
        opened += end
        np.copyto(opened, stay, where=stay <= end)
        opened[opened > self.limit[take][rows, columns]] = NEVER
        if self.gradient is not None:
            gradients = self.tables.variants[self.takes[take].variant].gradients
            opened[gradients[i][stops] > self.gradient[take][rows, columns]] = NEVER
        return opened

    def _behind(self, i: int) -> Ints:
        """Return what is behind cut ``i`` for a stage that finds state v.

        By (level s, c, v) the smallest delay where the cut spans at most s and ``sizes[c]`` devices are behind it.
        """
        return self.states.skipped(np.minimum.accumulate(self.least[i], axis=1).transpose(1, 2, 0))

    def _entering(self, i: int) -> Ints:
        """Return :meth:`_behind` through the transfers, by (c, s, v), where the stage itself has ``sizes[c]`` devices
        and spans level s."""
        behind = self._behind(i)
        least, most = self.least_trips[:, i, None], self.most_trips[:, i, None]
        # idle time in a link's group is less than the transfers, so what lags by them is never better
        lag = np.where(most <= self.period, behind.min(axis=1) + 2 * np.minimum(most, self.period) - least + 1, NEVER)
        hopeful = behind < lag[:, None]
        level, found, other = np.nonzero(hopeful[:, :, self.possible[i]].transpose(0, 2, 1))
        state = self.possible[i][found]
        starts = np.flatnonzero(np.diff(level * len(self.left) + state, prepend=-1))
        delays, at = behind[level, other, state], (level[starts], state[starts])
        entering = np.full((len(self.sizes), self.levels, len(self.left)), NEVER, dtype=np.int64)
        step = max(1, 4 * _CHUNK // max(1, len(delays)))
        for a in range(0, len(self.sizes) if len(starts) else 0, step):
            own = np.arange(a, min(a + step, len(self.sizes)))
            through = np.minimum.reduceat(self._through(i, own[:, None], level, other, delays), starts, axis=1)
            entering[a : a + step, at[0], at[1]] = through
        return np.minimum.accumulate(entering[:, ::-1], axis=1)[:, ::-1]

    def _through(self, i: int, own: Ints | int, level: Ints, other: Ints, behind: Ints) -> Ints:
        """Return the delays ``behind`` cut ``i`` after transfers over ``level`` between ``sizes[own]`` devices before
        it and ``sizes[other]`` behind it."""
        trips, period = self.round_trips[self.variant[other], level, i], self.link_periods[own, other]
        if self.tables.uniform:
            trips = np.maximum(trips, self.round_trips[self.variant[own], level, i])
        through, load = extend_array(behind, np.minimum(trips, period), period), trips
        if self.both_ways.any():
            apart = self.both_ways[level]
            through, load = np.where(apart, behind + trips, through), np.where(apart, trips // 2, trips)
        through[(load > period) | (behind >= NEVER)] = NEVER
        return through

    def _open(self, i: int) -> None:
        """Add the columns of cut ``i``."""
        if i == len(self.tables.cuts) - 1:
            entering = np.where(self.states.first, 0, np.full((len(self.sizes), self.levels, 1), NEVER))
        else:
            entering = self._entering(i)
        least = entering[:, 0]
        useful = least.min(axis=0) < NEVER
        useful[0] = False  # nothing is left to take
        if self.states.uniform:  # one more device must shorten the delay
            useful[:-1] &= np.any(least[:, :-1] < least[:, 1:], axis=0)
        states = self.possible[i][useful[self.possible[i]]]
        if not len(states):
            return
        new = slice(self.columns, self.columns + len(states))
        self.columns = new.stop
        self.cut[new] = i
        self.state[new] = states
        for number, take in enumerate(self.takes):
            replicas, spans = take.replicas[:, states], take.spans[:, states]
            delay = entering[self.states.place(number)[replicas], spans, states]
            period = replicas * self.period
            group = ceil_div(delay, np.maximum(period, 1))
            end = group * period
            self.delay[number, :, new], self.group[number, :, new], self.end[number, :, new] = delay, group, end
            usable = (replicas > 0) & (delay < NEVER)
            self.limit[number, :, new] = np.where(usable, np.minimum(end + period, self.cap), -1)
            if self.gradient is not None and self.syncable is not None:
                self.gradient[number, :, new] = self.syncable[spans, replicas]

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of a placement of the whole chain, found again from the tables."""
        cuts, last = self.tables.cuts, len(self.tables.cuts) - 1
        i, steps, ranges = 0, list[Step](), list[tuple[int, int, Ranges, Way]]()
        state, level, size = map(int, np.unravel_index(int(self.least[0].argmin()), self.least[0].shape))
        while i < last:
            step, column = self._step(i, state, level, size)
            steps.append(step)
            take, stop, replicas = self.takes[step.take], int(self.cut[column]), int(self.sizes[size])
            in_flight = int(ceil_div(self.least[i, state, level, size], replicas * self.period))
            options, (tensor, again, offloaded) = self.tables.classes[take.floor].options, self.states.named(step.take)
            checkpoint, cores = options.recomputed(i, stop, in_flight, replicas)
            ranges.append((int(cuts[i]), int(cuts[stop]), checkpoint, (tensor, cores if again else (), offloaded)))
            if stop < last:
                row = self._row(state)
                entering, span = int(self.delay[step.take, row, column]), int(take.spans[row, step.found])
                state, level, size = self._next(stop, step.found, entering, span, size)
            i = stop
        devices = self.states.devices(steps)
        return tuple(
            Stage(start, stop, group, checkpoint, *way)
            for (start, stop, checkpoint, way), group in zip(ranges, devices, strict=True)
        )

    def _row(self, state: int) -> int:
        """Return the row of a take that leaves ``state``."""
        return int(self.left[state]) if self.states.in_rows else 0

    def _step(self, i: int, state: int, level: int, size: int) -> tuple[Step, int]:
        """Return the step of the stage that attains ``least[i, state, level, size]``, and the column where it stops."""
        value, window, row = self.least[i, state, level, size], self._window(i), self._row(state)
        for number, take in enumerate(self.takes):
            allowed = self.states.into(number, state, level) & np.equal(
                self.states.place(number)[take.replicas[row]], size
            )
            delays = self._delays(i, number, slice(row, row + 1), window)[0]
            hits = np.flatnonzero((delays == value) & allowed[self.state[window]])
            if len(hits):
                column = window.start + int(hits[0])
                return Step(number, int(self.state[column]), state), column
        raise AssertionError("every label comes from a stage")

    def _next(self, i: int, found: int, entering: int, span: int, own: int) -> tuple[int, int, int]:
        """Return where in ``least[i]`` stands what gives its delay to a stage of ``sizes[own]`` devices over level
        ``span`` that finds a state."""
        behind = self._behind(i)[:, :, found]
        where: Ints = np.indices(behind.shape)
        through = self._through(i, own, where[0], where[1], behind)
        hits = (through == entering) & (where[0] >= span)
        level, size = map(int, np.unravel_index(int(np.argmax(hits)), hits.shape))
        states = self.states.before(found, level)
        nearby = self.least[i, states, : level + 1, size]
        at, label = np.unravel_index(int(np.argmax(nearby == behind[level, size])), nearby.shape)
        return int(states[at]), int(label), size

"""Can contiguous stages meet one given period? A dynamic program from the chain's end that keeps the smallest delays.

The *delay* at a cut is the time from the last forward before it to the first backward before it on the same microbatch:
as long, what lies before the cut has to hold the microbatch. A longer delay never helps: each step of the walk of 1F1B*
(:func:`...integers.extend`) is nondecreasing in it, and so is the number of microbatches in flight. So of all ways to
place the layers behind a cut on the same devices, the one with the smallest delay is as good as any. Two groups of
devices have as many links as the least common multiple of their sizes, so how a transfer lengthens the delay depends on
the group behind the cut, too, and a decision needs one number for each (cut, first device, replicas of the first
stage). Exact; ALGORITHMS section 5, ``contiguous``.
"""

from __future__ import annotations

import numpy as np

from ...integers import Ints, ceil_div, extend_array
from ...plan import Stage
from .device_counts import Counts, device_counts
from .options import NEVER
from .tables import StageTables, closed, largest_synced_gradients, longest_delay

_CHUNK = 2**14  # elements per vectorised step, so that its operands stay in cache


def decide(tables: StageTables, period: int, least_delay: Ints) -> tuple[Stage, ...] | None:
    """Return stages that have a valid pattern of ``period`` ns, or None: then no contiguous allocation has one.

    Exact over stages between ``tables.cuts``. With n cuts and P devices O(n^2 P) without replicas and O(n^2 P^2) with,
    times levels and classes of devices; far fewer after :func:`device_counts`.
    """
    counts = device_counts(tables, period, least_delay)
    if counts is None:
        return None
    sweep = _Sweep(tables, period, counts)
    return sweep.stages() if sweep.run() else None


class _Sweep:
    """One pass from the last cut to the first.

    ``least[i, a, s, c]`` is the smallest delay over all placements of the layers behind cut i whose first stage has
    ``sizes[c]`` devices, a first, where level s joins device a - 1 and the last of them. A *column* is a way to go on:
    a cut, and the first device b that is taken already. For each first device a of the next stage (a row; without
    replicas a = b - 1) the tables hold the delay seen through the cut's transfers, its group, the group's end, and what
    the stage may not pass.
    """

    def __init__(self, tables: StageTables, period: int, counts: Counts) -> None:
        self.tables, self.period, self.counts = tables, period, counts
        problem = tables.problem
        self.devices, self.levels = len(problem.platform), len(problem.platform.levels)
        self.cap = longest_delay(problem, period)
        size = len(tables.cuts)
        self.sizes = np.unique(np.concatenate([[1], *(x.replicas[x.replicas > 0] for x in tables.classes)]))
        self.place = np.zeros(self.devices + 1, dtype=np.int64)  # of each count in sizes
        self.place[self.sizes] = np.arange(len(self.sizes))
        links = np.lcm(self.sizes[:, None], self.sizes[None, :]).tolist()
        self.link_periods = np.array([[min(NEVER - 1, n * period) for n in row] for row in links], dtype=np.int64)
        self.least = np.full((size, self.devices + 1, self.levels, len(self.sizes)), NEVER, dtype=np.int64)
        self.round_trips = np.stack([closed(tables, level, period) for level in range(self.levels)])
        self.both_ways = np.array([problem.platform.both_ways(level) for level in range(self.levels)])
        self.syncable = self._syncable()
        self.low = np.maximum(counts.before, 0)
        self.high = self.devices - counts.after  # boundaries between free and taken devices: low..high
        room = int(np.maximum(self.high - np.maximum(self.low, 1) + 1, 0).sum()) + self.devices
        rows = len(tables.spans)
        self.first_column = np.zeros(size, dtype=np.int64)
        self.columns = 0
        self.cut = np.zeros(room, dtype=np.int64)
        self.boundary = np.zeros(room, dtype=np.int64)
        shape = (len(tables.classes), rows, room)
        self.delay, self.group, self.end, self.limit = (np.empty(shape, dtype=np.int64) for _ in range(4))
        self.gradient = np.empty(shape, dtype=np.int64) if self.syncable is not None else None

    def _syncable(self) -> Ints | None:
        """Return the most gradient bytes by level and replica count, or None where no stage has more."""
        problem = self.tables.problem
        if not problem.replicas:
            return None
        table = largest_synced_gradients(problem, self.period)
        return None if int(self.tables.gradients.max()) <= int(table.min()) else table

    def run(self) -> bool:
        """Fill the tables; return whether the whole chain has a placement."""
        last = len(self.tables.cuts) - 1
        for i in range(last, -1, -1):
            self.tables.problem.deadline.check()
            if self.low[i] > self.high[i]:
                self.first_column[i] = self.columns
                continue
            if i < last:
                self._close(i)
            self._open(i)
        return bool((self.least[0] < NEVER).any())

    def _window(self, i: int) -> slice:
        """Return the columns at which a stage from cut ``i`` can stop."""
        return slice(int(self.first_column[self.counts.reach[i]]), self.columns)

    def _close(self, i: int) -> None:
        """Compute the smallest delays at cut ``i`` from all columns within reach."""
        columns = self._window(i)
        if columns.start == columns.stop:
            return
        least, boundary = self.least[i], self.boundary[columns]
        order = np.argsort(boundary, kind="stable")
        boundaries, starts = np.unique(boundary[order], return_index=True)
        low, high = int(self.low[i]), int(min(self.high[i], self.devices - 1))
        for kind in range(len(self.tables.classes)):
            if not self.tables.problem.replicas:
                delays = self._delays(i, kind, slice(0, 1), columns)[0]
                spans = self.tables.outer_spans[0, boundary]
                np.minimum.at(least[:, :, 0], (boundary - 1, spans), delays)
                continue
            step = max(1, _CHUNK // (columns.stop - columns.start))
            for a in range(low, high + 1, step):
                self.tables.problem.deadline.check()
                rows = slice(a, min(a + step, high + 1))
                delays = self._delays(i, kind, rows, columns)
                found = np.minimum.reduceat(delays[:, order], starts, axis=1)
                spans = self.tables.outer_spans[rows][:, boundaries]
                sizes = self.place[self.tables.classes[kind].replicas[rows][:, boundaries]]
                first = np.broadcast_to(np.arange(rows.start, rows.stop)[:, None], found.shape)
                np.minimum.at(least, (first, spans, sizes), found)
        least[:low] = NEVER
        least[high + 1 :] = NEVER

    def _delays(self, i: int, kind: int, rows: slice, columns: slice) -> Ints:
        """Return the delay before each stage from cut ``i`` to a column's cut, NEVER where the stage cannot be."""
        device_class = self.tables.classes[kind]
        stops = self.cut[columns]
        replicas = device_class.replicas[rows][:, self.boundary[columns]] if device_class.options.by_replicas else stops
        work = device_class.options.work(i, stops, replicas)
        group, delay, end = (table[kind, rows, columns] for table in (self.group, self.delay, self.end))
        stay = work(group)
        stay += delay
        opened = work(group + 1)
        opened += end
        np.copyto(opened, stay, where=stay <= end)
        opened[opened > self.limit[kind, rows, columns]] = NEVER
        if self.gradient is not None:
            opened[self.tables.gradients[i][stops] > self.gradient[kind, rows, columns]] = NEVER
        return opened

    def _behind(self, i: int) -> Ints:
        """Return what is behind cut ``i`` for a stage that ends right before boundary b, b = 0..devices.

        By (level s, c, b) the smallest delay where the cut spans at most s and ``sizes[c]`` devices are behind it.
        """
        spanned = np.minimum.accumulate(self.least[i, 1:], axis=1).transpose(1, 2, 0)  # (s, c, first device - 1)
        behind = np.full((self.levels, len(self.sizes), self.devices + 1), NEVER, dtype=np.int64)
        for level, unit in enumerate(self.tables.problem.platform.unit_sizes):
            unit = min(unit, self.devices)
            units = -(-self.devices // unit)
            padded = np.full((len(self.sizes), units * unit), NEVER, dtype=np.int64)
            padded[:, : self.devices] = spanned[level]
            best = np.minimum.accumulate(padded.reshape(-1, units, unit)[..., ::-1], axis=-1)[..., ::-1]
            behind[level, :, 1:] = best.reshape(len(self.sizes), -1)[:, : self.devices]
        return behind

    def _entering(self, i: int) -> Ints:
        """Return :meth:`_behind` through the transfers, by (c, s, b), where the stage itself has ``sizes[c]`` devices
        and spans level s."""
        behind = self._behind(i)
        trips = self.round_trips[:, i, None]
        # idle time in a link's group is less than the transfers, so what lags by them is never better
        hopeful = behind < np.where(trips <= self.period, behind.min(axis=1) + trips + 1, NEVER)[:, None]
        level, other, boundary = (x.ravel() for x in np.nonzero(hopeful))
        entering = np.full((len(self.sizes), self.levels, self.devices + 1), NEVER, dtype=np.int64)
        for own in range(len(self.sizes)):
            through = self._through(i, own, level, other, behind[hopeful])
            np.minimum.at(entering[own], (level, boundary), through)
        return np.minimum.accumulate(entering[:, ::-1], axis=1)[:, ::-1]

    def _through(self, i: int, own: int, level: Ints, other: Ints, behind: Ints) -> Ints:
        """Return the delays ``behind`` cut ``i`` after transfers over ``level`` between ``sizes[own]`` devices before
        it and ``sizes[other]`` behind it."""
        trips, period = self.round_trips[level, i], self.link_periods[own, other]
        both_ways, extended = self.both_ways[level], extend_array(behind, np.minimum(trips, period), period)
        load, through = np.where(both_ways, trips // 2, trips), np.where(both_ways, behind + trips, extended)
        return np.where((load <= period) & (behind < NEVER), through, NEVER)

    def _open(self, i: int) -> None:
        """Add the columns of cut ``i``."""
        self.first_column[i] = self.columns
        low, high = max(int(self.low[i]), 1), int(self.high[i])
        if i == 0 or low > high:
            return
        if i == len(self.tables.cuts) - 1:
            entering = np.zeros((len(self.sizes), self.levels, self.devices + 1), dtype=np.int64)
            if self.tables.uniform:
                low = high
        else:
            entering = self._entering(i)
        boundary = np.arange(low, high + 1)
        useful = entering[:, 0, low : high + 1].min(axis=0) < NEVER
        if self.tables.uniform:  # one more device must shorten the delay
            useful[:-1] &= np.any(entering[:, 0, low:high] < entering[:, 0, low + 1 : high + 1], axis=0)
        boundary = boundary[useful]
        if not len(boundary):
            return
        new = slice(self.columns, self.columns + len(boundary))
        self.columns = new.stop
        self.cut[new] = i
        self.boundary[new] = boundary
        spans = self.tables.spans[:, boundary]
        for kind, device_class in enumerate(self.tables.classes):
            replicas = device_class.replicas[:, boundary]
            delay = entering[self.place[replicas], spans, boundary]
            period = replicas * self.period
            group = ceil_div(delay, np.maximum(period, 1))
            end = group * period
            self.delay[kind, :, new], self.group[kind, :, new], self.end[kind, :, new] = delay, group, end
            usable = (replicas > 0) & (delay < NEVER)
            self.limit[kind, :, new] = np.where(usable, np.minimum(end + period, self.cap), -1)
            if self.gradient is not None and self.syncable is not None:
                self.gradient[kind, :, new] = self.syncable[spans, replicas]

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of a placement of the whole chain, found again from the tables."""
        i, stages = 0, list[Stage]()
        first, span, size = map(int, np.unravel_index(int(self.least[0].argmin()), self.least[0].shape))
        while True:
            stage, kind, row, column = self._step(i, first, span, size)
            stages.append(stage)
            i = int(self.cut[column])
            if i == len(self.tables.cuts) - 1:
                return tuple(stages)
            own, delay = int(self.place[stage.replicas]), int(self.delay[kind, row, column])
            first, span, size = self._next(i, int(self.boundary[column]), delay, row, own)

    def _step(self, i: int, first: int, span: int, size: int) -> tuple[Stage, int, int, int]:
        """Return the stage that attains ``least[i, first, span, size]``, with the class, row and column it was found
        at."""
        value, columns = self.least[i, first, span, size], self._window(i)
        row = first if self.tables.problem.replicas else 0
        boundary = self.boundary[columns]
        allowed = self.tables.outer_spans[row, boundary] == span
        if not self.tables.problem.replicas:
            allowed &= boundary == first + 1
        for kind in range(len(self.tables.classes)):
            delays = self._delays(i, kind, slice(row, row + 1), columns)[0]
            sizes = self.place[self.tables.classes[kind].replicas[row, boundary]]
            hits = np.flatnonzero((delays == value) & allowed & (sizes == size))
            if len(hits):
                break
        device_class = self.tables.classes[kind]
        column = columns.start + int(hits[0])
        stop, b = int(self.cut[column]), int(self.boundary[column])
        devices = tuple(d for d in range(first, b) if d in device_class.eligible)
        in_flight = int(ceil_div(int(value), len(devices) * self.period))
        start_layer, stop_layer = int(self.tables.cuts[i]), int(self.tables.cuts[stop])
        checkpoint = device_class.options.checkpoint(i, stop, in_flight, len(devices))
        return Stage(start_layer, stop_layer, devices, checkpoint), kind, row, column

    def _next(self, i: int, boundary: int, entering: int, row: int, own: int) -> tuple[int, int, int]:
        """Return where in ``least[i]`` stands what gave a column, behind ``sizes[own]`` devices, its delay."""
        behind = self._behind(i)[:, :, boundary]
        where: Ints = np.indices(behind.shape)
        through = self._through(i, own, where[0], where[1], behind)
        hits = (through == entering) & (where[0] >= self.tables.spans[row, boundary])
        at, size = np.unravel_index(int(np.argmax(hits)), hits.shape)
        unit = self.tables.problem.platform.unit_sizes[at]
        last = min(self.devices, ((boundary - 1) // unit + 1) * unit)
        nearby = self.least[i, boundary : last + 1, : at + 1, size]
        offset, span = np.unravel_index(int(np.argmax(nearby == behind[at, size])), nearby.shape)
        return boundary + int(offset), int(span), int(size)

"""In which ways can a stage recompute some of its segments, and what does each way keep, hold and cost?

A *label* is one way to cut the layers from a stage's first to some position into recomputed segments and stored runs
(neighbours whose activations are kept). It has three numbers, and less is better in each: ``kept`` bytes for each
microbatch in flight, the ``peak`` bytes of the one in its backward (which holds one segment's activations after the
other), and the ``cost`` in ns of running its segments forward again. So only labels that no other beats or equals in
all three are kept (:mod:`.pareto`). Where layers may run the core of their attention again a third part is such a run,
which keeps less and costs time. Labels depend on neither the period nor the devices: a dynamic program over
positions makes them once for each first layer. ALGORITHMS section 5, "Segments"; not in any paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cost import memory_model
from ...integers import IntLike, Ints
from ...problem import Chain
from ..tables.stages import Ranges
from .pareto import Resolution, unbeaten

Flags = npt.NDArray[np.bool_]
CORES, SEGMENT = 1, 2  # of the kinds of parts, 0 a stored run


@dataclass(frozen=True)
class Units:
    """What ``layers[i:j]`` add to a stage as one recomputed segment or one stored run: tables ``[i, j]``.

    They are over all positions in the chain, or over some alone: then i and j number those.

    The memory of their input may be *held* already by the part of the stage before them; then it isn't kept twice.
    Bytes that a segment adds: ``keeps`` as the stage's first part, ``later_keeps`` behind other parts, ``held_keeps``
    where its input is held. Bytes that a run adds so: ``saved``, ``later_saved``, and ``inner``. While a segment runs
    backward it holds ``transient`` bytes more, and running it again costs ``recompute`` ns. ``output``
    says whether a run holds the memory of its output for the part behind it, ``passes`` whether the output is a view of
    the input, and so held where that was; both are None where no run ever holds its output. ``storage`` is what the
    tensor at each position takes when nobody holds it. Rules: :func:`....cost.memory_model.stored`, ``keeps_output``.

    ``growing``: runs and segments only grow with their length, and a run can be made layer by layer, as in every chain
    without skip connections. ``cores`` are those of layers whose cores run again, where these may be: then a run costs
    ``run_cost`` ns, and so much more a segment.
    """

    keeps: Ints
    later_keeps: Ints
    held_keeps: Ints
    transient: Ints
    recompute: Ints
    saved: Ints
    later_saved: Ints
    inner: Ints
    output: Flags | None
    passes: Flags | None
    storage: Ints
    growing: bool
    run_cost: Ints
    cores: Units | None = None

    @staticmethod
    def of(chain: Chain, positions: Ints | None = None) -> Units:
        """Return the tables of ``chain``, over some ``positions`` alone; entries with j <= i mean nothing."""
        places = np.arange(len(chain) + 1) if positions is None else positions
        count = len(places)
        start, stop = places[:, None], places[None, :]

        def table(values: IntLike) -> Any:
            return np.broadcast_to(np.asarray(values), (count, count))

        keeps, transient, recompute = map(table, memory_model.segment(chain, start, stop))
        later, held = (table(memory_model.segment(chain, start, stop, x, inside=True)[0]) for x in (False, True))
        saved, later_saved = (table(memory_model.stored(chain, start, stop, inside=x)) for x in (False, True))
        inner = table(memory_model.stored(chain, start, stop, held=True))
        output, passes = (
            table(memory_model.keeps_output(chain, start, stop, False, recomputed=x)) for x in (False, True)
        )
        proper, cores = stop > start, None
        holds = bool((proper & (output | passes)).any())
        if chain.either:
            other = replace(chain, layers=chain.either, either=())
            more = (other.sums.backward_ns - chain.sums.backward_ns)[places]
            extra, cores = more[None, :] - more[:, None], Units.of(other, positions)
            cores = replace(cores, run_cost=extra, recompute=cores.recompute + extra)
        return Units(
            keeps=keeps,
            later_keeps=later,
            held_keeps=held,
            transient=transient,
            recompute=recompute,
            saved=saved,
            later_saved=later_saved,
            inner=inner,
            output=output if holds else None,
            passes=passes if holds else None,
            storage=np.diagonal(later) - np.diagonal(held),
            growing=chain.edges is None,
            run_cost=table(0),
            cores=cores,
        )

    @property
    def ways(self) -> tuple[Units, ...]:
        """These, and those of layers whose cores run again."""
        return (self,) if self.cores is None else (self, self.cores)

    @property
    def holds(self) -> bool:
        """Whether some run holds its output."""
        return any(x.output is not None for x in self.ways)

    def run(self, start: int, stop: IntLike, first: bool, kept: Ints, held: Flags) -> tuple[Ints, Flags]:
        """Return what is kept with a run behind parts that have ``kept``, and whether its output's storage is held."""
        fresh = (self.saved if first else self.later_saved)[start, stop]
        return kept + np.where(held, self.inner[start, stop], fresh), self.held_behind(start, stop, held, False)

    def held_behind(self, start: int, stop: IntLike, held: npt.NDArray[np.bool_] | bool, recomputed: bool) -> Flags:
        """Return whether the output's storage is held behind a segment or run from ``start``."""
        if self.output is None or self.passes is None:
            return np.zeros(np.shape(stop) or np.shape(held), dtype=np.bool_)
        passes = self.passes[start, stop]
        return np.asarray(passes | np.zeros_like(held) if recomputed else self.output[start, stop] | (held & passes))


@dataclass(frozen=True)
class Labels:
    """Labels of the stages that start at one layer, in order of position; entry 0 is the empty one.

    ``parent`` is the label before the last unit, whose ``kind`` is :data:`SEGMENT` of a recomputed segment and else 0,
    for a stored run, and :data:`CORES` more where its cores run again. ``exact``: no label was dropped that isn't
    beaten by another.
    """

    kept: Ints
    peak: Ints
    cost: Ints
    position: Ints
    parent: Ints
    kind: Ints
    exact: bool

    def at(self, positions: Ints) -> Labels:
        """Return labels made over numbered ``positions`` at their places in the chain."""
        return replace(self, position=positions[self.position])

    def ranges(self, label: int, cores: bool = False) -> Ranges:
        """Return the recomputed segments of a label, in chain order, or the runs whose ``cores`` run again."""
        found, which = list[tuple[int, int]](), self.kind & (CORES if cores else SEGMENT)
        while label:
            before = int(self.parent[label])
            if which[label]:
                found.append((int(self.position[before]), int(self.position[label])))
            label = before
        return joined(reversed(found)) if cores else tuple(reversed(found))


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in order, of which those that meet are one."""
    found: list[tuple[int, int]] = []
    for first, last in ranges:
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, last))
    return tuple(found)


class _Open:
    """The labels that one more segment or run may still extend, in order of position, as contiguous columns."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.kept, self.peak, self.cost, self.index = (np.zeros(1, dtype=np.int64) for _ in range(4))
        self.kind = np.full(1, SEGMENT)  # of the last part, behind which is another
        self.held = np.zeros(1, dtype=np.bool_)  # whether the storage of what goes on is held
        self.starts, self.counts = [start], [1]  # positions, and how many labels stand at each

    def at(self, table: npt.NDArray[Any], stop: int, first: Ints | None = None) -> npt.NDArray[Any]:
        """Return the entries of ``table`` from each label's position to ``stop``, for the stage's first part of
        ``first``."""
        values = table[self.starts, stop]
        if first is not None and self.starts and self.starts[0] == self.start:
            values[0] = first[self.start, stop]
        return np.repeat(values, self.counts)

    def runs(self, units: Units, kind: int, previous: int, stop: int) -> tuple[Ints, Ints, Ints, Flags]:
        """Return which labels a run of a ``kind`` may extend to ``stop``, what is then kept, costs and is held: those
        at the ``previous`` position where runs grow layer by layer, else those that end otherwise."""
        if units.growing:
            count = self.counts[-1] if self.starts[-1] == previous else 0
            of = np.arange(len(self.kept) - count, len(self.kept))
            kept, held = units.run(previous, stop, previous == self.start, self.kept[of], self.held[of])
            return of, kept, self.cost[of] + units.run_cost[previous, stop], held
        of = np.flatnonzero(self.kind != kind)
        kept = (self.kept + self.at(units.later_saved, stop, units.saved))[of]
        return of, kept, (self.cost + self.at(units.run_cost, stop))[of], np.zeros(len(of), dtype=np.bool_)

    def segments(self, units: Units, stop: int) -> tuple[Ints, Ints, Ints, Flags, Ints]:
        """Return what all labels with a segment to ``stop`` keep, hold at the peak, and cost, whether its output's
        storage is held, and what it holds while it runs."""
        keeps, transient = self.at(units.later_keeps, stop, units.keeps), self.at(units.transient, stop)
        if self.held.any():
            keeps = np.where(self.held, self.at(units.held_keeps, stop), keeps)
        kept = self.kept + keeps
        held = np.zeros(len(kept), dtype=np.bool_) if units.passes is None else self.at(units.passes, stop)
        peak, cost = np.maximum(self.peak, kept + transient), self.cost + self.at(units.recompute, stop)
        return kept, peak, cost, held, transient

    def keep(self, which: Flags) -> None:
        """Drop the other labels."""
        ends = np.cumsum(self.counts)
        kept = np.diff(np.concatenate([[0], np.cumsum(which)])[np.concatenate([[0], ends])])
        self.starts = [x for x, n in zip(self.starts, kept.tolist(), strict=True) if n]
        self.counts = [n for n in kept.tolist() if n]
        self.kept, self.peak, self.cost, self.index = (x[which] for x in (self.kept, self.peak, self.cost, self.index))
        self.kind, self.held = self.kind[which], self.held[which]

    def add(self, position: int, kept: Ints, peak: Ints, cost: Ints, index: int, kind: Ints, held: Flags) -> None:
        """Append labels at ``position``, numbered from ``index``."""
        old: tuple[npt.NDArray[Any], ...] = self.kept, self.peak, self.cost, self.index, self.kind, self.held
        pairs = zip(old, (kept, peak, cost, np.arange(index, index + len(kept)), kind, held), strict=True)
        self.kept, self.peak, self.cost, self.index, self.kind, self.held = map(np.concatenate, pairs)
        if len(kept):
            self.starts.append(position)
            self.counts.append(len(kept))


def labels_from(
    units: Units,
    start: int,
    positions: Ints,
    most_cost: Ints,
    most_peak: Ints,
    resolution: Resolution,
    work: int | None = None,
) -> tuple[Labels | None, int]:
    """Return the labels of all stages that start at layer ``start``, at ``positions`` in chain order.

    They cost and hold at most what the caps allow there (shape (L + 1,); they never grow with the position). The Pareto
    set at every position (ALGORITHMS section 5, "Segments"), exactly or on the resolution's grid; a label that is
    beaten as a stage's end stays where it wouldn't be if the storage that it holds were still to be taken
    (:func:`_chosen`). Also returns how many extensions were tried; None for labels when these would be more than
    ``work``. O(L * labels).
    """
    zero = np.zeros(1, dtype=np.int64)
    found = [(zero, zero, zero, zero + start, zero, zero)]  # kept, peak, cost, position, parent, kind
    open_labels, size, tried, exact, previous = _Open(start), 1, 0, True, start
    for stop in positions[(positions > start) & (most_peak[positions] >= 0)].tolist():
        tried += len(open_labels.kept)
        if work is not None and tried > work:
            return None, tried
        parts, fits = [], np.zeros(len(open_labels.kept), dtype=np.bool_)
        for kind, own in enumerate(units.ways):
            if kind == 0 or not units.growing or own.saved[previous, stop] < units.saved[previous, stop]:
                of, kept, cost, held = open_labels.runs(own, kind, previous, stop)
                peak = np.maximum(open_labels.peak[of], kept)
                within = (peak <= most_peak[stop]) & (cost <= most_cost[stop])
                parts.append(
                    [x[within] for x in (kept, peak, cost, held, open_labels.index[of], np.full(len(of), kind))]
                )
        for kind, own in enumerate(units.ways, SEGMENT):
            kept, peak, cost, held, transient = open_labels.segments(own, stop)
            within = (cost <= most_cost[stop]) & (peak <= most_peak[stop])
            fits |= within
            within &= transient > 0  # otherwise storing costs no more bytes and no time
            parts.append([x[within] for x in (kept, peak, cost, held, open_labels.index, np.full(len(held), kind))])
        kept, peak, cost, held, parents, kinds = (np.concatenate(x) for x in zip(*parts, strict=True))
        chosen, complete = _chosen(kept, peak, cost, held, int(units.storage[stop]), resolution)
        exact = exact and complete
        at = np.full(len(chosen), stop)
        found.append((kept[chosen], peak[chosen], cost[chosen], at, parents[chosen], kinds[chosen]))
        if units.growing and 4 * np.count_nonzero(fits) < 3 * len(fits):  # what is too much now stays so
            open_labels.keep(fits)
        open_labels.add(stop, *found[-1][:3], size, found[-1][-1], held[chosen])
        size, previous = size + len(chosen), stop
        if not len(open_labels.kept):
            break
    kept, peak, cost, at, parents, kinds = (np.concatenate(x) for x in zip(*found, strict=True))
    return Labels(kept, peak, cost, at, parents, kinds, exact), tried


def _chosen(kept: Ints, peak: Ints, cost: Ints, held: Flags, storage: int, resolution: Resolution) -> tuple[Ints, bool]:
    """Return the indices of the labels at one position that are worth keeping, and whether none is missing.

    Labels that already hold the memory of the tensor that leaves there (``held``) have an advantage of ``storage``
    bytes over the others where the next part keeps that tensor, and none where it doesn't, or where the stage ends. So
    a label stays if no other beats it in one of these two counts of what is kept.
    """
    chosen, complete = unbeaten(kept, peak, cost, resolution)
    if not storage or held.all() or not held.any():
        return chosen, complete
    others, whole = unbeaten(kept + np.where(held, 0, storage), peak, cost, resolution)
    return np.union1d(chosen, others), complete and whole

"""How soon can a mini-batch be over on stages that go round and round the GPUs, wherever layers are cut and what they
recompute?

Stages are taken apart, as in ``dealt_bound``: one of n layers has the least work, and holds the least, of any n layers
that it can be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ....cost import time_model
from ....integers import Ints, ceil_div
from ....plan import Bound, ScheduleKind
from ....problem import Problem
from ....schedule.kinds import KINDS
from ....schedule.occupancy import held_at_first
from .dealt import deal, least_of, of_one
from .tables import NEVER, PlacedTables

MOST = 4 * 10**6  # layers to the square, times ranks and stages of a rank, beyond which nothing is bounded


def loop_bound(problem: Problem, kind: ScheduleKind) -> Bound | None:
    """Return the bound on all plans under a ``kind`` that places stages round and round, as many on each GPU as there
    may be; None where that would take too long, or nothing fits. OutOfTime at the problem's deadline.

    A rank begins when a forward has come through a layer for each rank before it, then has M passes of all its stages,
    and where backwards are whole the last of them goes back through those layers. When its first backward begins it
    holds as many microbatches of each stage as the kind's order says. What doesn't fit it recomputes, at the best ratio
    of bytes to time of any layer. Layers are dealt out to the ranks by numbers, so that all are over in time.
    """
    relaxed = time_model.relative(problem)
    if not KINDS[kind].splits:
        layers = tuple(replace(layer, backward_weight_ns=0) for layer in relaxed.chain.layers)
        relaxed = replace(relaxed, chain=replace(relaxed.chain, layers=layers))
    count, devices, microbatches = len(problem.chain), len(problem.platform), problem.policy.accumulate or 1
    if count**2 * devices * count > MOST:
        return None
    shapes = [
        _Loop(relaxed, kind, ranks, pipelines, chunks)
        for ranks in range(1, min(devices, count) + 1)
        for pipelines in range(1, devices // ranks + 1 if problem.replicas else 2)
        for chunks in range(1, count // ranks + 1)
    ]
    best: int | None = None
    for shape in sorted(shapes, key=lambda one: (one.floor_ns, one.ranks, one.chunks)):
        problem.deadline.check()
        if best is None or shape.floor_ns < best:
            found = shape.least()
            best = found if best is None or (found is not None and found < best) else best
    if best is None:
        return None
    return Bound("any", problem.replicas, problem.checkpointing, ceil_div(best, microbatches), schedule=kind)


@dataclass(frozen=True)
class _Loop(PlacedTables):
    """So many stages, its ``chunks``, on each rank."""

    chunks: int

    @cached_property
    def before(self) -> list[int]:
        """For each rank what comes before its first pass, and behind its last where backwards are whole."""
        ranks = range(self.ranks)
        found = [int(self.heads[rank].min()) for rank in ranks]
        if KINDS[self.kind].splits:
            return found
        bare = self.tables.back - self.tables.transfer
        trip = int(self.tables.transfer[1:-1].min(initial=NEVER))
        return [before + int(bare[rank]) + rank * trip for rank, before in zip(ranks, found, strict=True)]

    def least(self) -> int | None:
        """Return the least time (ns) within which stages of this shape may be over; None where they fit in no way."""
        stages, ends = self.ranks * self.chunks, self.count * self.tables.held * (self.ranks > 1)
        start, stop = self.tables.stages.start, self.tables.stages.stop
        own = self.work + ends[:, None] + ends[None, :]
        counts = held_at_first(self.kind, self.ranks, self.chunks, self.count) if self.ranks > 1 else (1,) * stages
        price = min(self.price, 1e12) / max(counts)
        columns: list[tuple[Ints, Ints, Ints]] = []
        for s in range(stages):
            summed = self.sums * (s < self.ranks and not KINDS[self.kind].splits and self.pipelines > 1)
            kept = counts[s] * self.tables.saved + self.weights
            least = self.weights if np.isfinite(self.price) else kept
            tables = (np.where(stop > start, table, NEVER) for table in (own + summed, kept, least))
            work, size, must = (least_of(table, s, stages) for table in tables)
            columns.append((work, size, must))
        works = [of_one(columns[rank :: self.ranks], self.room, price) for rank in range(self.ranks)]
        among = deal(works, self.before, self.shared[1])
        if among is None:
            return None
        return max(self.floor_ns, among.longest, self._shared(max(among.work, int(own[0, -1]))))

    def _shared(self, work: int) -> int:
        """Return what ranks take that share all ``work`` evenly, each from its beginning on."""
        return ceil_div(work + sum(self.before) - self.ranks * self.shared[1], self.ranks)

"""Where are layers cut over the stages of one grid of equal pipelines, and how many microbatches does each admit?

A grid is p stages of as many devices as there are pipelines; device j of every stage makes pipeline j, and all share a
batch, message-driven. Splits are the shortest paths of ``partition.contiguous.batch``, simulation says how long each
takes, and local moves improve the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from ...partition.blocks import moved
from ...plan import Stage
from ...problem import Problem
from .arrivals import BatchTime, batch_time
from .paths import PipelineTables, drained_bound, held, least_drained_ns, pipeline_tables, splits

_WHOLE = 20_000  # steps of a batch up to which all of it is simulated, beyond only a part
_IN_FULL = 4_000_000  # steps of a batch up to which the best split is simulated in full

Proposal = tuple[tuple[int, ...], tuple[int, ...], int]  # cuts, microbatches that stages are to hold, limit


@dataclass(frozen=True, slots=True)
class Split:
    """A split that was simulated: cuts, what its stages were to hold, limit, and the result."""

    cuts: tuple[int, ...]
    in_flight: tuple[int, ...]
    limit: int
    stages: tuple[Stage, ...]
    result: BatchTime


class Pipelines:
    """The splits of one grid that were tried: the ``best`` (None: none has fitted), and a bound on all in ``bound_ns``.

    Stage s runs on ``groups[s]``; each pipeline runs ``microbatches`` microbatches of a batch. ``limit`` fixes how many
    of them a pipeline admits. ``unfit``: no split fits the memory. ``steps`` were simulated so far.
    """

    def __init__(
        self,
        problem: Problem,
        groups: Sequence[tuple[int, ...]],
        microbatches: int,
        limit: int | None = None,
        bound_ns: int = 0,
    ) -> None:
        self.problem, self.groups, self.microbatches, self.bound_ns = problem, groups, microbatches, bound_ns
        self.best: Split | None = None
        self.unfit = False
        self.steps = 0
        self._limit = limit
        self._tables: PipelineTables | None = None
        self._seen: dict[tuple[tuple[Stage, ...], int], BatchTime] = {}

    @property
    def tables(self) -> PipelineTables | None:
        """What the stages may be and take, computed when first asked for; None when no split fits."""
        if self._tables is None and not self.unfit:
            self._tables = pipeline_tables(self.problem, self.groups, self.microbatches)
            self.unfit = self._tables is None
        return self._tables

    def forget(self) -> None:
        """Drop the tables, which are large, until they are asked for again."""
        self._tables = None

    def limits(self) -> list[int]:
        """Return the limits worth trying."""
        stages = len(self.groups)
        if self._limit is None:
            return limits(stages, self.microbatches)
        return [min(self._limit, 2 * stages - 1, self.microbatches)]  # more than that in a pipeline only wait

    def splits(self, limit: int, most: int | None = None) -> Iterator[Proposal]:
        """Yield splits (at most ``most`` for each way to hold ``limit`` microbatches) that may drain soon."""
        if self.tables is not None:
            for in_flight in dict.fromkeys(held(len(self.groups), min(limit, self.microbatches))):
                for cuts in islice(splits(self.tables, in_flight), most):
                    yield cuts, in_flight, limit

    def probe(self, most: int | None = None) -> Iterator[Proposal]:
        """Yield splits for one limit after the other, until one but the first has had some and a split fits."""
        first, *others = self.limits()
        yield from self.splits(first, most)
        for limit in others:
            yield from self.splits(limit, most)
            if self.best is not None:
                return

    def moves(self) -> Iterator[Proposal]:
        """Yield what lies one move away from the best: in-flight counts as simulated, a cut moved, another limit."""
        assert self.best is not None, "there is something to move"
        cuts, in_flight, limit = self.best.cuts, self.best.in_flight, self.best.limit
        simulated = self.best.result.in_flight
        if simulated != in_flight:
            yield cuts, simulated, limit
        for others in moved(cuts):
            yield others, in_flight, limit
        if self._limit is None and len(self.groups) > 1:
            for other in (limit + 1, limit - 1):
                if 1 <= other <= min(2 * len(self.groups) - 1, self.microbatches):
                    yield cuts, held(len(self.groups), min(other, self.microbatches))[0], other

    def try_(self, proposals: Iterable[Proposal]) -> Iterator[Split]:
        """Simulate splits unless they cannot beat the best, and yield each that becomes it."""
        tables = self.tables
        if tables is None:
            return
        for cuts, in_flight, limit in proposals:
            least = least_drained_ns(tables, cuts, in_flight, limit)
            if least is None or (self.best is not None and least >= self.best.result.batch_ns):
                continue
            stages = tables.stages(cuts, in_flight)
            assert stages is not None, "each of them fits"
            result = self._simulated(stages, limit)
            if result.fits and (self.best is None or result.batch_ns < self.best.result.batch_ns):
                self.best = Split(cuts, in_flight, limit, stages, result)
                yield self.best

    def improve(self, done: Callable[[], bool]) -> Iterator[Split]:
        """Move the best about while that helps and ``done`` doesn't say otherwise; yield each better one."""
        improved: Split | None = self.best
        while improved is not None:
            improved = next(self.try_(takewhile(lambda _: not done(), self.moves())), None)
            if improved is not None:
                yield improved

    def simulate_in_full(self) -> None:
        """Simulate the best in full, unless that takes too long; it is dropped where it doesn't fit then."""
        if self.best is None or self.best.result.exact or self._steps() > _IN_FULL:
            return
        result = batch_time(self.problem, self.best.stages, self.microbatches, self.best.limit)
        # later microbatches may hold more than the first ones
        self.best = replace(self.best, result=result) if result.fits else None

    def bound(self, enough: int | None, *, by_limit: bool = False) -> None:
        """Raise the bound, to ``enough`` at most; ``by_limit``: by what each of the limits and those above it allow."""
        if self.tables is None:
            return
        if not by_limit:
            found = drained_bound(self.tables, enough=enough)
        else:
            tried = sorted(self.limits())
            ends = tried if self._limit is not None else [*(x - 1 for x in tried[1:]), None]
            spans = zip(tried, ends, strict=True)
            found = min(drained_bound(self.tables, low, high, enough) for low, high in spans)
        self.bound_ns = max(self.bound_ns, found)

    def _simulated(self, stages: tuple[Stage, ...], limit: int) -> BatchTime:
        key = stages, limit
        if key not in self._seen:
            whole = self._steps() <= _WHOLE
            self._seen[key] = batch_time(self.problem, stages, self.microbatches, limit, whole=whole)
            self.steps += self._seen[key].steps
        return self._seen[key]

    def _steps(self) -> int:
        shared = self.problem.platform.shared_level is not None
        return 4 * (sum(map(len, self.groups)) if shared else len(self.groups)) * self.microbatches


def limits(stages: int, microbatches: int) -> list[int]:
    """Return the limits worth trying: p, between p and 2p - 1, and less for where memory is short."""
    if stages == 1:
        return [1]
    if stages <= 4:
        tried = [stages, 2 * stages - 1, *range(stages + 1, 2 * stages - 1), *range(stages - 1, 0, -1)]
    else:
        tried = [stages, 2 * stages - 1]
        tried += [stages * 5 // 4, stages * 3 // 2, stages * 3 // 4, stages // 2, stages // 4, 2, 1]
    return list(dict.fromkeys(min(x, microbatches) for x in tried))

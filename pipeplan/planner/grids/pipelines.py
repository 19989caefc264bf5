"""Where are layers cut over the stages of one grid of equal pipelines, and how many microbatches does each admit?

A grid is p stages of as many devices as there are pipelines; device j of every stage makes pipeline j, and all share a
batch, message-driven. Splits are shortest paths, simulation says how long each takes, and local moves improve the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from ...cost.stage_graph import stage_graph
from ...integers import NEVER, ceil_div
from ...partition.tables.split_paths import near
from ...plan import Allocation, Stage
from ...problem import Problem
from ...schedule.program import side_by_side
from ...schedule.programs.deciding import message_driven
from ...schedule.simulate import simulate
from ...schedule.timeline import flush_makespan_ns, run_uses
from ..drained.layout import Layout, held
from ..drained.search import climbed
from ..drained.tables import Tables, tables_of_pipelines
from ..periodic.incumbent import Incumbent
from .space import GridConfig

_WHOLE = 20_000  # steps of a batch up to which all of it is simulated, beyond only a part
_PARTS = 6  # of data parallelism at most
_IN_FULL = 4_000_000  # steps of a batch up to which the best split is simulated in full

Groups = Sequence[tuple[int, ...]]
Proposal = tuple[tuple[int, ...], tuple[int, ...], int]  # cuts, microbatches that stages are to hold, limit


@dataclass(frozen=True, slots=True)
class BatchTime:
    """A batch on a grid: its time with all-reduces, and by stage the microbatches held and the bytes too many.

    ``exact`` tells whether the whole batch was simulated; ``steps`` is the simulation's effort.
    """

    batch_ns: int
    in_flight: tuple[int, ...]
    over_bytes: tuple[int, ...]
    steps: int
    exact: bool

    @property
    def fits(self) -> bool:
        """Whether every stage stays within its memory."""
        return max(self.over_bytes) <= 0


def batch_time(
    problem: Problem, stages: Sequence[Stage], microbatches: int, limit: int, *, whole: bool = True
) -> BatchTime:
    """Return how the grid that ``stages`` make runs a batch of ``microbatches`` microbatches for each pipeline.

    Message-driven, at most ``limit`` microbatches in a pipeline. One pipeline is simulated for all, unless they share
    links: ``whole``, or of a long batch 4 * limit microbatches (at least 32), and the rest goes on at the pace of
    their middle.
    """
    graph = stage_graph(problem.chain, problem.platform, problem.policy, stages)
    count = microbatches if whole else min(microbatches, max(32, 4 * limit))
    each = side_by_side(graph)
    if all(resource.replicas == each for resource in graph.resources):
        graph, each = graph.first_replicas(), 1
    timeline = simulate(message_driven(graph, count * each, limit), deadline=problem.deadline)
    rest = 0
    if count < microbatches:
        first, window = count // 4, count // 2
        took = timeline.left_ns((first + window) * each) - timeline.left_ns(first * each)
        rest = ceil_div(took * (microbatches - count), window)
    uses, held, over = run_uses(timeline, problem.platform), [], []
    for s, stage in enumerate(graph.stages):
        resource, place = graph.resources[stage.resource], graph.stages_on(stage.resource).index(s)
        assert resource.memory_bytes is not None, "links have no stages"
        held.append(max(uses[d].in_flight[place] for d in resource.devices))
        over.append(max(uses[d].peak_bytes for d in resource.devices) - resource.memory_bytes)
    steps = count * each * len(graph.operations)
    return BatchTime(flush_makespan_ns(timeline) + rest, tuple(held), tuple(over), steps, count == microbatches)


@dataclass(frozen=True, slots=True)
class Split:
    """A split that was simulated: cuts, what its stages were to hold, limit, and the result."""

    cuts: tuple[int, ...]
    in_flight: tuple[int, ...]
    limit: int
    stages: tuple[Stage, ...]
    result: BatchTime

    @property
    def makespan_ns(self) -> int:
        """Time of the batch."""
        return self.result.batch_ns


class Pipelines:
    """The splits of one grid that were tried: the ``best`` (None: none has fitted), and a bound on all in ``bound_ns``.

    Stage s runs on ``groups[s]``; each pipeline runs ``microbatches`` microbatches of a batch. ``limit`` fixes how many
    of them a pipeline admits. ``unfit``: no split fits the memory. ``steps`` were simulated so far.
    """

    def __init__(
        self, problem: Problem, groups: Groups, microbatches: int, limit: int | None = None, bound_ns: int = 0
    ) -> None:
        self.problem, self.groups, self.microbatches, self.bound_ns = problem, tuple(groups), microbatches, bound_ns
        self.best: Split | None = None
        self.unfit = False
        self.steps = 0
        self._limit = limit
        self._tables: Tables | None = None
        self._seen: dict[tuple[tuple[Stage, ...], int], BatchTime] = {}

    @property
    def tables(self) -> Tables | None:
        """What the stages may be and take, computed when first asked for; None when no split fits."""
        if self._tables is None and not self.unfit:
            self._tables = tables_of_pipelines(self.problem, self.groups, self.microbatches)
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
                for cuts in islice(Layout(self.tables, self.groups, in_flight).starts(), most):
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
        for others in near(cuts, 2, False):
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
            layout = Layout(tables, self.groups, in_flight)
            least = layout.least_ns(cuts, ceil_div(self.microbatches, limit))
            if least is None or (self.best is not None and least >= self.best.makespan_ns):
                continue
            stages = layout.stages(cuts)
            result = self._simulated(stages, limit)
            if result.fits and (self.best is None or result.batch_ns < self.best.makespan_ns):
                self.best = Split(cuts, in_flight, limit, stages, result)
                yield self.best

    def improve(self, done: Callable[[], bool], better: Callable[[], None]) -> None:
        """Move the best about while that helps and ``done`` doesn't say otherwise; tell of each ``better`` one."""

        def moved(_: Split) -> Iterator[Split]:
            for split in self.try_(takewhile(lambda _: not done(), self.moves())):
                better()
                yield split

        if self.best is not None:
            climbed(self.best, moved)

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
            found = drained_bound(self.tables, self.groups, enough=enough)
        else:
            tried = sorted(self.limits())
            ends = tried if self._limit is not None else [*(x - 1 for x in tried[1:]), None]
            spans = zip(tried, ends, strict=True)
            found = min(drained_bound(self.tables, self.groups, low, high, enough) for low, high in spans)
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


def drained_bound(
    tables: Tables, groups: Groups, least: int = 1, most: int | None = None, enough: int | None = None
) -> int:
    """Return a time below which no contiguous split on these groups runs a batch, for any limit in ``least..most``.

    Microbatch m + limit enters when m has left. The first stage holds min(limit, M) microbatches, the others at least
    one, which says what they must recompute. ``enough`` is returned where it is such a time.
    """
    first = min(least, tables.microbatches) if len(groups) > 1 else 1
    layout = Layout(tables, tuple(groups), (first, *[1] * (len(groups) - 1)))
    # without all ways to recompute it isn't known what that takes at least
    fit = tables.exact and layout.times is not None
    found = layout.soonest(fit, enough, 1 if most is None else ceil_div(tables.microbatches, most))
    beyond = tables.most_ns * tables.microbatches  # longer stages are not in the tables
    return found[0] if found is not None else beyond if enough is None else min(beyond, enough)


def try_each(incumbent: Incumbent) -> None:
    """Try the best split of every grid of equal pipelines that may drain sooner than the best so far, and
    :func:`try_parts`, where there is a limit."""
    problem = incumbent.problem
    for stages in range(min(len(problem.platform), len(problem.chain)), 0, -1):
        _try(incumbent, GridConfig(stages, len(problem.platform) // stages if problem.replicas else 1, 1).groups())
    try_parts(incumbent)


def try_parts(incumbent: Incumbent) -> None:
    """Try data parallelism in parts, as many as help, whose sums hide behind the backwards of others."""
    problem, before = incumbent.problem, NEVER
    for parts in range(2, min(_PARTS, len(problem.chain)) + 1) if problem.replicas else ():
        best = _try(incumbent, (tuple(range(len(problem.platform))),) * parts)
        if best is None or best.makespan_ns >= before:
            return
        before = best.makespan_ns


def _try(incumbent: Incumbent, groups: Groups) -> Split | None:
    """Try the split on these groups that drains soonest, and return it; None where none drains before the best."""
    limits, pipelines, best = incumbent.limits, len(groups[0]), incumbent.best_ns
    if limits is None or limits.schedule.mini_batch % pipelines:
        return None
    grid = Pipelines(incumbent.problem, groups, limits.schedule.mini_batch // pipelines, limits.schedule.limit)
    grid.bound(best)
    if best is not None and grid.bound_ns >= best:
        return None
    proposals = (proposal for limit in grid.limits() for proposal in grid.splits(limit))
    for _ in grid.try_(takewhile(lambda _: not incumbent.expired, proposals)):
        pass  # the last is the best
    incumbent.try_all([Allocation(grid.best.stages)] if grid.best is not None else ())
    return grid.best

"""The search for the hybrid grid that is done first with a batch: bounds, then splits, simulation, local moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ...partition.contiguous.batch import PipelineTables, drained_bound, held, least_drained_ns, pipeline_tables, splits
from ...plan import Stage
from ...units import format_ns
from ..explain import shortfall
from ..incumbent import Settings
from .pipeline_time import Drained, drained
from .problem import Config, Found, GridProblem, Outcome, Row, configs, limits, why_not, work_bound

_PROBES = 2  # splits of each configuration at first
_NEAR = 0.06  # how much slower than the best a configuration may be to get more
_WHOLE = 20_000  # steps of a batch up to which all pipelines are simulated, beyond one stands for all
_SETTLED = 4_000_000  # steps of a batch up to which the finalists are simulated in full
_OFFERS = 6  # tables of configurations that are kept
_FINALISTS = 4  # configurations whose stages are moved about


@dataclass(frozen=True, slots=True)
class Effort:
    """How many steps of pipelines local moves may simulate, in all."""

    steps: int


EFFORTS = {"quick": Effort(0), "normal": Effort(10**6), "high": Effort(2 * 10**7)}


@dataclass(frozen=True, slots=True)
class _Point:
    """A split of one configuration that was simulated: cuts, what its stages were to hold, limit, and the result."""

    cuts: tuple[int, ...]
    in_flight: tuple[int, ...]
    limit: int
    stages: tuple[Stage, ...]
    result: Drained


def search_grids(asked: GridProblem, settings: Settings, effort: str = "normal") -> Outcome:
    """Return the best grid found for ``asked``, a table of the others, and a bound on all.

    Configurations are taken in the order of their work bounds and dropped when these are above the best so far, but
    every grid of all GPUs gets a figure. Heuristic: splits are the shortest paths of ``partition.drained``, the limits
    a few, and local moves improve the best of them; ``effort`` says how much. A KeyboardInterrupt ends it with the best
    so far.
    """
    search = _Search(asked, settings)
    try:
        search.probe()
        search.deepen()
        search.improve(EFFORTS[effort].steps)
        search.settle()
        search.bound()
        stopped = "time limit" if search.late else None
    except KeyboardInterrupt:
        if search.best is None:
            raise
        stopped = "interrupted"
    return search.outcome(stopped)


class _Search:
    def __init__(self, asked: GridProblem, settings: Settings) -> None:
        self.asked, self.settings = asked, settings
        self.late = False
        self.steps = 0  # simulated so far
        self.best: Found | None = None
        self.points: dict[Config, _Point] = {}
        self.bounds = {config: work_bound(asked, config) for config in configs(asked)}
        self.unfit: set[Config] = set()
        self._offers: dict[Config, PipelineTables] = {}  # the last few used; each is large
        self._seen: dict[tuple[Config, tuple[Stage, ...], int], Drained] = {}

    @property
    def expired(self) -> bool:
        late = self.settings.remaining_s() <= 0
        self.late |= late
        return late

    def probe(self) -> None:
        """Simulate a few splits of every configuration that can become the best, or that of its grid of all GPUs."""
        count = len(self.asked.problem.platform)
        of_grid: dict[tuple[int, int], int] = {}
        for config in sorted(self.bounds, key=lambda c: (self.bounds[c], c.offload, -c.microbatch, c.inter)):
            if self.expired:
                return
            grid = config.inter, config.data
            if not self._hopeful(config, of_grid.get(grid) if config.gpus == count else None):
                continue
            offer = self.offer(config)
            if offer is None:
                continue
            enough = None if self.best is None else self.best.batch_ns
            self.raise_bound(config, drained_bound(offer, enough=enough))
            if not self._hopeful(config, of_grid.get(grid) if config.gpus == count else None):
                continue
            tried = self._limits(config)
            for limit in tried:
                self._try(config, offer, limit, _PROBES)
                if config in self.points and limit in tried[1:]:
                    break
            if config in self.points:
                time = self.points[config].result.batch_ns
                of_grid[grid] = min(time, of_grid.get(grid, time))

    def _hopeful(self, config: Config, besides: int | None) -> bool:
        """Whether a configuration may beat the best so far, or ``besides``, the best of its grid."""
        if self.best is None:
            return True
        if self.asked.problem.platform and config.gpus == len(self.asked.problem.platform) and besides is None:
            return True  # a grid of all GPUs without a figure
        return self.bounds[config] < max(self.best.batch_ns, besides or 0)

    def deepen(self) -> None:
        """Simulate all splits and limits of the configurations that came close to the best."""
        for config in self._order():
            assert self.best is not None, "there are points"
            offer = self.offer(config)
            near = self.points[config].result.batch_ns <= self.best.batch_ns * (1 + _NEAR)
            if offer is None or not near or self.bounds[config] >= self.best.batch_ns:
                continue
            for limit in self._limits(config):
                if self.expired:
                    return
                self._try(config, offer, limit, None)

    def _try(self, config: Config, offer: PipelineTables, limit: int, most: int | None) -> None:
        for in_flight in dict.fromkeys(held(config.inter, min(limit, offer.microbatches))):
            for cuts in islice(splits(offer, in_flight), most):
                self.judge(config, offer, cuts, in_flight, limit)

    def _limits(self, config: Config) -> list[int]:
        if self.asked.limit is not None:
            most = 1 if config.inter == 1 else 2 * config.inter - 1  # more than that in a pipeline only wait
            return [min(self.asked.limit, most, config.microbatches(self.asked.batch))]
        return limits(config.inter, config.microbatches(self.asked.batch))

    def raise_bound(self, config: Config, bound: int) -> None:
        """Keep the better bound of a configuration."""
        self.bounds[config] = max(self.bounds[config], bound)

    def offer(self, config: Config) -> PipelineTables | None:
        """Return what the stages of a configuration offer, or None when they cannot fit."""
        if config in self.unfit:
            return None
        found = self._offers.pop(config, None)
        if found is None:
            problem = self.asked.of(config)
            found = pipeline_tables(problem, config.groups(), config.microbatches(self.asked.batch))
        if found is None:
            self.unfit.add(config)
            return None
        self._offers[config] = found
        if len(self._offers) > _OFFERS:
            del self._offers[next(iter(self._offers))]
        return found

    def judge(
        self, config: Config, offer: PipelineTables, cuts: tuple[int, ...], in_flight: tuple[int, ...], limit: int
    ) -> _Point | None:
        """Simulate a split unless it cannot beat its configuration's best; return it when it becomes that."""
        before = self.points.get(config)
        least = least_drained_ns(offer, cuts, in_flight, limit)
        if least is None or (before is not None and least >= before.result.batch_ns):
            return None
        stages = offer.stages(cuts, in_flight)
        if stages is None:
            return None
        key = config, stages, limit
        if key not in self._seen:
            whole = 4 * config.gpus * offer.microbatches <= _WHOLE
            self._seen[key] = drained(self.asked.of(config), stages, offer.microbatches, limit, whole=whole)
            self.steps += self._seen[key].steps
        result = self._seen[key]
        if not result.fits or (before is not None and result.batch_ns >= before.result.batch_ns):
            return None
        point = _Point(cuts, in_flight, limit, stages, result)
        self.points[config] = point
        if self.best is None or result.batch_ns < self.best.batch_ns:
            self.best = self._found(config)
            if self.settings.progress:
                self.settings.progress(
                    f"best so far {format_ns(result.batch_ns)} with {config.inter} x {config.data}, microbatch "
                    f"{config.microbatch}, limit {limit}"
                )
        return point

    def improve(self, steps: int) -> None:
        """Move the cuts, limits and in-flight counts of the best few configurations while that helps."""
        end = self.steps + steps
        for config in self._order()[:_FINALISTS]:
            offer = self.offer(config)
            assert offer is not None, "it has a point"
            improved = True
            while improved:
                improved = False
                for cuts, in_flight, limit in _moves(offer, self.points[config], self.asked.limit is None):
                    if self.steps >= end or self.expired:
                        return
                    if self.judge(config, offer, cuts, in_flight, limit) is not None:
                        improved = True
                        break

    def settle(self) -> None:
        """Simulate the best few configurations in full, so that the figure of the best is that of its plan."""
        for config in self._order()[:_FINALISTS]:
            point, microbatches = self.points[config], config.microbatches(self.asked.batch)
            if point.result.exact or 4 * config.gpus * microbatches > _SETTLED:
                continue
            result = drained(self.asked.of(config), point.stages, microbatches, point.limit)
            if result.fits:
                self.points[config] = replace(point, result=result)
            else:  # side by side, pipelines hold more than one alone
                del self.points[config]
        self.best = None
        for config in self._order()[:1]:
            self.best = self._found(config)

    def _order(self) -> list[Config]:
        return sorted(self.points, key=lambda config: self.points[config].result.batch_ns)

    def _found(self, config: Config) -> Found:
        point = self.points[config]
        return Found(config, point.stages, point.limit, point.result.batch_ns, point.result.exact)

    def bound(self) -> None:
        """Bound the configurations that may still hide something better, by what their limits allow."""
        if self.best is None:
            return
        for config in sorted(self.bounds, key=self.bounds.__getitem__):
            if self.bounds[config] >= self.best.batch_ns or self.expired:
                return
            offer = self.offer(config)
            if offer is None:
                continue
            tried = sorted(self._limits(config))
            ends: list[int | None] = [*(x - 1 for x in tried[1:]), None]
            if self.asked.limit is not None:
                ends = list(tried)
            best = self.best.batch_ns
            spans = zip(tried, ends, strict=True)
            self.raise_bound(config, min(drained_bound(offer, low, high, best) for low, high in spans))

    def outcome(self, stopped: str | None) -> Outcome:
        """Return what was found."""
        count = len(self.asked.problem.platform)
        grids = [(p, count // p) for p in range(1, count + 1) if count % p == 0]
        grids = [grid for grid in grids if self.asked.data in (None, grid[1])]
        if self.best is not None and (self.best.config.inter, self.best.config.data) not in grids:
            grids.append((self.best.config.inter, self.best.config.data))
        alive = [bound for config, bound in self.bounds.items() if config not in self.unfit]
        rows = tuple(self._row(inter, data) for inter, data in grids)
        return Outcome(self.best, rows, min(alive, default=0), stopped)

    def _row(self, inter: int, data: int) -> Row:
        own = [c for c in self.bounds if (c.inter, c.data) == (inter, data)]
        alive = [c for c in own if c not in self.unfit]
        if not own:
            return Row(inter, data, None, None, why_not(self.asked, inter, data))
        if not alive:
            return Row(inter, data, None, None, self._too_large(own))
        bound = min(self.bounds[c] for c in alive)
        points = [(self.points[c].result.batch_ns, i, c) for i, c in enumerate(alive) if c in self.points]
        if not points:
            return Row(inter, data, None, bound, "not searched")
        return Row(inter, data, self._found(min(points)[2]), bound)

    def _too_large(self, own: Sequence[Config]) -> str:
        config = min(own, key=lambda c: (c.microbatch, not c.offload))
        problem = self.asked.of(config)
        platform = problem.platform
        alone = replace(
            problem,
            platform=replace(platform, devices=tuple(platform.slowest(group) for group in config.groups())),
            replicas=False,
        )
        return shortfall(alone)


def _moves(
    offer: PipelineTables, point: _Point, limits_too: bool
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield what lies one move away: in-flight counts as simulated, a cut moved, another limit."""
    held = point.result.in_flight
    if held != point.in_flight:
        yield point.cuts, held, point.limit
    for s in range(1, len(point.cuts) - 1):
        for step in (1, -1, 2, -2):
            moved = point.cuts[s] + step
            if point.cuts[s - 1] < moved < point.cuts[s + 1]:
                yield (*point.cuts[:s], moved, *point.cuts[s + 1 :]), point.in_flight, point.limit
    for s in range(1, len(point.cuts) - 2):
        for step in (1, -1):
            one, other = point.cuts[s] + step, point.cuts[s + 1] + step
            if point.cuts[s - 1] < one and other < point.cuts[s + 2]:
                yield (*point.cuts[:s], one, other, *point.cuts[s + 2 :]), point.in_flight, point.limit
    if limits_too and len(offer.groups) > 1:
        for limit in (point.limit + 1, point.limit - 1):
            if 1 <= limit <= min(2 * len(offer.groups) - 1, offer.microbatches):
                yield point.cuts, offer.in_flight(limit), limit

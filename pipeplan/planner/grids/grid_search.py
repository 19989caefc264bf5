"""Which grid of pipelines is done first with a batch, as a validated plan? Bounds first, then splits, simulation, local
moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from ...check.bounds import any_bound
from ...deadline import OutOfTime
from ...errors import BadInput, Infeasible
from ...integers import NEVER
from ...partition.balance import in_segments, ways_to_recompute
from ...plan import Provenance, Schedule, Stage
from ...units import format_ns
from ...version import __version__
from ..drained.search import EFFORTS, until_ended
from ..periodic.explain import shortfall
from ..periodic.incumbent import GRACE_S, Settings
from ..plan import Planned, checked
from .pipelines import Pipelines, Proposal, Split, batch_time
from .space import Found, GridConfig, GridProblem, GridRow, Outcome, configs, work_bound

_PROBES = 2  # splits of each configuration at first
_NEAR = 0.06  # how much slower than the best a configuration may be to get more
_OPEN = 6  # configurations whose tables are kept, and more of short networks
_ENTRIES = 10**6  # cuts by cuts, of all that are kept
_FINALISTS = 4  # configurations whose stages are moved about


def search_grids(asked: GridProblem, settings: Settings, effort: str = "normal") -> Outcome:
    """Return the best grid found for ``asked``, a table of the others, and a bound on all.

    Configurations are taken in the order of their work bounds and dropped when these are above the best so far, but
    every grid of all GPUs gets a figure. Heuristic: splits are shortest paths, the limits
    a few, and local moves improve the best of them; ``effort`` says how much. A KeyboardInterrupt or the deadline ends
    it with the best so far.
    """
    search = _Search(asked, settings)
    stopped = until_ended(
        asked.problem, partial(search.run, EFFORTS[effort].grid_steps), lambda: search.best is not None
    )
    stopped = stopped or ("time limit" if search.late else None)
    if stopped == "time limit" and search.best is None:
        search.try_simplest()
    return search.outcome(stopped)


class _Search:
    def __init__(self, asked: GridProblem, settings: Settings) -> None:
        self.asked, self.settings = asked, settings
        self.late = False
        self.best: Found | None = None
        self.grids = {config: self._pipelines(config) for config in configs(asked)}
        self._open: dict[GridConfig, None] = {}  # the last few whose tables were used
        self._fitting: dict[GridConfig, None] = {}  # those with a split that fits, in the order in which it was found

    def _pipelines(self, config: GridConfig) -> Pipelines:
        asked = self.asked
        microbatches = config.microbatches(asked.batch)
        return Pipelines(asked.of(config), config.groups(), microbatches, asked.limit, work_bound(asked, config))

    @property
    def expired(self) -> bool:
        late = self.asked.problem.deadline.passed
        self.late |= late
        return late

    def run(self, steps: int) -> None:
        """Search with so many steps for local moves."""
        self.probe()
        self.deepen()
        self.improve(steps)
        self.settle()
        self.bound()

    def probe(self) -> None:
        """Simulate a few splits of every configuration that can become the best, or that of its grid of all GPUs."""
        for config in sorted(self.grids, key=lambda c: (self.grids[c].bound_ns, c.offload, -c.microbatch, c.stages)):
            if self.expired:
                return
            if not self._hopeful(config):
                continue
            grid = self.opened(config)
            grid.bound(None if self.best is None else self.best.batch_ns)
            if not grid.unfit and self._hopeful(config):
                self._try(config, grid.probe(_PROBES))

    def _hopeful(self, config: GridConfig) -> bool:
        """Whether a configuration may beat the best so far or, of all GPUs, that of its grid, which gets a figure."""
        if self.best is None:
            return True
        to_beat = self.best.batch_ns
        if config.gpus == len(self.asked.problem.platform):
            alike = [c for c in self._fitting if (c.stages, c.pipelines) == (config.stages, config.pipelines)]
            to_beat = max(to_beat, min(map(self._time, alike), default=NEVER))
        return self.grids[config].bound_ns < to_beat

    def deepen(self) -> None:
        """Simulate all splits and limits of the configurations that came close to the best."""
        for config in self._order():
            assert self.best is not None, "there are splits"
            near = self._time(config) <= self.best.batch_ns * (1 + _NEAR)
            if not near or self.grids[config].bound_ns >= self.best.batch_ns:
                continue
            grid = self.opened(config)
            for limit in grid.limits():
                if self.expired:
                    return
                self._try(config, grid.splits(limit))

    def _try(self, config: GridConfig, proposals: Iterable[Proposal]) -> None:
        for _ in self.grids[config].try_(proposals):
            self._note(config)

    def _note(self, config: GridConfig) -> None:
        """Keep the best split of a configuration if it is the best of all."""
        self._fitting[config] = None
        found = self._found(config)
        if self.best is None or found.batch_ns < self.best.batch_ns:
            self.best = found
            if self.settings.progress:
                self.settings.progress(
                    f"best so far {format_ns(found.batch_ns)} with {config.stages} x {config.pipelines}, microbatch "
                    f"{config.microbatch}, limit {found.limit}"
                )

    def opened(self, config: GridConfig) -> Pipelines:
        """Return the pipelines of a configuration, and have those that were used longest ago forget their tables."""
        self._open.pop(config, None)
        self._open[config] = None
        if len(self._open) > max(_OPEN, _ENTRIES // len(self.asked.problem.chain) ** 2):
            oldest = next(iter(self._open))
            del self._open[oldest]
            self.grids[oldest].forget()
        return self.grids[config]

    def improve(self, steps: int) -> None:
        """Move the cuts, limits and in-flight counts of the best few configurations while that helps."""
        finalists = self._order()[:_FINALISTS]

        def simulated() -> int:
            return sum(self.grids[config].steps for config in finalists)

        end = simulated() + steps
        for config in finalists:
            self.opened(config).improve(lambda: simulated() >= end or self.expired, partial(self._note, config))

    def settle(self) -> None:
        """Simulate the best few configurations in full, so that the figure of the best is that of its plan."""
        for config in self._order()[:_FINALISTS]:
            self.grids[config].simulate_in_full()
        self.best = next(map(self._found, self._order()), None)

    def _time(self, config: GridConfig) -> int:
        return self._found(config).batch_ns

    def _order(self) -> list[GridConfig]:
        """Return the configurations of which a split fits, the fastest first."""
        return sorted((config for config in self._fitting if self.grids[config].best is not None), key=self._time)

    def _found(self, config: GridConfig) -> Found:
        best = self.grids[config].best
        assert best is not None, "one of its splits fits"
        return Found(config, best.stages, best.limit, best.result.batch_ns, best.result.exact)

    def try_simplest(self) -> None:
        """Try grids of one stage, whose layers need no search, for some time behind the deadline."""
        end = self.asked.problem.deadline
        end = end.later(GRACE_S - end.remaining_s())
        flat = sorted((c for c in self.grids if c.stages == 1), key=lambda c: (-c.gpus, c.offload, -c.microbatch))
        with suppress(OutOfTime), end.insist():
            for config, how in product(flat, ways_to_recompute(self.asked.problem)):
                end.check()
                problem, group = replace(self.asked.of(config), deadline=end), config.groups()[0]
                count = len(problem.chain)
                stages = (Stage(0, count, group, in_segments(0, count, how)),)
                result = batch_time(problem, stages, config.microbatches(self.asked.batch), 1, whole=False)
                if result.fits:
                    self.grids[config].best = Split((0, count), (1,), 1, stages, result)
                    self._note(config)
                    return

    def bound(self) -> None:
        """Bound the configurations that may still hide something better, by what their limits allow."""
        if self.best is None:
            return
        for config in sorted(self.grids, key=lambda c: self.grids[c].bound_ns):
            if self.grids[config].bound_ns >= self.best.batch_ns or self.expired:
                return
            self.opened(config).bound(self.best.batch_ns, by_limit=True)

    def outcome(self, stopped: str | None) -> Outcome:
        """Return what was found."""
        count = len(self.asked.problem.platform)
        grids = [(p, count // p) for p in range(1, count + 1) if count % p == 0]
        grids = [grid for grid in grids if self.asked.pipelines in (None, grid[1])]
        if self.best is not None and (self.best.config.stages, self.best.config.pipelines) not in grids:
            grids.append((self.best.config.stages, self.best.config.pipelines))
        alive = [grid.bound_ns for grid in self.grids.values() if not grid.unfit]
        rows = tuple(self._row(inter, data) for inter, data in grids)
        return Outcome(self.best, rows, min(alive, default=0), stopped)

    def _row(self, inter: int, data: int) -> GridRow:
        own = [c for c in self.grids if (c.stages, c.pipelines) == (inter, data)]
        alive = [c for c in own if not self.grids[c].unfit]
        if not own:
            return GridRow(inter, data, None, None, why_no_grid(self.asked, inter, data))
        if not alive:
            return GridRow(inter, data, None, None, _grid_shortfall(self.asked, own))
        bound = min(self.grids[c].bound_ns for c in alive)
        fitting = [c for c in alive if self.grids[c].best is not None]
        if not fitting:
            return GridRow(inter, data, None, bound, "not searched")
        return GridRow(inter, data, self._found(min(fitting, key=self._time)), bound)


ALGORITHM = "grid"


def make_grid_plan(asked: GridProblem, settings: Settings | None = None, effort: str = "normal") -> Planned:
    """Return the validated plan of the best grid found; Infeasible, explained, if no grid fits.

    ``provenance.options`` holds the table of grids: the best figure of each, or what rules it out, and the bound.
    """
    if not any(True for _ in configs(asked)):
        raise BadInput(_why_not_asked(asked))
    outcome = search_grids(asked, settings or Settings(), effort)
    if outcome.best is None:
        raise Infeasible(_why_no_grid_fits(outcome))
    found = outcome.best
    problem = asked.of(found.config)
    options = _options(asked, outcome, found, effort)
    told = Provenance(ALGORITHM, options, solver_status=outcome.stopped, version=__version__)
    schedule = Schedule("message-driven", problem.policy.accumulate, found.limit)
    return checked(problem, found.stages, (any_bound(problem),), told, schedule)


def segment_length(stages: tuple[Stage, ...]) -> int | None:
    """Return ac, the layers of the longest recomputed segment; None when nothing is recomputed."""
    return max((stop - start for stage in stages for start, stop in stage.checkpoint), default=None)


def _options(asked: GridProblem, outcome: Outcome, best: Found, effort: str) -> dict[str, Any]:
    return {
        "batch": asked.batch,
        "microbatches": list(asked.sizes),
        "data_parallel": asked.pipelines or "auto",
        "limit": asked.limit,
        "effort": effort,
        "grid": _figures(GridRow(best.config.stages, best.config.pipelines, best, None)),
        "bound_ns": outcome.bound_ns,
        "grids": [_figures(row) for row in outcome.rows],
    }


def _figures(row: GridRow) -> dict[str, Any]:
    figures: dict[str, Any] = {"inter": row.stages, "data": row.pipelines}
    if row.found is not None:
        found = row.found
        figures |= {
            "batch_ns": found.batch_ns,
            "simulated": "in full" if found.exact else "one pipeline",
            "microbatch": found.config.microbatch,
            "offload": found.config.offload,
            "placement": found.config.placement,
            "limit": found.limit,
            "ac": segment_length(found.stages),
        }
    if row.bound_ns is not None:
        figures["bound_ns"] = row.bound_ns
    if row.reason is not None:
        figures["reason"] = row.reason
    return figures


# --- where there is none ---------------------------------------------------------------------------------------------


def _why_not_asked(asked: GridProblem) -> str:
    """Return in words which of the options of ``asked`` leaves no grid at all, whatever the memory."""
    count, pipelines = len(asked.problem.platform), asked.pipelines
    if pipelines is not None and pipelines > count:
        return f"--data-parallel: {pipelines} pipelines are more than the {count} GPUs"
    alone = (pipelines or 1) > 1 and asked.problem.chain.changed
    return f"{f'--data-parallel {pipelines}' if alone else '--batch'}: {why_no_grid(asked, 1, pipelines or 1)}"


def why_no_grid(asked: GridProblem, stages: int, pipelines: int) -> str | None:
    """Return why no configuration has this grid, whatever the memory; None when some do."""
    if pipelines > 1 and asked.problem.chain.changed:
        return asked.problem.chain.one_of_each
    layers = len(asked.problem.chain)
    if stages > layers:
        return f"{stages} stages are more than the network's {layers} layers"
    if asked.batch % pipelines:
        return f"a batch of {asked.batch} cannot be shared by {pipelines} pipelines"
    fitting = [size for size in asked.sizes if asked.batch // pipelines % size == 0]
    if not fitting:
        sizes = ", ".join(map(str, asked.sizes))
        return f"the {asked.batch // pipelines} samples of each pipeline aren't a multiple of microbatches of {sizes}"
    return asked.too_long(stages, max(fitting))


def _why_no_grid_fits(outcome: Outcome) -> str:
    """Return one sentence on a search that has found no grid: what ended it, or what each grid lacks."""
    if outcome.stopped is not None:
        return f"the {outcome.stopped} ended the search before it found a grid that fits"
    reasons = [f"{row.stages} x {row.pipelines}: {row.reason}" for row in outcome.rows if row.reason]
    return "no grid fits: " + "; ".join(reasons)


def _grid_shortfall(asked: GridProblem, unfit: Sequence[GridConfig]) -> str:
    """Return what the lightest of the ``unfit`` configurations of a grid lacks, on one pipeline of slowest devices."""
    config = min(unfit, key=lambda c: (c.microbatch, not c.offload))
    problem = asked.of(config)
    problem = problem.with_policy(replace(problem.policy, pipelines=config.pipelines))
    devices = tuple(problem.platform.slowest(group) for group in config.groups())
    return shortfall(replace(problem, platform=replace(problem.platform, devices=devices), replicas=False))

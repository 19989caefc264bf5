"""Which split into whole blocks, with recomputation by one rule, drains soonest over equal pipelines?

The class is made of plain inputs of one search: where stages may begin and end, what they recompute, equal pipelines,
and the schedules that are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile

import numpy as np

from ...check.shapes import held_at_most, shapes
from ...check.targets import Recompute, Shape, Target, refusals, weight_bytes
from ...cost import relaxations
from ...cost.stage_tables import StageTables
from ...errors import BadInput
from ...partition.cuts import legal_cuts
from ...partition.tables.split_paths import near as near_splits
from ...partition.tables.stages import Ranges
from ...plan import ScheduleKind, Stage
from ...problem import Problem
from ...registry import Late
from ...schedule.kinds import KINDS
from ...units import format_bytes, format_ns
from ..periodic.incumbent import Settings
from .layout import Layout
from .run import any_run
from .search import Config, climbed, until_ended
from .tables import Rule, RuledTables, work_floor_ns

MOST_CHUNKS = 4  # stages per GPU that are looked at, and more, up to as many, where all have equally many blocks
MOST_EVEN = 24
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # units that are recomputed at a time, or of each stage
FINALISTS = 4  # grids whose cuts are moved about
IMPOSSIBLE_NS = 2**62
BOUNDS = (Late("check.bounds.drained.proofs:shape_bound"),)  # on shapes with several stages on each GPU


@dataclass(frozen=True, slots=True)
class Found:
    """A split that was simulated, as indices of cuts, and the time of a mini-batch (ns)."""

    makespan_ns: int
    config: Config
    split: tuple[int, ...]
    recompute: Recompute
    stages: tuple[Stage, ...]


class BlockSearch:
    """The search of the class of a ``target``; ``best`` is the best so far."""

    def __init__(
        self, problem: Problem, name: str, target: Target, kinds: Sequence[ScheduleKind], settings: Settings
    ) -> None:
        self.name, self.target, self.settings, self.kinds = name, target, settings, tuple(kinds)
        self.cutoff_ns: int | None = None  # of the best, or what it must be below
        self.problem = problem if self.target.ties else replace(problem, tied="together")
        units = self.target.units(problem.chain)
        legal = set(legal_cuts(self.problem).tolist())
        self.units = units
        self.cuts = [0, *(unit.stop for unit in units if unit.stop in legal)]
        self.best: Found | None = None
        self.steps = 0  # that were simulated
        self.configs = sorted(self._configs(kinds), key=lambda c: (c.bound_ns, c.shape.ranks, c.shape.chunks))
        if not self.configs:
            raise BadInput(self._why_no_config(kinds))
        self.bounds: dict[Config, int] = {}
        self.finals: dict[Config, Found] = {}
        self._tables = StageTables.between(self.problem, np.array(self.cuts, dtype=np.int64))
        self._rules: dict[Recompute, Rule] = {}
        self._seen: dict[tuple[ScheduleKind, tuple[Stage, ...]], int | None] = {}
        self._lacking: tuple[int, int, str] | None = None  # bytes too many, and needed, and where

    # --- what there is ---

    def _configs(self, kinds: Iterable[ScheduleKind]) -> Iterator[Config]:
        count, units = self.problem.policy.accumulate or 1, len(self.cuts) - 1
        for kind in kinds:
            for shape in shapes(self.problem, kind, units, partial(self._chunks, kind)):
                if not refusals(self.target, kind, shape, count, self.problem.policy.zero):
                    floor = work_floor_ns(self.problem, shape.groups(), not KINDS[kind].splits)
                    yield Config(floor, kind, shape)

    def _chunks(self, kind: ScheduleKind, ranks: int) -> Iterable[int]:
        if KINDS[kind].homes is None:
            return (1,)
        most, blocks = (len(self.cuts) - 1) // ranks, sum(unit.block for unit in self.units)
        even = (x for x in range(MOST_CHUNKS + 1, min(most, MOST_EVEN) + 1) if blocks % (ranks * x) == 0)
        return (*range(2, min(most, MOST_CHUNKS) + 1), *even) if ranks > 1 else ()

    def _why_no_config(self, kinds: Sequence[ScheduleKind]) -> str:
        count = self.problem.policy.accumulate or 1
        reasons = refusals(self.target, kinds[0], Shape(2, 1), count, self.problem.policy.zero)
        why = reasons[0] if reasons else "no shape of pipelines is possible"
        return f"--for {self.name}: with {count} microbatches an update on {len(self.problem.platform)} GPUs, {why}"

    # --- the search ---

    def run(self, moves: int, first: Callable[[], None] = lambda: None) -> str | None:
        """Search all configurations; return why it ended early, or None. ``first`` is called behind the even splits."""

        def search() -> None:
            self._try_even()
            first()
            self._probe_all(self.configs)
            for config in self.configs if self.best else ():  # those that came before the first plan
                if self.cutoff_ns is not None and config.bound_ns < self.cutoff_ns:
                    self._bounded(config)
            self._improve(moves)

        return until_ended(self.problem, search, lambda: self.best is not None)

    def look(self) -> Found | None:
        """Return the best of the configurations whose even splits are soonest, of all where none fits, without moves;
        None for nothing below the cutoff. Proves nothing."""

        def search() -> None:
            self._try_even()
            self._probe_all([x.config for x in self._sooner()] or self.configs)

        until_ended(self.problem, search, lambda: self.best is not None)
        return self.best

    def _probe_all(self, configs: Iterable[Config]) -> None:
        """Probe those of some configurations that may beat the best."""
        self.settings.status.phase = "search"
        for config in configs:
            if self.cutoff_ns is not None and config.bound_ns >= self.cutoff_ns:
                continue
            if self.cutoff_ns is None or self._bounded(config) < self.cutoff_ns:
                self._probe(config)

    def _try_even(self) -> None:
        """Simulate the split of every configuration whose stages take about equally long, with nothing recomputed and
        with everything, unless its bound is above the best: a plan in little time, where one fits."""
        self.settings.status.phase = "even splits"
        work = relaxations.relative(self.problem).chain.sums
        ends = (work.forward_ns + work.backward_ns)[np.array(self.cuts)]
        can = self.problem.checkpointing != "none" and "every" in self.target.rules
        ways = [Recompute(), *([Recompute("every", 1)] if can else [])]
        for config in self.configs:
            if self.cutoff_ns is not None and config.bound_ns >= self.cutoff_ns:
                return
            stages = config.shape.ranks * config.shape.chunks
            split = np.searchsorted(ends, [ends[-1] * s // stages for s in range(stages + 1)])
            if len(np.unique(ends[split])) <= stages:  # a stage would take no time
                continue
            for way in ways[: 1 if KINDS[config.kind].splits else None]:
                if self._try_split(config, way, tuple(split.tolist())):
                    break

    def _bounded(self, config: Config) -> int:
        """Return a time (ns) below which no mini-batch of a configuration is done, and keep that of several stages on
        each GPU, which takes long to find: none is asked for where nothing fits."""
        if config.shape.chunks > 1 and config not in self.bounds:
            self.bounds[config] = self.chunked_bound(config)
        return self.bounds.get(config, config.bound_ns)

    def chunked_bound(self, config: Config) -> int:
        """Return a time (ns) below which no mini-batch of a configuration with several stages on each GPU is done."""
        kept = replace(self.problem, checkpointing="none") if KINDS[config.kind].splits else self.problem
        cuts = np.array(self.cuts, dtype=np.int64)
        found = (bound(kept, config.kind, config.shape, cuts) for bound in BOUNDS)
        return max([config.bound_ns, *(IMPOSSIBLE_NS if x is None else x for x in found)])

    def bound_ns(self, kind: ScheduleKind | None = None) -> int:
        """Return a time below which no plan of the class runs a mini-batch; with ``kind`` none under that schedule."""
        assert self.cutoff_ns is not None
        own = [config for config in self.configs if kind in (None, config.kind)]
        return min(self.cutoff_ns, *(self.bounds.get(config, config.bound_ns) for config in own))

    def _probe(self, config: Config) -> None:
        """Try the splits of a configuration that promise most, for every way to recompute that may pay; even ones of
        one that splits backwards, where nothing is recomputed."""
        if KINDS[config.kind].splits:
            pipe = self._pipe(config, Recompute())
            for split in pipe.starts():
                self._try_split(config, Recompute(), split)
            return
        bound: int | None = None
        spent: str | None = None  # a rule whose other ways take as long or longer than the best
        for way in self._ways(config):
            if way.rule == spent:
                continue
            pipe = self._pipe(config, way)
            enough = self.cutoff_ns
            least = pipe.soonest(enough=enough)
            if least is None:
                if enough is not None and pipe.soonest(fit=False, enough=enough) is None:
                    spent = way.rule
                continue
            bound = least[0] if bound is None else min(bound, least[0])
            for split in [least[1], *pipe.starts()]:
                self._try_split(config, way, split)
            better = config in self.finals and self.finals[config].recompute == way
            free = pipe.soonest(fit=False) if better else None
            if free is not None and free[0] == least[0]:
                if way.rule == "none":  # memory costs nothing, so nothing is recomputed for it
                    break
                spent = way.rule
        if bound is None:  # nothing that fits, or nothing below the best
            bound = config.bound_ns if self.cutoff_ns is None else self.cutoff_ns
            if self.cutoff_ns is None:
                self._note_lack(config)
        if config.shape.chunks == 1:  # what stages that share a device may fill of it is a guess, which bounds nothing
            self.bounds[config] = max(config.bound_ns, bound)

    def _ways(self, config: Config) -> Iterator[Recompute]:
        stages = config.shape.ranks * config.shape.chunks
        ways = self.target.ways(len(self.units) - stages + 1, COUNTS)
        return islice(ways, 1) if self.problem.checkpointing == "none" else ways

    def _rule(self, way: Recompute) -> Rule:
        if way not in self._rules:
            weights = weight_bytes(self.problem.chain)

            def ranges(start: int, stop: int) -> Ranges:
                own = [unit for unit in self.units if start <= unit.start < stop]
                return way.segments(self.target, own, weights)

            self._rules[way] = Rule(self._tables, ranges)
        return self._rules[way]

    def _pipe(self, config: Config, way: Recompute) -> Layout:
        """Return one pipeline of a configuration; stages that share a device have equal parts of its memory."""
        shape = config.shape
        count, ahead = (self.problem.policy.accumulate or 1) // shape.pipelines, config.kind == "1f1b"
        held = tuple(min(shape.ranks - s, count) for s in range(shape.ranks))
        if not ahead:
            held = held_at_most(config.kind, shape.ranks, shape.chunks, count)
        return Layout(RuledTables(self._rule(way), count, shape.chunks), shape.groups(), held, ahead)

    def _try_split(self, config: Config, way: Recompute, split: tuple[int, ...]) -> Found | None:
        """Simulate a split; return it if it became the best of its configuration."""
        self.problem.deadline.check()
        stages, known = self._pipe(config, way).stages(split), self.finals.get(config)
        makespan = self._simulated(config, stages, None if known is None else known.makespan_ns)
        if makespan is None or (known is not None and makespan >= known.makespan_ns):
            return None
        better = self.finals[config] = Found(makespan, config, split, way, stages)
        if self.cutoff_ns is None or makespan < self.cutoff_ns:
            self.best, self.cutoff_ns = better, makespan
            if self.settings.progress:
                shape = config.shape
                self.settings.progress(
                    f"best so far {format_ns(makespan)} a mini-batch with {shape.pipelines} x {shape.ranks} ranks, "
                    f"{config.kind}"
                )
        return better

    def _simulated(self, config: Config, stages: tuple[Stage, ...], below_ns: int | None) -> int | None:
        """Return the time of a mini-batch, None where it doesn't fit the memory, or surely isn't over ``below_ns``."""
        key = config.kind, stages
        if key not in self._seen:
            self.settings.status.candidates += 1
            run = any_run(self.problem, stages, config.kind, below_ns)
            self.steps += 0 if run is None else run.timeline.program.microbatches * len(run.graph.operations)
            self._seen[key] = run.makespan_ns if run is not None and run.fits else None
        return self._seen[key]

    def _improve(self, moves: int) -> None:
        """Move the cuts of the best configurations about while that helps, in so many simulated steps."""
        end = self.steps + moves

        def near(here: Found) -> Iterator[Found]:
            config = here.config
            if here.makespan_ns > self.bounds.get(config, config.bound_ns):
                splits = takewhile(lambda _: self.steps < end, near_splits(here.split, 2, False))
                yield from filter(None, (self._try_split(config, here.recompute, split) for split in splits))

        for found in self._sooner():
            climbed(found, near)

    def _sooner(self) -> list[Found]:
        """Return the soonest of the best of each configuration."""
        return sorted(self.finals.values(), key=lambda x: x.makespan_ns)[:FINALISTS]

    # --- where there is none ---

    def _note_lack(self, config: Config) -> None:
        """Keep what an even split of the configuration lacks with all recomputed, if it is least."""
        way = list(self._ways(config))[-1]
        pipe = self._pipe(config, way)
        free = pipe.soonest(fit=False)
        run = free and any_run(self.problem, pipe.stages(free[1]), config.kind)
        if run is None:
            return
        worst = max(run.uses, key=lambda use: use.over_bytes)
        if self._lacking is None or worst.over_bytes < self._lacking[0]:
            shape = config.shape
            where = f"{shape.pipelines} pipelines of {shape.ranks} ranks, {config.kind}"
            self._lacking = worst.over_bytes, worst.peak_bytes, where

    def why_none(self, stopped: str | None) -> str:
        """Return one sentence on why nothing was found."""
        if stopped is not None:
            return f"the {stopped} ended the search before it found a plan for {self.name} that fits"
        if self._lacking is None:
            return f"no split of {len(self.units)} units that {self.name} keeps whole is possible"
        over, needed, where = self._lacking
        together = ""
        if self.problem.chain.tied and not self.target.ties:
            one, other = self.problem.chain.tied[0]
            together = f"; layers {one} and {other} share weights, which {self.name} has in one stage"
        return (
            f"no plan that {self.name} can express fits: the split that lacks least, {where}, needs "
            f"{format_bytes(needed)} on a GPU, {format_bytes(over)} more than there is{together}"
            + ("; it recomputes nothing of models that it traces" if self.target.rules == ("none",) else "")
        )

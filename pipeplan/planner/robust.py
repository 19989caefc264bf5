"""Which plan is best where passes take now longer, now shorter than planned? That of the least 95th percentile.

A search for the shortest period leaves plans behind that take hardly longer. They, and the same with more microbatches
in flight between stages, which hides what comes late and takes memory, are run with durations drawn around the planned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import lcm
from typing import Any

from ..deadline import OutOfTime
from ..errors import InvalidPlan
from ..plan import Pattern
from ..problem import Problem
from ..schedule.kinds import KINDS
from ..schedule.pattern import most_in_flight, starts_of
from .periodic.incumbent import Scheduled
from .periodic.interval import at_interval, most_replicas, rescheduled
from .plan import Candidate, Jitter
from .simulated.other_schedules import default_microbatches, drains, own_schedule, program_of
from .simulated.simulation import drawn_ns, percentile_95, run_seeds

MOST_STEPS = 2 * 10**6  # that are simulated to choose, in some ten seconds
BETTER = 1000  # by what part of it a percentile must be less
_MADE_DEEPER = 3  # plans that are tried with more in flight


Compose = Callable[[Problem, Scheduled], Candidate]  # InvalidPlan where the plan isn't valid


def most_robust(
    problem: Problem, found: Sequence[Scheduled], compose: Compose, jitter: Jitter, open_interval: bool
) -> tuple[Candidate, dict[str, Any]]:
    """Return the candidate of the least 95th percentile of drawn runs, and the figures of its plan and of the first.

    The first of ``found`` has the shortest nominal period. Another is taken only if it does better as well in runs that
    it was not chosen by, which the figures are of. With an ``open_interval`` updates may be as rare as more
    microbatches in flight need. The problem's deadline and :data:`MOST_STEPS` end the search.
    """
    nominal = compose(problem, found[0])
    search = _Search(compose, jitter, default_microbatches(nominal.plan, own_schedule(nominal.plan)), open_interval)
    with suppress(OutOfTime, KeyboardInterrupt), problem.deadline.insist():
        search.run(nominal, found)
    best = search.best or nominal
    own, other = (search.p95_ns(candidate, jitter.seed) for candidate in (best, nominal))
    if own >= other:
        best, own = nominal, other
    return best, {
        "jitter": float(jitter.share),
        "seed": jitter.seed,
        "runs": jitter.runs,
        "microbatches": search.microbatches,
        "p95_ns": own,
        "nominal": {"period_ns": nominal.evaluation.period_ns, "p95_ns": other},
    }


class _Search:
    """Draws runs of candidates and keeps the best in ``best``; every run has as many ``microbatches``."""

    def __init__(self, compose: Compose, jitter: Jitter, microbatches: int, open_interval: bool) -> None:
        self.compose, self.jitter, self.microbatches, self.open_interval = compose, jitter, microbatches, open_interval
        self.best: Candidate | None = None
        self._best_ns = 0
        self._steps = 0

    def run(self, nominal: Candidate, found: Sequence[Scheduled]) -> None:
        """Try what was found, then the best of that with more in flight, then the best place after place."""
        tried = [(self._try(nominal), nominal)]
        for scheduled in found[1:]:
            candidate = self._composed(nominal.problem, scheduled)
            if candidate is not None:
                tried.append((self._try(candidate), candidate))
        tried = [pair for pair in tried if pair[0] is not None]
        tried.sort(key=lambda pair: pair[0] or 0)
        for _, candidate in tried[:_MADE_DEEPER]:
            for places in _whole(candidate.scheduled):
                self._try_deeper(candidate, places)
        while self.best is not None and any(self._try_deeper(self.best, [i]) for i in _places(self.best.scheduled)):
            pass

    def p95_ns(self, candidate: Candidate, seed: int) -> int:
        """Return what at most one in twenty drawn runs exceeds per microbatch."""
        plan, name = candidate.plan, own_schedule(candidate.plan)
        program = program_of(plan, name, self.microbatches)
        seeds = run_seeds(seed, self.jitter.runs)
        self._steps += len(seeds) * self.microbatches * len(program.operations)
        return round(percentile_95(drawn_ns(program, self.jitter.share, seeds, drains(plan, name))))

    def _try(self, candidate: Candidate) -> int | None:
        """Draw runs of a candidate that can become the best, and return its percentile."""
        deadline = candidate.problem.deadline
        deadline.check()
        if self.best is not None and (self._steps > MOST_STEPS or candidate.evaluation.period_ns >= self._best_ns):
            return None
        found = self.p95_ns(candidate, self.jitter.seed + 1)  # not those that figures are of
        if self.best is None or found < self._best_ns - self._best_ns // BETTER:
            self.best, self._best_ns = candidate, found
        return found

    def _composed(self, problem: Problem, scheduled: Scheduled) -> Candidate | None:
        try:
            return self.compose(problem, scheduled)
        except InvalidPlan:
            return None

    def _try_deeper(self, candidate: Candidate, places: Collection[int]) -> bool:
        """Try a candidate with more in flight; return whether that is the best now."""
        if self._steps > MOST_STEPS:
            return False
        before = self.best
        deeper = _deeper(candidate, places, self.open_interval)
        made = None if deeper is None else self._composed(*deeper)
        if made is not None:
            self._try(made)
        return self.best is not before


def _places(scheduled: Scheduled) -> range:
    """Return where more can be in flight: before which operations of the path, or how many more at once.

    Nowhere in a stage alone, which waits for nobody.
    """
    if len(scheduled.allocation.stages) == 1:
        return range(0)
    if scheduled.pattern is not None:
        return range(1, len(scheduled.pattern.operations))
    limited = scheduled.schedule is not None and KINDS[scheduled.schedule.kind].limit is not None
    return range(1, 2 if limited else 1)


def _whole(scheduled: Scheduled) -> Iterator[list[int]]:
    """Yield places all along the way: before every forward, every backward too, and where the way turns."""
    if not _places(scheduled):
        return
    if scheduled.pattern is None:
        yield from ([more] for more in (1, 2, 4))
        return
    kinds = [op.kind for op in scheduled.pattern.operations]
    forward = [i for i, kind in enumerate(kinds) if i and kind == "F"]
    turn, *backward = [i for i, kind in enumerate(kinds) if kind == "B"]
    yield from (forward, forward + backward, [turn])


def _deeper(candidate: Candidate, places: Collection[int], open_interval: bool) -> tuple[Problem, Scheduled] | None:
    """Return a candidate in which whole periods more pass before the operations at ``places``.

    Operations keep their places in the period, so nothing overlaps that did not. Where that is more than may be in
    flight between two updates, these become rarer if they may.
    """
    problem, scheduled = candidate.problem, candidate.scheduled
    if scheduled.pattern is None:
        assert scheduled.schedule is not None, "there is one or the other"
        limit = (scheduled.schedule.limit or 1) + sum(places)
        return problem, replace(scheduled, schedule=replace(scheduled.schedule, limit=limit))
    graph = candidate.evaluation.graph
    pattern = _delayed(candidate, scheduled.pattern, places)
    needed = most_in_flight(graph, starts_of(pattern), pattern.period_ns)
    if not problem.policy.rules.within_update or needed <= problem.policy.update_interval() or not open_interval:
        return problem, replace(scheduled, pattern=pattern)
    rarer = rescheduled(problem, scheduled, max(needed, most_replicas(scheduled.allocation.stages)))
    if rarer is None or rarer.pattern is None:
        return None
    return at_interval(problem, needed), replace(rarer, pattern=_delayed(candidate, rarer.pattern, places))


def _delayed(candidate: Candidate, pattern: Pattern, places: Collection[int]) -> Pattern:
    graph, starts, later = candidate.evaluation.graph, [], 0
    step = pattern.period_ns * lcm(*(resource.replicas for resource in graph.resources))
    for i, op in enumerate(pattern.operations):
        later += step * (i in places)
        starts.append(op.start_ns + later)
    return replace(
        pattern, operations=tuple(replace(op, start_ns=at) for op, at in zip(pattern.operations, starts, strict=True))
    )

"""Which period is refuted for every plan? Necessary conditions, the quick ones first, at more and more periods.

Periods that can be met stay so when they grow, so a period that any condition refutes is a bound, whatever is found at
shorter ones. Bisection looks for the longest. How many periods are tried depends on the number of layers, devices and
nothing else: same problem, same bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Literal

from ...cost import relaxations
from ...problem import Problem
from .blocks import Blocks
from .covers import MOST_COVERED, uncovered
from .facts import Facts
from .runs import LONGEST, Segments, runs_at, too_much

Part = Literal["work", "fill", "layer", "averages", "runs", "blocks", "pooled", "covers", "alone"]
PARTS: dict[Part, str] = {
    "work": "the work of all layers binds, shared perfectly",
    "fill": "the work of all layers binds, with what fills the pipeline before each GPU can begin",
    "layer": "the largest layer binds",
    "averages": "memory averaged over time binds, or the sums of gradients over replicas",
    "runs": "memory of what each stage holds at its worst instant binds, or its work",
    "blocks": "whole layers don't fill the devices evenly",
    "pooled": "memory of stage inputs, weights and buffers binds, averaged over time",
    "covers": "no sets of stages that fit on one GPU together cover all layers",
    "alone": "no GPU has room for two layers, and stages of one each take so long",
}
IMPOSSIBLE: dict[Part, str] = {
    "runs": "however it is cut, some layers fit on no GPU",
    "blocks": "however they are dealt out, whole layers fill more GPUs",
    "covers": "however it is cut, the stages fill more GPUs",
}
ENDLESS_NS = 10**30  # longer than any work or sum
WORK = 40_000  # of refutations, in table rows: some tenths of a second
MOST_TESTS = 40
MOST_LAYERS = 256
FINEST = 1000  # of a period, to which such a bound is made out
LITTLE = 50, 400  # parts of a period
MOST_DEEPER = 6  # periods at which covers are looked for


@dataclass(frozen=True)
class Proved:
    """No plan is shorter than ``period_ns``, by the condition ``part``; ``infeasible``: none fits at any period."""

    period_ns: int
    part: Part
    infeasible: bool = False


class Refutations:
    """The conditions of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.facts = Facts(relaxations.relative(problem))
        self._blocks = Blocks(self.facts)
        self._segments = Segments(self.facts)

    @property
    def tests(self) -> int:
        """How many periods may be tried."""
        count, spreads = self.facts.count, len(self.facts.spreads)
        return min(MOST_TESTS, WORK // (count * (20 + count * spreads // 8)))

    def refuted(self, period: int | None) -> Part | None:
        """Return what refutes ``period`` ns, None for nothing; without a period what refutes all."""
        facts = self.facts
        if period is not None and period * facts.ticks > LONGEST:
            return None
        if self._blocks.worthwhile and self._blocks.too_many(period or ENDLESS_NS):
            return "blocks"
        runs = runs_at(facts, period)
        if not runs.complete:
            return "runs"
        few = period is None and facts.count <= MOST_COVERED
        return "covers" if few and uncovered(facts, runs, self._segments, None) else None

    def pool_refuted(self, period: int) -> Part | None:
        """Return ``pooled`` where averages of all that is held refute ``period`` ns; slower than the others."""
        facts = self.facts
        if period * facts.ticks > LONGEST:
            return None
        runs = runs_at(facts, period)
        if not runs.complete:
            return "runs"
        return "pooled" if too_much(self._segments, runs, period * facts.ticks) else None

    def cover_refuted(self, period: int) -> Part | None:
        """Return ``covers`` where no sets of runs cover the chain at ``period`` ns; the slowest of all."""
        facts = self.facts
        if facts.count > MOST_COVERED or period * facts.ticks > LONGEST:
            return None
        runs = runs_at(facts, period)
        if not runs.complete:
            return "runs"
        return "covers" if uncovered(facts, runs, self._segments, period * facts.ticks) else None


def strong_bound(problem: Problem, quick: Proved) -> Proved:
    """Return the best bound of all conditions, at least ``quick``."""
    if len(problem.chain) > MOST_LAYERS:
        return quick
    conditions = Refutations(problem)
    if conditions.tests < 3:
        return quick
    part = conditions.refuted(None)
    if part is not None:
        return Proved(quick.period_ns, part, infeasible=True)
    found = longest_refuted(conditions.refuted, quick, conditions.tests)
    return longest_refuted(conditions.pool_refuted, found, conditions.tests // 3)


def deeper(problem: Problem, known: Proved, period: int, tests: int = MOST_DEEPER) -> Proved:
    """Return the longest bound up to ``period`` ns, at least ``known``, that follows where covers are looked for, at so
    many periods and at one of little more than what is known.

    Nothing where a little more than what is ``known`` cannot be refuted, or is all there is to find. Whoever claims
    a bound that was found by this finds it again, as it is looked for just below ``period`` as well.
    """
    if known.infeasible or known.period_ns >= period:
        return known
    more = (known.period_ns + known.period_ns // part for part in LITTLE)
    barely = next((one for one in more if one < period), None)
    if barely is None:
        return known
    conditions = Refutations(problem)
    if barely < period - 1:
        part = conditions.cover_refuted(barely)
        if part is None:
            return known
        known = Proved(barely + 1, part)
    tried = period - 1
    for _ in range(tests):
        part = conditions.cover_refuted(tried)
        if part is not None:
            known = Proved(tried + 1, part)
        else:
            period = tried
        if period - known.period_ns <= 1 + known.period_ns // FINEST:
            break
        tried = isqrt(known.period_ns * period)
    return known


def longest_refuted(refuted: Callable[[int], Part | None], low: Proved, tests: int) -> Proved:
    """Return the longest period that is refuted in so many ``tests``, by steps that grow and then by bisection."""
    best, period, step = low, low.period_ns, 1.02 if tests > 12 else 1.1
    met: int | None = None
    while tests and (met is None or met > best.period_ns):
        tests -= 1
        part = refuted(period)
        if part is None:
            met = period
        else:
            best = Proved(period + 1, part)
        if met is None:
            period, step = max(period + 1, int(period * step)), min(step**2, 4.0)
        else:
            period = (best.period_ns + met) // 2
    return best

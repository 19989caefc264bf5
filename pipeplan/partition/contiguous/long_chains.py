"""Which stages has a long chain, sought between some of its cuts at a time and recomputed between any of its layers?

First among cuts that are spread over the chain, then among those near the ends of the best stages so far: the nearest
and ever farther ones together, so that stages can move far and settle exactly. What they recompute is on some terms
(:mod:`.priced`), in the end on terms near those of the best. A heuristic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from ...cost import memory_model
from ...deadline import OutOfTime
from ...integers import Ints
from ...plan import Allocation, Stage
from ...problem import LayerTimes, Problem
from ..cuts import legal_cuts, spread_cuts
from ..recompute.priced import PricedLabels, Terms, first_terms, nearby, priced_labels
from ..recompute.segments import AnyLabels, caps_within, most_groups, profiles, with_labels
from ..tables.stages import SearchTables, stage_tables
from .bisection import plain_delays, shortest_between
from .claims import claimed_ns, longest_period_ns

_SPREAD = 64  # cuts all over the chain, at least
_MOST_NEAR = 320  # cuts near the ends of stages
_ROUNDS = 12
_WORTH = 2000  # a round that gains less than this part of the period is the last of its kind


def thinned(
    tables: SearchTables, stages: Sequence[Stage] = (), turn: int = 0, most_near: int = _MOST_NEAR
) -> SearchTables:
    """Return tables between few cuts: some all over the chain, and about ``most_near`` near the ends of ``stages``,
    others each ``turn`` where there are more."""
    problem, cuts = tables.problem, legal_cuts(tables.problem)
    index = spread_cuts(problem, cuts, max(_SPREAD, len(problem.platform)))
    if index is None:
        return tables
    if stages:
        index = np.union1d(index, _near(cuts, stages, turn, most_near))
    if tables.complete:
        return tables.select(index)
    return replace(stage_tables(problem, cuts[index]), states=tables.states, orders=tables.orders)


def _near(cuts: Ints, stages: Sequence[Stage], turn: int, most: int) -> Ints:
    """Return the indices of cuts 0, 1, 2, 4, .. cuts away from the ends of ``stages``, up to half a stage."""
    ends = np.searchsorted(cuts, [*(stage.start for stage in stages), stages[-1].stop])
    steps = [2**k for k in range(max(1, (len(cuts) // (2 * len(stages))).bit_length()))]
    turns = ceil(len(steps) * 2 * len(ends) / most)
    some = steps[turn % turns :: turns]
    away = np.array([-x for x in some] + [0, *some])
    return np.unique((ends[:, None] + away).clip(0, len(cuts) - 1))


def with_priced_segments(
    tables: SearchTables,
    period: int,
    least: int,
    longest: int,
    terms: tuple[Terms, ...],
) -> tuple[SearchTables, dict[LayerTimes | None, dict[int, PricedLabels]]] | None:
    """Return ``tables`` between few cuts with the times of stages that may recompute segments on some ``terms``, and
    the labels by profile and first layer; else as :func:`.segments.with_segments`."""
    problem, cuts, ends = tables.problem, tables.cuts, plain_delays(tables)
    behind = np.arange(len(cuts)) > np.arange(len(cuts))[:, None]
    labels = {}
    for times in profiles(tables):
        caps = caps_within(tables, period, ends, times)
        if caps is None:
            return None
        cost, peak = (np.where(behind, table[:, cuts], -1) for table in (caps.cost, caps.peak))
        labels[times] = priced_labels(problem.chain.timed(times), terms, cuts, cost, peak, problem.deadline)
    of: dict[LayerTimes | None, Callable[[int], AnyLabels]] = {x: found.__getitem__ for x, found in labels.items()}
    return with_labels(tables, of, most_groups(tables, least, longest))[0], labels


def terms_of(problem: Problem) -> tuple[Terms, ...]:
    """Return the terms to begin with."""
    return first_terms(problem.chain, max(device.memory_bytes for device in problem.platform.devices))


def between_layers(tables: SearchTables, best: Allocation | None, low: int, high: int) -> Allocation | None:
    """Return the best allocation that is found from ``low`` to ``high`` ns, or ``best``, what it begins with.

    ``tables`` are over all cuts, or some.
    """
    problem, longest = tables.problem, longest_period_ns(tables.problem)
    terms = terms_of(problem)
    try:
        for turn in range(_ROUNDS):
            upper = high if best is None else claimed_ns(best) - 1
            if upper < low:
                break
            some = thinned(tables, () if best is None else best.stages, turn)
            found = with_priced_segments(some, upper, low, longest, terms)
            if found is not None:
                best, _ = shortest_between(found[0], plain_delays(some), low, upper, best, _WORTH)
            if best is None or found is None or (turn and claimed_ns(best) > upper - upper // _WORTH):
                break
            terms = nearby(_terms_used(problem, best, found[1], terms)) or terms
    except OutOfTime:
        if best is None:
            raise
    return best


def _terms_used(
    problem: Problem,
    best: Allocation,
    labels: dict[LayerTimes | None, dict[int, PricedLabels]],
    terms: tuple[Terms, ...],
) -> list[Terms]:
    """Return the terms on which the stages of ``best`` are recomputed."""
    found = set()
    for stage in best.stages:
        times = problem.platform.slowest(stage.devices).times
        chain = problem.chain.timed(times)
        _, _, cost = memory_model.activations(chain, stage.start, stage.stop, stage.checkpoint)
        if stage.checkpoint and stage.start in labels[times]:
            found |= {*labels[times][stage.start].on_terms(stage.stop, cost).tolist()[:1]}
    return [terms[way] for way in sorted(found)]

"""What runs when if the backward is split, and weight gradients, which nothing waits for, fill the bubbles?"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from ...cost.stage_cost import StageCost
from ...cost.stage_graph import StageGraph
from ..program import Program, no_pipelines, refuse, side_by_side
from ..simulate import simulate
from .slots import Pass, listed, shares

SEARCH_STEPS = 10**6  # steps that the search for ZB2P's shape may simulate


def zb1p(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Program:
    """Return ZB-H1: 1F1B's order with stage s's weight gradients s microbatches late; p activations on every device.

    With 3 stages and 4 microbatches, ``I`` and ``W`` the two parts of the backward (balanced stages and F = I = W take
    3m + p - 1 slots)::

        device 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        device 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        device 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    With r replicas of every stage it is r such pipelines side by side.
    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 2.1; torch's ``ScheduleZBH1``.
    """
    stages = len(graph.stages)
    lags = [stages - s for s in range(stages)], list(range(stages))
    return _program(graph, microbatches, "zb1p", lags, True, weight_keeps)


def zb2p(graph: StageGraph, microbatches: int, weight_keeps: Fraction = Fraction(1)) -> Program:
    """Return ZB-H2: about twice as many forwards ahead, so that no stage waits for its first backward; 2p activations.

    Stage s of S runs 1 + a(S - 1 - s) forwards ahead and its weight gradients b s microbatches late. With equal parts
    a = b = 2 leaves no bubble at all once m >= 2p - 1 (p = 3, m = 6)::

        device 0  F0 F1 F2 F3 F4 I0 F5 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
        device 1  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 W0 I3 W1 I4 W2 I5 W3 W4 W5
        device 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 W0 I5 W1 W2 W3 W4 W5

    For unequal parts the simulator picks a, b and whether W or F goes first: steepest descent over a grid, scored by
    the longest span of a device (then the makespan) on at most 4p microbatches. An activation between the two parts of
    its backward counts ``weight_keeps``, or if that is 1 what the profile says. A heuristic. Source: Qi et al. 2024,
    sections 2.2 and 3.1.
    """
    refuse(no_pipelines(graph, "zb2p"))
    stages = len(graph.stages)
    probe = min(microbatches, 4 * stages * side_by_side(graph))
    budget = max(24, SEARCH_STEPS // max(1, probe * (len(graph.operations) + stages)))
    return _shaped(graph, microbatches, _search(graph, probe, budget, weight_keeps), weight_keeps)


Shape = tuple[int, int, bool]  # (10 a, 10 b, whether W goes before F)


def _search(graph: StageGraph, microbatches: int, budget: int, weight_keeps: Fraction) -> Shape:
    stages, longest = len(graph.stages), max(shares(microbatches, side_by_side(graph)))
    keeps = [_kept_share(stage, weight_keeps) for stage in graph.stages]
    scores: dict[Shape, tuple[int, int]] = {}

    def score(shape: Shape) -> tuple[int, int]:
        if shape not in scores:
            ahead, lag = _ahead_and_lag(stages, shape)
            held = max(_most_held(_order(s, longest, ahead[s], lag[s], shape[2]), keeps[s]) for s in range(stages))
            scores[shape] = (10**30, 0)
            if held <= 2 * stages and len(scores) <= budget:
                timeline = simulate(_shaped(graph, microbatches, shape, weight_keeps))
                lanes = range(len(timeline.program.lanes))
                scores[shape] = max(map(timeline.span_ns, lanes)), timeline.makespan_ns
        return scores[shape]

    def descend(shape: Shape) -> Shape:
        while True:
            a, b, _ = shape
            near = [
                (a + step_a, b + step_b, first)
                for step_a in (-4, -2, 0, 2, 4)
                for step_b in (-8, -4, -2, 0, 2, 4, 8)
                for first in (False, True)
                if a + step_a >= 10 and b + step_b >= 0
            ]
            best = min(near, key=lambda other: (score(other), other))
            if score(best) >= score(shape):
                return shape
            shape = best

    starts: list[Shape] = [(20, 20, False), (20, 20, True), (10, 10, False)]
    return min(map(descend, starts), key=lambda shape: (score(shape), shape))


def _shaped(graph: StageGraph, microbatches: int, shape: Shape, weight_keeps: Fraction) -> Program:
    return _program(graph, microbatches, "zb2p", _ahead_and_lag(len(graph.stages), shape), shape[2], weight_keeps)


Lags = tuple[list[int], list[int]]  # of each stage how many forwards it runs ahead, and how late its weight gradients


def _ahead_and_lag(stages: int, shape: Shape) -> Lags:
    a, b, _ = shape
    return [1 + round(a * (stages - 1 - s) / 10) for s in range(stages)], [round(b * s / 10) for s in range(stages)]


def _program(
    graph: StageGraph, microbatches: int, name: str, lags: Lags, weight_first: bool, weight_keeps: Fraction
) -> Program:
    def order(s: int, count: int) -> list[Pass]:
        return _order(s, count, lags[0][s], lags[1][s], weight_first)

    return listed(graph, microbatches, no_pipelines(graph, name), order, split=True, weight_keeps=weight_keeps)


def _order(stage: int, microbatches: int, ahead: int, lag: int, weight_first: bool) -> list[Pass]:
    """``ahead`` forwards, then rounds of one backward, one forward, and one weight part ``lag`` backwards late."""
    ahead = min(ahead, microbatches)
    order: list[Pass] = [("F", stage, m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(("B", stage, m))
        forward: list[Pass] = [("F", stage, ahead + m)] if ahead + m < microbatches else []
        weight: list[Pass] = [("W", stage, m - lag)] if m >= lag else []
        order += weight + forward if weight_first else forward + weight
    order += [("W", stage, m) for m in range(max(0, microbatches - lag), microbatches)]
    return order


def _kept_share(stage: StageCost, weight_keeps: Fraction) -> Fraction:
    """Return the share of a stage's activations that its weight part needs: ``weight_keeps``, or, if that is all, what
    the profile says."""
    if weight_keeps < 1 or stage.held_between_bytes is None or not stage.saved_bytes:
        return weight_keeps
    return Fraction(stage.held_between_bytes, stage.saved_bytes)


def _most_held(order: Sequence[Pass], weight_keeps: Fraction) -> Fraction:
    """Return the most activations held, counting ``weight_keeps`` of one between the parts of its backward."""
    change = {"F": Fraction(1), "B": weight_keeps - 1, "W": -weight_keeps}
    return max(accumulate((change[kind] for kind, _, _ in order), initial=Fraction(0)))

"""How short can a period be at all? Lower bounds for every plan, however its layers are placed and scheduled.

Bounds of class ``any``, from quick to slow; each condition is necessary for every valid plan, and which one binds is
said in words (:data:`PARTS`):

- ``averages``: all work shared perfectly, or as far as a pipeline has filled, and the largest layer;
- ``runs``: what the layers on one group of devices take and hold at their worst instant, with the microbatches that
  must be inside by then (``facts`` says what they cost at least);
- ``blocks``: layers as whole things, dealt out to the devices;
- ``pooled``: all that is held over time, with stage inputs, weights and buffers of the cheapest cuts;
- ``covers``: sets of runs that fit on one group of devices together, by work and by what they hold at their worst
  instants, have to cover the chain; looked for at any period, and then only up to one that is asked about.

With unequal devices and several levels all but the last take the largest memory, the fastest device and the fastest
link. Of schedules that are no patterns (drained ones, nF1B) no counts of microbatches inside are taken, as they needn't
be the same in every period. Where the layers of a DAG may stand in several orders, bounds hold for the
problem's own, and where each stage chooses among variants of its layers ``choosing`` alone, by averages, bounds. Bounds
of narrower classes come from exact algorithms (``contiguous`` is its own bound); the planner assembles them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from ...cost import relaxations
from ...deadline import OutOfTime
from ...partition.contiguous.contiguous import contiguous
from ...plan import Bound, Plan
from ...problem import Problem
from .averages import fill_bound, layer_bound, load_bound, work_ns
from .choosing import choosing_proof
from .covers import all_contiguous
from .strong import IMPOSSIBLE, PARTS, Part, Proved, deeper, strong_bound

__all__ = ["IMPOSSIBLE", "PARTS", "Proved", "all_contiguous", "any_bound", "bounded", "derived_up_to", "follows",
           "layer_bound", "load_bound", "overstated", "proof", "quick_proof", "reaches", "work_ns"]  # fmt: skip


def any_bound(problem: Problem, up_to: int | None = None) -> Bound:
    """Return the best lower bound for class ``any`` with the replicas and checkpointing that ``problem`` allows.

    Where the policy leaves the update interval open it holds for every interval. ``up_to`` as in :func:`proof`.
    """
    period = proof(problem).period_ns if up_to is None else derived_up_to(problem, up_to)
    return Bound("any", problem.replicas, problem.checkpointing, period, any_interval=problem.policy.open)


@lru_cache(maxsize=16)
def proof(problem: Problem, up_to: int | None = None) -> Proved:
    """Return the best lower bound for class ``any`` and what it follows from, or that no plan fits at all; remembered.

    What takes long is left out, but where the bound is below ``up_to`` ns, and then tells no more than that.
    """
    if problem.chain.variants:
        return choosing_proof(problem)
    if up_to is None:
        return strong_bound(problem, quick_proof(problem))
    known = proof(problem)
    if known.period_ns < up_to and all_contiguous(problem):
        with suppress(OutOfTime):
            least = max((best.lower_bound_ns or 0 for best in contiguous(problem)), default=0)
            known = Proved(least, "alone") if least > known.period_ns else known
    return known if known.period_ns >= up_to else deeper(problem, known, up_to)


def derived_up_to(problem: Problem, period: int) -> int:
    """Return a lower bound (ns) for class ``any``: the quick one where that reaches ``period``, else the best."""
    quick = quick_proof(problem).period_ns
    return quick if quick >= period else proof(problem, up_to=period).period_ns


def reaches(problem: Problem, period: int) -> bool:
    """Whether every plan takes ``period`` ns, as far as one look at covers tells."""
    known = proof(problem)
    return (known if problem.chain.variants else deeper(problem, known, period, 1)).period_ns >= period


def quick_proof(problem: Problem) -> Proved:
    """Return the bound by work and the largest layer alone."""
    if problem.chain.variants:
        return choosing_proof(problem)
    relaxed = relaxations.relative(problem)
    found: list[tuple[int, Part]] = [
        (max(1, load_bound(relaxed)), "work"),
        (fill_bound(relaxed), "fill"),
        (layer_bound(relaxed), "layer"),
    ]
    return Proved(*max(found, key=lambda one: one[0]))


def bounded(plan: Plan, bound: Bound) -> Problem:
    """Return the problem, without its search's time limit, of whose solutions ``bound`` of ``plan`` speaks."""
    policy = replace(plan.policy, accumulate=None) if bound.any_interval else plan.policy
    return Problem(plan.chain, plan.platform, policy, bound.replicas, bound.checkpointing)


def follows(bound: Bound, of_any: Bound) -> bool:
    """Whether ``bound`` says less than that of class ``any`` with the same replicas and checkpointing."""
    return bound.period_ns < of_any.period_ns and (of_any.any_interval or not bound.any_interval)


def overstated(bound: Bound, derived_ns: int) -> list[str]:
    """Return a sentence if ``bound`` claims more than what can be derived for its class."""
    if bound.period_ns <= derived_ns:
        return []
    return [
        f"lower_bounds: {bound.period_ns} ns of class {bound.allocation} is more than can be derived ({derived_ns} ns)"
    ]

"""Two profiles of one network side by side: what moved, and whether a plan made from the one holds for the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from .bounds import any_bound
from .errors import BadInput
from .evaluate import SIMULATED, evaluate
from .plan import Bound, Pattern, Plan
from .problem import Chain, Layer, Problem
from .profiles import merge_articulation
from .schedule.one_f_one_b import best_one_f_one_b_star
from .schedule.retime import order_of, retime
from .stages import StageGraph, stage_graph, starts_of
from .validate import structure_violations, violations


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A layer in both profiles, or in one of them; ``indices`` are its places, None where it is missing."""

    name: str
    indices: tuple[int | None, int | None]
    before: Layer | None
    after: Layer | None

    @property
    def time_ratio(self) -> float | None:
        """Forward and backward time after over before; None when there is nothing to compare."""
        if self.before is None or self.after is None or not time_ns(self.before):
            return None
        return time_ns(self.after) / time_ns(self.before)


def time_ns(layer: Layer) -> int:
    """Return forward and backward time of one layer."""
    return layer.forward_ns + layer.backward_ns


def paired_layers(one: Chain, other: Chain) -> list[LayerPair]:
    """Return the layers of two profiles in order, matched by name; where counts agree, renamed ones by place."""
    names = [[layer.name for layer in chain.layers] for chain in (one, other)]
    matcher = SequenceMatcher(a=names[0], b=names[1], autojunk=False)
    pairs = []
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        together = min(i_end - i, j_end - j) if kind == "equal" or i_end - i == j_end - j else 0
        for k in range(together):
            before, after = one.layers[i + k], other.layers[j + k]
            pairs.append(LayerPair(before.name, (i + k, j + k), before, after))
        pairs += [LayerPair(names[0][k], (k, None), one.layers[k], None) for k in range(i + together, i_end)]
        pairs += [LayerPair(names[1][k], (None, k), None, other.layers[k]) for k in range(j + together, j_end)]
    return pairs


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; 1 means the same order. At least two values."""
    ranks = [_ranks(values) for values in (one, other)]
    means = [sum(r) / len(r) for r in ranks]
    centred = [[x - mean for x in r] for r, mean in zip(ranks, means, strict=True)]
    product = sum(x * y for x, y in zip(*centred, strict=True))
    norm = (sum(x * x for x in centred[0]) * sum(y * y for y in centred[1])) ** 0.5
    return product / norm if norm else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for i in order[start:stop]:
            ranks[i] = (start + stop - 1) / 2
        start = stop
    return ranks


@dataclass(frozen=True, slots=True)
class Carried:
    """A plan carried to another profile: its stages with the other costs, and what is broken then.

    ``plan`` has no pattern where no period keeps the plan's order. ``period_ns`` is None when something is broken, and
    then ``other_order_ns`` is the period that the same stages reach in another order (1F1B*), if they do.
    """

    plan: Plan
    period_ns: int | None
    violations: tuple[str, ...]
    other_order_ns: int | None = None


def carried(plan: Plan, chain: Chain) -> Carried:
    """Return ``plan`` with the costs of ``chain``: the same stages in the same order, at the smallest period it allows.

    A plan without a pattern keeps its schedule and its limit, and is simulated anew. Otherwise memory is judged with
    the microbatches in flight of that order. Where an operation appears or vanishes (a transfer of no bytes),
    contiguous stages get their best 1F1B* instead. Exact for the order (:func:`.retime.retime`).
    """
    moved = replace(plan, chain=chain, pattern=None, lower_bounds=())
    if plan.schedule.kind in SIMULATED:
        found = violations(moved)
        if found:
            return Carried(moved, None, tuple(found))
        moved = replace(moved, lower_bounds=(_any_bound(moved),))
        return Carried(moved, evaluate(moved).period_ns, ())
    broken = structure_violations(chain, plan.platform, plan.policy, plan.allocation.stages)
    if broken or plan.pattern is None:
        return Carried(moved, None, tuple(broken or ["the plan has no pattern"]))
    graphs = [stage_graph(c, plan.platform, plan.policy, plan.allocation.stages) for c in (plan.chain, chain)]
    pattern = _pattern(graphs[0], graphs[1], plan.pattern)
    if pattern is None:
        return Carried(
            moved, None, ("no period lets the stages run in the order of the plan",), _other_order(graphs[1])
        )
    moved = replace(moved, pattern=pattern)
    found = violations(moved)
    if found:
        return Carried(moved, None, tuple(found), _other_order(graphs[1]))
    moved = replace(moved, lower_bounds=(_any_bound(moved),))
    return Carried(moved, evaluate(moved).period_ns, ())


def _any_bound(plan: Plan) -> Bound:
    return any_bound(Problem(plan.chain, plan.platform, plan.policy, True, "segments"))


def _other_order(graph: StageGraph) -> int | None:
    pattern = best_one_f_one_b_star(graph) if graph.contiguous else None
    return None if pattern is None else pattern.period_ns


def _pattern(old: StageGraph, new: StageGraph, pattern: Pattern) -> Pattern | None:
    same = [(x.kind, x.stage) for x in old.operations] == [(x.kind, x.stage) for x in new.operations]
    if same:
        return retime(new, order_of(old, starts_of(pattern), pattern.period_ns))
    return best_one_f_one_b_star(new) if new.contiguous else None


def matching_chain(plan: Plan, one: Chain, other: Chain) -> Chain:
    """Return ``other`` at the granularity at which ``plan`` was made from ``one``; BadInput if it wasn't."""
    for merge in (lambda chain: chain, merge_articulation):
        if plan.chain.layers == merge(one).layers:
            found: Chain = merge(other)
            return found
    raise BadInput(f"the plan was made from another profile than {one.name}: its layers differ")

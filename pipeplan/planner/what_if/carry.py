"""Does a plan that was made from one profile of a network hold for another, and at which period?

Which layers of the two are the same, and where the one has the cuts of the other, comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Literal

from ...check.bounds import any_bound
from ...check.validate import judged, structure_violations
from ...cost.stage_graph import StageGraph, stage_graph
from ...errors import BadInput
from ...names import shown
from ...partition.granularity import merging
from ...plan import Pattern, Plan, Stage
from ...problem import Chain, Layer, Problem
from ...schedule.kinds import graph_of, kind_of
from ...schedule.pattern import starts_of
from ...schedule.periodic.one_f_one_b_star import best_one_f_one_b_star
from ...schedule.periodic.retime import order_of, retime

Match = Literal["name", "order", "weights"]
Pairs = list[tuple[int | None, int | None]]


def matched(one: Chain, other: Chain, by: Match = "name") -> Pairs:
    """Return the indices of the same layers in two profiles, in order; None beside a layer that only one has.

    ``name``: what has the same name. ``weights``: what has as many parameters, where a layer has any. Between two such
    pairs layers belong together by place where there are as many in both. ``order``: the first with the first and so
    on; BadInput where one has more layers.
    """
    if by == "order":
        if len(one) != len(other):
            raise BadInput(f"--match order: A has {len(one)} layers, B has {len(other)}; match them by name or weights")
        return [(i, i) for i in range(len(one))]
    if by == "name":
        return _between(_alike(one, other, lambda layer: layer.name, lambda layer: True), len(one), len(other))
    found = _alike(one, other, lambda layer: layer.parameter_count, lambda layer: layer.parameter_count > 0)
    return _between(found, len(one), len(other))


def _alike(
    one: Chain, other: Chain, key: Callable[[Layer], Any], counts: Callable[[Layer], bool]
) -> list[tuple[int, int]]:
    """Return pairs, in order, of layers with an equal ``key``, among those that ``counts``."""
    places = [[i for i, layer in enumerate(chain.layers) if counts(layer)] for chain in (one, other)]
    keys = [[key(chain.layers[i]) for i in where] for chain, where in zip((one, other), places, strict=True)]
    blocks = SequenceMatcher(a=keys[0], b=keys[1], autojunk=False).get_matching_blocks()
    return [(places[0][x.a + k], places[1][x.b + k]) for x in blocks for k in range(x.size)]


def _between(found: list[tuple[int, int]], length: int, other_length: int) -> Pairs:
    """Return all layers: the pairs ``found``, and between two of them those by place where there are as many."""
    pairs: Pairs = []
    i = j = 0
    for i_end, j_end in [*found, (length, other_length)]:
        together = i_end - i if i_end - i == j_end - j else 0
        pairs += [(i + k, j + k) for k in range(together)]
        pairs += [(k, None) for k in range(i + together, i_end)]
        pairs += [(None, k) for k in range(j + together, j_end)]
        pairs += [(i_end, j_end)] if i_end < length else []
        i, j = i_end + 1, j_end + 1
    return pairs


def stages_in(stages: Sequence[Stage], chain: Chain, other: Chain, pairs: Pairs) -> tuple[Stage, ...]:
    """Return ``stages`` of ``chain`` with the same cuts and recomputed segments in ``other``.

    Between the layers around a cut that both have, ``other`` is cut where fewest bytes cross, first of all there.
    BadInput where a stage would have no layers.
    """
    same = [(i, j) for i, j in pairs if i is not None and j is not None]

    def moved(cut: int) -> int:
        if cut in (0, len(chain)):
            return 0 if cut == 0 else len(other)
        first = max((j for i, j in same if i < cut), default=-1) + 1
        last = min((j for i, j in same if i >= cut), default=len(other))
        return min(range(first, last + 1), key=lambda place: other.cut_bytes[place])

    found = []
    for s, stage in enumerate(stages):
        start, stop = moved(stage.start), moved(stage.stop)
        if start >= stop:
            raise BadInput(
                f"B has none of the layers of stage {s}, {shown(chain.layers[stage.start].name)} to "
                f"{shown(chain.layers[stage.stop - 1].name)}; match them another way"
            )
        segments = ((moved(first), moved(last)) for first, last in stage.checkpoint)
        kept = tuple((first, last) for first, last in segments if first < last)
        found.append(replace(stage, start=start, stop=stop, checkpoint=kept))
    return tuple(found)


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


def carried(plan: Plan, chain: Chain, stages: tuple[Stage, ...] | None = None) -> Carried:
    """Return ``plan`` with the costs of ``chain``: the same stages in the same order, at the smallest period it allows.

    ``stages`` are the plan's where ``chain`` has other layers, None where the plan's own will do.

    A plan without a pattern keeps its schedule and its limit, and is simulated anew. Otherwise memory is judged with
    the microbatches in flight of that order. Where an operation appears or vanishes (a transfer of no bytes),
    contiguous stages get their best 1F1B* instead. Exact for the order (:func:`..schedule.periodic.retime.retime`).
    """
    stages = stages or plan.allocation.stages
    allocation = replace(plan.allocation, stages=stages)
    moved = replace(plan, chain=chain, allocation=allocation, pattern=None, lower_bounds=())
    graph: StageGraph | None = None
    if kind_of(plan).build is None:
        broken = structure_violations(chain, plan.platform, plan.policy, stages)
        if broken or plan.pattern is None:
            return Carried(moved, None, tuple(broken or ["the plan has no pattern"]))
        graph = stage_graph(chain, plan.platform, plan.policy, stages)
        pattern = _pattern(graph_of(plan), graph, plan.pattern)
        if pattern is None:
            why = "no period lets the stages run in the order of the plan"
            return Carried(moved, None, (why,), _other_order(graph))
        moved = replace(moved, pattern=pattern)
    result, found = judged(moved)
    if result is None or found:
        return Carried(moved, None, tuple(found), None if graph is None else _other_order(graph))
    bound = any_bound(Problem(chain, plan.platform, plan.policy, True, "segments"))
    return Carried(replace(moved, lower_bounds=(bound,)), result.period_ns, ())


def _other_order(graph: StageGraph) -> int | None:
    pattern = best_one_f_one_b_star(graph) if graph.separate else None
    return None if pattern is None else pattern.period_ns


def _pattern(old: StageGraph, new: StageGraph, pattern: Pattern) -> Pattern | None:
    same = [(x.kind, x.stage) for x in old.operations] == [(x.kind, x.stage) for x in new.operations]
    if same:
        return retime(new, order_of(old, starts_of(pattern), pattern.period_ns))
    return best_one_f_one_b_star(new) if new.separate else None


def matching_chain(plan: Plan, one: Chain, other: Chain, same: Callable[[Layer], Any] = lambda layer: layer) -> Chain:
    """Return ``other`` at the granularity at which ``plan`` was made from ``one``, whose layers are the plan's if they
    are the ``same``, in the plan's order; BadInput if it wasn't."""
    own = list(map(same, plan.chain.in_own_order().layers))
    for merge in (Chain.in_own_order, merging(), merging("articulation")):
        if own == list(map(same, merge(one).layers)):
            found: Chain = merge(other)
            order = plan.chain.order
            return found if order is None or len(found) != len(own) else found.reordered(order)
    raise BadInput(f"the plan was made from another profile than {shown(one.name)}: its layers differ")

"""What runs when if a device may hold a given number of chunk activations, two chunks on each, placed like a V?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations

from ...cost.stage_graph import StageGraph
from ...errors import BadInput
from ..program import Arrival, Decide, Program, make_program, refuse, side_by_side
from ..simulate import simulate
from ..slots import homes
from .controlled import v_half, v_half_holds, v_min, v_min_holds
from .vees import no_vee, zbv

LEAST = 2  # chunk activations: of a microbatch in both chunks of a device
SEARCH_STEPS = 10**5  # that the search for a policy may simulate
_ORDERS = sorted(map("".join, permutations("FfbB")))  # of passes that others wait for, small in the second chunk
_STARTS = 4  # orders from which the search goes on


@dataclass(frozen=True, slots=True, order=True)
class Precedence:
    """What a device does next: of the passes that have come the first in ``order``, else a weight part.

    ``kept`` chunk activations are kept for the second chunk, on device d of p ``slope`` * d // p more, so that what was
    admitted comes through. A weight part doesn't begin where a pass is to come within 1/``patience`` of its length (0:
    it never waits). Where it ``frees`` what a forward waits for, it goes before all others.
    """

    order: str
    kept: int
    slope: int = 0
    patience: int = 2
    frees: bool = False


def v_limit(
    graph: StageGraph, microbatches: int, limit: int | None = None, weight_keeps: Fraction = Fraction(1)
) -> Program:
    """Return a schedule for p devices, stages d and 2p - 1 - d on device d, each within ``limit`` chunk activations.

    Without a limit it is 2p, 1F1B's memory. Devices run what comes, by a :class:`Precedence`; a forward waits while a
    device holds all that it may. The policy is the one whose run has the least longest span of a device, then the least
    makespan, on at most 4p microbatches; where V-Min, V-Half or ZBV hold no more and are shorter, it is one of them.
    With p = 2, 4 microbatches and a limit of 3, lower case in the second chunk (F = I = W)::

        device 0  F0 F1 .  f0 i0 w0 .  I0 W0 f1 i1 F2 w1 I1 W1 F3 f2 i2 w2 .  I2 W2 f3 i3 w3 .  I3 W3
        device 1  .  F0 f0 F1 .  i0 I0 w0 f1 W0 .  i1 I1 F2 w1 f2 W1 F3 i2 I2 w2 f3 W2 .  i3 I3 w3 W3

    A heuristic, by durations as they are, equal or not. With r replicas of every stage it is r such pipelines side by
    side. The question is that of Qi et al. 2024 (Pipeline Parallelism with Controllable Memory), section 4.
    """
    refuse(no_vee(graph, "v-limit"))
    devices = len(graph.stages) // 2
    limit = most_of_vee(graph) if limit is None else limit
    if limit < LEAST:
        raise BadInput(f"--limit: v-limit holds a microbatch in both chunks of a GPU, 2 chunk activations, not {limit}")
    probe = min(microbatches, 4 * devices * side_by_side(graph))
    builds = _Builds(graph, limit, weight_keeps)
    steps = max(1, probe * (len(graph.operations) + len(graph.stages)))
    best = builds.search(probe, max(4, SEARCH_STEPS // steps))
    return best(microbatches)


def most_of_vee(graph: StageGraph) -> int:
    """Return 1F1B's memory in activations of stages placed like a V."""
    return len(graph.stages)


Build = Callable[[int], Program]  # of so many microbatches


class _Builds:
    """Programs of stages within a limit, and the best of them."""

    def __init__(self, graph: StageGraph, limit: int, weight_keeps: Fraction) -> None:
        self.graph, self.limit, self.weight_keeps = graph, limit, weight_keeps

    def search(self, microbatches: int, budget: int) -> Build:
        """Return what makes the best program of so many microbatches, simulating no more than ``budget`` of them."""
        scores: dict[Precedence, tuple[int, int]] = {}

        def score(policy: Precedence) -> tuple[int, int]:
            if policy not in scores:
                scores[policy] = _score(self.greedy(policy)(microbatches)) if len(scores) < budget else (10**30, 0)
            return scores[policy]

        starts = sorted((Precedence(order, 1) for order in _ORDERS), key=score)[:_STARTS]
        best = min((self._descend(policy, score) for policy in starts), key=score)
        found = [(score(best), self.greedy(best))]
        found += [(_score(build(microbatches)), build) for build in self._known()]
        return min(found, key=lambda pair: pair[0])[1]

    def _descend(self, policy: Precedence, score: Callable[[Precedence], tuple[int, int]]) -> Precedence:
        while True:
            near = min(self._near(policy), key=score)
            if score(near) >= score(policy):
                return policy
            policy = near

    def _near(self, policy: Precedence) -> Iterator[Precedence]:
        for kept in (policy.kept - 1, policy.kept + 1, policy.kept + 2):
            if 1 <= kept < self.limit:
                yield replace(policy, kept=kept)
        for slope in (policy.slope - 1, policy.slope + 1, policy.slope + 2):
            if 0 <= slope < self.limit:
                yield replace(policy, slope=slope)
        for patience in (0, 1, 2, 3, 4):
            yield replace(policy, patience=patience)
        yield replace(policy, frees=not policy.frees)
        for order in _ORDERS:
            yield replace(policy, order=order)

    def _known(self) -> Iterator[Build]:
        devices = len(self.graph.stages) // 2
        for build, holds in ((v_min, v_min_holds(devices)), (v_half, v_half_holds(devices)), (zbv, 2 * devices)):
            if holds <= self.limit:
                yield lambda count, build=build: build(self.graph, count, self.weight_keeps)  # type: ignore[misc]

    def greedy(self, policy: Precedence) -> Build:
        """Return what makes the programs of a policy."""
        own = homes(self.graph)

        def build(microbatches: int) -> Program:
            rules = {}
            for d, home in enumerate(own):
                first = self.limit - policy.kept - policy.slope * d // len(own)
                for pipeline in range(self.graph.resources[home].replicas):
                    rules[home, pipeline] = _rule(self.graph, d, policy, self.limit, max(1, first), self.weight_keeps)
            return make_program(self.graph, microbatches, {}, rules=rules, split=True, weight_keeps=self.weight_keeps)

        return build


def _score(program: Program) -> tuple[int, int]:
    timeline = simulate(program)
    return max(map(timeline.span_ns, range(len(timeline.program.lanes)))), timeline.makespan_ns


def _rule(
    graph: StageGraph, d: int, policy: Precedence, most: int, most_first: int, weight_keeps: Fraction
) -> Callable[[], Decide]:
    """Return what device d does: it holds ``most`` activations at most, ``most_first`` of them of its first chunk."""
    keeps = {"F": Fraction(1), "B": weight_keeps - 1, "W": -weight_keeps}
    length = [stage.backward_weight_ns for stage in graph.stages]
    places = {name: place for place, name in enumerate(policy.order)}

    def rule() -> Decide:
        held = [Fraction(0), Fraction(0)]  # of the first chunk, of the second

        def decide(now_ns: int, announced: Sequence[Arrival]) -> Arrival | None:
            full = sum(held) + 1 > most
            first_full = full or held[0] + 1 > most_first
            chosen = weight = coming = None
            rank = (len(places), 0)
            for arrival in announced:
                first = arrival.stage == d
                if arrival.kind == "W":
                    weight = weight or (arrival if arrival.has_come(now_ns) else None)
                elif arrival.kind != "F" or not (first_full if first else full):
                    own = places[arrival.kind if first else arrival.kind.lower()], arrival.step.microbatch
                    if not arrival.has_come(now_ns):
                        coming = coming or arrival
                    elif own < rank:
                        chosen, rank = arrival, own
            waits = policy.frees and full and any(a.kind == "F" and a.has_come(now_ns) for a in announced)
            if weight is not None and (waits or chosen is None):
                early = coming is not None and policy.patience * (coming.at_ns - now_ns) <= length[weight.stage]
                chosen = None if early and policy.patience and not waits else weight
            if chosen is not None:
                held[chosen.stage != d] += keeps[chosen.kind]
            return chosen

        return decide

    return rule

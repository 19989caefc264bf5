"""Which version of the weights does each pass use, and how many versions must a stage keep?

They follow from the policy's two rules and the order of a run's passes. Memory, the lowering of programs and the study
of TiMePReSt ask here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..cost.stage_graph import StageGraph
from ..errors import BadInput
from ..integers import ceil_div
from ..plan import Plan
from ..problem import WEIGHTS, Policy, WeightRules
from .pattern import starts_of
from .program import PASSES, Step
from .timeline import Timeline, Turn


def weight_policy(policy: Policy) -> WeightRules:
    """Return the rules of ``policy``; BadInput where vertical sync has no meaning."""
    if policy.vertical_sync and WEIGHTS[policy.weights].synced is None:
        known = " or ".join(name for name, rules in WEIGHTS.items() if rules.synced is not None)
        raise BadInput(f"plan: vertical sync goes with --weights {known}; this plan has {policy.weights!r}")
    return policy.rules


Lent = tuple[tuple[int, int], ...]  # (stage, version of its weights) of stages that keep weights for another


@dataclass(frozen=True, slots=True)
class Use:
    """One pass of a stage: the ``version`` that it uses, and how many updates the stage has ``made`` before it.

    With ``updates`` it is the last backward of its mini-batch (where that comes in two parts, the last second one), and
    the next update follows it. ``lent`` has (stage, its version) for stages on the same devices some of whose weights
    it uses.
    """

    step: Step
    made: int
    version: int
    updates: bool
    lent: Lent = ()


def used(
    timeline: Timeline, policy: WeightRules, interval: int, lenders: Sequence[Sequence[int]] = ()
) -> list[list[Use]]:
    """Return which version each pass of a run uses: for each stage its passes, over all replicas, in their order.

    Mini-batch j is microbatches ``[j * interval, (j + 1) * interval)``. All replicas of a stage make an update right
    after its last backward of a mini-batch, wherever that ran. Of weights that an earlier stage on its devices, one of
    its ``lenders``, keeps, a pass uses the version that the policy's rules give for what that stage has made.
    """
    program = timeline.program
    steps: list[list[Step]] = [[] for _ in program.graph.stages]
    for lane in program.lanes:
        for step in lane.steps:
            work = program.operations[step.position]
            if work.kind in PASSES:
                steps[work.stage].append(step)
    common = _common_versions(timeline, interval)
    entered: dict[int, int] = {}  # microbatch -> version of its forward on the first stage
    found: list[list[Use]] = []
    updated: list[list[Turn]] = []  # of each stage, when it made its updates
    for s, passes in enumerate(steps):
        made, forward = 0, dict[tuple[int, int], int]()  # (stage, microbatch) -> version of its weights in the forward
        finished: Counter[int] = Counter()
        uses: list[Use] = []
        turns: list[Turn] = []
        for step in sorted(passes, key=timeline.turn):
            m, work, turn = step.microbatch, program.operations[step.position], timeline.turn(step)
            minibatch, lent = m // interval, []
            for q in (s, *(lenders[s] if lenders else ())):
                theirs = made if q == s else bisect_right(updated[q], turn)
                if work.kind == "F":
                    version = policy.forward_version(minibatch, theirs, entered.get(m, theirs))
                    forward[q, m] = version
                else:
                    version = policy.backward_version(forward[q, m], theirs, common(m))
                lent.append((q, version))
            version = lent.pop(0)[1]
            entered.setdefault(m, version)
            over = step.position == program.release[s]
            finished[minibatch] += work.covers * over
            updates = over and finished[minibatch] == interval
            uses.append(Use(step, made, version, updates, tuple(lent)))
            made += updates
            if updates:
                turns.append(turn)
        found.append(uses)
        updated.append(turns)
    return found


def _common_versions(timeline: Timeline, interval: int) -> Callable[[int], int]:
    """Return a function: microbatch -> the newest version that all stages have when the last begins its backward.

    The first stage is the last to make a version.
    """
    program = timeline.program
    first, last = program.position["B", 0], program.position["B", len(program.graph.stages) - 1]
    ends = [timeline.end_ns(Step(m, first)) for m in range(program.microbatches)]
    made = sorted(max(ends[m : m + interval]) for m in range(0, len(ends), interval))
    return lambda microbatch: bisect_right(made, timeline.begin_ns(Step(microbatch, last)))


def lateness(plan: Plan, graph: StageGraph) -> list[tuple[Fraction, int]]:
    """Return how many updates the gradients of each stage are late in the steady state of a pattern: on average over
    the microbatches of an update, and at most; nothing for schedules without one.

    Every one is late by one under 2bw, by none where pipelines drain or backwards use the newest weights. Under
    ``stash`` an update reaches the forwards behind its last backward: a microbatch is late by as many as fit in among
    those whose backward has not begun when its forward does.
    """
    if plan.pattern is None:
        return []
    late, starts = plan.policy.rules.late, starts_of(plan.pattern)
    if late is not None:
        return [(Fraction(late), late) for _ in graph.stages]
    found = []
    for s in range(len(graph.stages)):
        at = 0 if plan.policy.vertical_sync else s  # whose newest version a microbatch reads
        inside_ns = starts[graph.position["B", at]] - starts[graph.position["F", at]]
        before = inside_ns // plan.pattern.period_ns
        found.append((Fraction(before, plan.interval), ceil_div(before, plan.interval)))
    return found


def alive(passes: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield how many versions a stage must have at each of its ``passes``: the newest, and those still to be used.

    Of each pass, in order, (newest version when it starts, version that it uses).
    """
    last_use = {version: place for place, (_, version) in enumerate(passes)}
    live: set[int] = set()  # versions that this pass or a later one uses
    waiting = sorted(last_use, reverse=True)  # versions that are used and not made yet, the next one last
    for place, (newest, version) in enumerate(passes):
        while waiting and waiting[-1] <= newest:
            live.add(waiting.pop())
        yield len(live | {newest})
        if last_use[version] == place:
            live.discard(version)


def kept(passes: Sequence[tuple[int, int]]) -> int:
    """Return the most versions that a stage must have at once, for ``passes`` as :func:`alive` takes them."""
    return max(alive(passes), default=1)


def kept_by_stages(timeline: Timeline, policy: WeightRules, interval: int) -> list[int]:
    """Return how many versions of its weights each stage must have at once in a run."""
    return [kept([(use.made, use.version) for use in uses]) for uses in used(timeline, policy, interval)]

"""Which version of the weights does each pass use, and how many versions must a stage keep?

They follow from the policy's two rules and the order of a run's passes. Memory, the lowering of programs and the study
of TiMePReSt ask here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ..cost.stage_graph import StageGraph
from ..errors import BadInput
from ..integers import ceil_div
from ..plan import Pattern
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


@dataclass(frozen=True, slots=True)
class Waits:
    """What updates wait for that are not made right behind a stage's last backward: the sum over its replicas that goes
    on beside passes (``sums_ns`` by stage), and all gradients of the ``groups`` of stages that it is in."""

    sums_ns: Mapping[int, int] = field(default_factory=dict)
    groups: Sequence[Sequence[int]] = ()

    def of(self, stage: int) -> set[int]:
        """Return the stages whose gradients ``stage`` waits for."""
        return {s for group in self.groups if stage in group for s in group}


PROMPT = Waits()
Lent = tuple[tuple[int, int], ...]  # (stage, version of its weights) of stages that keep weights for another


@dataclass(frozen=True, slots=True)
class Use:
    """One pass of a stage: the ``version`` that it uses, and how many updates the stage has ``made`` before it.

    Behind the last backward of a mini-batch (where that comes in two parts, the last second one) the stage ``makes``
    the version of that number, or will; 0 behind others. ``lent`` has (stage, its version) for stages on the same
    devices some of whose weights it uses.
    """

    step: Step
    made: int
    version: int
    makes: int = 0
    lent: Lent = ()


def used(
    timeline: Timeline, policy: WeightRules, interval: int, lenders: Sequence[Sequence[int]] = (), waits: Waits = PROMPT
) -> list[list[Use]]:
    """Return which version each pass of a run uses: for each stage its passes, over all replicas, in their order.

    Mini-batch j is microbatches ``[j * interval, (j + 1) * interval)``. All replicas of a stage make an update right
    after its last backward of a mini-batch, wherever that ran, or as late as it ``waits``. Of weights that an earlier
    stage on its devices, one of its ``lenders``, keeps, a pass uses the version that the policy's rules give for what
    that stage has made.
    """
    program = timeline.program
    steps: list[list[Step]] = [[] for _ in program.graph.stages]
    for lane in program.lanes:
        for step in lane.steps:
            work = program.operations[step.position]
            if work.kind in PASSES:
                steps[work.stage].append(step)
    for passes in steps:
        passes.sort(key=timeline.turn)
    due = [_due(timeline, passes, s, interval) for s, passes in enumerate(steps)]
    ready = [_ready(timeline, passes, s, interval, due, waits) for s, passes in enumerate(steps)]
    common = _common_versions(timeline, interval)
    entered: dict[int, int] = {}  # microbatch -> version of its forward on the first stage
    found: list[list[Use]] = []
    for s, passes in enumerate(steps):
        forward = dict[tuple[int, int], int]()  # (stage, microbatch) -> version of its weights in the forward
        uses: list[Use] = []
        for step in passes:
            m, work, turn = step.microbatch, program.operations[step.position], timeline.turn(step)
            minibatch, lent = m // interval, []
            for q in (s, *(lenders[s] if lenders else ())):
                made = bisect_left(ready[q], turn)
                if work.kind == "F":
                    version = policy.forward_version(minibatch, made, entered.get(m, made))
                    forward[q, m] = version
                else:
                    version = policy.backward_version(forward[q, m], made, common(m))
                lent.append((q, version))
            version = lent.pop(0)[1]
            entered.setdefault(m, version)
            place = bisect_left(due[s], turn)
            makes = place + 1 if due[s][place : place + 1] == [turn] else 0
            uses.append(Use(step, bisect_left(ready[s], turn), version, makes, tuple(lent)))
        found.append(uses)
    return found


def _due(timeline: Timeline, passes: Sequence[Step], stage: int, interval: int) -> list[Turn]:
    """Return the turns of a stage's last backwards of its whole mini-batches, from its ``passes``."""
    program, found = timeline.program, list[Turn]()
    finished: Counter[int] = Counter()
    for step in passes:
        if step.position == program.release[stage]:
            minibatch = step.microbatch // interval
            finished[minibatch] += program.operations[step.position].covers
            if finished[minibatch] == interval:
                found.append(timeline.turn(step))
    return found


def _ready(
    timeline: Timeline, passes: Sequence[Step], stage: int, interval: int, due: Sequence[Sequence[Turn]], waits: Waits
) -> list[Turn]:
    """Return the turns behind which a stage's passes find its updates made.

    One that waits is there when the last backward of all that it waits for, and the sum, should be over; at the latest
    before the forwards of the next mini-batch but one, and behind the stage's next gradient.
    """
    together, own = waits.of(stage), due[stage]
    if not together and stage not in waits.sums_ns:
        return list(own)
    first: dict[int, Turn] = {}  # mini-batch -> just before its first forward
    for step in passes:
        if timeline.program.operations[step.position].kind == "F":
            begin, duration, _ = timeline.turn(step)
            first.setdefault(step.microbatch // interval, (begin, duration, Step(step.microbatch, -1)))
    found = []
    for j, turn in enumerate(own):
        ends = [timeline.end_ns(due[s][j][2]) + waits.sums_ns.get(s, 0) for s in (stage, *together) if j < len(due[s])]
        latest = [x for x in (first.get(j + 2), *own[j + 1 : j + 2]) if x is not None]
        found.append(max(turn, min([(max(ends), -1, turn[2]), *latest])))
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


@dataclass(frozen=True, slots=True)
class Delay:
    """How many updates a stage's gradients miss, that come between the version that a forward reads and the update that
    its gradient is for: on average over the microbatches of an update, and at most."""

    mean: float
    most: int


def average_delay(found: Sequence[Delay]) -> float:
    """Return the mean over a plan's stages."""
    return fmean(x.mean for x in found)


def delays(uses: Sequence[Sequence[Use]], timeline: Timeline, interval: int, window: range) -> list[Delay]:
    """Return the delay of each stage, whose passes are ``uses`` as :func:`used` finds them, over the microbatches of
    ``window``, which are whole updates."""
    works, found = timeline.program.operations, []
    for own in uses:
        passes = [use for use in own if works[use.step.position].kind == "F" and use.step.microbatch in window]
        missed = [use.step.microbatch // interval - use.version for use in passes]
        found.append(Delay(sum(missed) / len(missed), max(missed)))
    return found


def pattern_delays(graph: StageGraph, pattern: Pattern, policy: Policy, interval: int, waits: Waits) -> list[Delay]:
    """Return the delay of each stage in the steady state of ``pattern``, in its own time.

    An update reaches the forwards behind it. So of each update miss it as many microbatches as start between the
    forward of its last one and the end of all that it waits for.
    """
    starts, period, found = starts_of(pattern), pattern.period_ns, []
    over = [starts[x := graph.position["B", s]] + graph.operations[x].duration_ns for s in range(len(graph.stages))]
    for s in range(len(graph.stages)):
        at = 0 if policy.rules.alone else s  # with vertical sync the first: whose newest version a microbatch reads
        begin, behind = starts[graph.position["F", at]], starts[graph.position["B", at]]
        inside = (behind - begin) // period
        if (together := waits.of(at)) or at in waits.sums_ns:
            end = max(over[q] + waits.sums_ns.get(q, 0) for q in (at, *together))
            inside = max(inside, ceil_div(end - begin, period) - 1)
        late, share = divmod(inside, interval)
        some, others = (late + 2 - policy.rules.forward_version(late + 2, x, x) for x in (1, 2))
        found.append(
            Delay((share * some + (interval - share) * others) / interval, max(some, others) if share else others)
        )
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

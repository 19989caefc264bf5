"""What does one rank do, in order? Instructions, with the version of every pass and the place of every update.

Made from the program alone, before the run and without torch; the executor only walks the list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from ...errors import InvalidPlan
from ...schedule.program import Program, RankOp, Step, lower
from ...schedule.timeline import Timeline, Turn
from ...schedule.weight_versions import Lent, Use, WeightPolicy, alive, kept, used

Pass = Literal["F", "B"]
LATER = 10**15  # before everything else of a turn
Edge = tuple[Pass, int]  # what travels: activations ("F") or gradients ("B"), and the stage that sends them


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage forward with weights ``version``; ``lent`` are those that other stages of the rank keep for it."""

    stage: int
    microbatch: int
    version: int
    lent: Lent = ()


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage backward; ``version`` is what it differentiates (and recomputes) with.

    What ``covers`` several microbatches, here and in exchanges of gradients, names the last of them. With
    ``inputs_only`` the gradients of weights are left for :class:`BackwardWeights`.
    """

    stage: int
    microbatch: int
    version: int
    covers: int = 1
    lent: Lent = ()
    inputs_only: bool = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run again what a stage recomputes, which its backward then finds done."""

    stage: int
    microbatch: int
    version: int
    lent: Lent = ()


@dataclass(frozen=True, slots=True)
class BackwardWeights:
    """Compute the gradients of a stage's weights, which its backward has left for later."""

    stage: int
    microbatch: int
    version: int
    lent: Lent = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Send what ``stage`` made in pass ``kind`` to rank ``peer``."""

    kind: Pass
    stage: int
    microbatch: int
    peer: int
    covers: int = 1

    @property
    def edge(self) -> Edge:
        """The edge that it uses."""
        return self.kind, self.stage


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive from rank ``peer`` what ``stage`` needs for pass ``kind``."""

    kind: Pass
    stage: int
    microbatch: int
    peer: int
    covers: int = 1

    @property
    def edge(self) -> Edge:
        """The edge that it uses."""
        return edge_into(self.kind, self.stage)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the gradients of a stage's replicas before it makes ``version``."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class ReduceTied:
    """Sum the gradients of the weights that ``stages`` share, over all their replicas, for ``version``.

    It comes before the updates of all of them, or where nothing drains before that of the first stage, when the others
    have made ``version`` of the weights that they don't share: then they make it of the shared ones, too.
    """

    stages: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class PutAside:
    """Put the gradient for ``version`` of a stage aside: passes add to the next before this one's norm is known."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class Norm:
    """Begin the sum over all ranks that tells the norm of all gradients for ``version``; updates wait for it.

    It comes behind the last backward for that version on any rank, and all sums.
    """

    version: int


@dataclass(frozen=True, slots=True)
class Update:
    """Make ``version`` of a stage's weights from the gradient that has been accumulated."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class Agree:
    """Decide with all ranks, whose pipeline is empty, whether ``version`` can be made from the gradients."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of the drained pipeline after ``step`` updates of all stages."""

    step: int


Instruction = (
    Forward
    | Recompute
    | Backward
    | BackwardWeights
    | Send
    | Receive
    | PutAside
    | Reduce
    | ReduceTied
    | Norm
    | Update
    | Agree
    | Save
)


def edge_into(kind: Pass, stage: int) -> Edge:
    """Return the edge on which ``stage`` gets its input (``F``) or the gradient of its output (``B``)."""
    return kind, stage - 1 if kind == "F" else stage + 1


def sentence(instruction: Instruction) -> str:
    """Return how messages name an instruction: ``the forward of microbatch 3 on stage 1``."""
    match instruction:
        case Forward(stage, microbatch, _):
            return f"the forward of microbatch {microbatch} on stage {stage}"
        case Recompute(stage, microbatch, _):
            return f"the recomputation of microbatch {microbatch} on stage {stage}"
        case Backward(stage, microbatch, _, covers):
            return f"the backward of {_which(microbatch, covers)} on stage {stage}"
        case BackwardWeights(stage, microbatch, _):
            return f"the gradients of weights of microbatch {microbatch} on stage {stage}"
        case Send(kind, stage, microbatch, peer, covers):
            return f"stage {stage}'s send of {_what(kind)} of {_which(microbatch, covers)} to rank {peer}"
        case Receive(kind, stage, microbatch, peer, covers):
            return f"stage {stage}'s receive of {_what(kind)} of {_which(microbatch, covers)} from rank {peer}"
        case Reduce(stage, version):
            return f"the gradient sum over the replicas of stage {stage} for update {version}"
        case ReduceTied(stages, version):
            return f"the gradient sum of what stages {' and '.join(map(str, stages))} share for update {version}"
        case PutAside(stage, version):
            return f"the putting aside of stage {stage}'s gradient for update {version}"
        case Norm(version):
            return f"the norm of all gradients for update {version}"
        case Update(stage, version):
            return f"update {version} of stage {stage}"
        case Agree(version):
            return f"the agreement on update {version}"
        case Save(step):
            return f"the checkpoint after update {step}"


def _what(kind: Pass) -> str:
    return "the activations" if kind == "F" else "the gradient"


def _which(last: int, covers: int) -> str:
    return f"microbatch {last}" if covers == 1 else f"microbatches {last - covers + 1} to {last}"


def lowered(
    timeline: Timeline,
    policy: WeightPolicy,
    interval: int,
    ranks: Mapping[int, int],
    tied: Sequence[tuple[int, ...]] = (),
    lenders: Sequence[Sequence[int]] = (),
    clips: bool = False,
    beside: Set[int] = frozenset(),
) -> list[list[Instruction]]:
    """Return the instructions of every rank (``ranks``: device to rank) for a run, updates and versions included.

    The order is that of the simulated run: passes and exchanges as :func:`..schedule.program.lower` places them, and an
    update on all replicas of a stage where :func:`..schedule.weight_versions.used` has it, an update every ``interval``
    microbatches. What stages share (``tied``) is summed right before the first one's update, which is the last. So
    collectives stand in one place of one total order, and nothing deadlocks. InvalidPlan when a pass would need weights
    that are not made yet, or more versions than the policy keeps. With ``clips``, where nothing drains, gradients are
    put aside until the norm of all is known, and an update comes as late as it may: before the first use of what it
    makes. So it does for stages ``beside``, whose replicas sum gradients while passes go on; then the norm comes when
    these sums should be over.
    """
    program, graph = timeline.program, timeline.program.graph
    orders = lower(program, timeline.start_ns)
    entries: dict[int, list[tuple[Turn, int, Instruction]]] = {device: [] for device in orders}
    use_of: dict[Step, Use] = {}
    sums = {stages[0]: stages for stages in tied}
    late = _LateUpdates()

    def devices_of(stage: int) -> tuple[int, ...]:
        return graph.resources[graph.stages[stage].resource].devices

    for s, uses in enumerate(used(timeline, policy, interval, lenders)):
        _check_versions(s, uses, policy, interval)
        devices = devices_of(s)
        for use in uses:
            use_of[use.step] = use
            for q, version in ((s, use.version), *use.lent) if clips or beside else ():
                late.used(q, version, timeline.turn(use.step))
            if use.updates:
                made, turn = use.made + 1, timeline.turn(use.step)
                for device in {d for holder in sums.get(s, ()) for d in devices_of(holder)}:
                    entries[device].append((turn, len(orders[device]) + 4 * made - 2, ReduceTied(sums[s], made)))
                for replica in devices:
                    place = len(orders[replica]) + 4 * made
                    if clips or s in beside:
                        entries[replica].append((turn, place - 3, PutAside(s, made)))
                    if len(devices) > 1:
                        entries[replica].append((turn, place - 1, Reduce(s, made)))
                    if not clips and s not in beside:
                        entries[replica].append((turn, place, Update(s, made)))
                if clips or s in beside:
                    late.due(s, made, turn)
    sums_ns = {s: graph.stages[s].sync_period_ns * interval for s in beside} if clips else {}
    turns = sorted(map(timeline.turn, use_of)) if sums_ns else []
    for turn, update in late.norms(turns, sums_ns) if clips else ():
        for device, operations in orders.items():
            entries[device].append((turn, len(operations) + 4 * update, Norm(update)))
    for s, version, turn, is_use in late.updates(clips):
        for replica in devices_of(s):
            place = version - LATER if is_use else len(orders[replica]) + 4 * version + 1
            entries[replica].append((turn, place, Update(s, version)))
    positions: dict[tuple[str, int], int] = {}
    for device, operations in orders.items():
        for index, op in enumerate(operations):
            if (op.kind, op.stage) not in positions:
                positions[op.kind, op.stage] = _position(program, op)
            step = Step(op.microbatch, positions[op.kind, op.stage])
            match op.kind:
                case "F":
                    use = use_of[step]
                    instruction: Instruction = Forward(op.stage, op.microbatch, use.version, use.lent)
                case "B":
                    use = use_of[step]
                    instruction = Backward(op.stage, op.microbatch, use.version, op.covers, use.lent, program.split)
                case "R":
                    use = use_of[step]
                    instruction = Recompute(op.stage, op.microbatch, use.version, use.lent)
                case "W":
                    use = use_of[step]
                    instruction = BackwardWeights(op.stage, op.microbatch, use.version, use.lent)
                case _:
                    assert op.peer is not None, "an exchange has a peer"
                    kind: Pass = "F" if op.kind.endswith("_F") else "B"
                    make = Send if op.kind.startswith("SEND") else Receive
                    instruction = make(kind, op.stage, op.microbatch, ranks[op.peer], op.covers)
            entries[device].append((timeline.turn(step), index, instruction))
    lists: list[list[Instruction]] = [[] for _ in ranks]
    alone = {s for s in range(len(graph.stages)) if len(devices_of(s)) == 1}
    for device, rank in ranks.items():
        in_order = [instruction for _, _, instruction in sorted(entries[device], key=lambda entry: entry[:2])]
        lists[rank] = _sends_before_updates(_whole_backwards(in_order), alone)
    return lists


class _LateUpdates:
    """When each stage's gradients for a version are there, and when it is first used: the updates come between."""

    def __init__(self) -> None:
        self._due: dict[tuple[int, int], Turn] = {}  # by stage and version
        self._first: dict[tuple[int, int], Turn] = {}

    def used(self, stage: int, version: int, turn: Turn) -> None:
        """Note that a pass at ``turn`` uses ``version`` of the weights of ``stage``."""
        self._first[stage, version] = min(self._first.get((stage, version), turn), turn)

    def due(self, stage: int, version: int, turn: Turn) -> None:
        """Note that the stage's gradient for ``version`` is there behind ``turn``."""
        self._due[stage, version] = turn

    def norms(self, turns: Sequence[Turn] = (), sums_ns: Mapping[int, int] | None = None) -> list[tuple[Turn, int]]:
        """Return behind which turn all stages have their gradients, for each version that all make.

        Sums of stages that go on beside passes take ``sums_ns`` more: then return by when they are over the last of
        the ``turns`` of all passes, but leave one before the first update.
        """
        known: dict[int, Turn] = {}
        over: dict[int, int] = {}
        for (s, version), turn in self._due.items():
            known[version] = max(known.get(version, turn), turn)
            begin, duration, _ = turn
            over[version] = max(over.get(version, 0), begin + duration + (sums_ns or {}).get(s, 0))
        for version in known if turns else ():
            ends = [end for s, made in self._due if made == version and (end := self._end(s, version)) is not None]
            latest = bisect_left(turns, min(ends)) - 2 if ends else -1
            place = min(latest, bisect_left(turns, over[version], key=lambda turn: turn[0]))
            if place >= 0:
                known[version] = max(known[version], turns[place])
        return [(turn, version) for version, turn in known.items()]

    def _end(self, stage: int, version: int) -> Turn | None:
        """Return before which turn the stage must make a version: its first use, or when the next gradient is there."""
        ends = [self._first.get((stage, version)), self._due.get((stage, version + 1))]
        return min((end for end in ends if end is not None), default=None)

    def updates(self, clips: bool) -> Iterator[tuple[int, int, Turn, bool]]:
        """Yield (stage, version, turn, whether the update comes before that turn or behind it).

        It comes before the first use of the version, and before the next gradient is put aside. With ``clips``
        InvalidPlan where that would be before the norm is known.
        """
        norms = {version: turn for turn, version in self.norms()} if clips else {}  # at the earliest
        for (s, version), due in sorted(self._due.items(), key=lambda entry: (entry[0][1], entry[0][0])):
            known, turn = norms.get(version, due), self._end(s, version)
            if turn is not None and turn <= known:
                raise InvalidPlan(
                    [
                        f"stage {s} would have three gradients at once, because the norm of all gradients for "
                        f"update {version} is known too late; accumulate more microbatches"
                    ]
                )
            yield s, version, known if turn is None else turn, turn is not None


def _whole_backwards(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return ``instructions`` with backwards whole whose parts follow each other, without a message that goes between.

    One pass through the graph does less than two. Those of stages that recompute apart stay: their graphs are for two.
    """
    apart = {x.stage for x in instructions if isinstance(x, Recompute)}
    kept: list[Instruction] = []
    for x in instructions:
        before = kept[-1] if kept else None
        if (
            isinstance(x, BackwardWeights)
            and isinstance(before, Backward)
            and x.stage not in apart
            and (x.stage, x.microbatch) == (before.stage, before.microbatch)
        ):
            kept[-1] = replace(before, inputs_only=False)
        else:
            kept.append(x)
    return kept


def _sends_before_updates(instructions: list[Instruction], alone: Set[int]) -> list[Instruction]:
    """Return ``instructions`` with updates after the sends that follow them: others wait for those, not for these.

    Between them only receives are posted, so no pass and no exchange changes its place. Only updates of stages
    ``alone``, without replicas, move: those of replicas are sums too, with a place in the total order.
    """
    for index in range(len(instructions) - 2, -1, -1):
        update = instructions[index]
        if not isinstance(update, Update) or update.stage not in alone:
            continue
        last = index
        for place in range(index + 1, len(instructions)):
            if not isinstance(instructions[place], Send | Receive):
                break
            if isinstance(instructions[place], Send):
                last = place
        instructions.insert(last, instructions.pop(index))
    return instructions


def _position(program: Program, op: RankOp) -> int:
    """Return the position of the step that ``op`` is, or that its message comes from."""
    position_of = program.graph.position
    match op.kind:
        case "SEND_F" | "RECV_F":
            sender = op.stage - (op.kind == "RECV_F")
            return position_of.get(("SEND_F", sender), position_of["F", sender])
        case "SEND_B" | "RECV_B":
            sender = op.stage + (op.kind == "RECV_B")
            return position_of.get(("SEND_B", sender), position_of["B", sender])
        case _:
            return program.position[op.kind, op.stage]


def _check_versions(stage: int, uses: Sequence[Use], policy: WeightPolicy, interval: int) -> None:
    """Raise InvalidPlan unless every version exists when it is used and the policy keeps enough of them."""
    for use, count in zip(uses, alive([(use.made, use.version) for use in uses]), strict=True):
        if use.version > use.made:
            raise InvalidPlan(
                [f"stage {stage} would need version {use.version} of its weights after {use.made} updates"]
            )
        if policy.most_versions is not None and count > policy.most_versions:
            raise InvalidPlan(
                [
                    f"stage {stage} would need {count} weight versions at once, but {policy.most_versions} are kept; "
                    f"{interval} microbatches per update are too few for what is in flight"
                ]
            )


def agreed(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return one mini-batch of a drained schedule, with all updates at the end, behind one agreement on them."""
    version = next(x.version for x in instructions if isinstance(x, Update))
    return with_updates_last([*instructions, Agree(version)])


def with_updates_last(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return one mini-batch of a drained schedule with all updates at the end.

    Sums over replicas stay where they begin, so they go on beside other stages' passes. Updates keep their order, which
    is the same on all ranks.
    """
    return sorted(instructions, key=lambda x: isinstance(x, Update))


def clipped(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return one mini-batch of a drained schedule with all sums and then all updates at the end, between them the norm.

    Sums and updates keep their order, which is the same on all ranks.
    """
    updates = [x for x in instructions if isinstance(x, Update)]
    sums = [x for x in instructions if isinstance(x, Reduce)]
    others = [x for x in instructions if not isinstance(x, Reduce | Update)]
    return [*others, *sums, Norm(updates[0].version), *updates]


def with_tied_sums(
    instructions: Sequence[Instruction], tied: Sequence[tuple[int, ...]], own: Sequence[int]
) -> list[Instruction]:
    """Return one mini-batch of a drained schedule on a rank with stages ``own``, sums of ``tied`` weights included.

    A rank that holds any of them makes all its updates at the end, behind the sums, which come in the order of
    ``tied``. The ranks of a device group hold the same stages. So all ranks' lists are parts of one total order: the
    program's, with these sums, and then these updates in their order, after everything else. Nothing deadlocks.
    """
    sums = [stages for stages in tied if set(stages) & set(own)]
    if not sums:
        return list(instructions)
    updates = [x for x in instructions if isinstance(x, Reduce | Norm | Update)]
    others = [x for x in instructions if not isinstance(x, Reduce | Norm | Update)]
    return [*others, *(ReduceTied(stages, updates[0].version) for stages in sums), *updates]


def forwards(instructions: Sequence[Instruction], version: int) -> list[Instruction]:
    """Return the forwards and their exchanges alone, all with ``version``: a run that evaluates."""
    kept: list[Instruction] = []
    for x in instructions:
        match x:
            case Forward():
                kept.append(replace(x, version=version, lent=tuple((s, version) for s, _ in x.lent)))
            case Send("F") | Receive("F"):
                kept.append(x)
    return kept


def later(instruction: Instruction, microbatches: int, versions: int) -> Instruction:
    """Return ``instruction`` with microbatches and versions counted on by so many."""
    if microbatches == versions == 0:
        return instruction
    match instruction:  # passes and messages as a run makes each of them, which replace() would take longer for
        case Forward(s, m, version, lent):
            return Forward(s, m + microbatches, version + versions, _lent_later(lent, versions))
        case Backward(s, m, version, covers, lent, inputs_only):
            return Backward(s, m + microbatches, version + versions, covers, _lent_later(lent, versions), inputs_only)
        case Recompute(s, m, version, lent):
            return Recompute(s, m + microbatches, version + versions, _lent_later(lent, versions))
        case BackwardWeights(s, m, version, lent):
            return BackwardWeights(s, m + microbatches, version + versions, _lent_later(lent, versions))
        case Send(kind, s, m, peer, covers):
            return Send(kind, s, m + microbatches, peer, covers)
        case Receive(kind, s, m, peer, covers):
            return Receive(kind, s, m + microbatches, peer, covers)
        case PutAside() | Reduce() | ReduceTied() | Norm() | Update() | Agree():
            return replace(instruction, version=instruction.version + versions)
        case Save(step):
            return Save(step + versions)


def _lent_later(lent: Lent, versions: int) -> Lent:
    return tuple((s, version + versions) for s, version in lent) if lent else lent


def version_uses(instructions: Sequence[Instruction], stage: int, by: Collection[int] = ()) -> Counter[int]:
    """Return how many passes of ``stage``, and of those that use weights that it keeps, use each version of these.

    When the last is over, the version can be overwritten.
    """
    found: Counter[int] = Counter()
    for x in instructions:
        if isinstance(x, Forward | Recompute | Backward | BackwardWeights) and (x.stage == stage or x.stage in by):
            found[x.version if x.stage == stage else dict(x.lent)[stage]] += 1
    return found


def most_versions(instructions: Sequence[Instruction], stage: int) -> int:
    """Return how many versions of the weights of ``stage`` must be there at once: the newest, and those still used.

    Others that use weights of it need them too.
    """
    passes: list[tuple[int, int]] = []
    newest = min(version_uses(instructions, stage), default=0)
    for x in instructions:
        match x:
            case (
                Forward(s, _, version)
                | Recompute(s, _, version)
                | Backward(s, _, version)
                | BackwardWeights(s, _, version)
            ) if s == stage:
                passes.append((newest, version))
            case Forward() | Recompute() | Backward() | BackwardWeights():
                passes += [(newest, version) for s, version in x.lent if s == stage]
            case Update(s, version) if s == stage:
                newest = version
    return kept(passes)

"""What does one rank do, in order? Instructions, with the version of every pass and the place of every update.

Made from the program alone, before the run and without torch; the executor only walks the list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from ...errors import InvalidPlan
from ...problem import WeightRules
from ...schedule.deadlock import Action, lower
from ...schedule.program import Program, Step
from ...schedule.timeline import Timeline, Turn
from ...schedule.weight_versions import PROMPT, Use, Waits, alive, used
from . import instructions as do

LATER = 10**15  # before everything else of a turn
ONE_PASS: dict[str, type[do.Forward | do.Recompute | do.BackwardWeights]] = {  # of one microbatch
    "F": do.Forward,
    "R": do.Recompute,
    "W": do.BackwardWeights,
}


def lowered(
    timeline: Timeline,
    policy: WeightRules,
    interval: int,
    ranks: Mapping[int, int],
    tied: Sequence[tuple[int, ...]] = (),
    lenders: Sequence[Sequence[int]] = (),
    clips: bool = False,
    waits: Waits = PROMPT,
) -> list[list[do.Instruction]]:
    """Return the instructions of every rank (``ranks``: device to rank) for a run, updates and versions included.

    The order is that of the simulated run: passes and exchanges as :func:`..schedule.program.lower` places them, and an
    update on all replicas of a stage where :func:`..schedule.weight_versions.used` has it, an update every ``interval``
    microbatches. What stages share (``tied``) is summed right before the first one's update, which is the last. So
    collectives stand in one place of one total order, and nothing deadlocks. InvalidPlan when a pass would need weights
    that are not made yet, or more versions than the policy keeps. With ``clips``, where nothing drains, gradients are
    put aside until the norm of all is known, and an update comes as late as it may: before the first use of what it
    makes. So it does for stages whose replicas sum gradients while passes go on (``waits``); then the norm comes when
    these sums should be over.
    """
    listing = _Listing(timeline, tied, clips, waits.sums_ns)
    for s, uses in enumerate(used(timeline, policy, interval, lenders, waits)):
        _check_versions(s, uses, policy, interval)
        listing.add_updates(s, uses)
    listing.add_late_updates()
    listing.add_operations(ranks)
    lists: list[list[do.Instruction]] = [[] for _ in ranks]
    alone = {s for s in range(len(timeline.program.graph.stages)) if len(listing.devices_of(s)) == 1}
    for device, rank in ranks.items():
        lists[rank] = _sends_before_updates(_whole_backwards(listing.in_order(device)), alone)
    return lists


class _Listing:
    """What every device does, each instruction with its turn and its place in that, in whatever order it is added.

    ``beside`` has what sums of stages take, in ns, that go on beside passes.
    """

    def __init__(
        self, timeline: Timeline, tied: Sequence[tuple[int, ...]], clips: bool, beside: Mapping[int, int]
    ) -> None:
        self._timeline, self._clips, self._beside = timeline, clips, beside
        self._graph = timeline.program.graph
        self._orders = lower(timeline.program, timeline.start_ns)
        self._entries: dict[int, list[tuple[Turn, int, do.Instruction]]] = {device: [] for device in self._orders}
        self._sums = {stages[0]: stages for stages in tied}
        self._use_of: dict[Step, Use] = {}
        self._late = _LateUpdates()

    def devices_of(self, stage: int) -> tuple[int, ...]:
        """Return the devices of a stage."""
        return self._graph.resources[self._graph.stages[stage].resource].devices

    def in_order(self, device: int) -> list[do.Instruction]:
        """Return what a device does."""
        return [instruction for _, _, instruction in sorted(self._entries[device], key=lambda entry: entry[:2])]

    def add_updates(self, stage: int, uses: Sequence[Use]) -> None:
        """Add what a stage does for its updates behind each of the passes that they come behind, and note all passes;
        updates that wait come later."""
        devices, waits = self.devices_of(stage), self._clips or stage in self._beside
        for use in uses:
            turn = self._timeline.turn(use.step)
            self._use_of[use.step] = use
            for q, version in ((stage, use.version), *use.lent) if self._clips or self._beside else ():
                self._late.used(q, version, turn)
            if not use.makes:
                continue
            made = use.makes
            for device in {d for holder in self._sums.get(stage, ()) for d in self.devices_of(holder)}:
                self._behind(device, turn, 4 * made - 2, do.ReduceTied(self._sums[stage], made))
            for device in devices:
                if waits:
                    self._behind(device, turn, 4 * made - 3, do.PutAside(stage, made))
                if len(devices) > 1:
                    self._behind(device, turn, 4 * made - 1, do.Reduce(stage, made))
                if not waits:
                    self._behind(device, turn, 4 * made, do.Update(stage, made))
            if waits:
                self._late.due(stage, made, turn)

    def add_late_updates(self) -> None:
        """Add the norms of all gradients, and the updates that wait for them or for sums beside passes."""
        if self._clips:
            turns = sorted(map(self._timeline.turn, self._use_of)) if self._beside else []
            for turn, version in self._late.norms(turns, self._beside):
                for device in self._orders:
                    self._behind(device, turn, 4 * version, do.Norm(version))
        for s, version, turn, is_use in self._late.updates(self._clips):
            for device in self.devices_of(s):
                if is_use:
                    self._entries[device].append((turn, version - LATER, do.Update(s, version)))
                else:
                    self._behind(device, turn, 4 * version + 1, do.Update(s, version))

    def add_operations(self, ranks: Mapping[int, int]) -> None:
        """Add passes and exchanges, in the order that devices have them in."""
        program = self._timeline.program
        positions: dict[tuple[str, int], int] = {}
        for device, operations in self._orders.items():
            for index, op in enumerate(operations):
                if (op.kind, op.stage) not in positions:
                    positions[op.kind, op.stage] = _position(program, op)
                step = Step(op.microbatch, positions[op.kind, op.stage])
                self._entries[device].append((self._timeline.turn(step), index, self._operation(op, step, ranks)))

    def _operation(self, op: Action, step: Step, ranks: Mapping[int, int]) -> do.Instruction:
        if op.kind.startswith(("SEND", "RECV")):
            assert op.peer is not None, "an exchange has a peer"
            kind: do.Pass = "F" if op.kind.endswith("_F") else "B"
            make = do.Send if op.kind.startswith("SEND") else do.Receive
            return make(kind, op.stage, op.microbatch, ranks[op.peer], op.covers)
        use = self._use_of[step]
        if op.kind == "B":
            return do.Backward(op.stage, op.microbatch, use.version, use.lent, op.covers, self._timeline.program.split)
        return ONE_PASS[op.kind](op.stage, op.microbatch, use.version, use.lent)

    def _behind(self, device: int, turn: Turn, place: int, instruction: do.Instruction) -> None:
        """Add an instruction behind all operations of a turn."""
        self._entries[device].append((turn, len(self._orders[device]) + place, instruction))


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


def _whole_backwards(instructions: Sequence[do.Instruction]) -> list[do.Instruction]:
    """Return ``instructions`` with backwards whole whose parts follow each other, without a message that goes between.

    One pass through the graph does less than two. Those of stages that recompute apart stay: their graphs are for two.
    """
    apart = {x.stage for x in instructions if isinstance(x, do.Recompute)}
    kept: list[do.Instruction] = []
    for x in instructions:
        before = kept[-1] if kept else None
        if (
            isinstance(x, do.BackwardWeights)
            and isinstance(before, do.Backward)
            and x.stage not in apart
            and (x.stage, x.microbatch) == (before.stage, before.microbatch)
        ):
            kept[-1] = replace(before, inputs_only=False)
        else:
            kept.append(x)
    return kept


def _sends_before_updates(instructions: list[do.Instruction], alone: Set[int]) -> list[do.Instruction]:
    """Return ``instructions`` with updates after the sends that follow them: others wait for those, not for these.

    Between them only receives are posted, so no pass and no exchange changes its place. Only updates of stages
    ``alone``, without replicas, move: those of replicas are sums too, with a place in the total order.
    """
    for index in range(len(instructions) - 2, -1, -1):
        update = instructions[index]
        if not isinstance(update, do.Update) or update.stage not in alone:
            continue
        last = index
        for place in range(index + 1, len(instructions)):
            if not isinstance(instructions[place], do.Send | do.Receive):
                break
            if isinstance(instructions[place], do.Send):
                last = place
        instructions.insert(last, instructions.pop(index))
    return instructions


def _position(program: Program, op: Action) -> int:
    """Return the position of the step that ``op`` is, or that its message comes from."""
    position_of = program.graph.position
    match op.kind:
        case "SEND_F" | "RECV_F":
            sender = op.stage - (op.kind == "RECV_F")
            return position_of.get(("SEND_F", sender), position_of["F", sender])
        case "SEND_B" | "RECV_B":
            sender = op.stage + (op.kind == "RECV_B")
            return position_of.get(("SEND_B", sender), position_of["B", sender])
        case kind:
            assert kind != "I", "programs have it as B"
            return program.position[kind, op.stage]


def _check_versions(stage: int, uses: Sequence[Use], policy: WeightRules, interval: int) -> None:
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

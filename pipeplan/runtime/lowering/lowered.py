"""What does one rank do, in order? Instructions, with the version of every pass and the place of every update.

Made from the program alone, before the run and without torch; the executor only walks the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from ...errors import InvalidPlan
from ...problem import WeightRules
from ...schedule.program import Program, RankOp, Step, lower
from ...schedule.timeline import Timeline, Turn
from ...schedule.weight_versions import Use, alive, used
from .instructions import (
    Backward,
    BackwardWeights,
    Forward,
    Instruction,
    Norm,
    Pass,
    PutAside,
    Receive,
    Recompute,
    Reduce,
    ReduceTied,
    Send,
    Update,
)
from .late_updates import LateUpdates

LATER = 10**15  # before everything else of a turn


def lowered(
    timeline: Timeline,
    policy: WeightRules,
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
    late = LateUpdates()

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

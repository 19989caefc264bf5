"""Program: what each device and link does, in order; what unrolling a pattern or any other schedule gives.

Simulator and runtime know programs only. A lane is the ordered work of one device or one link. The order is all that a
program says; times come from the simulator or from the real machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .plan import Pattern
from .stages import StageGraph, starts_of


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One operation of the path on one microbatch; ``position`` is its index on the path."""

    microbatch: int
    position: int


@dataclass(frozen=True)
class Lane:
    """The ordered steps of one device (``device`` is its platform index) or of one link (``device`` is None)."""

    name: str
    device: int | None
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Program:
    """Lanes that run ``microbatches`` microbatches through ``graph``; together they hold every step exactly once."""

    graph: StageGraph
    microbatches: int
    lanes: tuple[Lane, ...]

    def text(self) -> str:
        """Return one row per device, ``0F0 0F1 0B0``: stage, kind, microbatch, as torch's pipelining writes them."""
        rows = []
        for lane in self.lanes:
            if lane.device is not None:
                rows.append(f"{lane.name}: " + " ".join(step_name(self.graph, step) for step in lane.steps))
        return "\n".join(rows) + "\n"


def device_of(graph: StageGraph, stage: int, microbatch: int) -> int:
    """Return the device that runs ``microbatch`` of ``stage``: replica ``microbatch mod r`` (PipeDream 3.2)."""
    devices = graph.resources[graph.stages[stage].resource].devices
    return devices[microbatch % len(devices)]


def step_name(graph: StageGraph, step: Step) -> str:
    """Return ``2F5`` for stage 2's forward of microbatch 5."""
    op = graph.operations[step.position]
    return f"{op.stage}{op.kind}{step.microbatch}"


def unroll(graph: StageGraph, pattern: Pattern, microbatches: int) -> Program:
    """Return the program that runs ``microbatches`` microbatches in the pattern's order: fill, steady state, drain.

    Microbatch m runs each operation at its start + m * period, so lanes are sorted by that time; operations of a valid
    pattern tie on one lane only when the first of them takes no time.
    """
    starts = starts_of(pattern)
    queues: dict[tuple[int, int], list[Step]] = {}
    for m in range(microbatches):
        for position, op in enumerate(graph.operations):
            key = op.resource, m % graph.resources[op.resource].replicas
            queues.setdefault(key, []).append(Step(m, position))

    def when(step: Step) -> tuple[int, int, Step]:
        start = starts[step.position] + step.microbatch * pattern.period_ns
        return start, graph.operations[step.position].duration_ns, step

    return make_program(graph, microbatches, {key: sorted(queue, key=when) for key, queue in queues.items()})


def make_program(graph: StageGraph, microbatches: int, orders: dict[tuple[int, int], Sequence[Step]]) -> Program:
    """Return the program whose lanes are ``orders``: (resource, replica) to steps in order; links have replica 0."""
    lanes: list[Lane] = []
    for index, resource in enumerate(graph.resources):
        for replica in range(resource.replicas):
            device = None if resource.is_link else resource.devices[replica]
            name = resource.name if resource.is_link else f"device {device}"
            lanes.append(Lane(name, device, tuple(orders.get((index, replica), ()))))
    lanes.sort(key=lambda lane: (lane.device is None, -1 if lane.device is None else lane.device))
    return Program(graph, microbatches, tuple(lanes))


RankOpKind = Literal["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


@dataclass(frozen=True, slots=True)
class RankOp:
    """What one process does next: compute ``stage`` on ``microbatch``, or exchange with ``peer`` (a platform device).

    The stage of a SEND is the sender's, the stage of a RECV the receiver's.
    """

    kind: RankOpKind
    stage: int
    microbatch: int
    peer: int | None = None


def lower(program: Program, start_ns: Sequence[Sequence[int]]) -> dict[int, list[RankOp]]:
    """Return each device's operations with its sends and receives, in one total order of the whole program.

    ``start_ns[microbatch][position]`` (a simulated timeline) gives the order. A send and its receive enter two lists
    at the same moment, so under rendezvous semantics the earliest unfinished exchange can always proceed and nothing
    deadlocks. Neighbours on different devices exchange even when their cut has no bytes.
    """
    graph = program.graph
    order = sorted(
        (start_ns[step.microbatch][step.position], graph.operations[step.position].duration_ns, step)
        for lane in program.lanes
        for step in lane.steps
    )
    ranks: dict[int, list[RankOp]] = {lane.device: [] for lane in program.lanes if lane.device is not None}

    def exchange(kind: Literal["F", "B"], sender: int, m: int) -> None:
        receiver = sender + 1 if kind == "F" else sender - 1
        here, there = device_of(graph, sender, m), device_of(graph, receiver, m)
        ranks[here].append(RankOp("SEND_F" if kind == "F" else "SEND_B", sender, m, there))
        ranks[there].append(RankOp("RECV_F" if kind == "F" else "RECV_B", receiver, m, here))

    last = len(graph.stages) - 1
    for _, _, step in order:
        op, m = graph.operations[step.position], step.microbatch
        match op.kind:
            case "SEND_F":
                exchange("F", op.stage, m)
            case "SEND_B":
                exchange("B", op.stage, m)
            case "F" | "B":
                ranks[device_of(graph, op.stage, m)].append(RankOp(op.kind, op.stage, m))
                neighbour = op.stage + (1 if op.kind == "F" else -1)
                silent = 0 <= neighbour <= last and ("SEND_" + op.kind, op.stage) not in graph.position
                if silent and graph.stages[neighbour].resource != graph.stages[op.stage].resource:
                    exchange(op.kind, op.stage, m)
    return ranks

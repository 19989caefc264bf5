"""What a run will do, decided from the plan alone: ranks, every rank's instructions, and what should come of it.

Without torch, so that a plan that cannot be run is refused before any process starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from ..errors import BadInput
from ..evaluate import flush_makespan_ns
from ..plan import Plan
from ..program import Program, unroll
from ..simulate import Timeline, simulate
from ..stages import StageGraph, most_in_flight, stage_graph, starts_of
from .instructions import Instruction, lowered, repeated
from .weights import weight_policy


@dataclass(frozen=True)
class Script:
    """A run of ``plan`` over ``steps`` updates, each from ``interval`` microbatches.

    ``devices[rank]`` is the platform device that a rank plays. ``program`` is one mini-batch of a drained schedule,
    the whole run otherwise; ``timeline`` is its simulation with the plan's times, whose order is run.
    """

    plan: Plan
    graph: StageGraph
    steps: int
    interval: int
    drains: bool
    devices: tuple[int, ...]
    program: Program
    timeline: Timeline
    instructions: tuple[tuple[Instruction, ...], ...]

    @property
    def microbatches(self) -> int:
        """Microbatches of the whole run."""
        return self.steps * self.interval

    @property
    def round(self) -> int:
        """Microbatches after which every stage's replicas have had equally many."""
        return lcm(*(resource.replicas for resource in self.graph.resources))

    def period_of(self, timeline: Timeline) -> float | None:
        """Return ns per microbatch in the steady state of ``timeline``, None where the run is too short to have one."""
        if self.drains:
            return flush_makespan_ns(timeline) / self.interval
        return timeline.steady_period_ns()

    @property
    def planned_period_ns(self) -> float:
        """What the plan promises: the pattern's period, or a drained mini-batch's share per microbatch."""
        assert self.plan.pattern is not None
        if self.drains:
            return flush_makespan_ns(self.timeline) / self.interval
        return self.plan.pattern.period_ns

    @property
    def filled(self) -> int:
        """Microbatches after which the pipeline has held as many as it ever will, on every replica."""
        pattern = self.plan.pattern
        assert pattern is not None
        return 2 * most_in_flight(self.graph, starts_of(pattern), pattern.period_ns) + self.round

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in chain order."""
        device = self.devices[rank]
        return [s for s, stage in enumerate(self.plan.allocation.stages) if device in stage.devices]

    def ranks_of(self, stage: int) -> list[int]:
        """Return the ranks of a stage's replicas, in replica order."""
        return [self.devices.index(device) for device in self.plan.allocation.stages[stage].devices]


def prepare(plan: Plan, steps: int) -> Script:
    """Return the script of ``steps`` updates of a valid ``plan``; BadInput says what cannot be run, or not yet.

    The simulation proves that the order doesn't deadlock. Linear in the microbatches of the run (of one mini-batch,
    in a drained schedule, plus the instructions).
    """
    if steps < 1:
        raise BadInput(f"steps: {steps} is not a positive number of weight updates")
    policy = weight_policy(plan.policy)
    _refuse(plan)
    assert plan.pattern is not None
    interval = (plan.schedule.microbatches if policy.drains else None) or plan.policy.accumulate
    if interval is None:
        raise BadInput("plan: policy.accumulate is not decided, so nothing says when weights are updated")
    if not policy.drains:  # a replica has one microbatch of each mini-batch at least, as costs charge it
        interval = plan.policy.update_interval(max(stage.replicas for stage in plan.allocation.stages))
    graph = stage_graph(plan.chain, plan.platform, plan.policy, plan.allocation.stages)
    devices = tuple(sorted({device for stage in plan.allocation.stages for device in stage.devices}))
    ranks = {device: rank for rank, device in enumerate(devices)}
    program = unroll(graph, plan.pattern, interval if policy.drains else steps * interval)
    timeline = simulate(program)
    lists = lowered(program, timeline.start_ns, policy, interval, ranks)
    if policy.drains:
        lists = [repeated(instructions, interval, steps) for instructions in lists]
    return Script(
        plan=plan,
        graph=graph,
        steps=steps,
        interval=interval,
        drains=policy.drains,
        devices=devices,
        program=program,
        timeline=timeline,
        instructions=tuple(tuple(instructions) for instructions in lists),
    )


def _refuse(plan: Plan) -> None:
    """Raise BadInput with one sentence for what the runtime doesn't do."""
    if plan.schedule.kind not in ("pattern", "flush") or plan.pattern is None:
        raise BadInput(f"plan: schedules of kind {plan.schedule.kind!r} cannot be run yet; pattern and flush can")
    if plan.policy.precision != "fp32":
        raise BadInput(f"plan: precision {plan.policy.precision!r} cannot be run yet; fp32 can")
    if plan.policy.offload:
        raise BadInput("plan: optimizer state cannot be offloaded to the host yet")
    if plan.chain.edges is not None:
        raise BadInput(
            f"plan: {plan.chain.name} is a graph with skip connections; models run as chains of layers with one input "
            "and one output each"
        )
    for one, other in plan.chain.tied:
        holders = [
            next(s for s, stage in enumerate(plan.allocation.stages) if stage.start <= layer < stage.stop)
            for layer in (one, other)
        ]
        if holders[0] != holders[1]:
            raise BadInput(
                f"plan: layers {one} ({plan.chain.layers[one].name}) and {other} ({plan.chain.layers[other].name}) "
                f"share weights but are in stages {holders[0]} and {holders[1]}; that cannot be run yet"
            )

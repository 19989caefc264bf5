"""A plan's simulated run and its figures, for tables and scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..evaluate import Evaluation, evaluate, flush_makespan_ns
from ..plan import Plan
from ..program import unroll
from ..simulate import Timeline, simulate


@dataclass(frozen=True)
class Simulation:
    """A plan, what it promises, and the timeline of a run of it."""

    plan: Plan
    promised: Evaluation
    timeline: Timeline

    @property
    def makespan_ns(self) -> int:
        """Time of the whole run; a drained one ends with its weight synchronisation."""
        drained = self.plan.schedule.kind == "flush"
        return flush_makespan_ns(self.timeline) if drained else self.timeline.makespan_ns

    def figures(self) -> dict[str, Any]:
        """Return every figure under a name with its unit; ``period_ns`` is None when the run is too short to settle."""
        timeline, plan = self.timeline, self.plan
        assert plan.pattern is not None
        lanes = timeline.program.lanes
        return {
            "microbatches": timeline.program.microbatches,
            "makespan_ns": self.makespan_ns,
            "fill_ns": timeline.fill_ns,
            "period_ns": timeline.steady_period_ns(),
            "pattern_period_ns": plan.pattern.period_ns,
            "devices": [
                {
                    "device": lane.device,
                    "busy_ns": timeline.busy_ns(i),
                    "bubble": timeline.bubble(i),
                    "in_flight": timeline.in_flight(i),
                    "peak_bytes": timeline.peak_bytes(i),
                    "predicted_peak_bytes": self.promised.devices[lane.device].peak_bytes,
                    "memory_bytes": plan.platform.devices[lane.device].memory_bytes,
                }
                for i, lane in enumerate(lanes)
                if lane.device is not None
            ],
            "links": [
                {"link": lane.name, "busy_ns": timeline.busy_ns(i), "use": timeline.busy_ns(i) / self.makespan_ns}
                for i, lane in enumerate(lanes)
                if lane.device is None
            ],
        }


def simulate_plan(plan: Plan, microbatches: int | None = None) -> Simulation:
    """Return the simulated run of a valid plan.

    By default a drained plan runs one mini-batch, any other enough microbatches for a steady middle: eight times those
    in flight, at least 32.
    """
    promised = evaluate(plan)
    if microbatches is None:
        microbatches = plan.schedule.microbatches or max(32, 8 * promised.most_in_flight)
    assert plan.pattern is not None
    return Simulation(plan, promised, simulate(unroll(promised.graph, plan.pattern, microbatches)))

"""How does a plan run in simulation, under one schedule or several? Timelines with their figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from ...check.evaluate import Evaluation, evaluate
from ...check.lateness import plan_delays
from ...choices import BEST, DRAINED
from ...deadline import NEVER, Deadline
from ...errors import BadInput
from ...plan import Plan
from ...registry import Late
from ...schedule.kinds import kind_of, plan_timeline, schedules
from ...schedule.pattern import DeviceUse
from ...schedule.program import Program
from ...schedule.registered import SteadyRun
from ...schedule.simulate import simulate
from ...schedule.timeline import Timeline, Times, in_flight, longest_span_ns, most_held, run_uses, worth
from ...schedule.weight_versions import Delay, kept_by_stages, weight_policy
from ...schedule.written import Written
from ...status import Status
from ...units import format_ns
from .other_schedules import default_microbatches, drains, own_schedule, program_of, program_of_written

if TYPE_CHECKING:
    from ...schedule.synthesis.synthesize import Synthesis

best_orders = Late("planner.what_if.best_order:best_orders")
RUNS, MOST_RUNS = 20, 10**4  # with drawn durations


def jittered_ns(program: Program, share: float, seed: int) -> Times:
    """Return durations, ``[microbatch][position]`` in ns, each the planned one times 1 + ``share`` * N(0, 1).

    Independent for every step, never negative, and the same for the same seed.
    """
    planned = np.array([work.duration_ns for work in program.operations], dtype=np.float64)
    noise = np.random.default_rng(seed).standard_normal((program.microbatches, len(planned)))
    drawn = np.rint(planned * np.maximum(0.0, 1.0 + share * noise)).astype(np.int64)
    return tuple(map(tuple, drawn.tolist()))


@dataclass(frozen=True, repr=False)
class Simulation:
    """The timeline of a plan under a schedule; ``promised`` is what the plan's own pattern promises.

    ``jitter_ns`` holds one time per microbatch for each seed under jitter, none without. ``barrier``: whether all GPUs
    wait for each other between two updates of a drained run, so that it takes its makespan. ``order``: how good
    that is, where the best one was sought.
    """

    plan: Plan
    schedule: str
    promised: Evaluation
    timeline: Timeline
    jitter_ns: tuple[float, ...] = ()
    barrier: bool = True
    order: Synthesis | None = None

    def __repr__(self) -> str:
        return (
            f"<Simulation {self.name}, {self.timeline.program.microbatches} microbatches: "
            f"{format_ns(self.per_microbatch_ns)} each, makespan {format_ns(self.makespan_ns)}, "
            f"{'fits' if self.fits else 'needs more memory than there is'}>"
        )

    @cached_property
    def delays(self) -> list[Delay]:
        """How many updates the gradients of each stage miss; empty for another schedule than the plan's own."""
        return plan_delays(self.plan, self.promised.graph) if self.own else []

    @property
    def own(self) -> bool:
        """Whether the plan runs under the schedule that it was made for."""
        return self.schedule == own_schedule(self.plan)

    @property
    def name(self) -> str:
        """The schedule in words."""
        return "the plan's pattern" if self.schedule == "pattern" else self.schedule

    @property
    def steady(self) -> SteadyRun | None:
        """The steady state of nF1B; None for other schedules."""
        program, entry = self.timeline.program, schedules().get(self.schedule)
        steady = None if entry is None else entry.steady
        if steady is None or program.limit is None:
            return None
        return steady(program.graph, program.batch, program.limit)

    def versions(self, vertical_sync: bool) -> list[int]:
        """Return how many versions of its weights each stage keeps in this nF1B run."""
        program = self.timeline.program
        policy = replace(program.graph.policy, vertical_sync=vertical_sync)
        return kept_by_stages(self.timeline, weight_policy(policy), program.batch)

    @cached_property
    def uses(self) -> list[DeviceUse]:
        """What every device of the platform holds at most."""
        return run_uses(self.timeline, self.plan.platform)

    @property
    def drained(self) -> bool:
        """Whether the run ends a mini-batch: the pipeline empties and weights are synchronised."""
        return self.schedule not in schedules() or drains(self.plan, self.schedule)  # written ones drain

    @cached_property
    def makespan_ns(self) -> int:
        """Time of the whole run; a drained one ends with its weight synchronisation."""
        return worth(self.timeline, barrier=True) if self.drained else self.timeline.makespan_ns

    @property
    def span_ns(self) -> int | None:
        """The longest that one GPU is at a drained mini-batch, from its first start; None for other schedules."""
        return longest_span_ns(self.timeline) if self.drained else None

    @cached_property
    def per_microbatch_ns(self) -> float:
        """What a microbatch costs in the long run: its share of a drained run, or the steady period."""
        if self.steady is not None:
            return self.steady.period_ns
        return per_microbatch_ns(self.timeline, self.drained, self.barrier)

    @property
    def fits(self) -> bool:
        """Whether every device stays within its memory."""
        return all(
            self.uses[lane.device].over_bytes <= 0
            for lane in self.timeline.program.lanes
            if lane.device is not None and lane.steps
        )

    def _of_device(self, lane: int, device: int) -> dict[str, Any]:
        timeline = self.timeline
        return {
            "device": device,
            "busy_ns": timeline.busy_ns(lane),
            "bubble": timeline.bubble(lane),
            "in_flight": in_flight(timeline, lane),
            "most_held": most_held(timeline, lane),
            "peak_bytes": self.uses[device].peak_bytes,
            "predicted_peak_bytes": self.promised.devices[device].peak_bytes if self.own else None,
            "memory_bytes": self.plan.platform.devices[device].memory_bytes,
        }

    def figures(self) -> dict[str, Any]:
        """Return every figure under a name with its unit.

        ``period_ns`` is what a microbatch takes: its share of a drained run, filled and drained, else the time between
        two in the steady state, None where the run is too short to have one. ``beat_ns`` is the time between two while
        the pipeline of a drained run is full. ``pattern_period_ns`` is the one or the other as planned.
        """
        timeline, plan = self.timeline, self.plan
        lanes = timeline.program.lanes
        steady = self.steady
        reached = timeline.steady_period_ns()
        found: dict[str, Any] = {
            "schedule": self.schedule,
            "microbatches": timeline.program.microbatches,
            "makespan_ns": self.makespan_ns,
            "longest_span_ns": self.span_ns,
            "barrier": self.barrier,
            "fill_ns": timeline.fill_ns,
            "period_ns": self.per_microbatch_ns if self.drained or steady is not None else reached,
            "beat_ns": reached if self.drained else None,
            "per_microbatch_ns": self.per_microbatch_ns,
            "pattern_period_ns": plan.pattern.period_ns if plan.pattern else None,
            "longest_stage_bubble": timeline.longest_stage_bubble(),
            "fits": self.fits,
            "delays": [asdict(x) for x in self.delays],
            "devices": [self._of_device(i, lane.device) for i, lane in enumerate(lanes) if lane.device is not None],
            "links": [
                {"link": lane.name, "busy_ns": timeline.busy_ns(i), "use": timeline.busy_ns(i) / self.makespan_ns}
                for i, lane in enumerate(lanes)
                if lane.device is None
            ],
        }
        if steady is not None:
            found[self.schedule] = {
                "batch": timeline.program.batch,
                "limit": timeline.program.limit,
                "steady_period_ns": steady.period_ns,
                "settled": steady.repeats,
                "versions": self.versions(vertical_sync=False),
                "versions_with_vertical_sync": self.versions(vertical_sync=True),
            }
        if self.order is not None:
            found["order"] = {
                "lower_bound_ns": self.order.bound_ns,
                "gap": self.order.gap,
                "proved_optimal": self.order.optimal,
                "moves": self.order.moves,
                "cut": self.order.cut,
            }
        if self.jitter_ns:
            found["jitter"] = {
                "runs": len(self.jitter_ns),
                "median_ns": statistics.median(self.jitter_ns),
                "p95_ns": percentile_95(self.jitter_ns),
            }
        return found


@dataclass(frozen=True, slots=True)
class Refused:
    """A schedule that the plan cannot run under, and why."""

    schedule: str
    reason: str


def per_microbatch_ns(timeline: Timeline, drained: bool, barrier: bool = True) -> float:
    """Return the share of a microbatch in a drained run, or the period of the steady middle of an endless one.

    A drained run takes its makespan, or without a ``barrier`` between updates the longest span of a GPU.
    """
    steady = None if drained else timeline.steady_period_ns()
    total = worth(timeline, barrier) if drained else timeline.makespan_ns
    return total / timeline.program.microbatches if steady is None else steady


def percentile_95(values: Iterable[float]) -> float:
    """Return the smallest of ``values`` that at least 95% of them do not exceed."""
    ordered = sorted(values)
    return ordered[ceil(0.95 * len(ordered)) - 1]


def simulate_plan(
    plan: Plan,
    microbatches: int | None = None,
    schedule: str | None = None,
    options: Mapping[str, Any] | None = None,
    barrier: bool = True,
    deadline: Deadline = NEVER,
    status: Status | None = None,
) -> Simulation:
    """Return the simulated run of a valid plan under ``schedule``, by default its own.

    By default a drained plan runs one mini-batch, any other enough microbatches for a steady middle: 16 times those
    in flight, at least 64. Without a ``barrier`` between updates a drained run takes the longest span of a GPU. The
    search for the best order ends when half of what the ``deadline`` leaves is over.
    """
    promised = evaluate(plan)
    schedule = schedule or own_schedule(plan)
    if microbatches is None:
        microbatches = default_microbatches(plan, schedule, options)
    if schedule == BEST:
        given = {name: value for name, value in (options or {}).items() if name == "weight_keeps"}
        order = best_orders(plan, microbatches, barrier, deadline=deadline.part(2), status=status, **given)[0].order
        return Simulation(plan, schedule, promised, order.timeline, barrier=barrier, order=order)
    asked = any(value is not None for value in (options or {}).values())
    own = schedule == own_schedule(plan) and not asked and kind_of(plan).drains
    if own and microbatches == plan.schedule.microbatches:
        timeline = plan_timeline(plan)
    else:
        timeline = simulate(program_of(plan, schedule, microbatches, options))
    return Simulation(plan, schedule, promised, timeline, barrier=barrier)


def simulate_written(plan: Plan, written: Written, name: str) -> Simulation:
    """Return the run of a schedule that somebody wrote, called ``name``, on the stages of a valid plan."""
    program = program_of_written(plan, written, name)
    return Simulation(plan, name, evaluate(plan), simulate(program))


def run_seeds(seed: int, runs: int) -> range:
    """Return the seeds of drawn runs; two ``seed`` s share none."""
    return range(seed * MOST_RUNS, seed * MOST_RUNS + runs)


def drawn_ns(
    program: Program, share: float, seeds: Iterable[int], drained: bool, barrier: bool = True
) -> Iterator[float]:
    """Yield a time per microbatch for each seed, durations drawn around the planned ones: see :func:`under_jitter`."""
    free = program.first_come()
    for seed in seeds:
        yield per_microbatch_ns(simulate(free, jittered_ns(free, share, seed)), drained, barrier)


def under_jitter(
    simulation: Simulation, share: float, seeds: Sequence[int], status: Status | None = None
) -> Simulation:
    """Return ``simulation`` with a time per microbatch for each seed, durations drawn around the planned ones.

    Links carry what comes first, in every schedule alike; devices keep their order, unless they decide as they go.
    """
    times = []
    for time in drawn_ns(simulation.timeline.program, share, seeds, simulation.drained, simulation.barrier):
        times.append(time)
        if status is not None:
            status.say(f"{simulation.name}, drawn durations: {len(times)} of {len(seeds)} runs")
    return replace(simulation, jitter_ns=tuple(times))


def compare_schedules(
    plan: Plan,
    schedules: Sequence[str],
    microbatches: int | None = None,
    options: Mapping[str, Any] | None = None,
    barrier: bool = True,
    deadline: Deadline = NEVER,
    status: Status | None = None,
) -> tuple[list[Simulation], list[Refused]]:
    """Return the runs of ``plan`` under each schedule, best first, and the schedules that it cannot run under.

    Best: within memory first, then the least time per microbatch.
    """
    runs, refused = [], []
    status = status or Status()
    for number, schedule in enumerate(schedules, 1):
        status.part, status.phase = f"{number} of {len(schedules)} schedules", schedule
        try:
            runs.append(simulate_plan(plan, microbatches, schedule, options, barrier, deadline, status))
        except BadInput as error:
            refused.append(Refused(schedule, str(error)))
    status.part = ""
    drained = plan.policy.weights == DRAINED  # others would train otherwise
    runs.sort(key=lambda run: (not run.fits, drained and not run.drained, run.per_microbatch_ns))
    return runs, refused

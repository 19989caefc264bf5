"""Which period does each algorithm reach on one network, for several numbers of GPUs and memories?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from ...check.bounds import any_bound
from ...check.lateness import plan_delays
from ...deadline import OutOfTime
from ...errors import Infeasible
from ...integers import ceil_div
from ...partition.balance import balance
from ...plan import Schedule
from ...problem import MICROBATCHES_PER_DEVICE, Device, Problem
from ...schedule.kinds import too_long
from ...schedule.weight_versions import average_delay
from ..drained.run import drained_run
from ..least_late import drained_quickly, fresher, least_late
from ..periodic.incumbent import Settings
from ..periodic.interval import at_interval
from ..periodic.jobs import in_order
from ..plan import AUTO, Planned, make_plan, with_interval

GPIPE: Final = "gpipe"


@dataclass(frozen=True, slots=True)
class Reached:
    """What one algorithm reached: its scheduled period (None: no plan) and what it claimed before scheduling, in ns;
    by how many updates gradients are late on average."""

    algorithm: str
    period_ns: int | None
    claimed_ns: int | None
    seconds: float
    data_parallel: bool = False
    late_updates: float | None = None


@dataclass(frozen=True, slots=True)
class OnePlatform:
    """One platform: its number of GPUs, the memory of each (bytes), after how much all plans update
    weights, the bound of class ``any`` (ns), a cell each, and how many GPUs run each layer together (``tensor``), in
    which ``variant`` of them."""

    gpus: int
    memory_bytes: int
    update_microbatches: int
    update_samples: int
    bound_ns: int
    cells: tuple[Reached, ...]
    tensor: int = 1
    variant: str = "1"

    @property
    def best_ns(self) -> int | None:
        """The shortest period in the row."""
        return min((cell.period_ns for cell in self.cells if cell.period_ns is not None), default=None)


def compare(
    problem: Problem,
    gpus: Sequence[int],
    memories: Sequence[int],
    algorithms: Sequence[str],
    *,
    clock: Callable[[], float],
    settings: Settings | None = None,
    effort: str = "normal",
    jobs: int = 1,
    weights: bool = True,
    batch: bool = True,
) -> Iterator[OnePlatform]:
    """Yield a row for each number of GPUs and memory, as soon as it is done.

    The network and its bandwidth come from ``problem``'s platform, which must have one level; numbers of GPUs that its
    groups don't divide are left out. Algorithms are the
    planner's and ``gpipe``: balanced stages that run all forwards of a mini-batch and then all backwards, drained.
    All have one interval between updates in a row: the problem's, or the largest that one of them decides on where it
    is open; where nobody said the ``batch``, four microbatches a GPU. Where nobody said the ``weights`` each algorithm
    takes those that :func:`.least_late.least_late` would. ``clock`` gives CPU seconds. ``jobs`` rows are made at a
    time, each in a process.
    """
    whole, width = problem.platform.whole or problem.platform, problem.platform.width

    def on(count: int, memory: int) -> Problem:
        devices, levels = (Device(memory - whole.reserved_bytes),) * count, (replace(whole.levels[0], count=count),)
        platform = replace(whole, devices=devices, levels=levels).grouped(width, problem.chain.tensor)
        every = problem.policy.accumulate if batch else MICROBATCHES_PER_DEVICE * count // problem.chain.several
        return at_interval(replace(problem, platform=platform), every)

    sizes = ((count, memory) for count in gpus if count % width == 0 for memory in memories)
    rows = ((on(*size), algorithms, clock, settings, effort, weights) for size in sizes)
    yield from in_order(jobs, _row, rows)


def _row(
    problem: Problem,
    algorithms: Sequence[str],
    clock: Callable[[], float],
    settings: Settings | None,
    effort: str,
    weights: bool = True,
) -> OnePlatform:
    settings = replace(settings or Settings(), explained=False)
    plans, seconds = dict[str, Planned | None](), dict[str, float]()

    @cache
    def drained(every: int) -> Planned | None:
        return drained_quickly(problem, every, settings)

    def make(name: str, algorithm: str) -> None:
        began = clock()

        def planned(problem: Problem) -> Planned:
            found = make_plan(problem, algorithm, settings=settings, effort=effort)
            return fresher(found, problem) if algorithm == AUTO else found

        try:
            plans[name] = planned(problem) if weights else least_late(problem, lambda x: (planned(x), x), drained)[0]
        except (Infeasible, OutOfTime):
            plans[name] = None
        seconds[name] = seconds.get(name, 0.0) + clock() - began

    interval = problem.policy.accumulate
    for name in algorithms:
        if name != GPIPE:
            make(name, name)
    if interval is None:
        intervals = [found.plan.interval for found in plans.values() if found is not None]
        interval = max(intervals, default=MICROBATCHES_PER_DEVICE * len(problem.platform))
        problem = at_interval(problem, interval)
        for name, found in list(plans.items()):
            if found is not None and found.plan.policy.accumulate != interval:
                slow = name == AUTO and found.plan.pattern is not None  # its own stages, or a quick search's
                make(name, "contiguous" if slow else name)
                both = plans[name], with_interval(found, interval) if slow else None
                plans[name] = min(filter(None, both), key=lambda x: x.evaluation.period_ns, default=None)
    cells = []
    for name in algorithms:
        if name == GPIPE:
            began = clock()
            period_ns = gpipe_period_ns(problem, interval)
            late = None if period_ns is None else 0.0
            cells.append(Reached(name, period_ns, None, clock() - began, late_updates=late))
        else:
            cells.append(_reached(name, plans[name], seconds[name]))
    platform, chain = problem.platform, problem.chain
    policies = {problem.policy, *(found.plan.policy for found in plans.values() if found is not None)}
    bound = min(any_bound(problem.with_policy(policy)).period_ns for policy in policies)
    size = len(platform.whole or platform), platform.devices[0].memory_bytes, interval, interval * chain.microbatch
    return OnePlatform(*size, bound, tuple(cells), chain.tensor, chain.variant)


def _reached(algorithm: str, found: Planned | None, seconds: float) -> Reached:
    if found is None:
        return Reached(algorithm, None, None, seconds)
    return Reached(
        algorithm,
        found.evaluation.period_ns,
        found.plan.provenance.claimed_period_ns,
        seconds,
        found.plan.allocation.data_parallel,
        average_delay(plan_delays(found.plan, found.evaluation.graph)),
    )


def gpipe_period_ns(problem: Problem, microbatches: int) -> int | None:
    """Return the makespan per microbatch (ns) of GPipe on balanced stages, or None when they don't fit the memory.

    One weight version, mini-batches of ``microbatches``, every one of them in flight before the first backward; stages
    are recomputed where the problem allows it and they don't fit otherwise. None at the problem's deadline, and where
    the mini-batch has too many steps to be simulated.
    """
    drained = problem.with_policy(problem.policy.drained(microbatches))
    with suppress(OutOfTime), problem.deadline.insist():
        for allocation in balance(drained):
            endless = too_long(4 * len(allocation.stages) - 2, Schedule(GPIPE, microbatches))
            run = None if endless else drained_run(drained, allocation.stages, GPIPE)
            if run is not None:
                return ceil_div(run.makespan_ns, microbatches)
    return None

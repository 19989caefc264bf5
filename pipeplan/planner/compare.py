"""Which period does each algorithm reach on one network, for several numbers of GPUs and memories?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..check.bounds import any_bound
from ..cost.stage_graph import stage_graph
from ..deadline import OutOfTime
from ..errors import Infeasible
from ..integers import ceil_div
from ..partition.balance import balance
from ..plan import Allocation
from ..problem import Device, Platform, Problem
from ..schedule.gpipe import gpipe
from ..schedule.memory import run_uses
from ..schedule.simulate import simulate
from ..schedule.timeline import flush_makespan_ns
from .incumbent import Settings
from .interval import at_interval
from .plan import Planned, make_plan
from .simulated import MINI_BATCH_PER_DEVICE

GPIPE = "gpipe"


@dataclass(frozen=True, slots=True)
class Reached:
    """What one algorithm reached: its scheduled period (None: no plan) and what it claimed before scheduling, in ns."""

    algorithm: str
    period_ns: int | None
    claimed_ns: int | None
    seconds: float
    data_parallel: bool = False


@dataclass(frozen=True, slots=True)
class OnePlatform:
    """One platform: its number of GPUs, the memory of each (bytes), what all plans update weights after (None without
    any plan), the bound of class ``any`` (ns), a cell each."""

    gpus: int
    memory_bytes: int
    update_microbatches: int | None
    update_samples: int | None
    bound_ns: int
    cells: tuple[Reached, ...]

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
) -> Iterator[OnePlatform]:
    """Yield a row for each number of GPUs and memory, as soon as it is done.

    The network and its bandwidth come from ``problem``'s platform, which must have one level. Algorithms are the
    planner's and ``gpipe``: balanced stages that run all forwards of a mini-batch and then all backwards, drained.
    All have one interval between updates in a row: the problem's, or the largest that one of them decides on where it
    is open. ``clock`` gives CPU seconds.
    """
    level = problem.platform.levels[0]
    for count in gpus:
        for memory in memories:
            platform = Platform((Device(memory),) * count, (replace(level, count=count),), problem.platform.full_duplex)
            here = replace(problem, platform=platform)
            yield _row(here, algorithms, clock, settings, effort)


def _row(
    problem: Problem, algorithms: Sequence[str], clock: Callable[[], float], settings: Settings | None, effort: str
) -> OnePlatform:
    interval, plans, seconds = problem.policy.accumulate, dict[str, Planned | None](), dict[str, float]()

    def make(name: str, earlier: Planned | None = None) -> None:
        began = clock()
        known = () if earlier is None else (Allocation(earlier.plan.allocation.stages),)
        try:
            plans[name] = make_plan(problem, name, settings=settings, effort="quick" if known else effort, known=known)
        except (Infeasible, OutOfTime):
            plans[name] = None
        seconds[name] = seconds.get(name, 0.0) + clock() - began

    planned = [name for name in algorithms if name != GPIPE]
    if interval is None:
        for name in planned:
            make(name)
        intervals = [found.plan.interval for found in plans.values() if found is not None]
        if not planned:
            intervals = [MINI_BATCH_PER_DEVICE * len(problem.platform)]
        interval = max(intervals, default=None)
    if interval is not None:
        problem = at_interval(problem, interval)
        for name in planned:
            found = plans.get(name)
            if name not in plans or (found is not None and found.plan.policy.accumulate != interval):
                make(name, found)
    cells = []
    for name in algorithms:
        if name == GPIPE:
            began = clock()
            period = None if interval is None else gpipe_period_ns(problem, interval)
            cells.append(Reached(name, period, None, clock() - began))
        else:
            cells.append(_reached(name, plans[name], seconds[name]))
    samples = None if interval is None else interval * problem.chain.microbatch
    memory = problem.platform.devices[0].memory_bytes
    return OnePlatform(len(problem.platform), memory, interval, samples, any_bound(problem).period_ns, tuple(cells))


def _reached(algorithm: str, found: Planned | None, seconds: float) -> Reached:
    if found is None:
        return Reached(algorithm, None, None, seconds)
    return Reached(
        algorithm,
        found.evaluation.period_ns,
        found.plan.provenance.claimed_period_ns,
        seconds,
        found.plan.allocation.data_parallel,
    )


def gpipe_period_ns(problem: Problem, microbatches: int) -> int | None:
    """Return the makespan per microbatch (ns) of GPipe on balanced stages, or None when they don't fit the memory.

    One weight version, mini-batches of ``microbatches``, every one of them in flight before the first backward; stages
    are recomputed where the problem allows it and they don't fit otherwise. None at the problem's deadline.
    """
    policy = replace(problem.policy, weights="flush", accumulate=microbatches)
    with suppress(OutOfTime):
        for allocation in balance(problem.with_policy(policy)):
            graph = stage_graph(problem.chain, problem.platform, policy, allocation.stages)
            timeline = simulate(gpipe(graph, microbatches), deadline=problem.deadline)
            if all(use.peak_bytes <= use.memory_bytes for use in run_uses(timeline, problem.platform)):
                return ceil_div(flush_makespan_ns(timeline), microbatches)
    return None

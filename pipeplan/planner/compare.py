"""Which period does each algorithm reach on one network, for several numbers of GPUs and memories?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..check.bounds import any_bound
from ..cost.stage_graph import stage_graph
from ..deadline import OutOfTime
from ..errors import Infeasible
from ..integers import ceil_div
from ..partition.balance import balance
from ..problem import Device, Problem
from ..schedule.gpipe import gpipe
from ..schedule.memory import run_uses
from ..schedule.simulate import simulate
from ..schedule.timeline import flush_makespan_ns
from .incumbent import Settings
from .plan import make_plan
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
    """One platform: its number of GPUs, the memory of each (bytes), the bound of class ``any`` (ns), a cell each."""

    gpus: int
    memory_bytes: int
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
    ``clock`` gives CPU seconds.
    """
    level, reserved = problem.platform.levels[0], problem.platform.reserved_bytes
    for count in gpus:
        for memory in memories:
            platform = replace(
                problem.platform, devices=(Device(memory - reserved),) * count, levels=(replace(level, count=count),)
            )
            here = replace(problem, platform=platform)
            cells = tuple(_cell(here, name, clock, settings, effort) for name in algorithms)
            yield OnePlatform(count, memory, any_bound(here).period_ns, cells)


def _cell(
    problem: Problem, algorithm: str, clock: Callable[[], float], settings: Settings | None, effort: str
) -> Reached:
    began = clock()
    try:
        if algorithm == GPIPE:
            return Reached(algorithm, gpipe_period_ns(problem), None, clock() - began)
        found = make_plan(problem, algorithm, settings=settings, effort=effort)
    except (Infeasible, OutOfTime):
        return Reached(algorithm, None, None, clock() - began)
    return Reached(
        algorithm,
        found.evaluation.period_ns,
        found.plan.provenance.claimed_period_ns,
        clock() - began,
        found.plan.allocation.data_parallel,
    )


def gpipe_period_ns(problem: Problem) -> int | None:
    """Return the makespan per microbatch (ns) of GPipe on balanced stages, or None when they don't fit the memory.

    One weight version, mini-batches of four microbatches per GPU, every one of them in flight before the first
    backward; stages are recomputed where the problem allows it and they don't fit otherwise.
    """
    microbatches = MINI_BATCH_PER_DEVICE * len(problem.platform)
    policy = replace(problem.policy, weights="flush", accumulate=microbatches)
    for allocation in balance(problem.with_policy(policy)):
        graph = stage_graph(problem.chain, problem.platform, policy, allocation.stages)
        timeline = simulate(gpipe(graph, microbatches), deadline=problem.deadline)
        if all(use.peak_bytes <= use.memory_bytes for use in run_uses(timeline, problem.platform)):
            return ceil_div(flush_makespan_ns(timeline), microbatches)
    return None

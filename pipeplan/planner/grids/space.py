"""Which grids of stages x pipelines can run a batch on a number of GPUs, and how fast could each be at best?

Myelin section III-A arranges GPUs in a grid: rows are pipelines, columns share a stage and all-reduce its gradients.
Here are the ways to do so, what is asked of the search for the one that is done first with a batch, and its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Literal

from ...cost import memory_model, time_model
from ...plan import Schedule, Stage
from ...problem import Chain, Problem
from ...schedule.kinds import too_long
from .microbatches import Profiles, profiles

Placement = Literal["stage", "pipeline"]
COARSENING = 4  # buckets per chunk: two and four are best in Myelin's Figure 8


@dataclass(frozen=True, slots=True)
class GridConfig:
    """``pipelines`` of ``stages`` stages fed ``microbatch`` samples at a time, optimizer state on the host or not.

    ``placement`` says whose devices are neighbours in the platform's order: those of one stage, so that all-reduces
    stay inside servers, or those of one pipeline, so that messages do.
    """

    stages: int
    pipelines: int
    microbatch: int
    offload: bool = False
    placement: Placement = "stage"

    @property
    def gpus(self) -> int:
        """GPUs of the grid."""
        return self.stages * self.pipelines

    def microbatches(self, batch: int) -> int:
        """Return how many microbatches each pipeline runs for ``batch`` samples."""
        return batch // (self.pipelines * self.microbatch)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each stage; device j of every stage makes pipeline j."""
        if self.placement == "stage":
            return tuple(tuple(range(s * self.pipelines, (s + 1) * self.pipelines)) for s in range(self.stages))
        return tuple(tuple(range(s, self.gpus, self.stages)) for s in range(self.stages))


@dataclass(frozen=True, slots=True)
class GridProblem:
    """What is asked: ``problem`` for a batch of ``batch`` samples in microbatches of one of the ``sizes``.

    ``offloads`` lists whether the optimizer's state may be, or must be, on the host; ``limit`` fixes the microbatches
    in a pipeline, ``pipelines`` the number of pipelines. The chain and the accumulation of ``problem`` are left to the
    configuration.
    """

    problem: Problem
    profiles: Profiles
    batch: int
    sizes: tuple[int, ...]
    offloads: tuple[bool, ...] = (False,)
    limit: int | None = None
    pipelines: int | None = None

    def of(self, config: GridConfig) -> Problem:
        """Return the problem under a configuration: its microbatches, updates and optimizer state."""
        microbatches = self.batch // config.microbatch
        policy = replace(self.problem.policy, accumulate=microbatches, offload=config.offload)
        return replace(self.problem, chain=self.profiles.at(config.microbatch), policy=policy)

    def too_long(self, stages: int, microbatch: int) -> str | None:
        """Return in words why no plan of so many stages and such microbatches is judged, or None."""
        return too_long(4 * stages - 2, Schedule("message-driven", self.batch // microbatch))


def grid_problem(
    problem: Problem,
    batch: int,
    chains: Sequence[Chain],
    sizes: Sequence[int] | None = None,
    *,
    pipelines: int | None = None,
    fixed_ns: int = 0,
    offload: bool | None = None,
    overlap: bool = False,
    limit: int | None = None,
) -> tuple[GridProblem, list[str]]:
    """Return the question which grid is done first with a batch, and in words what its answer assumes.

    ``chains`` are profiles of one network at microbatches of several sizes, ``sizes`` those to choose from (None: those
    profiled); of each pass of a layer ``fixed_ns`` don't change with the size. ``offload`` None: where it is faster.
    ``overlap``: the optimizer steps on one chunk of gradients while the next is summed.
    """
    given = profiles(chains, fixed_ns)
    chosen = tuple(sorted(set(sizes or given.measured)))
    policy = replace(problem.policy, accumulate=None, coarsening=COARSENING if overlap else None)
    movable = memory_model.host_bytes(replace(policy, offload=True), 4, 1) > 0
    either = offload is None and movable and policy.bytes_per_parameter is None
    offloads = (False, True) if either else (bool(offload),)
    scaled = given.assumption(chosen)
    assumptions = [] if scaled is None else [scaled]
    assumptions.append(
        "gradients are summed after each stage's last backward by rings, 2(r-1)/r bytes / bandwidth"
        + (", the optimizer steps meanwhile: the longer of the two and a chunk of the other" if overlap else "")
    )
    if problem.platform.shared_level is None:
        assumptions.append("any two GPUs have a link of their own")
    if True in offloads:
        assumptions.append("moving optimizer state between host and GPU takes no time of its own")
    return (
        GridProblem(problem.with_policy(policy), given, batch, chosen, offloads, limit, pipelines),
        assumptions,
    )


@dataclass(frozen=True, slots=True)
class Found:
    """A configuration with its stages, the limit on microbatches in a pipeline, and the time of a batch."""

    config: GridConfig
    stages: tuple[Stage, ...]
    limit: int
    batch_ns: int
    exact: bool


@dataclass(frozen=True, slots=True)
class GridRow:
    """One grid in the table: the best that was found for it (``found``), or why there is nothing (``reason``).

    ``bound_ns``: no plan of the grid takes less, None where none exists.
    """

    stages: int
    pipelines: int
    found: Found | None
    bound_ns: int | None
    reason: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a search found: the best plan (None: nothing fits), a row for each grid of all GPUs and for the best one.

    ``bound_ns``: no grid of at most as many GPUs, with contiguous stages, microbatches of the given sizes and any
    limit, runs the batch in less. ``stopped`` says why the search ended early.
    """

    best: Found | None
    rows: tuple[GridRow, ...]
    bound_ns: int
    stopped: str | None = None


def configs(asked: GridProblem) -> Iterator[GridConfig]:
    """Yield every configuration of at most all GPUs that the batch and the network allow, memory apart."""
    platform = asked.problem.platform
    placements: tuple[Placement, ...] = ("stage", "pipeline") if len(platform.levels) > 1 else ("stage",)
    for inter in range(1, min(len(platform), len(asked.problem.chain)) + 1):
        most = len(platform) // inter if asked.problem.replicas else 1
        for data in [asked.pipelines] if asked.pipelines else range(1, most + 1):
            if data > most:
                continue
            for size in asked.sizes:
                if asked.batch % (data * size) == 0 and asked.too_long(inter, size) is None:
                    for offload in asked.offloads:
                        for placement in placements if inter > 1 and data > 1 else placements[:1]:
                            yield GridConfig(inter, data, size, offload, placement)


def work_bound(asked: GridProblem, config: GridConfig) -> int:
    """Return a time below which no plan of a configuration runs the batch, from its work alone.

    With U(s) the time of a stage and P(s) that of those before it a batch takes at least M U(s) + P(s). Work in all is
    W = sum of U(s), and the largest of these is least when they are equal: W / (1 - (1 - 1/M)^p). Nor is it less than
    the mean over the stages of M U(s) and the update after it, or M times the largest layer.
    """
    problem, count, p = time_model.relative(asked.of(config)), config.microbatches(asked.batch), config.stages
    sums, platform = problem.chain.sums, problem.platform
    speed = max(device.speed for device in platform.devices)
    passes = int(sums.forward_ns[-1] + sums.backward_ns[-1])
    chain = problem.chain
    step = Fraction(time_model.whole_step_ns(chain, 0, len(chain)), problem.policy.sharers(config.pipelines))
    overlaps = problem.policy.coarsening is not None
    work = passes + (Fraction(0) if overlaps else step / count)
    drain = work / (1 - Fraction(count - 1, count) ** p)
    gradient: int = memory_model.gradient_of(chain, problem.policy, 0, len(chain))
    rounds = Fraction(2 * (config.pipelines - 1) * gradient * 10**9, config.pipelines * platform.paths[0][0])
    rounds += 2 * (config.pipelines - 1) * platform.paths[0][1] * (gradient > 0)
    if overlaps:
        rounds = max(rounds, step / speed)
    largest = max(layer.forward_ns + layer.backward_ns for layer in problem.chain.layers)
    return ceil(max(drain / speed, (count * work / speed + rounds) / p, count * largest / speed))

"""Which grids of stages x pipelines can run a batch on a number of GPUs, and how fast could each be at best?

Myelin section III-A arranges GPUs in a grid: rows are pipelines, columns share a stage and all-reduce its gradients.
Here are the ways to do so, what a network costs at other microbatch sizes (as profiled, between two profiles, or scaled
from one), what is asked of the search for the grid that is done first with a batch, and its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Literal

from ...cost import memory_model
from ...cost.saved import for_weights, storages
from ...errors import BadInput
from ...plan import Schedule, Stage
from ...problem import Chain, Layer, Problem
from ...problem.layers import Scale, scaled
from ...schedule.kinds import too_long
from ..drained.tables import work_floor_ns

_FIXED = ("name", "weight_bytes", "parameter_count")


@dataclass(frozen=True)
class Profiles:
    """Profiles of one network by microbatch size; ``fixed_ns`` is the part of a layer's pass that no size changes."""

    measured: Mapping[int, Chain]
    fixed_ns: int = 0

    def at(self, microbatch: int) -> Chain:
        """Return the network at microbatches of ``microbatch`` samples (>= 1).

        A profiled size is taken as it is. With one profile, activations and boundary bytes are proportional to the
        size, and a pass of a layer that took t takes fixed + (t - fixed) * size / profiled size. With several, every
        number lies on the line through the two nearest profiles, but never below what is proportional to the nearest
        when the size shrinks, nor above it when the size grows. Weights and optimizer steps don't depend on it.
        """
        if microbatch not in self._known:
            self._known[microbatch] = self._made(microbatch)
        return self._known[microbatch]

    @cached_property
    def _known(self) -> dict[int, Chain]:
        return dict(self.measured)

    def _made(self, microbatch: int) -> Chain:
        near = sorted(self.measured, key=lambda size: (abs(size - microbatch), size))
        base, *others = (self.measured[size] for size in near[:2])
        size = base.microbatch

        def number(scale: Scale, value: int, *far: int) -> int:
            """Return a number by itself, or on the line through the other profile's."""
            fixed = min(value, self.fixed_ns) if scale == "time" and not far else 0
            proportional = fixed + Fraction((value - fixed) * microbatch, size)
            if not far:
                return ceil(proportional)
            low, high = min(proportional, Fraction(value)), max(proportional, Fraction(value))
            slope = Fraction(far[0] - value, others[0].microbatch - size)
            return ceil(min(high, max(low, value + slope * (microbatch - size))))

        layers = []
        for layer, *same in zip(base.layers, *(x.layers for x in others), strict=True):
            found: Layer = scaled(layer, number, *same)
            part = found.backward_weight_ns  # it and the whole are rounded on their own
            layers.append(found if part is None else replace(found, backward_weight_ns=min(part, found.backward_ns)))
        reading = number("time", base.reading_ns, *(x.reading_ns for x in others))
        if not base.reads_beside:
            reading = min(reading, layers[0].forward_ns, layers[-1].forward_ns)
        entering = ceil(Fraction(base.input_bytes * microbatch, size))
        made = replace(base, layers=tuple(layers), input_bytes=entering, microbatch=microbatch, reading_ns=reading)
        return _saving_enough(made)

    def assumption(self, microbatches: Sequence[int]) -> str | None:
        """Return in words how sizes that were not profiled got their numbers; None when all were profiled."""
        made = [size for size in microbatches if size not in self.measured]
        if not made:
            return None
        sizes = ", ".join(map(str, made))
        if len(self.measured) > 1:
            return f"microbatches of {sizes}: times and sizes on the line through the two nearest profiles"
        (known,) = self.measured
        fixed = f" beyond a fixed {self.fixed_ns / 1000:g} us of each pass of a layer" if self.fixed_ns else ""
        return f"microbatches of {sizes}: times{fixed} and sizes proportional to those of the profile at {known}"


def profiles(chains: Sequence[Chain], fixed_ns: int = 0) -> Profiles:
    """Return the profiles of one network; BadInput says where two differ in more than the microbatch size."""
    first = chains[0]
    measured: dict[int, Chain] = {}
    for chain in chains:
        if chain.microbatch in measured:
            raise BadInput(f"two profiles are for microbatches of {chain.microbatch}")
        if len(chain) != len(first):
            raise BadInput(
                f"the profiles are of different networks: {len(first)} layers at microbatches of {first.microbatch}, "
                f"{len(chain)} at {chain.microbatch}"
            )
        if (chain.edges, chain.tied, chain.shared) != (first.edges, first.tied, first.shared):
            raise BadInput("the profiles are of different networks: their edges or tied layers differ")
        for i, (one, two) in enumerate(zip(first.layers, chain.layers, strict=True)):
            for name in _FIXED:
                if getattr(one, name) != getattr(two, name):
                    raise BadInput(
                        f"the profiles are of different networks: layers[{i}] has {name} {getattr(one, name)!r} at "
                        f"microbatches of {first.microbatch}, {getattr(two, name)!r} at {chain.microbatch}"
                    )
        measured[chain.microbatch] = chain
    return Profiles(measured, fixed_ns)


def _saving_enough(chain: Chain) -> Chain:
    """Return ``chain`` with layers that save no less than the tensors they name: all were rounded on their own."""
    layers = [
        layer if private >= 0 else replace(layer, saved_bytes=(layer.saved_bytes or 0) - private)
        for layer, private in zip(chain.layers, storages(chain).facts.private, strict=True)
    ]
    weights = for_weights(chain)
    for i, private in enumerate(() if weights is None else storages(weights).facts.private):
        needs = layers[i].weight_needs
        if private < 0 and needs is not None:
            layers[i] = replace(layers[i], weight_needs=replace(needs, saved_bytes=needs.saved_bytes - private))
    return replace(chain, layers=tuple(layers))


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
    return (GridProblem(problem.with_policy(policy), given, batch, chosen, offloads, limit, pipelines), assumptions)


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
    """Return a time below which no plan of a configuration runs the batch, from its work alone."""
    return work_floor_ns(asked.of(config), config.groups())

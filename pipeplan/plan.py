"""What is decided: stages on devices (Allocation), when operations run (Pattern), and both with reasons (Plan).

Constructing these checks nothing, so that a bad plan can be shown and explained; ``validate`` judges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from .choices import ScheduleKind as ScheduleKind
from .choices import TargetName
from .problem import Chain, Checkpointing, Platform, Policy, Way, Weights

AllocationClass = Literal["contiguous", "one-special", "any", TargetName]  # the last are what targets can express
OpKind = Literal["F", "B", "SEND_F", "SEND_B"]


@dataclass(frozen=True, slots=True)
class Stage:
    """``layers[start:stop]`` on ``devices`` (its replicas); microbatch m runs on ``devices[m % len(devices)]``.

    ``checkpoint`` lists the half-open layer ranges that are recomputed in the backward; the other layers are stored.
    Where the chain has variants each of ``devices`` is the first of ``tensor`` neighbours that run each layer together,
    as the chain's variant of that name has it; ``selective`` lists ranges of layers whose cores run again.
    """

    start: int
    stop: int
    devices: tuple[int, ...]
    checkpoint: tuple[tuple[int, int], ...] = ()
    tensor: int = 1
    selective: tuple[tuple[int, int], ...] = ()
    offloaded: bool = False

    @property
    def way(self) -> Way:
        """How it has the chain's layers (:meth:`.problem.Chain.of`), where that has variants."""
        return self.tensor, self.selective, self.offloaded

    @property
    def members(self) -> tuple[int, ...]:
        """All devices that run the stage, group by group."""
        return tuple(d for first in self.devices for d in range(first, first + self.tensor))

    def recomputing(self, segments: Iterable[tuple[int, int]]) -> Stage:
        """Return the stage with what it has of ``segments`` of all layers recomputed."""
        inside = ((max(first, self.start), min(last, self.stop)) for first, last in segments)
        return replace(self, checkpoint=tuple((first, last) for first, last in inside if first < last))

    @property
    def replicas(self) -> int:
        """Number of devices that run the stage, each on every ``replicas``-th microbatch."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Stages in chain order, the period that the partitioner hoped for (None when it makes no claim), and a period
    below which it has proved that no allocation of its class exists (None when it has proved nothing)."""

    stages: tuple[Stage, ...]
    claimed_period_ns: int | None = None
    lower_bound_ns: int | None = None

    @property
    def contiguous(self) -> bool:
        """Whether no device appears in two stages."""
        order = [d for stage in self.stages for d in stage.devices]
        return len(set(order)) == len(order)

    def keeps_units(self, platform: Platform) -> bool:
        """Whether stages take the devices of each server, and of each unit of a level above, one after the other."""
        order = [d for stage in self.stages for d in stage.devices]
        runs = [[unit for unit, _ in groupby(d // size for d in order)] for size in platform.unit_sizes]
        return all(len(set(units)) == len(units) for units in runs)

    @property
    def one_special(self) -> bool:
        """Whether at most one device group holds several stages (MadPipe section 4.2)."""
        groups = [stage.devices for stage in self.stages]
        return sum(groups.count(group) > 1 for group in set(groups)) <= 1

    @property
    def data_parallel(self) -> bool:
        """Whether the whole chain is one replicated stage."""
        return len(self.stages) == 1 and self.stages[0].replicas > 1


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One operation on microbatch 0: of a SEND, ``stage`` is the sender; ``start_ns`` is absolute."""

    kind: OpKind
    stage: int
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """A periodic schedule: microbatch m runs every operation at its start + m * period (ALGORITHMS section 2).

    Index shift and offset are derived: ``start_ns // period_ns`` and ``start_ns % period_ns``.
    """

    period_ns: int
    operations: tuple[TimedOp, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """No plan of class ``allocation`` (with these options) has a shorter period than ``period_ns``.

    With ``any_interval`` that holds however often weights are updated, else at the plan's own interval; with
    ``schedule`` for plans under that kind alone; of a DAG's layers always in the order in which the plan has them.
    ``claimed`` says that this is the word of a file, which nothing here has derived. It is never written: whoever reads
    a file finds out by themselves.
    """

    allocation: AllocationClass
    replicas: bool
    checkpointing: Checkpointing
    period_ns: int
    claimed: bool = False
    any_interval: bool = False
    schedule: ScheduleKind | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """How microbatches run: the pattern without end, or ``microbatches`` per mini-batch in a drained schedule.

    Of a written one ``order`` has the passes of every GPU, or group of them, in the order of these: ``0F0,0I0,0W0``,
    and ``0R0`` before ``0I0`` where a stage recomputes in a pass of its own.
    """

    kind: ScheduleKind = "pattern"
    microbatches: int | None = None
    limit: int | None = None
    order: tuple[str, ...] | None = None

    @property
    def mini_batch(self) -> int:
        """Microbatches of a mini-batch; 1 where the schedule knows none."""
        return self.microbatches or 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """What was found for a plan's problem with other ``weights``, or with an update every so many other
    ``microbatches``: a period (ns), None where nothing fits; ``quick`` by a search that is quicker than the plan's."""

    weights: Weights
    microbatches: int
    period_ns: int | None
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a plan comes from, and what it was weighed against. ``seconds`` is the only field of a plan that differs
    between equal runs."""

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    claimed_period_ns: int | None = None
    solver: str | None = None
    solver_status: str | None = None
    version: str = ""
    seconds: float = 0.0
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The one thing that is written: what was given, what was decided, how good it is, and where it is from."""

    chain: Chain
    platform: Platform
    policy: Policy
    allocation: Allocation
    pattern: Pattern | None
    lower_bounds: tuple[Bound, ...]
    provenance: Provenance
    schedule: Schedule = Schedule()

    @property
    def interval(self) -> int:
        """Microbatches between two updates: each replica of a stage sees one of them at least, where none drains."""
        return self.schedule.microbatches or self.policy.update_interval(
            max(stage.replicas for stage in self.allocation.stages)
        )

    def telling(self, **options: Any) -> Plan:
        """Return the plan whose provenance has these ``options``, too."""
        told = {**self.provenance.options, **options}
        return replace(self, provenance=replace(self.provenance, options=told))

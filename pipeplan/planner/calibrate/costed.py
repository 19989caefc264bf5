"""How long does an iteration take that somebody states in full? Stages, pipelines, recomputation, schedule and batch.

Nothing is searched and nothing has to fit: a measured run is set beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ...cost.stage_graph import stage_graph
from ...errors import BadInput
from ...plan import Stage
from ...problem import Chain, Platform, Policy, Problem
from ...schedule.memory import run_uses
from ...schedule.registry import schedules
from ...schedule.simulate import simulate
from ...schedule.timeline import Timeline, flush_makespan_ns, longest_span_ns
from ..periodic.stated import replicated, stated


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run in words, as ``plan --split`` takes them: layers per stage (None: one stage), equal pipelines, GPUs of each
    stage, recomputed layers, the schedule's name, samples per update (None: a microbatch for each pipeline), whether a
    barrier stands between two updates, and the share of activations that weight gradients need.
    """

    split: str | None = None
    pipelines: int = 1
    on: str | None = None
    recompute: str = "none"
    schedule: str = "1f1b"
    batch: int | None = None
    barrier: bool = True
    weight_keeps: Fraction = Fraction(1)


@dataclass(frozen=True)
class Costed:
    """A configuration's stages and simulated iteration."""

    stages: tuple[Stage, ...]
    timeline: Timeline
    platform: Platform
    barrier: bool = True

    @property
    def iteration_ns(self) -> int:
        """From the first forward to the next iteration's: the makespan with a barrier, else the longest span."""
        return flush_makespan_ns(self.timeline) if self.barrier else longest_span_ns(self.timeline)

    @property
    def peak_bytes(self) -> int:
        """What the fullest GPU holds at most."""
        return max(use.peak_bytes for use in run_uses(self.timeline, self.platform))


def costed(chain: Chain, platform: Platform, policy: Policy, asked: Configuration) -> Costed:
    """Return the iteration of a stated run, drained; BadInput says what in the configuration cannot be.

    ``policy`` says how weights are kept; the batch decides how many microbatches an update has.
    """
    batch = chain.microbatch * asked.pipelines if asked.batch is None else asked.batch
    if batch % (chain.microbatch * asked.pipelines):
        raise BadInput(
            f"batch: {batch} samples are no whole number of microbatches of {chain.microbatch} for each of "
            f"{asked.pipelines} pipelines"
        )
    known = schedules()
    entry = known.get(asked.schedule)
    if entry is None or not entry.drains or entry.build is None:
        drained = ", ".join(name for name, x in known.items() if x.drains and x.build is not None)
        raise BadInput(f"schedule: {asked.schedule!r} is none that drains; there are {drained}")
    microbatches = batch // chain.microbatch
    drained_policy = policy.drained(microbatches)
    problem = Problem(chain, platform, drained_policy, checkpointing="segments")
    split = asked.split or str(len(chain))
    replicas = None if asked.on is not None else replicated(split, asked.pipelines)
    allocation = next(stated(problem, split, replicas, asked.on, asked.recompute))
    graph = stage_graph(chain, platform, drained_policy, allocation.stages)
    refused = entry.refuses(graph)
    if refused is not None:
        raise BadInput(f"schedule: {refused}")
    options = {"weight_keeps": asked.weight_keeps} if "weight_keeps" in entry.options else {}
    timeline = simulate(entry.build(graph, microbatches, **options))
    return Costed(allocation.stages, timeline, platform, asked.barrier)

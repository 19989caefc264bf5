"""What a run was asked for, as every rank is told; and what follows from it and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import BadInput
from ..plan import Plan
from .device import Choice as DeviceChoice
from .lowering.lowered_run import FROM_THE_START, Script, prepare
from .model.spec import ModelSpec
from .torch_engine import refuse_for_torch
from .training.checkpoint import Checkpoint
from .training.half import AS_PROFILED, HalfOptions, half_type
from .training.optimizers import Choice, MakeOptimizer, optimizer_maker
from .training.stage_optimizer import check_elementwise, is_elementwise

COARSENING = 2  # buckets that are summed at once: the least at which Myelin's figure 8 has few enough exchanges

Engine = Literal["own", "torch"]


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank is told.

    ``steps`` counts from the very start of training, ``resume`` is the checkpoint to go on from, ``checkpoint`` the
    folder for new ones, ``every`` so many updates, of which the newest ``keep`` stay (None: all). ``optimizer`` None is
    the plan's. The data repeats after ``epoch`` microbatches, with the next seed. ``save`` is the file to which rank 0
    writes the trained model's state, ``load`` one to start from. ``device`` is asked for on each rank. ``half`` is
    about mixed precision; replicas sum ``coarsening`` buckets at once, None: as many as serves, 0: all. Messages come
    ``link_delay_ns`` later than they could, to emulate a slow network.
    """

    plan: Plan
    model: ModelSpec
    steps: int
    lr: float
    seed: int
    timeout_s: float
    threads: int
    save: str | None
    load: str | None = None
    optimizer: Choice | None = None
    scheduler: Choice | None = None
    evaluates: bool = False
    epoch: int | None = None
    checkpoint: str | None = None
    every: int | None = None
    keep: int | None = None
    resume: Checkpoint | None = None
    engine: Engine = "own"
    device: DeviceChoice = "auto"
    link_delay_ns: int = 0
    half: HalfOptions = AS_PROFILED
    coarsening: int | None = None

    @property
    def make_optimizer(self) -> MakeOptimizer:
        """What makes the optimizers of stages."""
        return optimizer_maker(self.optimizer or self.plan.policy.optimizer, self.lr)

    @property
    def chunk_buckets(self) -> int | None:
        """How many buckets replicas sum at once, None for all: what an optimizer needs that isn't elementwise."""
        if self.coarsening is None and self.plan.policy.coarsening is not None:
            return self.plan.policy.coarsening
        if self.coarsening is None:
            return COARSENING if is_elementwise(self.make_optimizer) else None
        return self.coarsening or None

    @property
    def sums(self) -> bool:
        """Whether gradients are summed over replicas."""
        return any(stage.replicas > 1 for stage in self.plan.allocation.stages)

    @property
    def has_buckets(self) -> bool:
        """Whether a stage can be stepped bucket by bucket: for what is offloaded, or for sums in chunks."""
        return self.plan.policy.offload or (self.sums and self.chunk_buckets is not None)

    def bucket_of(self, stage: int, parameters: int) -> int | None:
        """Return the parameters of a bucket of a stage that has ``parameters``, None for one that is stepped at once.

        Without offloading only a stage whose sum has more than one chunk has buckets.
        """
        size, coarsening = self.plan.policy.bucket_parameters, self.chunk_buckets
        chunks = self.plan.allocation.stages[stage].replicas > 1 and coarsening and parameters > coarsening * size
        return size if self.plan.policy.offload or chunks else None

    def _check(self) -> None:
        """Raise BadInput for options that don't go with the plan, or that would do nothing."""
        policy = self.plan.policy
        half_type(self.plan, self.half)
        if policy.offload:
            check_elementwise(self.make_optimizer, "offloading its state bucket by bucket")
        coarsening = policy.coarsening if self.coarsening is None else self.coarsening
        if coarsening:
            check_elementwise(self.make_optimizer, f"a coarsening of {coarsening}")
        if self.coarsening is not None and not self.sums:
            raise BadInput("coarsening: no stage has replicas, so there are no sums to cut into chunks")
        if self.engine == "torch" and self.link_delay_ns:
            raise BadInput("link delay: torch's engine exchanges its messages itself, so they cannot be delayed")

    def script(self) -> Script:
        """Return what the ranks will do."""
        first = FROM_THE_START if self.resume is None else self.resume.position
        # a checkpoint at the end alone is a segment as long as the run
        every = None if self.checkpoint is None else self.every or self.steps
        script = prepare(self.plan, self.steps, every=every, first=first, evaluates=self.evaluates)
        self._check()
        if self.engine == "torch":
            refuse_for_torch(script)
        return script

"""What is every rank of a run told, and what follows from that?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ...check.delays import plan_delays
from ...check.replica_sums import COARSENING
from ...check.validate import check
from ...choices import DelayCorrection
from ...errors import BadInput, InvalidPlan
from ...plan import Plan
from ...problem import NOT_PREDICTED
from ...registry import Late
from ...schedule.kinds import graph_of
from ..device import kind_of
from ..lowering.lowered_run import FROM_THE_START, LoweredRun, lower_run
from ..measure.progress import StepDone
from ..model.build.spec import ModelSpec
from ..model.loaded import LoadedModel
from ..training.half import half_type
from ..training.rank import check_decay
from ..training.update.optimizers import MakeOptimizer, averaging, correctable, is_plain, optimizer_maker, planned_as
from ..training.update.stepper import check_elementwise, is_elementwise
from .options import RunOptions, clipping

if TYPE_CHECKING:
    from ..training.state.checkpoint import Checkpoint

refuse_for_torch = Late("runtime.engine.torch_engine:refuse_for_torch")
LEAST_TIMEOUT_S: Final = 60.0
LEAST_ON_GPUS_S: Final = 600.0  # where first passes load, tune and compile kernels stage after stage
PREDICTED: Final = 1.0  # updates that a stage may be late, up to which predicted weights train better than sc alone
PATIENCE: Final = 20  # times what one microbatch takes through the whole pipeline


@dataclass(frozen=True, slots=True)
class Job:
    """A run of ``model`` as ``plan`` and ``options`` say; ``resume`` is the checkpoint to go on from.

    ``notes`` say what is done otherwise than by default.
    """

    plan: Plan
    model: ModelSpec
    options: RunOptions
    resume: Checkpoint | None = None
    notes: tuple[str, ...] = ()

    @property
    def make_optimizer(self) -> MakeOptimizer:
        """What makes the optimizers of stages."""
        make = optimizer_maker(self.options.optimizer or self.plan.policy.optimizer, self.options.lr)
        return make if self.options.ema is None else averaging(make, self.options.ema)

    @property
    def chunk_buckets(self) -> int | None:
        """How many buckets replicas sum at once, None for all: what an optimizer needs that isn't elementwise."""
        asked, planned = self.options.coarsening, self.plan.policy.coarsening
        if asked is None and planned is not None:
            return planned
        if asked is None:
            return COARSENING if is_elementwise(self.make_optimizer) else None
        return asked or None

    @property
    def sums(self) -> bool:
        """Whether gradients are summed over replicas."""
        return any(stage.replicas > 1 for stage in self.plan.allocation.stages)

    def bucket_of(self, stage: int, parameters: int) -> int | None:
        """Return the parameters of a bucket of a stage that has ``parameters``, None for one that is stepped at once.

        Without offloading only a stage whose sum has more than one chunk has buckets.
        """
        size, coarsening = self.plan.policy.bucket_parameters, self.chunk_buckets
        chunks = self.plan.allocation.stages[stage].replicas > 1 and coarsening and parameters > coarsening * size
        return size if self.plan.policy.offload or chunks else None

    @property
    def compares(self) -> bool:
        """Whether the first microbatch is compared with plain training."""
        return self.options.compares and not self.options.evaluates and self.resume is None

    @property
    def folder(self) -> Path | None:
        """Where checkpoints are written; an evaluation writes none."""
        return None if self.options.evaluates else self.options.checkpoint

    @property
    def stops(self) -> bool:
        """Whether a signal lets the run end after the mini-batches that have begun, for what it leaves then."""
        return self.folder is not None or self.options.traced

    def lowered(self) -> LoweredRun:
        """Return what the ranks will do; BadInput for what cannot be run."""
        options = self.options
        first = FROM_THE_START if self.resume is None else self.resume.position
        steps = options.steps + first.step if options.evaluates else options.steps
        # a checkpoint at the end alone is a segment as long as the run
        every = None if self.folder is None else options.every or steps
        judged = None if options.held_out is None or options.evaluates else options.held_out.every
        lowered = lower_run(self.plan, steps, every=every, first=first, evaluates=options.evaluates, judged=judged)
        self._check()
        if any(map(lowered.waits, range(len(self.plan.allocation.stages)))):
            check_elementwise(self.make_optimizer, f"--weights {self.plan.policy.weights} where stages share some")
        if options.engine == "torch":
            refuse_for_torch(lowered)
        return lowered

    def timeout_s(self, lowered: LoweredRun) -> float:
        """Return how long a rank waits for another one."""
        if self.options.timeout_s is not None:
            return self.options.timeout_s
        on_gpus = kind_of(self.options.device, self.plan.chain) == "cuda"
        return max(LEAST_ON_GPUS_S if on_gpus else LEAST_TIMEOUT_S, PATIENCE * lowered.graph.path_ns / 1e9)

    def _check(self) -> None:
        """Raise BadInput for options that don't go with the plan, or that would do nothing."""
        policy, options = self.plan.policy, self.options
        half_type(self.plan, options.half)
        if options.no_decay and not options.evaluates:
            check_decay(options.no_decay, self.make_optimizer)
        if policy.offload:
            check_elementwise(self.make_optimizer, "offloading its state bucket by bucket")
        if self.plan.chain.selective:
            raise BadInput("the plan is of layers that run attention's core again, which run doesn't; export it")
        if policy.sharing.scattered and self.sums:
            raise BadInput(
                f"--zero {policy.zero}: run shares the optimizer's state alone (--zero 1); export the plan to "
                "torchtitan, DeepSpeed or Megatron-LM"
            )
        if policy.zero and self.sums:
            check_elementwise(self.make_optimizer, "sharing its state between replicas (--zero 1)")
        coarsening = policy.coarsening if options.coarsening is None else options.coarsening
        if coarsening:
            check_elementwise(self.make_optimizer, f"a coarsening of {coarsening}")
        if options.coarsening is not None and not self.sums:
            raise BadInput("coarsening: no stage has replicas, so there are no sums to cut into chunks")
        if options.engine == "torch" and options.slows_links:
            what = "link delay" if options.link_delay_ns else "link rate"
            raise BadInput(f"{what}: torch's engine exchanges its messages itself, so they cannot be delayed")


class Launcher:
    """What a rank has of what has started it, and of the others; this one starts nobody else, and heeds nobody.

    ``local_rank`` counts the processes of this machine. Who starts several gives what they :meth:`meet` at, lets all
    stop before the same mini-batch, and may listen.
    """

    local_rank = 0

    def meet(self) -> Any:
        """Return the store at which the ranks meet; called when the model is built, so what is wrong with that shows
        before anybody waits."""

    def compare(self, spec: ModelSpec, model: LoadedModel) -> None:
        """Raise BadInput on all ranks if the model isn't the same on them."""

    def at(self, index: int) -> None:
        """Hear the index of each instruction."""

    def done(self, step: StepDone) -> None:
        """Hear of each update of the last stage."""

    def may_begin(self, minibatch: int) -> bool:
        """Whether a mini-batch is to be begun, the same to all ranks."""
        return True


def job_of(plan: Plan, model: ModelSpec, options: RunOptions) -> Job:
    """Return what the ranks are told; what ``options`` say otherwise than ``plan`` is put into the plan."""
    planned = None if options.optimizer is None else planned_as(options.optimizer)
    if planned is not None:
        plan = replace(plan, policy=replace(plan.policy, optimizer=planned))
    if options.bucket_size is not None:
        plan = replace(plan, policy=replace(plan.policy, bucket_parameters=options.bucket_size))
    plan = clipping(plan, options.clip_norm is not None and not options.evaluates)
    if options.ema is not None and not plan.policy.ema:
        plan = replace(plan, policy=replace(plan.policy, ema=True))
        check(plan)  # it holds more
    plan, correction, note = _corrected(plan, options)
    options = replace(options, delay_correction=correction)
    job = Job(plan, model, options.from_anywhere(), notes=() if note is None else (f"late gradients: {note}",))
    if options.bucket_size is not None and not (plan.policy.offload or (job.sums and job.chunk_buckets is not None)):
        raise BadInput("bucket size: the plan neither offloads optimizer state nor are sums cut into chunks")
    return job


def _corrected(plan: Plan, options: RunOptions) -> tuple[Plan, DelayCorrection, str | None]:
    """Return the plan that holds what is done about late gradients, what that is, and why it is none of what could be;
    BadInput for what is asked for and cannot be done.

    Weights are predicted by default where that takes no memory, or where it helps and finds room.
    """
    asked, policy = options.delay_correction, plan.policy
    if policy.drains or options.evaluates or asked == "none":
        return plan, "none", None
    made = optimizer_maker(options.optimizer or policy.optimizer, options.lr)([nn.Parameter(torch.zeros(1))])
    if not correctable(made):
        if asked is not None:
            raise BadInput(
                f"--delay-correction {asked}: it is for SGD with momentum (without nesterov), Adam and AdamW"
            )
        return plan, "none", None if is_plain(made) else f"{type(made).__name__} with these options isn't corrected"
    alone, predicting = (replace(plan, policy=replace(policy, predict=predict)) for predict in (False, True))
    if asked == "sc" or (asked is None and not (policy.predictable and (policy.predict or _predicts(plan)))):
        return alone, "sc", None
    if not policy.predictable:
        raise BadInput(f"--delay-correction {asked}: {NOT_PREDICTED}; sc goes")
    try:
        check(predicting)  # it holds more
    except InvalidPlan:
        if asked is not None:
            raise
        return alone, "sc", "sc alone corrects them, as predicted weights don't fit (plan --predicted keeps room)"
    return predicting, asked or "both", None


def _predicts(plan: Plan) -> bool:
    """Whether weights are predicted where nobody says it: where that takes no memory, or trains better."""
    late = max(x.mean for x in plan_delays(plan, graph_of(plan)))
    return plan.policy.precision == "mixed" or 0 < late <= PREDICTED

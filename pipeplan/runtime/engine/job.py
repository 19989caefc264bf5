"""What is every rank of a run told, and what follows from that? One field for each thing that can be asked of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...check.evaluate import COARSENING
from ...choices import DelayCorrection
from ...errors import BadInput
from ...files.text import check_writable
from ...plan import Plan
from ...problem import Chain
from ...registry import Late
from ...schedule.kinds import kind_of as kind_of_schedule
from ..device import Choice as DeviceChoice
from ..device import kind_of
from ..lowering.lowered_run import FROM_THE_START, LoweredRun, lower_run
from ..measure.progress import StepDone
from ..model.build.spec import ModelSpec, find
from ..model.loaded import LoadedModel
from ..training.half import AS_PROFILED, HalfOptions, half_type
from ..training.rank import check_decay
from ..training.update.optimizers import PLATEAU, Choice, MakeOptimizer, averaging, optimizer_maker, rates_maker
from ..training.update.stepper import check_elementwise, is_elementwise

if TYPE_CHECKING:
    from ..training.state.checkpoint import Checkpoint

plan_text = Late("files.plans:plan_text")
LEAST_TIMEOUT_S: Final = 60.0
LEAST_ON_GPUS_S: Final = 600.0  # where first passes load, tune and compile kernels stage after stage
PATIENCE: Final = 20  # times what one microbatch takes through the whole pipeline


@dataclass(frozen=True, slots=True)
class HeldOutOptions:
    """How a run evaluates its model while it trains: after ``every`` so many updates, on the first ``count``
    microbatches of ``data``.

    ``metrics`` is ``module:function(output, target)``, a number or a dict of numbers, of which means are told. The best
    evaluation is that with the least loss, or ``watched`` metric, or the ``highest``; the run ends after ``patience``
    evaluations that are no better.
    """

    data: str
    every: int
    count: int
    metrics: str | None = None
    watched: str = "loss"
    highest: bool = False
    patience: int | None = None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run is asked for. A checkpoint is written to a folder at the end, and when SIGTERM or SIGINT comes.

    The pipeline drains before every checkpoint, so with weights that outlive an update the next ones see fresher
    weights than without.
    """

    steps: int
    """Weight updates from the very start of training; of an evaluation, as many microbatches as they would take."""
    lr: float | None = None  # learning rate; None: what the optimizer learns at if nobody says another
    seed: int = 0  # of a zoo model's weights, of the data and of random numbers
    optimizer: Choice | None = None  # instead of the plan's
    no_decay: tuple[str, ...] = ()
    """Words in the names of weights, or of their modules' classes, that have no weight decay."""
    groups: str | None = None  # ``module:function`` that makes the optimizer's parameter groups of all named parameters
    scheduler: Choice | None = None  # changes the learning rate after each update
    warmup: int = 0  # updates in which the learning rate rises, before the schedule begins
    ema: float | None = None  # of the running average of the weights that is kept, the share that stays at each update
    delay_correction: DelayCorrection | None = None
    """What is done about late gradients; None: sc, and both with mixed precision, as far as the optimizer can be."""
    averaged: bool = False  # whether what is saved, or evaluated, is the running average of the weights
    held_out: HeldOutOptions | None = None  # how the model is evaluated while it trains
    clip_norm: float | None = None  # the total norm that gradients are clipped to; None: they aren't
    evaluates: bool = False  # whether the model is run forward alone
    epoch: int | None = None  # microbatches after which the data repeats, with the next seed
    compares: bool = True  # whether a model that was traced is compared with plain training on its first microbatch
    half: HalfOptions = AS_PROFILED  # which 16 bits a plan of mixed precision runs in, and its loss scale
    bucket_size: int | None = None
    """Parameters that are stepped at a time where the optimizer is offloaded or sums are cut; None: the plan's."""
    coarsening: int | None = None
    """Buckets that replicas sum at once while those before are stepped; None: as serves, 0: all."""
    save: Path | None = None  # file for the trained model's ``state_dict``: safetensors by its name's end, else torch's
    load: Path | None = None
    """File, index or folder with a ``state_dict`` to start from, unless a checkpoint is resumed."""
    checkpoint: Path | None = None  # folder for checkpoints
    every: int | None = None  # a checkpoint after each update whose number it divides as well
    keep: int | None = None  # how many of the newest checkpoints stay; None: all
    resume: bool = False  # whether to go on from the folder's newest good checkpoint, if there is one
    traced: bool = False
    """Whether a report is wanted of a run that a signal ends, too: it then ends as one with checkpoints does."""
    max_restarts: int = 0
    """How often a run that fails for other reasons than its input begins again, from the newest checkpoint."""
    device: DeviceChoice = "auto"
    """CPUs over gloo, or GPUs over NCCL, or through the host where ranks share one; ``auto`` takes GPUs if torch sees
    any and the plan's profile isn't of a CPU."""
    threads: int = 1  # CPU threads of each process
    timeout_s: float | None = None  # longest wait for another rank; None: from the plan
    link_delay_s: float = 0.0
    """How much later than they could messages between ranks come, to see what a slow network would do."""

    @property
    def rates(self) -> Choice | None:
        """The scheduler; one that follows evaluations takes the highest for the best where they do."""
        found = self.scheduler
        highest = self.held_out is not None and self.held_out.highest
        if found is None or found.name != PLATEAU or not highest or "mode" in dict(found.options):
            return found
        return replace(found, options=(*found.options, ("mode", "max")))

    def check(self) -> None:
        """Raise BadInput for what cannot be done, whatever the plan."""
        if self.save is not None:
            check_writable(str(self.save.absolute()))
        if self.keep is not None and self.keep < 1:
            raise BadInput(f"keep: {self.keep} is not a positive number of checkpoints")
        if not 0 <= self.link_delay_s < inf:
            raise BadInput(f"link delay: {self.link_delay_s} must be 0 seconds or more")
        writes = self.every is not None or self.keep is not None
        if self.checkpoint is None and (self.resume or writes):
            raise BadInput("checkpoint: no folder is named to resume from or to write to")
        if self.checkpoint is not None and self.evaluates and (not self.resume or writes):
            raise BadInput("checkpoint: an evaluation changes nothing; it can only resume from one")
        if self.optimizer is not None:
            optimizer_maker(self.optimizer, self.lr)  # what is wrong with it shows before any process starts
        if not self.evaluates:
            rates_maker(self.rates, self.warmup, self.steps)
        if self.ema is not None and not 0 <= self.ema < 1:
            raise BadInput(f"ema: {self.ema} isn't a share of an average from 0 to below 1")
        if self.averaged and self.ema is None and not self.evaluates:
            raise BadInput("averaged: pass --ema, the share that the average keeps")
        follows = self.scheduler is not None and self.scheduler.name == PLATEAU
        if follows and self.held_out is None and not self.evaluates:
            raise BadInput(f"scheduler: {PLATEAU} follows evaluations; say --eval-data and --eval-every")
        if self.groups is not None:
            find(self.groups)
            if self.no_decay:
                raise BadInput("no decay: the parameter groups set it already")

    def from_anywhere(self) -> RunOptions:
        """Return the same with absolute paths, for processes in other folders."""
        paths = {name: getattr(self, name) for name in ("save", "load", "checkpoint")}
        return replace(self, **{name: path.absolute() for name, path in paths.items() if path is not None})


# --- the job ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """A run of ``model`` as ``plan`` and ``options`` say; ``resume`` is the checkpoint to go on from.

    ``notes`` say what is done otherwise than by default. Of the processes that are one rank it is for those at
    ``place``.
    """

    plan: Plan
    model: ModelSpec
    options: RunOptions
    resume: Checkpoint | None = None
    notes: tuple[str, ...] = ()
    place: int = 0

    @property
    def plan_text(self) -> str | None:
        """The plan's file, None for a plan without the bound that files have."""
        quoted = any(bound.allocation == "any" and not bound.schedule for bound in self.plan.lower_bounds)
        return str(plan_text(self.plan)) if quoted else None

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
        return lowered.of_place(self.place)

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
        chains = [self.plan.chain.of(x.way) for x in self.plan.allocation.stages]
        if any(chain.selective for chain in chains):
            _ = self.model.selective  # or refuses it
        for s, (chain, stage) in enumerate(zip(chains, self.plan.allocation.stages, strict=True)):
            if chain.offloaded and stage.checkpoint:
                raise BadInput(
                    f"stage {s} recomputes segments and its activations wait in host memory, where each layer is kept "
                    "or runs again by itself; plan with --checkpointing none"
                )
        if self.plan.chain.width > self.plan.chain.tensor:
            ranks, what = self.plan.chain.experts, "a layer's experts"
            if ranks == 1:
                ranks, what = self.plan.chain.context, "a sequence"
            raise BadInput(
                f"in the plan {ranks} GPUs share {what}, which run doesn't; export it to Megatron-LM or torchtitan"
            )
        if policy.sharing.scattered and self.sums:
            raise BadInput(
                f"--zero {policy.zero}: run shares the optimizer's state alone (--zero 1); export the plan to "
                "torchtitan, DeepSpeed or Megatron-LM"
            )
        if any(chain.tensor > 1 for chain in chains):
            self._check_together(chains)
        if policy.zero and self.sums:
            check_elementwise(self.make_optimizer, "sharing its state between replicas (--zero 1)")
        coarsening = policy.coarsening if options.coarsening is None else options.coarsening
        if coarsening:
            check_elementwise(self.make_optimizer, f"a coarsening of {coarsening}")
        if options.coarsening is not None and not self.sums:
            raise BadInput("coarsening: no stage has replicas, so there are no sums to cut into chunks")

    def _check_together(self, chains: Sequence[Chain]) -> None:
        """Raise BadInput for what several GPUs that run each layer together don't do; ``chains`` are as stages have
        the plan's."""
        if any(chain.sequence_parallel for chain in chains):
            raise BadInput("the plan splits layers along the sequence, which run cannot do; export it")
        held_out = self.options.held_out
        if held_out is not None and held_out.metrics is not None and chains[-1].tensor > 1:
            raise BadInput(
                "--metrics: the GPUs that run the last layers together have each a part of what they put out"
            )
        for s, (one, other) in enumerate(pairwise(chains)):
            stop = self.plan.allocation.stages[s].stop
            if one.cut_bytes[stop] != other.cut_bytes[stop]:
                raise BadInput(
                    f"stages {s} and {s + 1}, of tensor degrees {one.tensor} and {other.tensor}, have parts of what "
                    "one sends the other, which run doesn't put together; plan with other stages"
                )
        if kind_of_schedule(self.plan).by_arrival:
            raise BadInput(
                f"{self.plan.schedule.kind}: GPUs that run a layer together need one order, which messages would decide"
            )
        check_elementwise(self.make_optimizer, "running each layer on several GPUs")


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

"""What can be asked of a run beside plan and model? One field for each thing; and its plan under another schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from ...check.validate import check
from ...choices import BEST, DelayCorrection
from ...errors import BadInput
from ...files.schedule_csv import read_schedule
from ...files.text import check_writable
from ...names import shown
from ...plan import Plan, Schedule
from ...problem import CLIPPED_TOGETHER
from ...schedule.kinds import KINDS, OTHERS, graph_of, refused
from ...schedule.pattern import starts_of
from ...schedule.periodic.one_f_one_b import one_f_one_b_pattern
from ...schedule.periodic.retime import order_of, retime
from ...schedule.program import pipelines
from ...schedule.written import Written
from ...schedule.written import order_of as listed_order
from ..data.loader import Loader
from ..device import Choice as DeviceChoice
from ..lowering.lowered_run import lower_run
from ..model.build.spec import ModelSpec, data_of, find, named_data
from ..model.user_code import user_code
from ..training.half import AS_PROFILED, HalfOptions
from ..training.update.optimizers import PLATEAU, Choice, optimizer_maker, rates_maker

Engine = Literal["own", "torch"]


@dataclass(frozen=True, slots=True)
class HeldOutOptions:
    """How a run evaluates its model while it trains: after ``every`` so many updates, on the first ``count``
    microbatches of ``data``.

    ``metrics`` is ``module:function(output, target)``, a number or a dict of numbers, of which means are told. The best
    evaluation is that with the least loss, or ``watched`` metric, or the ``highest``; the run ends after ``patience``
    evaluations that are no better. ``averaged``: with the running average of the weights.
    """

    data: str
    every: int
    count: int
    metrics: str | None = None
    watched: str = "loss"
    highest: bool = False
    patience: int | None = None
    averaged: bool = False


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
    engine: Engine = "own"
    """"torch" runs a drained schedule on torch's own pipeline runtime, which measures updates alone."""
    device: DeviceChoice = "auto"
    """CPUs over gloo, or GPUs over NCCL, or through the host where ranks share one; ``auto`` takes GPUs if torch sees
    any and the plan's profile isn't of a CPU."""
    threads: int = 1  # CPU threads of each process
    timeout_s: float | None = None  # longest wait for another rank; None: from the plan
    link_delay_s: float = 0.0
    """How much later than they could messages between ranks come, to see what a slow network would do."""
    link_rate: int | None = None
    """Bytes per second of links on which messages and sums are as long as they would be there; None: the real ones."""

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
        if self.link_rate is not None and self.link_rate < 1:
            raise BadInput(f"link rate: {self.link_rate} is not a positive number of bytes per second")
        if not 0 <= self.link_delay_s < inf:
            raise BadInput(f"link delay: {self.link_delay_s} isn't a time from 0 seconds on")
        writes = self.every is not None or self.keep is not None
        if self.checkpoint is None and (self.resume or writes):
            raise BadInput("checkpoint: no folder is named to resume from or to write to")
        if self.engine == "torch" and self.checkpoint is not None:
            raise BadInput("checkpoint: torch's engine writes none")
        if self.checkpoint is not None and self.evaluates and (not self.resume or writes):
            raise BadInput("checkpoint: an evaluation changes nothing; it can only resume from one")
        if self.optimizer is not None:
            optimizer_maker(self.optimizer, self.lr)  # what is wrong with it shows before any process starts
        if not self.evaluates:
            rates_maker(self.rates, self.warmup, self.steps)
        if self.ema is not None and not 0 <= self.ema < 1:
            raise BadInput(f"ema: {self.ema} isn't a share of an average from 0 to below 1")
        if self.averaged and self.ema is None and not self.evaluates:
            raise BadInput("averaged: --ema says how the average of the weights runs")
        follows = self.scheduler is not None and self.scheduler.name == PLATEAU
        if follows and self.held_out is None and not self.evaluates:
            raise BadInput(f"scheduler: {PLATEAU} follows evaluations; say --eval-data and --eval-every")
        if self.held_out is not None and self.engine == "torch":
            raise BadInput("evaluation: torch's engine makes none while it trains")
        if self.groups is not None:
            find(self.groups)
            if self.no_decay:
                raise BadInput("no decay: the parameter groups say that themselves")

    @property
    def slows_links(self) -> bool:
        """Whether slower links than the real ones are emulated."""
        return bool(self.link_delay_s) or self.link_rate is not None

    @property
    def link_delay_ns(self) -> int:
        """How much later messages come."""
        return round(self.link_delay_s * 1e9)

    def from_anywhere(self) -> RunOptions:
        """Return the same with absolute paths, for processes in other folders."""
        paths = {name: getattr(self, name) for name in ("save", "load", "checkpoint")}
        return replace(self, **{name: path.absolute() for name, path in paths.items() if path is not None})


def clipping(plan: Plan, clips: bool) -> Plan:
    """Return ``plan`` for gradients that are clipped, or aren't.

    BadInput where its stages don't update together, InvalidPlan where gradients that wait find no room.
    """
    if clips == plan.policy.clip:
        return plan
    if clips and not plan.policy.updates_together:
        raise BadInput("clip norm: " + CLIPPED_TOGETHER.format(weights=plan.policy.weights))
    before, pattern = graph_of(plan), plan.pattern
    plan = replace(plan, policy=replace(plan.policy, clip=clips))
    if pattern is not None:  # steps wait for the norm, and are no part of backwards
        order = order_of(before, starts_of(pattern), pattern.period_ns)
        plan = replace(plan, pattern=retime(graph_of(plan), order))
    check(plan)
    return plan


def run_otherwise(plan: Plan, vertical_sync: bool, schedule: str | None, limit: int | None) -> Plan:
    """Return ``plan`` with its devices running otherwise than it says; BadInput where it then breaks a promise.

    With ``vertical_sync`` a microbatch sees one weight version on all stages. ``schedule`` is the name of a kind, or a
    CSV file with an order as torch reads it, or PipeDream's own 1F1B, which becomes a pattern; ``limit`` is what it
    admits at once (None: the plan's own, or as serves).
    """
    if vertical_sync and not plan.policy.vertical_sync:
        plan = replace(plan, policy=replace(plan.policy, vertical_sync=True))
        check(plan)  # it keeps other versions
    if schedule is None:
        return plan
    if schedule == PIPEDREAM:
        if plan.policy.weights != OTHERS[PIPEDREAM].weights:
            raise BadInput(
                f"plan: {PIPEDREAM} keeps weights {OTHERS[PIPEDREAM].weights}; this plan has {plan.policy.weights}"
            )
        pattern = one_f_one_b_pattern(graph_of(plan), limit)
        bounds = tuple(x for x in plan.lower_bounds if x.schedule is None)
        plan = replace(plan, schedule=Schedule(), pattern=pattern, lower_bounds=bounds)
    elif schedule.endswith(".csv"):
        plan = written_plan(plan, read_schedule(schedule), schedule)
    else:
        plan = under(plan, schedule, limit)
    check(plan)  # it holds other activations
    return plan


def in_epochs(options: RunOptions, plan: Plan, model: ModelSpec, epochs: int, length: int | None) -> RunOptions:
    """Return ``options`` of a run of so many passes over the data, each of whole updates and ended by a checkpoint.

    ``length`` is the number of microbatches in an epoch, by default the length of the data.
    """
    interval = lower_run(plan, 1).interval
    data = data_of(model, plan.chain.microbatch) if length is None else None
    has = _length(data, model.data or "", "--epoch-length") if length is None else length
    epoch = has // interval * interval
    if not epoch:
        raise BadInput(f"--epochs: an epoch has {has} microbatches, fewer than the {interval} of one update")
    every = options.every
    if options.checkpoint is not None and every is None:
        every = epoch // interval
    return replace(options, steps=epochs * epoch // interval, epoch=epoch, every=every)


def held_out_of(
    plan: Plan, about: HeldOutOptions, every: int | None, batches: int | None, monitor: str
) -> HeldOutOptions:
    """Return ``about`` with what is asked of it: by default each evaluation takes all of the data. ``monitor`` names a
    metric, or ``max:`` and one."""
    if every is None:
        raise BadInput("--eval-every: say after how many updates the model is evaluated")
    if batches is None:
        batches = _length(named_data(about.data, plan.chain.microbatch), about.data, "--eval-batches")
    most, _, watched = monitor.rpartition(":")
    if most not in ("", "max") or not watched:
        raise BadInput(f"--monitor: {monitor!r} is neither the name of a metric nor max:NAME")
    return replace(about, every=every, count=batches, watched=watched, highest=most == "max")


def _length(data: Any, name: str, option: str) -> int:
    length = data.batches if isinstance(data, Loader) else None
    if hasattr(data, "__len__"):
        with user_code(f"len({name})"):
            length = len(data)
    if length is None:
        asks = "--epochs" if option == "--epoch-length" else f"--eval-data {name}"
        raise BadInput(f"{asks}: the data has no length; say {option}")
    return length


PIPEDREAM = "pipedream"  # of simulated schedules, the one that plans have as a pattern


def under(plan: Plan, name: str, limit: int | None = None) -> Plan:
    """Return ``plan`` under the kind of schedule ``name``, which admits up to ``limit`` at once if it has a limit.

    BadInput where the kind doesn't go with the plan's weights, or its stages cannot run so.
    """
    kind = next((row for known, row in KINDS.items() if known == name and not row.written), None)
    if kind is None:
        known = ", ".join(known for known, row in KINDS.items() if not row.written)
        raise BadInput(f"--schedule: '{shown(name)}' is not one of {known}, {PIPEDREAM}, {BEST}, nor a .csv file")
    if plan.policy.weights not in kind.weights:
        raise BadInput("plan: " + kind.refusal.format(weights=plan.policy.weights))
    if kind.simulated is None and plan.pattern is None:
        raise BadInput(f"plan: has no pattern, in whose order {name} runs")
    microbatches = None
    if kind.in_mini_batches:
        microbatches = plan.schedule.microbatches or plan.policy.accumulate
    if kind.limit is None and limit is not None:
        raise BadInput(f"--limit: a {name} schedule holds what its order says")
    if kind.limit is not None and limit is None:
        limit = plan.schedule.limit or kind.limit.usual(graph_of(plan))[0]
    schedule = Schedule(name, microbatches, limit)  # type: ignore[arg-type]  # it is a key of the table
    instead = f"; `pipeplan plan --weights {plan.policy.weights} --schedule {name}` plans for it"
    return _fitting(replace(plan, schedule=schedule, pattern=None if kind.simulated else plan.pattern), name, instead)


def written_plan(plan: Plan, written: Written, name: str) -> Plan:
    """Return ``plan``, which drains, with its GPUs in the order of the ``written`` schedule in a file of this name.

    Of equal pipelines each runs it, and an update takes all its microbatches. BadInput where it doesn't fit.
    """
    if plan.policy.weights not in KINDS["written"].weights:
        raise BadInput(f"{name}: " + KINDS["written"].refusal.format(weights=plan.policy.weights))
    count = written.microbatches * pipelines(graph_of(plan), name)
    schedule = Schedule("written", count, order=listed_order(written))
    policy = replace(plan.policy, accumulate=count)
    return _fitting(replace(plan, schedule=schedule, pattern=None, policy=policy), name)


def _fitting(plan: Plan, name: str, instead: str = "") -> Plan:
    """Return ``plan`` without bounds of other schedules; BadInput where its stages cannot run under its own, which
    ends with what to do ``instead``."""
    reason = refused(graph_of(plan), plan.schedule)
    if reason is not None:
        raise BadInput(f"{name}: {reason}{instead}")
    return replace(plan, lower_bounds=tuple(x for x in plan.lower_bounds if x.schedule is None))

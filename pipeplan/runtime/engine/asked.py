"""How does what is asked of a run change its plan, and how long is it? Before any process starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from ...check.lateness import plan_delays
from ...check.validate import check
from ...choices import BEST, DelayCorrection
from ...errors import BadInput, InvalidPlan
from ...files.schedule_csv import read_schedule
from ...names import shown
from ...plan import Plan, Schedule
from ...problem import CLIPPED_TOGETHER, NOT_PREDICTED
from ...schedule.kinds import KINDS, OTHERS, graph_of, refused
from ...schedule.pattern import starts_of
from ...schedule.periodic.one_f_one_b import one_f_one_b_pattern
from ...schedule.periodic.retime import order_of, retime
from ...schedule.program import pipelines
from ...schedule.written import Written
from ...schedule.written import order_of as listed_order
from ..lowering.lowered_run import lower_run
from ..model.build.spec import ModelSpec, data_of, named_data
from ..model.contract import Batches
from ..model.user_code import user_code
from ..training.update.optimizers import correctable, is_plain, optimizer_maker, planned_as
from .job import HeldOutOptions, Job, RunOptions

PREDICTED: Final = 1.0  # updates that a stage may be late, up to which predicted weights train better than sc alone


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
        if plan.policy.weights != OTHERS[PIPEDREAM].own_weights:
            raise BadInput(
                f"plan: {PIPEDREAM} keeps weights {OTHERS[PIPEDREAM].own_weights}; this plan has {plan.policy.weights}"
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
    plan: Plan,
    data: str,
    every: int | None,
    batches: int | None,
    monitor: str,
    metrics: str | None,
    patience: int | None,
) -> HeldOutOptions:
    """Return how a run is evaluated as asked: by default each time on all of the data. ``monitor`` names a metric, or
    ``max:`` and one."""
    if every is None:
        raise BadInput("--eval-every: say after how many updates the model is evaluated")
    if batches is None:
        batches = _length(named_data(data, plan.chain.microbatch), data, "--eval-batches")
    most, _, watched = monitor.rpartition(":")
    if most not in ("", "max") or not watched:
        raise BadInput(f"--monitor: {monitor!r} is neither the name of a metric nor max:NAME")
    return HeldOutOptions(data, every, batches, metrics, watched, most == "max", patience)


def _length(data: Any, name: str, option: str) -> int:
    length = data.batches if isinstance(data, Batches) else None
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
    if kind.build is None and plan.pattern is None:
        raise BadInput(f"plan: has no pattern, in whose order {name} runs")
    microbatches = None
    if kind.in_mini_batches:
        microbatches = plan.schedule.microbatches or plan.policy.accumulate
    if kind.limit is None and limit is not None:
        raise BadInput(f"--limit: a {name} schedule has a fixed order")
    if kind.limit is not None and limit is None:
        limit = plan.schedule.limit or kind.limit.usual(graph_of(plan))[0]
    schedule = Schedule(name, microbatches, limit)  # type: ignore[arg-type]  # it is a key of the table
    instead = f"; `pipeplan plan --weights {plan.policy.weights} --schedule {name}` plans for it"
    return _fitting(replace(plan, schedule=schedule, pattern=None if kind.build else plan.pattern), name, instead)


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

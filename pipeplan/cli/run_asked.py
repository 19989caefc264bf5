"""Which plan and model does the run command train, and how? As its options say, or as refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..choices import BEST, DRAINED
from ..errors import BadInput
from ..registry import Late
from .options import refuse_without

if TYPE_CHECKING:
    from ..plan import Plan
    from ..runtime.engine.job import RunOptions
    from ..runtime.model.build.spec import ModelSpec

load_plan: Callable[[str], Plan] = Late("files.plans:load_plan")
ordered_alike = Late("planner.what_if.best_order:ordered_alike")
STEPS = 50


def refuse_together(
    trace: str | None, log_dir: Path | None, against: str | None, bracket: bool, given: Mapping[str, Any]
) -> None:
    """Raise UsageError for options that don't go together, whatever the plan."""
    if bracket and (given["evaluates"] or "RANK" in os.environ):
        raise click.UsageError("--bracket is about training by processes of its own, without --evaluate and torchrun")
    if against is not None and (given["resume"] or given["evaluates"] or trace == "-" or "RANK" in os.environ):
        raise click.UsageError(
            "--against trains twice from the start, by processes of its own; it goes without --resume, --evaluate, "
            "--trace - and torchrun"
        )
    if given["steps"] is not None and given["epochs"] is not None:
        raise click.UsageError("say either --steps or --epochs")
    if log_dir is not None and given["evaluates"]:
        raise click.UsageError("--log-dir is told of updates, and an evaluation makes none")
    refuse_without("epochs", "epoch_length")
    refuse_without("eval_data", "eval_every", "eval_batches", "metrics", "patience")


def model_of(typed: str | None, data: str | None, plan: str, named: str) -> ModelSpec:
    """Return which model a run trains: the ``typed`` one, or the zoo's that the profile in the file ``plan`` is named.

    Only what is typed is imported, never what a file names: BadInput where that name could be one of code.
    """
    from ..runtime.model.build.spec import ModelSpec

    spec = ModelSpec(named if typed is None else typed, data)
    if typed is None and not spec.of_zoo:
        raise BadInput(f"{plan}: its profile is named {named!r}; code runs only when it is typed: name it with --model")
    return spec


def plan_against(name: str, first: str, given: Mapping[str, Any]) -> Plan:
    """Return the plan to train from again, ``flush`` for the best that drains by a quick search; BadInput where its
    updates aren't those of the ``first``."""
    one = load_plan(first)
    if name == DRAINED:
        return _drained(one, given["clip_norm"] is not None)
    other = plan_to_run(name, {**given, "vertical_sync": False, "schedule": None, "limit": None})
    found = [f"{plan.interval} microbatches of {plan.chain.microbatch} samples" for plan in (one, other)]
    if found[0] != found[1]:
        words = " and ".join(found)
        raise BadInput(f"--against {name}: updates of the two plans are of {words}; plan both for one --batch")
    return other


def _drained(plan: Plan, clip: bool) -> Plan:
    from ..planner.least_late import drained_quickly
    from ..planner.periodic.incumbent import Settings
    from ..problem import Problem

    policy = replace(plan.policy, clip=clip or plan.policy.clip)
    several = any(stage.replicas > 1 for stage in plan.allocation.stages)
    found = drained_quickly(Problem(plan.chain, plan.platform, policy, several, "segments"), plan.interval, Settings())
    if found is None:
        raise BadInput(
            f"--against {DRAINED}: a quick search finds no plan that drains; name a plan to train from again"
        )
    return found.plan


def plan_to_run(name: str, given: dict[str, Any]) -> Plan:
    """Return the plan that is named, as the options that are ``given``, which are taken out, let its devices run it."""
    vertical_sync, schedule, limit = (given.pop(x) for x in ("vertical_sync", "schedule", "limit"))
    from ..schedule.kinds import KINDS

    loaded = load_plan(name)
    if limit is not None and schedule is None and KINDS[loaded.schedule.kind].limit is None:
        raise click.UsageError("--limit goes with --schedule message-driven")
    from ..runtime.engine.asked import clipping, run_otherwise

    if schedule == BEST:
        loaded, schedule = ordered_alike(loaded), None
    loaded = run_otherwise(loaded, vertical_sync, schedule or (None if limit is None else loaded.schedule.kind), limit)
    return clipping(loaded, given["clip_norm"] is not None and not given["evaluates"])


def options_of(plan: Plan, spec: ModelSpec, given: dict[str, Any]) -> RunOptions:
    """Return what is asked of a run; ``given`` are its options as typed."""
    from ..runtime.engine.asked import held_out_of, in_epochs
    from ..runtime.engine.job import RunOptions
    from ..runtime.training.half import HalfOptions
    from ..runtime.training.update.optimizers import parse_choice

    steps, epochs, length, timeout, delay = (
        given.pop(x) for x in ("steps", "epochs", "epoch_length", "timeout", "link_delay")
    )
    data, every, batches, metrics, monitor, patience = (
        given.pop(x) for x in ("eval_data", "eval_every", "eval_batches", "metrics", "monitor", "patience")
    )
    for name in ("optimizer", "scheduler"):
        given[name] = None if given[name] is None else parse_choice(given[name], f"--{name}")
    options = RunOptions(
        steps=steps or STEPS,
        timeout_s=None if timeout is None else timeout / 1e9,
        link_delay_s=(delay or 0) / 1e9,
        half=HalfOptions(*(given.pop(x) for x in ("half", "loss_scale", "loss_scale_window"))),
        **given,
    )
    if epochs is not None:
        options = in_epochs(options, plan, spec, epochs, length)
    if data is None:
        return options
    usual = None if options.epoch is None else options.epoch // plan.interval
    return replace(options, held_out=held_out_of(plan, data, every or usual, batches, monitor, metrics, patience))

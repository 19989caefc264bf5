"""How is a plan run? By one process for each device, or as one of those that torchrun started; a report comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...errors import RunFailed
from ...plan import Plan
from ...status import Status
from ..device import kind_of
from ..engine.job import job_of
from ..engine.options import RunOptions
from ..measure.progress import StepProgress
from ..measure.report import RunReport
from ..model.build.spec import ModelSpec
from ..training.state.checkpoint import Alone
from .agreement import resume_point, writing_to
from .own import run_here
from .torchrun import is_under_torchrun, run_under_torchrun


def run_plan(
    plan: Plan,
    model: ModelSpec,
    options: RunOptions,
    listener: Callable[[StepProgress], None] | None = None,
    note: Callable[[str], None] | None = None,
    status: Status | None = None,
) -> RunReport | None:
    """Train ``model`` as ``plan`` and ``options`` say; return what happened.

    ``listener`` hears of every update, ``note`` of every damaged checkpoint that is passed over and, on several nodes,
    where rank 0 is; ``status`` says at which microbatch the last stage is.

    The plan's policy gives weights, optimizer and microbatches per update. One process runs for each used device:
    processes of its own on this machine, or under torchrun the calling process as the rank that its environment names
    (then only rank 0 gets a report, the others None).

    BadInput when the model isn't what the plan was made for, or the plan cannot be run; RunFailed when a rank fails,
    with the rank and the operation; RunStopped after a signal.
    """
    if is_under_torchrun():
        return run_under_torchrun(plan, model, options, listener, note, status)
    options.check()
    model.check()
    job = job_of(plan, model, options)
    kind_of(options.device, plan.chain)  # whether there is a GPU shows before any process starts
    with writing_to(job.folder, Alone()):
        for attempt in range(options.max_restarts + 1):
            if options.resume or attempt:
                job = replace(job, resume=resume_point(job, note, Alone()))
            lowered = job.lowered()
            try:
                return run_here(job, lowered, listener, status or Status())
            except RunFailed:
                if attempt == options.max_restarts:
                    raise
    raise AssertionError("the last attempt returns or raises")

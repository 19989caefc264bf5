"""How is a plan run? By one process for each device, or as one of those that torchrun started; a report comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from ...errors import RunFailed
from ...plan import Plan
from ...status import Status
from ..device import kind_of
from ..engine.asked import job_of
from ..engine.job import RunOptions
from ..measure.progress import Audience, StepProgress
from ..measure.report import RunReport
from ..model.build.spec import ModelSpec
from .agreement import UNKNOWN, Statement, checkpoint_items, compare, resume_point, run_items, writing_to
from .own import OwnLaunch
from .rendezvous import START_S, check_reachable, number_in_environment
from .torchrun import TorchrunLaunch, is_under_torchrun, under_torchrun

Launch = OwnLaunch | TorchrunLaunch  # they meet, say whether that is ``again`` after a failure, and run a job


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
    hears = Audience(listener, note, status or Status())
    with under_torchrun() if is_under_torchrun() else nullcontext(OwnLaunch()) as launch:
        return _run(launch, plan, model, options, hears)


def _run(launch: Launch, plan: Plan, model: ModelSpec, options: RunOptions, hears: Audience) -> RunReport | None:
    peers = launch.meet(plan, options, hears.note)
    options.check()
    model.check()
    job = job_of(plan, model, options)
    kind_of(options.device, plan.chain)  # whether there is a GPU shows before any process starts
    if peers.world > 1:
        everybodys = compare(run_items(plan, model, options), peers, START_S)
        check_reachable(everybodys, peers)
        _say_where(everybodys, hears.note)
    with writing_to(job.folder, peers):
        for attempt in range(options.max_restarts + 1):
            if options.resume or launch.again or attempt:
                job = replace(job, resume=resume_point(job, hears.note, peers))
                if peers.world > 1:
                    compare(checkpoint_items(job.resume), peers)
            try:
                return launch.run(job, hears)
            except RunFailed:
                if attempt == options.max_restarts:
                    raise
    raise AssertionError("the last attempt returns or raises")


def _say_where(everybodys: Sequence[Statement], note: Callable[[str], None] | None) -> None:
    """Tell on every node where rank 0 is, for torchrun numbers nodes as it likes."""
    first = everybodys[0]
    if note is not None and not number_in_environment("LOCAL_RANK") and len({said.host for said in everybodys}) > 1:
        address = f" ({first.address})" if first.address not in ("", UNKNOWN) else ""
        note(f"rank 0 of {len(everybodys)} is on {first.host}{address}; it writes the report, --save and --trace")

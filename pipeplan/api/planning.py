"""Which plan is best for a profile on a machine, or what is a stated one worth? One call, whatever searches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from ..check.targets import TARGETS
from ..choices import BEST, DRAINED
from ..deadline import Deadline
from ..errors import BadInput
from ..files.plans import load_plan
from ..names import shown
from ..partition import ALGORITHMS
from ..partition.merging import merging
from ..plan import ScheduleKind
from ..planner.periodic.incumbent import GAP, Settings
from ..planner.plan import AUTO, Planned
from ..planner.simulated.simulation import RUNS
from ..problem import Chain, Problem
from ..schedule.kinds import KINDS
from ..schedule.periodic.solvers import Solver
from ..status import Status
from ..units import parse_time
from .asked import ANY, Asked, Effort, Order, deadline_of, problem_of, refuse_others
from .profiles import Profile, as_profile, is_name
from .result import PlanResult

Given = Profile | Chain | str | Path  # a profile, its file, or a model by its name


def plan(
    profile: Given,
    *,
    algorithm: str = AUTO,
    options: Mapping[str, Any] | None = None,
    for_: str | None = None,
    schedule: ScheduleKind | Literal["best"] | None = None,
    limit: int | None = None,
    split: str | None = None,
    replicas: str | None = None,
    on: str | None = None,
    recompute: str | None = None,
    effort: Effort | None = None,
    gap: float | None = None,
    order: Order = "best",
    solver: Solver = "cbc",
    jobs: int = 1,
    time_limit: str | Deadline | None = None,
    microbatch: int | None = None,
    robust: float | None = None,
    seed: int = 0,
    runs: int = RUNS,
    progress: Callable[[str], None] | None = None,
    status: Status | None = None,
    on_plan: Callable[[PlanResult], None] | None = None,
    **asked: Unpack[Asked],
) -> PlanResult:
    """Return the best validated plan found for ``profile`` on what ``asked`` describes; Infeasible, explained, if none.

    ``profile`` is one, its file, or the name of a model, which is estimated for ``gpu`` in microbatches of
    ``microbatch`` samples. ``asked`` are ``gpus``, ``mem``, ``weights`` and all of :func:`.asked.problem_of`.
    ``algorithm`` with its ``options`` searches, within ``effort``, until a plan is within ``gap`` of the lower bound or
    ``time_limit`` (``"30s"``) has passed; the layers of a DAG in the best ``order`` that is found, or as they are
    ``given``. Where ``weights`` and ``schedule`` are not said the weights are those that :func:`..planner.least_late
    .least_late` chooses. With ``split`` (``"4,4,5"``), ``replicas``, ``on`` and ``recompute`` nothing
    is searched: see :func:`..planner.stated.stated`. ``for_`` plans what that framework can express; ``on_plan`` gets
    its plan twice before its price is known: the first that is found, and the best. ``schedule`` and
    ``limit`` are as in :func:`..planner.plan.make_plan`; ``best`` is the best order of passes that is found, see
    :func:`..planner.ordered.ordered`. With ``robust``, a share (0.05), it is the best where
    durations are drawn around the planned ones, in ``runs`` runs of a ``seed``. ``jobs`` processes search at a time,
    with the same plan for any number. ``progress`` hears of each improvement, ``status`` says at any time what is going
    on. BadInput for what contradicts.
    """
    from ..planner.least_late import least_late
    from ..planner.periodic.stated import STATED
    from ..planner.plan import make_plan
    from ..planner.robust import Jitter
    from ..planner.what_if.alternatives import with_alternatives
    from ..planner.what_if.best_order import OWN, TRIED
    from ..planner.what_if.layer_orders import planned_in_best_order
    from ..planner.what_if.ordered import WHY_NOT, ordered
    from ..planner.what_if.target import make_target_plan, priced

    deadline = deadline_of(time_limit)
    refuse_others(effort=effort, solver=solver, order=order)
    stated = _stated(algorithm, effort, gap, split=split, replicas=replicas, on=on, recompute=recompute)
    options = _known(algorithm, options or {})
    if schedule is not None and schedule not in (*KINDS, BEST):
        raise BadInput(f"--schedule: '{shown(schedule)}' is not one of {', '.join((*KINDS, BEST))}")
    kind: ScheduleKind | None = None if schedule == BEST else schedule
    if gap is not None and algorithm != AUTO:
        raise BadInput("--gap says when --algorithm auto may stop; leave it out")
    jitter = None if robust is None else Jitter(robust, seed, runs)
    if for_ is not None and jitter is not None:
        raise BadInput("--for has a search of its own; leave out --robust")
    if schedule == BEST and (for_ is not None or jitter is not None):
        raise BadInput(f"--schedule best orders passes for itself; leave out {'--robust' if for_ is None else '--for'}")
    if for_ is not None:
        _refuse_with_target(for_, algorithm, stated is not None, kind, limit, asked)
        asked["weights"] = DRAINED
    elif schedule is not None and asked.get("weights") is None and _drains(schedule):
        asked["weights"] = DRAINED
    status = status or Status()
    merging(asked.get("granularity", "auto"), asked.get("blocks"))  # refuses before anything is read
    (given,), deadline = given_profiles(profile, asked, [microbatch], status, deadline)
    until = deadline.part(2) if schedule == BEST else deadline
    problem, assumptions = problem_of(given, **asked, segments=algorithm == AUTO, deadline=until)
    if schedule == BEST and not problem.policy.drains:
        raise BadInput(f"schedule: {WHY_NOT.format(weights=problem.policy.weights)}")
    settings = Settings(solver, gap=GAP if gap is None else gap, jobs=jobs, progress=progress, status=status)
    effort, began, worked = effort or "normal", time.perf_counter(), time.process_time()
    if for_ is not None:

        def tell(planned: Planned) -> None:
            if on_plan is not None:
                on_plan(_timed(planned, assumptions, began))

        found = make_target_plan(problem, for_, settings, effort, () if kind is None else (kind,), tell)
        tell(found)
        found = priced(problem, found, for_, settings, effort, time.perf_counter() - began)
    else:

        def planned(problem: Problem) -> Planned:
            if stated is not None:
                return make_plan(problem, STATED, stated, settings, effort, kind, limit, jitter)
            return make_plan(problem, algorithm, options, settings, effort, kind, limit, jitter)

        def found_of(problem: Problem) -> tuple[Planned, Problem]:
            if order == "best" and stated is None and algorithm in (AUTO, "contiguous"):
                return planned_in_best_order(problem, settings, effort, kind, planned)
            return planned(problem), problem

        found, problem = least_late(problem, found_of) if asked.get("weights") is None else found_of(problem)
        if stated is None:  # other stages than the stated ones are no alternatives
            found = with_alternatives(found, problem, settings, time.process_time() - worked)
    if schedule == BEST:
        status.phase = "orders of passes"
        found = ordered(found, deadline, TRIED if stated is None else (OWN,))
    return _timed(found, assumptions, began)


def grid(
    profile: Given,
    *,
    pipelines: int | None = None,
    microbatches: Sequence[int] | None = None,
    profiles: Sequence[Given] = (),
    layer_overhead: str = "0",
    overlap: bool = False,
    limit: int | None = None,
    effort: Effort | None = None,
    time_limit: str | Deadline | None = None,
    progress: Callable[[str], None] | None = None,
    status: Status | None = None,
    **asked: Unpack[Asked],
) -> PlanResult:
    """Return the plan of the stages x equal ``pipelines`` (None: any) that are done first with ``batch`` samples.

    ``microbatches`` are the sizes to choose from, by default those that are profiled: of ``profile`` and of further
    ``profiles`` of the same network; a model by its name is estimated at each size. ``layer_overhead`` is the part of a
    layer's pass that doesn't shrink with the microbatch. What is ``asked`` is as in :func:`plan`, but that weights are
    ``flush``, with an update for each batch, and replicas are the pipelines.
    """
    from ..planner.drained.space import grid_problem
    from ..planner.what_if.grid import make_grid_plan

    deadline = deadline_of(time_limit)
    refuse_others(effort=effort)
    _refuse_with_grid(asked)
    batch, asked["batch"], asked["weights"] = asked.get("batch"), ANY, DRAINED
    if not isinstance(batch, int):
        raise BadInput("--data-parallel plans for a batch; say its samples with --batch")
    merged = merging(asked.get("granularity", "auto"), asked.get("blocks"))
    status = status or Status()
    sizes = sorted(set(microbatches)) if microbatches and is_name(profile) else [None]
    (first, *others), deadline = given_profiles(profile, asked, sizes, status, deadline)
    others += [other for x in profiles for other in given_profiles(x, asked, [None], status, deadline)[0]]
    problem, assumptions = problem_of(first, **asked, deadline=deadline)
    question, more = grid_problem(
        problem,
        batch,
        [problem.chain, *(merged(other.chain) for other in others)],
        microbatches,
        pipelines=pipelines,
        fixed_ns=parse_time(layer_overhead, "--layer-overhead"),
        offload=asked.get("offload"),
        overlap=overlap,
        limit=limit,
    )
    began = time.perf_counter()
    found = make_grid_plan(question, Settings(progress=progress, status=status), effort or "normal")
    return _timed(found, [*assumptions, *more], began)


def read_plan(path: str | Path) -> PlanResult:
    """Return the plan in a file, checked; InvalidPlan says all that is wrong with it."""
    from ..check.evaluate import evaluate

    loaded = load_plan(str(path))
    return PlanResult(loaded, evaluate(loaded))


def given_profiles(
    profile: Given, asked: Asked, sizes: Sequence[int | None], status: Status, deadline: Deadline
) -> tuple[list[Profile], Deadline]:
    """Return the profile that is given, in microbatches of ``sizes``, and the deadline: estimates are no search."""
    if is_name(profile):
        status.phase = "estimate"
    began = time.monotonic()
    about = asked.get("gpu"), asked.get("optimizer", "sgd"), asked.get("precision")
    found = [as_profile(profile, *about, size) for size in sizes]
    status.phase = "search"
    return found, deadline.later(time.monotonic() - began) if is_name(profile) else deadline


def _timed(found: Planned, assumptions: Sequence[str], began: float) -> PlanResult:
    """Return what was found, with the seconds since ``began``."""
    seconds = round(time.perf_counter() - began, 3)
    plan = replace(found.plan, provenance=replace(found.plan.provenance, seconds=seconds))
    return PlanResult(plan, found.evaluation, tuple(assumptions))


def _stated(algorithm: str, effort: str | None, gap: float | None, **given: str | None) -> dict[str, str] | None:
    """Return what states a configuration, None where nothing does; BadInput beside what says how to search."""
    said = {name: value for name, value in given.items() if value is not None}
    if not said:
        return None
    if "split" not in said:
        raise BadInput(f"--{next(iter(said))} goes with --split, which says the stages")
    searching = {"algorithm": algorithm != AUTO, "effort": effort is not None, "gap": gap is not None}
    for name, there in searching.items():
        if there:
            raise BadInput(f"--split searches nothing; leave out --{name}")
    return said


def _known(algorithm: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an algorithm that are given; BadInput for those that it doesn't have."""
    if algorithm != AUTO and algorithm not in ALGORITHMS:
        raise BadInput(f"--algorithm: '{shown(algorithm)}' is not one of {', '.join((AUTO, *ALGORITHMS))}")
    knobs = {} if algorithm == AUTO else ALGORITHMS[algorithm].options
    for name, value in options.items():
        if name not in knobs:
            has = f"it has {', '.join(knobs)}" if knobs else "it has none"
            raise BadInput(f"-O {shown(name)} is not an option of --algorithm {algorithm}; {has}")
        if value not in knobs[name]:
            among = ", ".join(str(x).lower() for x in knobs[name])
            raise BadInput(f"-O {name}: '{shown(str(value))}' is not one of {among}")
    return dict(options)


def _refuse_with_target(
    target: str, algorithm: str, stated: bool, schedule: ScheduleKind | None, limit: int | None, asked: Asked
) -> None:
    """Raise BadInput for what contradicts --for."""
    if target not in TARGETS:
        raise BadInput(f"--for: '{shown(target)}' is not one of {', '.join(TARGETS)}")
    if algorithm != AUTO or stated:
        said = "--split" if stated else f"--algorithm {algorithm}"
        raise BadInput(f"--for has a search of its own; leave out {said}")
    if schedule is not None and schedule not in TARGETS[target].kinds:
        raise BadInput(f"--for {target} plans {' or '.join(TARGETS[target].kinds)}, not --schedule {schedule}")
    if asked.get("vertical_sync") or limit is not None:
        said = "--vertical-sync" if asked.get("vertical_sync") else "--limit"
        raise BadInput(f"--for {target} drains; leave out {said}")
    if asked.get("checkpointing") not in (None, "none"):
        raise BadInput(f"--for {target} recomputes as that can; leave out --checkpointing, or say none")
    _refuse_other_weights("--for", asked, "drains the pipelines after every mini-batch")


def _refuse_with_grid(asked: Asked) -> None:
    """Raise BadInput for what contradicts a grid."""
    _refuse_other_weights("--data-parallel", asked, "drains the pipelines after every batch")
    if asked.get("accumulate") is not None:
        raise BadInput("--data-parallel updates weights once per --batch; leave out --accumulate")
    if asked.get("no_replicas"):
        raise BadInput("--data-parallel and --no-replicas contradict each other; --data-parallel 1 has none")
    if asked.get("vertical_sync"):
        raise BadInput("--data-parallel plans message-driven pipelines that drain; leave out --vertical-sync")


def _drains(schedule: str) -> bool:
    """Whether a schedule goes with weights that are flushed and with no others."""
    return schedule == BEST or KINDS[schedule].drains  # type: ignore[index]  # one of them, as checked


def _refuse_other_weights(option: str, asked: Asked, why: str) -> None:
    if asked.get("weights") not in (None, DRAINED):
        raise BadInput(f"{option} {why}, which is --weights flush, not {asked.get('weights')}")

"""Which plan is best for a profile on a machine, or what is a stated one worth? One call, whatever searches."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Unpack

from ..check.targets import TARGETS
from ..check.units import CannotExpress
from ..choices import BEST, BY_MATRIX, DRAINED, OPTIMIZERS, Effort
from ..deadline import Deadline
from ..errors import BadInput, Infeasible, NoBetter, PipeplanError
from ..files.plans import load_plan
from ..names import shown
from ..partition import ALGORITHMS
from ..partition.granularity import merging
from ..plan import Plan, ScheduleKind
from ..planner.periodic.incumbent import GAP, Settings
from ..planner.plan import AUTO, Planned
from ..problem import MICROBATCHES_PER_DEVICE, SHARING, Chain, Problem, small_matrices
from ..schedule.kinds import KINDS
from ..status import Status
from ..units import gpu_counts, parse_time
from .asked import Asked, Common, Grids, Parts, Planning, defaults, part_of
from .plans import own_export
from .problems import ANY, as_held, bytes_per_parameter, deadline_of, holding, on_groups, problem_of, with_zero
from .profiles import DEGREES, Profile, as_profile, is_name
from .result import PlanResult
from .resuming import going_on, moving_least, plan_before
from .tensor import EACH, OfDegree, Worth, best_degree, parts

Given = Profile | Chain | str | Path  # a profile, its file, or a model by its name
DEFAULTS: Planning = defaults(Planning)
GRID_DEFAULTS: Grids = defaults(Grids)
SEGMENTS = (AUTO, "data-parallel", "piper")  # which choose among them where nobody says what may be recomputed
STATING = ("split", "replicas", "on", "recompute")
REPEATED = re.compile(r"\b([0-9]{1,8})\*([1-9][0-9]{0,3})\b")  # 5*14: fourteen stages of five


@dataclass(frozen=True)
class Question:
    """A question for one plan with all its words, and who hears of the search."""

    said: Planning
    settings: Settings
    kind: ScheduleKind | None
    stated: dict[str, str] | None
    deadline: Deadline

    @property
    def effort(self) -> Effort:
        """How hard is searched."""
        return self.said["effort"] or "normal"

    def made(self, problem: Problem) -> Planned:
        """Return the plan of a problem as it stands: searched for, or stated."""
        from ..planner.plan import STATED, make_plan

        algorithm, options = (
            (self.said["algorithm"], _known(self.said)) if self.stated is None else (STATED, self.stated)
        )
        return make_plan(problem, algorithm, options, self.settings, self.effort, self.kind, self.said["limit"])

    def found(self, problem: Problem) -> tuple[Planned, Problem]:
        """Return the plan in the order of layers that is asked for, and the problem in that order."""
        from ..planner.layer_orders import planned_in_best_order
        from ..planner.least_late import fresher

        found = None
        if self.said["order"] == "best" and self.stated is None and self.said["algorithm"] in (AUTO, "contiguous"):
            found, problem = planned_in_best_order(problem, self.settings, self.made)
        found = found or self.made(problem)
        return fresher(found, problem) if self.said["algorithm"] == AUTO else found, problem


def plan(
    profile: Given | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    status: Status | None = None,
    on_plan: Callable[[PlanResult], None] | None = None,
    **asked: Unpack[Planning],
) -> PlanResult:
    """Return the best validated plan found for ``profile`` on what ``asked`` describes; Infeasible, explained, if none.

    ``profile`` is one, its file, or the name of a model, which is estimated for ``gpu`` in microbatches of
    ``microbatch`` samples. ``asked`` are ``gpus``, ``mem``, ``weights`` and all of :func:`.problems.problem_of`.
    ``algorithm`` with its ``options`` searches, within ``effort``, until a plan is within ``gap`` of the lower bound or
    ``time_limit`` (``"30s"``) has passed; the layers of a DAG in the best ``order`` that is found, or as they are
    ``given``. Where ``weights`` and ``schedule`` are not said the weights are those that :func:`..planner.least_late
    .least_late` chooses. With ``split`` (``"4,4,5"``), ``replicas``, ``on`` and ``recompute`` nothing
    is searched: see :func:`..planner.stated.stated`. ``for_`` plans what that framework can express; ``on_plan`` gets
    its plan twice before its price is known: the first that is found, and the best. With ``resume_from``, a run's
    checkpoints, it has the profile and all that their plan says (:mod:`.resuming`). ``schedule`` and
    ``limit`` are as in :func:`..planner.plan.make_plan`; ``best`` is the best order of passes that is found, see
    :func:`..planner.what_if.best_order.ordered`. ``jobs`` processes search at a time; any number finds the same.
    ``progress`` hears of each improvement, ``status`` says at any time what is going on. BadInput for what contradicts.
    """
    from ..planner.what_if.alternatives import with_unpipelined
    from ..planner.what_if.best_order import OWN, TRIED, WHY_NOT, ordered
    from ..planner.what_if.target import priced

    status, before = status or Status(), None
    asking: Planning = {**DEFAULTS, **asked}
    if asking["resume_from"] is not None:
        if profile is not None:
            raise BadInput("--resume-from: its checkpoint has a profile of its own; leave out PROFILE")
        before = plan_before(asking["resume_from"])
        profile, asking = before.chain, going_on(asking, before)
    if profile is None:
        raise BadInput("profile: None is not a profile, and no --resume-from names a checkpoint with one")
    question = _question(asking, progress, status)
    said, best = question.said, question.said["schedule"] == BEST
    merging(said["granularity"], said["blocks"])  # refuses before anything is read
    if said["tensor"] == EACH:
        _refuse_with_each(said, question)
    words: Asked = part_of(Asked, said)
    words["zero"] = 0 if isinstance(said["zero"], str) else said["zero"]
    (given,), deadline = given_profiles(
        profile, words, [said["microbatch"]], status, question.deadline, _parts_of(profile, said)
    )
    until, began = deadline.part(2) if best else deadline, time.perf_counter()

    def of_part(part: Profile) -> OfDegree:
        segments, each = said["algorithm"] in SEGMENTS, bool(part.chain.variants)
        problem, assumptions = problem_of(part, **words, segments=segments, each=each, deadline=until)
        if said["algorithm"] == "data-parallel" and part.chain.changed and len(problem.platform) > 1:
            raise BadInput(f"--algorithm data-parallel: {part.chain.one_of_each}")
        if best and not problem.policy.drains:
            raise BadInput(f"schedule: {WHY_NOT.format(weights=problem.policy.weights)}")
        held = [] if said["for_"] is None else as_held(problem, said["for_"])[1]
        return OfDegree(problem, [*assumptions, *held])

    def planned(part: OfDegree, beat_ns: int | None) -> Planned:
        def tell(found: Planned) -> None:
            if on_plan is not None:
                on_plan(_timed(found, part.assumptions, began))

        def of(problem: Problem, beat_ns: int | None) -> Planned:
            if said["for_"] is None:
                return _searched(question, problem)
            return _for_target(question, as_held(problem, said["for_"])[0], tell, beat_ns)

        if said["zero"] == ANY:
            return _best_sharing(part.problem, bytes_per_parameter(words["bytes_per_parameter"]), of, beat_ns)
        found, problem = of(part.problem, beat_ns), part.problem
        if (
            not problem.chain.variants
            and OPTIMIZERS[problem.policy.optimizer].elementwise
            and problem.policy.bytes_per_parameter is None
        ):
            found = with_unpipelined(problem.with_policy(with_zero(problem.policy, problem.chain, 3)), found)
        return found

    worth = Worth(
        "period_ns", lambda found: found.evaluation.period_ns, partial(_least, question), partial(_proved, question)
    )
    again = False if said["checkpointing"] == "none" else None
    each = [given] if said["tensor"] == EACH else []  # behind all degrees: among its variants stages choose
    if each and not given.chain.variants:
        raise BadInput(
            "--tensor each: the profile has one degree alone; profile --estimate GPU --tensor 1,2,4 makes one"
        )
    asked_for = parts(given, {**said, **({"tensor": None} if each else {})}, again)
    found, degree = best_degree([*asked_for, *each], of_part, planned, worth, until, status)
    if said["for_"] is not None:
        problem = replace(as_held(degree.problem, said["for_"])[0], deadline=until)
        found = found if problem.chain.variants else priced(problem, found, said["for_"], question.settings)
        made = own_export(found.plan, said["for_"])
        if not isinstance(made, str):
            told = replace(found.plan.provenance, options={**found.plan.provenance.options, "arguments": made.text})
            found = replace(found, plan=replace(found.plan, provenance=told))
    _refuse_small_matrices(found.plan)
    if before is not None:
        found = moving_least(found, before)
    if best:
        status.phase = "orders of passes"
        found = ordered(found, deadline, TRIED if question.stated is None else (OWN,))
    return _timed(found, degree.assumptions, began)


def _best_sharing(
    problem: Problem,
    size: tuple[int, int | None] | None,
    plan: Callable[[Problem, int | None], Planned],
    beat_ns: int | None,
) -> Planned:
    """Return the best of the plans that ``plan`` makes where replicas share more and more, of as many bytes per
    parameter as ``size`` says, which says what each takes; Infeasible where there is none."""
    taken, best, why = dict[str, int | None](), list[Planned](), list[PipeplanError]()
    for zero in list(SHARING)[: None if problem.replicas else 1]:
        policy = with_zero(problem.policy, problem.chain, zero)
        part = problem.with_policy(policy if size is None else holding(policy, *size))
        if not part.policy.goes_with(part.policy.weights):
            continue
        taken[str(zero)] = None
        try:
            found = plan(replace(part, deadline=problem.deadline.part(len(SHARING) - zero)), beat_ns)
        except (CannotExpress, Infeasible, NoBetter) as error:
            why.append(error)
            continue
        taken[str(zero)] = beat_ns = found.evaluation.period_ns
        if not best or found.evaluation.period_ns < best[0].evaluation.period_ns:
            best = [found]
    if not best:
        raise why[0]
    provenance = best[0].plan.provenance
    provenance = replace(provenance, options={**provenance.options, "zero": taken})
    return replace(best[0], plan=replace(best[0].plan, provenance=provenance))


def _refuse_small_matrices(plan: Plan) -> None:
    """Raise BadInput where an optimizer of whole matrices keeps more of a stage's weights than ``plan`` counts."""
    name, layers = plan.policy.optimizer, plan.chain.layers
    counted = plan.policy.bytes_per_parameter is None and name in BY_MATRIX
    for s, stage in enumerate(plan.allocation.stages if counted else ()):
        known = [x for x in layers[stage.start : stage.stop] if x.matrix_state is not None]
        kept = sum(x.matrix_state[BY_MATRIX.index(name)] for x in known if x.matrix_state)
        why = small_matrices(name, kept, sum(x.parameter_count for x in known), f"stage {s}")
        if why is not None:
            raise BadInput(why)


def _refuse_with_each(said: Planning, question: Question) -> None:
    """Raise BadInput for what knows no degrees of each stage's own."""
    kind = question.kind
    others = {
        f"--for {said['for_']}": said["for_"] not in (None, "megatron"),
        f"--algorithm {said['algorithm']}": said["algorithm"] not in (AUTO, "contiguous", "piper"),
        "--split": question.stated is not None,
        f"--schedule {said['schedule']}": kind is not None and kind not in ("pattern", "1f1b", "message-driven"),
    }
    for words, there in others.items():
        if there:
            raise BadInput(f"--tensor each: {words} gives all stages one degree; say degrees such as --tensor 2,4")


def _parts_of(profile: Given, said: Planning) -> Parts:
    """Return in which degrees a model that is named is estimated: where nobody says, in all for a target that can run
    them."""
    parted: Parts = part_of(Parts, said)
    target = None if said["for_"] is None else TARGETS[said["for_"]]
    if said["tensor"] == EACH:
        return {**parted, "tensor": ANY}
    if is_name(profile) and said["tensor"] is None and target is not None and target.tensor:
        return {**parted, "tensor": ANY, "sequence_parallel": True}
    return parted


def _least(question: Question, problem: Problem) -> int:
    """Return what no plan of a problem takes less than, quickly, whatever weights it may choose."""
    from ..check.bounds import load_bound, quick_proof
    from ..cost.time_model import relative
    from ..planner.what_if.target import as_run_by

    target = question.said["for_"]
    if target is not None:
        problem = as_run_by(problem, target)
    elif question.said["weights"] is None:
        return load_bound(relative(problem) if problem.chain.variants else problem)
    return quick_proof(problem).period_ns


def _proved(question: Question, found: Planned) -> int:
    """Return what no plan of the degree of one that was found takes less than, of what is asked."""
    plan, asked = found.plan, ("any", question.said["for_"])
    if plan.policy.drains and question.said["weights"] is None:  # its bounds are of what drains
        return _least(question, Problem(plan.chain, plan.platform, plan.policy))
    return max(x.period_ns for x in plan.lower_bounds if x.allocation in asked and x.schedule in (None, question.kind))


def _question(said: Planning, progress: Callable[[str], None] | None, status: Status) -> Question:
    """Return what is asked, with the weights that follow; BadInput for what contradicts."""
    deadline, schedule = deadline_of(said["time_limit"]), said["schedule"]
    algorithm, gap, target = said["algorithm"], said["gap"], said["for_"]
    stated = _stated(said)
    _known(said)
    if gap is not None and algorithm != AUTO:
        raise BadInput("-O gap says when --algorithm auto may stop; leave it out")
    if schedule == BEST and target is not None:
        raise BadInput("--schedule best orders passes for itself; leave out --for")
    exchanging = isinstance(said["zero"], str) or SHARING[said["zero"]].scattered > 0
    if target is not None:
        _refuse_with_target(target, said, stated is not None)
        said["weights"] = DRAINED
    elif exchanging and said["weights"] is None:
        said["weights"] = DRAINED
    elif schedule is not None and said["weights"] is None:
        of_schedule = (DRAINED,) if schedule == BEST else KINDS[schedule].weights
        if len(of_schedule) == 1:
            said["weights"] = of_schedule[0]
    settings = Settings(
        said["solver"], gap=GAP if gap is None else gap, jobs=said["jobs"], progress=progress, status=status
    )
    return Question(said, settings, None if schedule == BEST else schedule, stated, deadline)


def _for_target(question: Question, problem: Problem, tell: Callable[[Planned], None], beat_ns: int | None) -> Planned:
    """Return the best plan that a target can express."""
    from ..planner.what_if.target import make_target_plan

    target, kinds = question.said["for_"], () if question.kind is None else (question.kind,)
    assert target is not None, "else it is searched for without"
    if problem.chain.variants:
        from ..planner.what_if.towers import make_towers_plan

        found = make_towers_plan(problem, target, beat_ns)
    else:
        found = make_target_plan(problem, target, question.settings, question.effort, kinds, tell, beat_ns)
    tell(found)
    return found


def _searched(question: Question, problem: Problem) -> Planned:
    """Return the plan that is found, or stated, under the weights that are asked for or that are less late."""
    from ..planner.least_late import drained_quickly, least_late
    from ..planner.what_if.alternatives import with_alternatives

    said = question.said
    asked = said["weights"] is not None
    free = question.kind is None and said["limit"] is None and question.stated is None

    def drained(interval: int) -> Planned | None:
        return drained_quickly(problem, interval, question.settings)

    found, ordered = (
        question.found(problem) if asked else least_late(problem, question.found, drained if free else None)
    )
    if question.stated is not None or problem.chain.variants:  # other stages are no alternatives, or of one degree
        return found
    quiet = replace(question.settings, progress=None, explained=False, status=Status())
    other = replace(question, settings=quiet, kind=None)
    return with_alternatives(found, ordered, question.settings, asked or not free, lambda x: other.found(x)[0])


def grid(
    profile: Given,
    *,
    progress: Callable[[str], None] | None = None,
    status: Status | None = None,
    **asked: Unpack[Grids],
) -> PlanResult:
    """Return the plan of the stages x equal ``pipelines`` (None: any) that are done first with ``batch`` samples.

    ``microbatches`` are the sizes to choose from, by default those that are profiled: of ``profile`` and of further
    ``profiles`` of the same network; a model by its name is estimated at each size. ``layer_overhead`` is the part of a
    layer's pass that doesn't shrink with the microbatch. What is ``asked`` is as in :func:`plan`, but that weights are
    ``flush``, with an update for each batch, and replicas are the pipelines.
    """
    from ..files.profile_rules import check_chain
    from ..planner.grids.grid_search import make_grid_plan
    from ..planner.grids.space import grid_problem

    said: Grids = {**GRID_DEFAULTS, **asked}
    deadline, batch, microbatches = deadline_of(said["time_limit"]), said["batch"], said["microbatches"]
    if not isinstance(batch, int):
        raise BadInput("a grid is planned for a batch; say its samples with --batch")
    words: Asked = part_of(Common, said)
    words["batch"], words["weights"] = ANY, DRAINED
    merged = merging(said["granularity"], said["blocks"])
    status = status or Status()
    sizes = sorted(set(microbatches)) if microbatches and is_name(profile) else [None]
    given, deadline = given_profiles(profile, words, sizes, status, deadline, part_of(Parts, said))
    given += [other for x in said["profiles"] for other in given_profiles(x, words, [None], status, deadline)[0]]
    began = time.perf_counter()

    def of_part(part: Profile) -> OfDegree:
        return OfDegree(*problem_of(part, **words, deadline=deadline))

    def planned(part: OfDegree, _: int | None) -> Planned:
        problem = part.problem
        own = {name: getattr(problem.chain, name) for name in DEGREES}
        others = [parts(x, own, problem.chain.selective)[0].chain for x in given[1:]]
        timed = [merged(on_groups(x, problem.platform.whole or problem.platform)[0]) for x in others]
        question, more = grid_problem(
            problem,
            batch,
            [problem.chain, *timed],
            microbatches and [x * part.several for x in microbatches],
            pipelines=said["pipelines"],
            fixed_ns=parse_time(said["layer_overhead"], "--layer-overhead"),
            offload=said["offload"],
            overlap=said["overlap"],
            limit=said["limit"],
        )
        part.assumptions.extend(more)
        for size in question.sizes:
            check_chain(question.profiles.at(size), f"{profile} at microbatches of {size}")
        return make_grid_plan(question, Settings(progress=progress, status=status), said["effort"] or "normal")

    worth = Worth(
        "batch_ns",
        lambda found: int(found.plan.provenance.options["grid"]["batch_ns"]),
        lambda problem: 0,
        lambda found: int(found.plan.provenance.options["bound_ns"]),
        whole=True,
    )
    found, degree = best_degree(parts(given[0], said), of_part, planned, worth, deadline, status)
    return _timed(found, degree.assumptions, began)


def estimate(
    profile: Given,
    *,
    progress: Callable[[str], None] | None = None,
    status: Status | None = None,
    **asked: Unpack[Grids],
) -> PlanResult:
    """Return the fastest :func:`grid` of a model that is named, in mixed precision with Adam where nobody says."""
    said: Grids = {"optimizer": "adam", "precision": "mixed", "microbatches": (1,), **asked}
    if said.get("batch") is None:
        gpus = said.get("gpus") or 1
        count = prod(gpus if isinstance(gpus, tuple) else gpu_counts(str(gpus)))
        said["batch"] = MICROBATCHES_PER_DEVICE * count * max(said["microbatches"] or (1,))
    return grid(profile, progress=progress, status=status, **said)


def read_plan(path: str | Path) -> PlanResult:
    """Return the plan in a file, checked; InvalidPlan says all that is wrong with it."""
    from ..check.evaluate import evaluate

    loaded = load_plan(str(path))
    return PlanResult(loaded, evaluate(loaded))


def given_profiles(
    profile: Given,
    asked: Asked,
    sizes: Sequence[int | None],
    status: Status,
    deadline: Deadline,
    parted: Parts | None = None,
) -> tuple[list[Profile], Deadline]:
    """Return the profile that is given, in microbatches of ``sizes``, and the deadline: estimates are no search.

    What is ``asked`` gets the bytes per parameter of an engine that is named.
    """
    if is_name(profile):
        status.phase = "estimate"
    began = time.monotonic()
    about = asked.get("gpu"), asked.get("optimizer", "sgd"), asked.get("precision")
    engine = (parted or {}).get("engine")
    if engine is not None and not is_name(profile):
        raise BadInput("--engine: goes with a model's name; the layers of a profile have their times")
    if engine in TARGETS and asked.get("bytes_per_parameter") is None and not asked.get("offload"):
        asked["bytes_per_parameter"] = TARGETS[engine].holds.get(about[1:])
    found = [as_profile(profile, *about, size, **parted or {}) for size in sizes]
    status.phase = "search"
    return found, deadline.later(time.monotonic() - began) if is_name(profile) else deadline


def _timed(found: Planned, assumptions: Sequence[str], began: float) -> PlanResult:
    """Return what was found, with the seconds since ``began``."""
    seconds = round(time.perf_counter() - began, 3)
    plan = replace(found.plan, provenance=replace(found.plan.provenance, seconds=seconds))
    return PlanResult(plan, found.evaluation, tuple(assumptions))


def _stated(said: Planning) -> dict[str, str] | None:
    """Return what states a configuration, None where nothing does; BadInput beside what says how to search."""
    found = {name: said[name] for name in STATING if said[name] is not None}  # type: ignore[literal-required]  # each is a word
    for name in set(found) & {"split", "replicas"}:
        found[name] = REPEATED.sub(lambda x: ",".join([x[1]] * int(x[2])), found[name])
    if not found:
        return None
    if "split" not in found:
        raise BadInput(f"--{next(iter(found))} goes with --split, which says the stages")
    searching = {"algorithm": said["algorithm"] != AUTO, "effort": bool(said["effort"]), "gap": said["gap"] is not None}
    for name, there in searching.items():
        if there:
            raise BadInput(f"--split searches nothing; leave out {'-O gap' if name == 'gap' else f'--{name}'}")
    return found


def _known(said: Planning) -> dict[str, Any]:
    """Return the options of the algorithm that are given; BadInput for those that it doesn't have."""
    algorithm = said["algorithm"]
    knobs = {} if algorithm == AUTO else ALGORITHMS[algorithm].options
    for name, value in (said["options"] or {}).items():
        if name not in knobs:
            has = f"it has {', '.join(knobs)}" if knobs else "it has none"
            raise BadInput(f"-O {shown(name)} is not an option of --algorithm {algorithm}; {has}")
        if value not in knobs[name]:
            among = ", ".join(str(x).lower() for x in knobs[name])
            raise BadInput(f"-O {name}: '{shown(str(value))}' is not one of {among}")
    return dict(said["options"] or {})


def _refuse_with_target(target: str, said: Planning, stated: bool) -> None:
    """Raise BadInput for what contradicts --for."""
    algorithm, schedule, weights = said["algorithm"], said["schedule"], said["weights"]
    if algorithm != AUTO or stated:
        other = "--split" if stated else f"--algorithm {algorithm}"
        raise BadInput(f"--for has a search of its own; leave out {other}")
    if schedule is not None and schedule not in TARGETS[target].kinds:
        raise BadInput(f"--for {target} plans {' or '.join(TARGETS[target].kinds)}, not --schedule {schedule}")
    if said["vertical_sync"] or said["limit"] is not None:
        raise BadInput(f"--for {target} drains; leave out {'--vertical-sync' if said['vertical_sync'] else '--limit'}")
    if said["checkpointing"] not in (None, "none"):
        raise BadInput(f"--for {target} recomputes as that can; leave out --checkpointing, or say none")
    if weights not in (None, DRAINED):
        raise BadInput(f"--for drains the pipelines after every mini-batch, which is --weights flush, not {weights}")

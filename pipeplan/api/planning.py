"""Which plan is best for a profile on a machine, or what is a stated one worth? One call, whatever searches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Unpack

from ..check.targets import TARGETS, as_run_by
from ..check.units import CannotExpress
from ..choices import BEST, BY_MATRIX, DRAINED, OPTIMIZERS, Effort
from ..deadline import Deadline
from ..errors import BadInput, Infeasible, NoBetter, PipeplanError
from ..files.plans import load_plan
from ..partition.granularity import merging
from ..plan import Plan, ScheduleKind
from ..planner.periodic.incumbent import GAP, Settings
from ..planner.plan import AUTO, Planned
from ..problem import SHARING, Problem, small_matrices
from ..registry import Late
from ..schedule.kinds import KINDS
from ..status import Status
from .asked import Asked, Parts, Planning, defaults, part_of
from .given.problems import ANY, as_held, bytes_per_parameter, deadline_of, holding, problem_of, with_zero
from .given.profiles import Profile, is_name
from .given.tensor import EACH, OfDegree, Worth, best_degree, by_layer, for_each, parts
from .plans import own_export
from .questions import Given, given_profiles, options_of, refuse_with_target, stated_of, timed
from .result import PlanResult

make_target_plan: Callable[..., Planned] = Late("planner.what_if.target:make_target_plan")
priced: Callable[..., Planned] = Late("planner.what_if.target:priced")
ordered: Callable[..., Planned] = Late("planner.what_if.best_order:ordered")
refuse_undrained = Late("planner.what_if.best_order:refuse_undrained")
going_on, moving_least = Late("api.resuming:going_on"), Late("api.resuming:moving_least")
UNPIPELINED = (Late("planner.what_if.alternatives:with_unpipelined"),)  # what is told beside a plan's part
ALTERNATIVES = (Late("planner.what_if.alternatives:with_alternatives"),)  # and beside the plan that is chosen
ORDERS = {"best": Late("planner.layer_orders:planned_in_best_order")}  # of a DAG's layers, beside that which is given
DEFAULTS: Planning = defaults(Planning)
SEGMENTS = (AUTO, "data-parallel", "piper")  # which choose among them where nobody says what may be recomputed


@dataclass(frozen=True)
class Question:
    """A question for one plan with all that is ``said``, and who hears of the search, which ``began`` at some time.

    ``words`` are asked of every part of a profile until the ``deadline``; ``orders`` are problems with their layers in
    the order of the plan, by variant and sharing.
    """

    said: Planning
    settings: Settings
    kind: ScheduleKind | None
    stated: dict[str, str] | None
    deadline: Deadline
    words: Asked
    began: float = 0.0
    on_plan: Callable[[PlanResult], None] | None = None
    orders: dict[tuple[str, int], Problem] = field(default_factory=dict)

    @property
    def effort(self) -> Effort:
        """How hard is searched."""
        return self.said["effort"] or "normal"

    def made(self, problem: Problem) -> Planned:
        """Return the plan of a problem as it stands: searched for, or stated."""
        from ..planner.plan import STATED, make_plan

        said = self.said
        algorithm = said["algorithm"] if self.stated is None else STATED
        options = options_of(said) if self.stated is None else self.stated
        return make_plan(problem, algorithm, options, self.settings, self.effort, self.kind, said["limit"])

    def found(self, problem: Problem) -> tuple[Planned, Problem]:
        """Return the plan in the order of layers that is asked for, and the problem in that order."""
        from ..planner.least_late import fresher

        found, in_order = None, ORDERS.get(self.said["order"])
        if in_order is not None and self.stated is None and self.said["algorithm"] in (AUTO, "contiguous"):
            found, problem = in_order(problem, self.settings, self.made)
        found = found or self.made(problem)
        return fresher(found, problem) if self.said["algorithm"] == AUTO else found, problem

    @property
    def uniform_alone(self) -> str | None:
        """Return which option knows stages of one variant alone; None where none does."""
        said, kind = self.said, self.kind
        others = {
            f"--for {said['for_']}": said["for_"] not in (None, "megatron"),
            f"--algorithm {said['algorithm']}": said["algorithm"] not in (AUTO, "contiguous", "piper"),
            "--split": self.stated is not None,
            f"--schedule {said['schedule']}": kind is not None and kind not in ("pattern", "1f1b", "message-driven"),
        }
        return next((words for words, there in others.items() if there), None)

    @property
    def free(self) -> bool:
        """Whether any schedule will do, and any stages."""
        return self.kind is None and self.said["limit"] is None and self.stated is None

    def profiles(self, given: Profile) -> list[Profile]:
        """Return the parts of a profile that are asked for, behind which is one where stages, or layers, choose."""
        said = self.said
        again = False if said["checkpointing"] == "none" else None
        if said["tensor"] == EACH:
            each = for_each(given, said["offload_activations"])
            if not each.chain.variants:
                raise BadInput(
                    "--tensor each: the profile has one degree alone; profile --tensor 1,2,4 makes one with others"
                )
            return [*parts(given, {**said, "tensor": None}, again), each]
        found = parts(given, said, again)
        if said["for_"] is None and self.uniform_alone is None:
            found += [by_layer(given)] * any(x.chain.selective and x.chain.width == 1 for x in found)
        return found

    def problem(self, part: Profile) -> OfDegree:
        """Return the problem of a part; BadInput for one that it can't have."""
        said = self.said
        segments, each = said["algorithm"] in SEGMENTS, bool(part.chain.variants)
        problem, assumptions = problem_of(part, **self.words, segments=segments, each=each, deadline=self.deadline)
        if said["algorithm"] == "data-parallel" and part.chain.changed and len(problem.platform) > 1:
            raise BadInput(f"--algorithm data-parallel: {part.chain.one_of_each}")
        if said["schedule"] == BEST:
            refuse_undrained(problem.policy, "schedule")
        held = [] if said["for_"] is None else as_held(problem, said["for_"])[1]
        return OfDegree(problem, [*assumptions, *held])

    def plan(self, part: OfDegree, beat_ns: int | None) -> Planned:
        """Return the best plan of a part, however replicas share where that is open, and what no pipeline takes."""
        problem, find = part.problem, partial(self._found, part.assumptions)
        if self.said["zero"] == ANY:
            return self._best_sharing(problem, find, beat_ns)
        found, policy = find(problem, beat_ns), problem.policy
        counted = policy.bytes_per_parameter is not None
        if problem.chain.variants or counted or not OPTIMIZERS[policy.optimizer].elementwise:
            return found
        for told in UNPIPELINED:
            found = told(problem.with_policy(with_zero(policy, problem.chain, 3)), found)
        return found

    def _best_sharing(
        self, problem: Problem, find: Callable[[Problem, int | None], Planned], beat_ns: int | None
    ) -> Planned:
        """Return the best of the plans that ``find`` makes where replicas share more and more, which says what each
        takes; Infeasible where there is none."""
        size = bytes_per_parameter(self.words["bytes_per_parameter"])
        taken, best, why = dict[str, int | None](), list[Planned](), list[PipeplanError]()
        for zero in list(SHARING)[: None if problem.replicas else 1]:
            policy = with_zero(problem.policy, problem.chain, zero)
            part = problem.with_policy(policy if size is None else holding(policy, *size))
            if not part.policy.goes_with(part.policy.weights):
                continue
            taken[str(zero)] = None
            try:
                found = find(replace(part, deadline=problem.deadline.part(len(SHARING) - zero)), beat_ns)
            except (CannotExpress, Infeasible, NoBetter) as error:
                why.append(error)
                continue
            taken[str(zero)] = beat_ns = found.evaluation.period_ns
            if not best or found.evaluation.period_ns < best[0].evaluation.period_ns:
                best = [found]
        if not best:
            raise why[0]
        return replace(best[0], plan=best[0].plan.telling(zero=taken))

    def _found(self, assumptions: list[str], problem: Problem, beat_ns: int | None) -> Planned:
        def tell(found: Planned) -> None:
            if self.on_plan is not None:
                self.on_plan(timed(found, assumptions, self.began))

        target = self.said["for_"]
        if target is not None:
            return self._for_target(as_held(problem, target)[0], tell, beat_ns)
        found, self.orders[problem.chain.variant, problem.policy.zero] = self._searched(problem)
        return found

    def least(self, problem: Problem) -> int:
        """Return what no plan of a problem takes less than, quickly, whatever weights it may choose."""
        from ..check.bounds import load_bound, quick_proof
        from ..cost.relaxations import relative

        target = self.said["for_"]
        if target is not None:
            problem = as_run_by(problem, target)
        elif self.said["weights"] is None:
            return load_bound(relative(problem) if problem.chain.variants else problem)
        return quick_proof(problem).period_ns

    def proved(self, found: Planned) -> int:
        """Return what no plan of the degree of one that was found takes less than, of what is asked."""
        plan, asked = found.plan, ("any", self.said["for_"])
        if plan.policy.drains and self.said["weights"] is None:  # its bounds are of what drains
            return self.least(Problem(plan.chain, plan.platform, plan.policy))
        return max(x.period_ns for x in plan.lower_bounds if x.allocation in asked and x.schedule in (None, self.kind))

    def _for_target(self, problem: Problem, tell: Callable[[Planned], None], beat_ns: int | None) -> Planned:
        """Return the best plan that a target can express."""
        target, kinds = self.said["for_"], () if self.kind is None else (self.kind,)
        assert target is not None, "else it is searched for without"
        found = make_target_plan(problem, target, self.settings, self.effort, kinds, tell, beat_ns)
        tell(found)
        return found

    def _searched(self, problem: Problem) -> tuple[Planned, Problem]:
        """Return the plan that is found, or stated, under the weights that are asked for or that are less late, and the
        problem in the order of its layers."""
        from ..planner.least_late import drained_quickly, found_quickly, least_late

        @cache
        def drained(interval: int) -> Planned | None:
            return drained_quickly(problem, interval, self.settings)

        if self.said["weights"] is not None:
            return self.found(problem)
        if not self.free:
            return least_late(problem, self.found)
        hint = partial(found_quickly, settings=self.settings) if self.said["algorithm"] == AUTO else None
        return least_late(problem, self.found, drained, hint)


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
    ``microbatch`` samples. ``asked`` are ``gpus``, ``mem``, ``weights`` and all of :func:`.given.problems.problem_of`.
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
    status, before = status or Status(), None
    asking: Planning = {**DEFAULTS, **asked}
    if asking["resume_from"] is not None:
        if profile is not None:
            raise BadInput("--resume-from: its checkpoint has a profile of its own; leave out PROFILE")
        before, asking = going_on(asking, asking["resume_from"])
        profile = before.chain
    if profile is None:
        raise BadInput("profile: None is not a profile, and no --resume-from names a checkpoint with one")
    question = _question(asking, progress, status)
    said, best = question.said, question.said["schedule"] == BEST
    merging(said["granularity"], said["blocks"])  # refuses before anything is read
    if said["tensor"] == EACH:
        other = question.uniform_alone
        if other is not None:
            raise BadInput(f"--tensor each: {other} gives all stages one degree; say degrees such as --tensor 2,4")
    (given,), words, deadline = given_profiles(
        profile, question.words, [said["microbatch"]], status, question.deadline, _parts_of(profile, said)
    )
    until, began = deadline.part(2) if best else deadline, time.perf_counter()
    question = replace(question, words=words, deadline=until, began=began, on_plan=on_plan)
    worth = Worth("period_ns", lambda found: found.evaluation.period_ns, question.least, question.proved)
    found, degree = best_degree(question.profiles(given), question.problem, question.plan, worth, until, status)
    if said["for_"] is None and question.stated is None and not found.plan.chain.variants:
        here = question.orders[found.plan.chain.variant, found.plan.policy.zero]
        drained = said["weights"] is not None or not question.free  # else it was looked for
        for told in ALTERNATIVES:
            found = told(found, replace(here, deadline=until), question.settings, drained)
    if said["for_"] is not None:
        problem = replace(as_held(degree.problem, said["for_"])[0], deadline=until)
        found = found if problem.chain.variants else priced(problem, found, said["for_"], question.settings)
        made = own_export(found.plan, said["for_"])
        if not isinstance(made, str):
            found = replace(found, plan=found.plan.telling(arguments=made.text))
    _refuse_small_matrices(found.plan)
    if before is not None:
        found = moving_least(found, before)
    if best:
        status.phase = "orders of passes"
        found = ordered(found, deadline, question.stated is None)
    return timed(found, degree.assumptions, began)


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


def _parts_of(profile: Given, said: Planning) -> Parts:
    """Return in which degrees a model that is named is estimated: where nobody says, in all for a target that can run
    them, and all are split along the sequence, too."""
    parted: Parts = part_of(Parts, said)
    target = None if said["for_"] is None else TARGETS[said["for_"]]
    if said["tensor"] == EACH:
        return {**parted, "tensor": ANY}
    if is_name(profile) and said["tensor"] in (None, ANY) and target is not None and target.tensor:
        return {**parted, "tensor": ANY, "sequence_parallel": True}
    return parted


def _question(said: Planning, progress: Callable[[str], None] | None, status: Status) -> Question:
    """Return what is asked, with the weights that follow; BadInput for what contradicts."""
    deadline, schedule = deadline_of(said["time_limit"]), said["schedule"]
    algorithm, gap, target = said["algorithm"], said["gap"], said["for_"]
    stated = stated_of(said)
    options_of(said)
    if gap is not None and algorithm != AUTO:
        raise BadInput("-O gap says when --algorithm auto may stop; leave it out")
    if schedule == BEST and target is not None:
        raise BadInput("--schedule best orders passes for itself; leave out --for")
    exchanging = isinstance(said["zero"], str) or SHARING[said["zero"]].scattered > 0
    if target is not None:
        refuse_with_target(target, said, stated is not None)
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
    words: Asked = part_of(Asked, said)
    words["zero"] = 0 if isinstance(said["zero"], str) else said["zero"]
    return Question(said, settings, None if schedule == BEST else schedule, stated, deadline, words)


def read_plan(path: str | Path) -> PlanResult:
    """Return the plan in a file, checked; InvalidPlan says all that is wrong with it."""
    from ..check.evaluate import evaluate

    loaded = load_plan(str(path))
    return PlanResult(loaded, evaluate(loaded))

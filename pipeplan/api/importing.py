"""What is what somebody runs today worth, and what would change it?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from ..choices import DRAINED, Effort, TargetName
from ..deadline import Deadline
from ..errors import BadInput, InvalidPlan
from ..files.frameworks import READERS, Source, parsed_renames, read_options
from ..planner.periodic.incumbent import Settings
from ..planner.what_if.target import Judged, judge
from ..problem import Problem
from ..status import Status
from .asked import Asked, Common
from .problems import ANY, DEFAULTS, as_held, deadline_of, problem_of, with_zero
from .profiles import Profile, read_profile
from .result import PlanResult
from .tensor import parts


@dataclass(frozen=True)
class Imported:
    """The plan that is run ``today``, and the ``best`` one that was found for its framework."""

    judged: Judged
    today: PlanResult
    best: PlanResult


def import_plan(
    profile: Profile | str | Path,
    arguments: str | Path,
    *,
    framework: TargetName,
    rename: Iterable[str] = (),
    effort: Effort | None = None,
    time_limit: str | Deadline | None = None,
    progress: Callable[[str], None] | None = None,
    status: Status | None = None,
    **asked: Unpack[Common],
) -> Imported:
    """Return the plan that ``arguments``, a file for ``framework``, run of a profile's network, and a better one.

    Stages, schedule, batch and recomputation are the arguments'; what they say of optimizer, precision and ZeRO counts
    where no keyword does. ``rename`` says what torchtitan calls the layers, as for :meth:`.PlanResult.export`.
    """
    if framework not in READERS:
        raise BadInput(f"framework: arguments are read of {', '.join(READERS)}")
    said, status = read_options(str(arguments)), status or Status()
    whole = profile if isinstance(profile, Profile) else read_profile(profile)
    reader, deadline = READERS[framework], deadline_of(time_limit)
    degree, experts = said.count(reader.tensor, 1), said.count(reader.experts, 1)
    given: Asked = {**DEFAULTS, **asked, "weights": DRAINED, "batch": ANY}
    own = parts(whole, degree, experts=experts)[-1 if reader.selective(said) else 0]  # the selective one, if there is
    problem, assumed = problem_of(own, **given, deadline=deadline)
    others = []
    for part in parts(whole, None):
        with suppress(BadInput):  # where groups of so many cross servers
            others += [problem_of(part, **given, deadline=deadline)[0]] * (part.chain.variant != own.chain.variant)
    found = reader(Source(said, problem.chain, len(problem.platform), parsed_renames(tuple(rename))))
    of_arguments = {name: getattr(found, name) for name in ("optimizer", "precision") if name not in asked}
    changed = {name: value for name, value in of_arguments.items() if value is not None}
    policy = replace(problem.policy, accumulate=found.microbatches, **changed)
    if found.zero is not None and "zero" not in asked:
        policy = with_zero(policy, problem.chain, found.zero)
    problem, held = as_held(problem.with_policy(policy), framework)
    policy = problem.policy
    try:
        judged = judge(
            problem,
            framework,
            found.stages,
            found.kind,
            Settings(progress=progress, status=status),
            effort or "normal",
            [_as_often(other.with_policy(policy), problem) for other in others],
        )
    except InvalidPlan as error:
        raise InvalidPlan([f"{arguments}: {sentence}" for sentence in error.violations]) from error
    today, best = judged.today, judged.best
    return Imported(
        judged,
        PlanResult(today.plan, today.evaluation, (*assumed, *held, *found.notes)),
        PlanResult(best.plan, best.evaluation, (*assumed, *held)),
    )


def _as_often(other: Problem, problem: Problem) -> Problem:
    """Return a problem of another degree with an update after as many samples as ``problem``, or as near as can be."""
    samples = (problem.policy.accumulate or 1) * problem.chain.microbatch
    every = max(1, samples // other.chain.microbatch)
    return other.with_policy(replace(other.policy, accumulate=every))

"""Which algorithm finds the best plan for a profile, over GPUs and memories; and what would change what runs today?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

from ..choices import DRAINED, Effort, TargetName
from ..deadline import NEVER, Deadline
from ..errors import BadInput, InvalidPlan, PipeplanError
from ..files.frameworks import READERS, Source, parsed_renames, read_options
from ..names import shown
from ..partition import ALGORITHMS
from ..planner.periodic.incumbent import GAP, Settings
from ..planner.plan import AUTO
from ..planner.what_if.compare import GPIPE, OnePlatform
from ..planner.what_if.compare import compare as compared
from ..planner.what_if.target import Judged, judge
from ..problem import MICROBATCHES_PER_DEVICE, Problem
from ..status import Status
from ..units import parse_bytes, parse_counts
from .asked import Asked, Common, Comparing, Parts, defaults, part_of
from .given.problems import ANY, as_held, assumed_batch, deadline_of, problem_of, with_zero
from .given.profiles import Profile, read_profile
from .given.tensor import parts
from .questions import Given, given_profiles
from .result import PlanResult


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
    degrees = {name: said.count(option, 1) for name, option in reader.degrees.items()}
    usual: Asked = defaults(Asked)
    given: Asked = {**usual, **asked, "weights": DRAINED, "batch": ANY}
    found = [x for x in parts(whole, degrees) if x.chain.context == 1 or x.chain.by_heads == reader.by_heads(said)]
    if not found:
        raise BadInput(f"{arguments}: the profile has no variant for such a group; estimate it with --context")
    own = found[-1 if reader.selective(said) else 0]  # the selective one, if there is
    problem, assumed = problem_of(own, **given, deadline=deadline)
    others = []
    for part in parts(whole, {}):
        with suppress(BadInput):  # where groups of so many cross servers
            others += [problem_of(part, **given, deadline=deadline)[0]] * (part.chain.variant != own.chain.variant)
    read = reader(Source(said, problem.chain, len(problem.platform), parsed_renames(tuple(rename))))
    of_arguments = {name: getattr(read, name) for name in ("optimizer", "precision") if name not in asked}
    changed = {name: value for name, value in of_arguments.items() if value is not None}
    policy = replace(problem.policy, accumulate=read.microbatches, **changed)
    if read.zero is not None and "zero" not in asked:
        policy = with_zero(policy, problem.chain, read.zero)
    problem, held = as_held(problem.with_policy(policy), framework)
    policy = problem.policy
    try:
        judged = judge(
            problem,
            framework,
            read.stages,
            read.kind,
            Settings(progress=progress, status=status),
            effort or "normal",
            [_as_often(other.with_policy(policy), problem) for other in others],
        )
    except InvalidPlan as error:
        raise InvalidPlan([f"{arguments}: {sentence}" for sentence in error.violations]) from error
    today, best = judged.today, judged.best
    return Imported(
        judged,
        PlanResult(today.plan, today.evaluation, (*assumed, *held, *read.notes)),
        PlanResult(best.plan, best.evaluation, (*assumed, *held)),
    )


def _as_often(other: Problem, problem: Problem) -> Problem:
    """Return a problem of another degree with an update after as many samples as ``problem``, or as near as can be."""
    samples = (problem.policy.accumulate or 1) * problem.chain.microbatch
    every = max(1, samples // other.chain.microbatch)
    return other.with_policy(replace(other.policy, accumulate=every))


DEFAULTS: Comparing = defaults(Comparing)
MOST_CASES = 1000  # without a time limit


@dataclass(frozen=True)
class Comparison:
    """Rows of one platform each, of ``total`` that were asked for, on the network of ``problem``."""

    problem: Problem
    assumptions: tuple[str, ...]
    rows: tuple[OnePlatform, ...]
    total: int

    def __repr__(self) -> str:
        names = ", ".join(cell.algorithm for cell in self.rows[0].cells)
        return f"<Comparison {shown(self.problem.chain.name)}: {names} on {len(self.rows)} platforms>"

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each platform and algorithm, times in ns."""
        return [
            {"gpus": row.gpus, "memory_bytes": row.memory_bytes, "samples": row.update_samples, **asdict(cell)}
            for row in self.rows
            for cell in row.cells
        ]

    def show(self, width: int | None = None) -> None:
        """Print the table, as ``pipeplan compare`` does."""
        from ..report.tables.searches import print_rows

        print_rows(self.problem, self.rows, self.assumptions, width)


def names() -> tuple[str, ...]:
    """Return what can be compared."""
    return AUTO, GPIPE, *ALGORITHMS


def compare(profile: Given, *, status: Status | None = None, **asked: Unpack[Comparing]) -> Comparison:
    """Return what each of ``algorithms`` reaches for ``gpus`` such as ``"2-8"`` and ``mem`` such as ``"3GB,4GB"``.

    All update weights equally often: see :func:`..planner.compare.compare`. ``status`` says how far it is. ``jobs``
    platforms are searched at a time. PipeplanError where ``time_limit`` leaves none.
    """
    said: Comparing = {**DEFAULTS, **asked}
    algorithms = said["algorithms"].split(",") if isinstance(said["algorithms"], str) else said["algorithms"]
    for name in algorithms:
        if name not in names():
            raise BadInput(f"--algorithms: '{shown(name)}' is not one of {', '.join(names())}")
    if said["platform"] is not None:
        raise BadInput("compare builds its platforms from --gpus and --mem; leave out --platform")
    deadline = deadline_of(said["time_limit"])
    words: Asked = part_of(Asked, said)
    gpus, mem = words["gpus"] or "", words["mem"] or ""
    counts = list(gpus) if isinstance(gpus, tuple) else parse_counts(str(gpus), "--gpus")
    memories = [mem] if isinstance(mem, int) else [parse_bytes(size, "--mem") for size in mem.split(",")]
    total = len(counts) * len(memories)
    if total > MOST_CASES and deadline is NEVER:
        searches = f"{len(counts)} x {len(memories)} cases, {total * len(algorithms)} searches"
        raise BadInput(f"--gpus, --mem: {searches}; more than {MOST_CASES} cases want a --time-limit")
    status, began = status or Status(), time.monotonic()
    words["gpus"], words["mem"] = (counts[0],), min(memories)
    parted: Parts = part_of(Parts, said)
    (given,), words, deadline = given_profiles(profile, words, [None], status, deadline, parted)
    problems, assumptions = list[Problem](), list[str]()
    for part in parts(given, said):
        fitting = [count for count in counts if count % part.chain.width == 0]
        if fitting:
            words["gpus"] = (fitting[0],)
            problem, assumptions = problem_of(part, **words, deadline=deadline)
            problems.append(problem)
    if not problems:
        raise BadInput(f"--tensor {said['tensor']}: no count in --gpus is a multiple of such a group")
    total = len(memories) * sum(count % x.chain.width == 0 for x in problems for count in counts)
    batch = words["accumulate"] is not None or words["batch"] is not None
    if not batch and len(counts) > 1:
        assumptions[0] = assumed_batch(f"of {MICROBATCHES_PER_DEVICE} microbatches a GPU")
    settings = Settings(said["solver"], gap=GAP if said["gap"] is None else said["gap"])
    status.say(f"0 of {total} cases done")
    rows: list[OnePlatform] = []
    compared_by = partial(
        compared,
        gpus=counts,
        memories=memories,
        algorithms=algorithms,
        clock=time.process_time,
        settings=settings,
        effort=said["effort"] or "normal",
        jobs=said["jobs"],
        weights=words["weights"] is not None,
        batch=batch,
    )
    for row in chain.from_iterable(map(compared_by, problems)):
        if deadline.passed:  # this row may have been cut short
            break
        rows.append(row)
        left = (time.monotonic() - began) / len(rows) * (total - len(rows))
        status.say(f"{len(rows)} of {total} cases done, {left:.0f} s more at this pace")
    if not rows:
        raise PipeplanError("the time limit ended the comparison before its first case was done")
    return Comparison(problems[0], tuple(assumptions), tuple(rows), total)

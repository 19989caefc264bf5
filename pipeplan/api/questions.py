"""What does a question for a plan say? The profile that is meant, words that state or search, and what contradicts."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..check.targets import TARGETS
from ..choices import DRAINED
from ..deadline import Deadline
from ..errors import BadInput
from ..names import shown
from ..partition import ALGORITHMS
from ..planner.plan import AUTO, Planned
from ..problem import Chain
from ..status import Status
from .asked import Asked, Parts, Planning
from .given.profiles import Profile, as_profile, is_name
from .result import PlanResult

Given = Profile | Chain | str | Path  # a profile, its file, or a model by its name
STATING = ("split", "replicas", "on", "recompute")
REPEATED = re.compile(r"\b([0-9]{1,8})\*([1-9][0-9]{0,3})\b")  # 5*14: fourteen stages of five


def given_profiles(
    profile: Given,
    asked: Asked,
    sizes: Sequence[int | None],
    status: Status,
    deadline: Deadline,
    parted: Parts | None = None,
) -> tuple[list[Profile], Asked, Deadline]:
    """Return the profile that is given, in microbatches of ``sizes``, what is ``asked`` with the bytes per parameter of
    an engine that is named, and the deadline: estimates are no search."""
    if is_name(profile):
        status.phase = "estimate"
    began = time.monotonic()
    about = asked.get("gpu"), asked.get("optimizer", "sgd"), asked.get("precision")
    engine = (parted or {}).get("engine")
    if engine is not None and not is_name(profile):
        raise BadInput("--engine: goes with a model's name; the layers of a profile have their times")
    if engine in TARGETS and asked.get("bytes_per_parameter") is None and not asked.get("offload"):
        asked = {**asked, "bytes_per_parameter": TARGETS[engine].holds.get(about[1:])}
    found = [as_profile(profile, *about, size, **parted or {}) for size in sizes]
    status.phase = "search"
    return found, asked, deadline.later(time.monotonic() - began) if is_name(profile) else deadline


def timed(found: Planned, assumptions: Sequence[str], began: float) -> PlanResult:
    """Return what was found, with the seconds since ``began``."""
    seconds = round(time.perf_counter() - began, 3)
    plan = replace(found.plan, provenance=replace(found.plan.provenance, seconds=seconds))
    return PlanResult(plan, found.evaluation, tuple(assumptions))


def stated_of(said: Planning) -> dict[str, str] | None:
    """Return what states a configuration, None where nothing does; BadInput beside what says how to search."""
    found = {name: said[name] for name in STATING if said[name] is not None}  # type: ignore[literal-required]  # each is a word
    for name in set(found) & {"split", "replicas"}:
        found[name] = REPEATED.sub(lambda x: ",".join([x[1]] * int(x[2])), found[name])
    if not found:
        return None
    if "split" not in found:
        raise BadInput(f"--{next(iter(found))} goes with --split, which says the stages")
    if said["offload_activations"] and found.get("recompute", "none") != "none":
        raise BadInput("--recompute: where activations wait in host memory, each layer runs again by itself or not")
    searching = {"algorithm": said["algorithm"] != AUTO, "effort": bool(said["effort"]), "gap": said["gap"] is not None}
    for name, there in searching.items():
        if there:
            raise BadInput(f"--split searches nothing; leave out {'-O gap' if name == 'gap' else f'--{name}'}")
    return found


def options_of(said: Planning) -> dict[str, Any]:
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


def refuse_with_target(target: str, said: Planning, stated: bool) -> None:
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

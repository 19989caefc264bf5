"""How does training go on on other GPUs? With the plan of its checkpoint: the same batch, model and optimizer."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, cast

from ..errors import BadInput
from ..files.plans import load_plan
from ..plan import Plan
from ..planner.plan import Planned
from ..planner.what_if.moves import nearest
from ..problem import Platform
from ..runtime.training.state.checkpoint import plan_of
from ..units import gpu_counts
from .asked import Planning

SAID = ("batch", "accumulate", "weights", "microbatch", "granularity", "blocks")  # by the plan of the checkpoint
KEPT = "weights", "optimizer", "precision", "offload", "zero", "vertical_sync"
MACHINE = ("platform", "gpu", "mem", "bandwidth")  # which say a machine of their own


def going_on(said: Planning, checkpoint: str) -> tuple[Plan, Planning]:
    """Return the plan of the checkpoint, and what is asked with what it says; BadInput for what it says otherwise."""
    before = load_plan(plan_of(checkpoint))
    if said["for_"] is not None or said["tensor"] is not None:
        raise BadInput("--resume-from: run resumes in the degree of its plan; leave out --for and --tensor")
    words: dict[str, Any] = {**said}
    for name in SAID:
        if words[name] not in (None, "auto"):
            raise BadInput(f"--resume-from: the checkpoint's plan says {name}; leave out --{name}")
    policy, size = before.policy, before.policy.bytes_per_parameter
    shared = policy.shared_bytes_per_parameter
    kept: dict[str, Any] = {
        "accumulate": before.interval,
        **{name: getattr(policy, name) for name in KEPT},
        "clipped": policy.clip,
        "predicted": policy.predict,
        "granularity": "node",
        "bytes_per_parameter": size if size is None or shared is None else f"{size - shared}+{shared}",
    }
    if all(words[name] is None for name in MACHINE):
        if said["gpus"] is None:
            raise BadInput("--resume-from: --gpus says how many GPUs are left, such as 3x8")
        kept |= {"platform": _resized(before.platform.whole or before.platform, said["gpus"]), "gpus": None}
    return before, cast("Planning", words | kept)


def _resized(platform: Platform, gpus: Any) -> Platform:
    """Return as many of the platform's GPUs; BadInput where it doesn't say what more of them are like."""
    counts = gpu_counts(str(gpus)) if isinstance(gpus, str | int) else tuple(gpus)
    if len(set(platform.devices)) > 1:
        raise BadInput("--gpus: the GPUs of the checkpoint's plan differ; --platform FILE says which are left")
    if len(counts) > len(platform.levels):
        raise BadInput("--gpus: the checkpoint's plan has one server; --platform FILE says what joins several")
    levels = tuple(replace(x, count=n) for x, n in zip(platform.levels, counts, strict=False))
    return replace(platform, devices=platform.devices[:1] * prod(level.count for level in levels), levels=levels)


def moving_least(found: Planned, before: Plan) -> Planned:
    """Return a plan about as good as the one that was found that moves the fewest bytes, and says how many."""
    made, moved, other = nearest(found, before)
    told: dict[str, Any] = {"coming_bytes": moved.coming, "held_bytes": moved.held}
    if made.evaluation.period_ns > found.evaluation.period_ns:
        told |= {"best_period_ns": found.evaluation.period_ns, "best_coming_bytes": other.coming}
    return replace(made, plan=made.plan.telling(resumed=told))

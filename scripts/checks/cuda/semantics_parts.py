"""Do ranks on one GPU train over NCCL's semantics as they do through the host? By the stand-in of :mod:`one_gpu`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from checked_models import FAULTY
from checking import FLUSH, NEVER, REPLICAS, STRAIGHT, Check, Outcome, Part, must, weights_apart

from pipeplan.errors import RunFailed

SAME = 1e-6  # of the largest weight: sums of replicas are added in another order


def same_as_staged(
    check: Check,
    planning: Mapping[str, Any],
    running: Mapping[str, Any] = {},  # nobody changes it
    ranks: int = 2,
) -> Outcome:
    """Do losses and weights over streams that block equal those through the host?"""
    plan = check.plan("gpt", ranks, planning)
    found = {}
    for data in ("gpt", "one_gpu:gpt"):
        saved = check.folder / "trained.pt"
        report = check.run(plan, data, save=saved, **running)
        found[data] = report, torch.load(saved, map_location="cpu")
    (staged, state), (over, its) = found.values()
    must(over["exchange"] == "nccl", f"the stand-in wasn't taken: {over['exchange']}")
    off = weights_apart(its, state)
    losses = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(over["losses"], staged["losses"], strict=True))
    must(max(off, losses) <= SAME, f"weights are {off:.1e}, losses {losses:.1e} off")
    seconds = {"staged_s": staged["seconds"], "stand_in_s": over["seconds"]}
    return Outcome(f"the same as through the host but for {max(off, losses):.1e}", {"off": off, **seconds})


def a_rank_dies(check: Check) -> Outcome:
    """Does a rank that is killed end the others, whose streams wait for it, with one sentence?"""
    begin = time.monotonic()
    try:
        check.run(check.plan("gpt", 2, STRAIGHT), "one_gpu:dying", FAULTY, timeout_s=30.0)
    except RunFailed as error:
        must("SIGKILL" in str(error), f"it says {error}")
        return Outcome(f"after {time.monotonic() - begin:.0f} s: {error}")
    raise AssertionError("the run ended well")


SEMANTICS = {
    "streams_straight": Part(
        lambda check: same_as_staged(check, STRAIGHT), "Are messages over streams what they are through the host?", 25
    ),
    "streams_2bw": Part(lambda check: same_as_staged(check, NEVER), "And where the pipeline never drains?", 25),
    "streams_replicas": Part(
        lambda check: same_as_staged(check, {**REPLICAS, "weights": "2bw"}, {"coarsening": 1}),
        "And where sums go on beside passes?",
        25,
    ),
    "streams_split": Part(
        lambda check: same_as_staged(check, {**STRAIGHT, "schedule": "zb1p"}), "And where backwards are split?", 25
    ),
    "streams_clipped": Part(
        lambda check: same_as_staged(check, {**FLUSH, "clipped": True}, {"clip_norm": 1.0}),
        "And where gradients are clipped?",
        25,
    ),
    "streams_killed": Part(a_rank_dies, "Does a rank that dies end those whose streams wait for it?", 45),
}

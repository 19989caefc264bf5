"""What are published layouts worth by this project's costs, do they fit, and is there a better one for Megatron-LM?

Sources: Grattafiori et al., The Llama 3 Herd of Models (2024), Table 4 (its chunks a rank aren't said: 8 here, so that
126 blocks and both ends are 16 x 8); DeepSeek-AI, DeepSeek-V3 Technical Report (2024), sections 3.2 and 4.2, and 180
thousand H800 hours for 1e12 tokens, of which the order of passes here is DualPipe's on two chunks a rank, with products
of 16 bits and without multi-token prediction; Megatron-Bridge's recipe of Llama 3 70B on 64 H100s, whose time isn't
among these. The search has the same GPUs and batch, the degrees of ``tried``, and ``LIMIT`` of time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pipeplan as pp
from pipeplan.api.given.tensor import parts
from pipeplan.files.machines.accelerators import accelerator
from pipeplan.plan import ScheduleKind

LIMIT = "60s"
COMMON: dict[str, Any] = {
    "weights": "flush",
    "zero": 1,
    "precision": "mixed",
    "optimizer": "adam",
    "bytes_per_parameter": "6+12",
    "network": "50GB/s",
}


@dataclass(frozen=True)
class Layout:
    """A published layout: equal pipelines of ``stages`` ranks with so many ``chunks`` each, of a ``batch`` of samples;
    its time as published, in s, None where it isn't known. ``held``: what its memory counts by in place of
    :data:`COMMON`."""

    name: str
    model: str
    gpu: str
    stages: int
    pipelines: int
    chunks: int
    batch: int
    counts: tuple[int, ...]
    seconds: float | None = None
    degrees: dict[str, int] = field(default_factory=dict)
    tried: dict[str, Any] = field(default_factory=dict)
    schedule: ScheduleKind = "interleaved"
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """GPUs that run each layer together."""
        tensor = self.degrees.get("tensor", 1) * self.degrees.get("context", 1)
        return max(tensor, self.degrees.get("experts", 1))

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.width * self.stages * self.pipelines

    def theirs(self, profile: pp.Profile, **how: Any) -> pp.PlanResult:
        """Return what the layout takes where memory has no end, with the machine as it is but for ``how``."""
        groups = [",".join(str(s * self.pipelines + r) for r in range(self.pipelines)) for s in range(self.stages)]
        on = groups + groups[::-1] if self.schedule == "dualpipev" else groups * self.chunks
        part = parts(profile, {"tensor": 1, "context": 1, "experts": 1, **self.degrees})[0]
        return pp.plan(part, **{**self.machine, **how}, mem="2TB", schedule=self.schedule,
                       split=",".join(map(str, self.counts)), on="/".join(on), recompute="none")  # fmt: skip

    def ours(self, profile: pp.Profile) -> pp.PlanResult:
        """Return the best plan that is found for Megatron-LM, of all degrees in the profile."""
        return pp.plan(profile, **self.machine, for_="megatron", effort="quick", time_limit=LIMIT)

    @property
    def machine(self) -> dict[str, Any]:
        """The machine and the batch, as :func:`pipeplan.plan` takes them."""
        return {**COMMON, "gpus": (self.gpus // 8, 8), "gpu": self.gpu, "batch": self.batch}


def even(blocks: int, stages: int) -> tuple[int, ...]:
    """Return layers of stages with as many blocks each, embedding first, norm, head and loss last."""
    return blocks // stages + 1, *[blocks // stages] * (stages - 2), blocks // stages + 3


LLAMA = "zoo:llama3-405b,sequence="
SHARED = {"zero": 2, "bytes_per_parameter": "2+16"}  # gradients of 32 bits, too, as section 3.3.2 of Llama 3 says
LAYOUTS = (
    Layout("Llama 3 405B", f"{LLAMA}8192", "h100", 16, 64, 8, 2048, (*[1] * 127, 3), 12.1, {"tensor": 8},
           {"tensor": "8"}, held=SHARED),
    Layout("Llama 3 405B", f"{LLAMA}8192", "h100", 16, 128, 8, 2048, (*[1] * 127, 3), 6.5, {"tensor": 8},
           held=SHARED),
    Layout("Llama 3 405B, 131,072 tokens", f"{LLAMA}131072", "h100", 16, 8, 8, 128, (*[1] * 127, 3), 10.9,
           {"tensor": 8, "context": 16}, {"tensor": "8", "context": "8,16"}, held=SHARED),
    Layout("DeepSeek-V3", "zoo:deepseek-v3", "h800", 16, 2, 2, 15360, (*[2] * 30, 1, 4), 19.9, {"experts": 64},
           {"experts": "32,64"}, "dualpipev"),
    Layout("Llama 3 70B, Megatron-Bridge", "zoo:llama3-70b", "h100", 8, 2, 5, 128, even(80, 40), None, {"tensor": 4},
           {"tensor": "2,4,8"}),
)  # fmt: skip
HEAD = ("network", "layout", "published", "theirs, as counted", "fullest GPU", "fits", "found for Megatron-LM")


def seconds(found: pp.PlanResult) -> float:
    """Return what a batch takes."""
    assert found.evaluation.makespan_ns is not None
    return found.evaluation.makespan_ns / 1e9


def judge_layouts() -> None:
    """Print a table of all layouts, in Markdown."""
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for one in LAYOUTS:
        said = {"tensor": str(one.degrees.get("tensor", 1)), **{x: str(n) for x, n in one.degrees.items()}, **one.tried}
        along = {"sequence_parallel": said["tensor"] != "1"}
        profile = pp.profile(one.model, gpu=one.gpu, microbatch=1, dtype="bfloat16", optimizer="adam",
                             granularity="block", **said, **along)  # fmt: skip
        theirs = one.theirs(profile)
        took, held = seconds(theirs), one.theirs(profile, **one.held) if one.held else theirs
        peak = max(x.peak_bytes for x in held.evaluation.devices)
        room = accelerator(one.gpu).memory_bytes
        degrees = "".join(f"{x} {n}, " for x, n in one.degrees.items())
        cells = [
            one.name,
            f"{one.gpus} GPUs: {degrees}stages {one.stages} x {one.chunks}, pipelines {one.pipelines}",
            "" if one.seconds is None else f"{one.seconds:.1f} s",
            f"{took:.1f} s" + ("" if one.seconds is None else f" ({took / one.seconds - 1:+.0%})"),
            f"{peak / 1e9:.0f} GB of {room / 1e9:.0f}",
            "yes" if peak <= room else "no",
            _found(one, profile, took) if one.tried else "",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def _found(one: Layout, profile: pp.Profile, took: float) -> str:
    try:
        ours = one.ours(profile)
    except pp.Infeasible as error:
        return f"none: {error}"
    plan, own = ours.plan, seconds(ours)
    stages, peak = plan.allocation.stages, max(x.peak_bytes for x in ours.evaluation.devices)
    ranks = len({x.devices for x in stages})
    again = sum(bool(x.checkpoint) for x in stages)
    return (
        f"{own:.1f} s ({own / took - 1:+.0%}), {peak / 1e9:.0f} GB: degree {plan.chain.variant}, {ranks} ranks "
        f"x {len(stages) // ranks}, {again} of {len(stages)} stages recompute"
    )

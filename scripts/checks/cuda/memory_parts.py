"""How many bytes do runs take of a GPU, beside those planned: tensors, what torch reserves, and all that is used?"""

from __future__ import annotations

import json
from typing import Any, Final

import torch
from checked_models import MODELS
from checking import ACCUMULATE, FLUSH, Check, Figures, Outcome, Part, must, needed
from constant_parts import entry_of

import pipeplan as pp
from pipeplan.errors import PipeplanError

FULL: Final = 0.92  # of a GPU's memory
WAYS: Final[dict[str, dict[str, Any]]] = {
    "flush": FLUSH,
    "2bw": {"weights": "2bw", "checkpointing": "none"},
    "stash": {"weights": "stash", "checkpointing": "none"},
    "recomputed": {"weights": "flush", "recompute": "all", "split": None},
    "offload": {**FLUSH, "offload": True, "optimizer": "adam"},
    "adam": {**FLUSH, "optimizer": "adam"},
}


def memory_truth(check: Check) -> Outcome:
    """How do planned bytes compare with those of tensors, of torch and of the whole GPU, on one rank?"""
    figures: Figures = {}
    for precision, dtype in (("fp32", "float32"), ("mixed", "bfloat16")):
        layers = len(check.profile("gpt", dtype).chain)
        for name, way in WAYS.items():
            asked = dict(way) | {"precision": precision}
            if "split" in asked:
                asked["split"] = str(layers)
            report = check.run(check.plan("gpt", 1, asked, dtype), "gpt", 3)
            rows = report["memory"] or report["activations"]
            figures[f"{name}, {precision}"] = rows[0] | {
                "allocated_over_planned": rows[0]["measured_bytes"] / max(1, rows[0]["planned_bytes"])
            }
    ratios = {name: row["allocated_over_planned"] for name, row in figures.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    least = min(ratios, key=lambda name: ratios[name])
    words = f"tensors take {ratios[least]:.3f} ({least}) to {ratios[worst]:.3f} ({worst}) of what is planned"
    return Outcome(words, figures)


def filled(check: Check) -> Outcome:
    """Does a plan that fills nearly all of a GPU fit, and how much isn't torch's tensors?"""
    needed(check.kind == "cuda", "nobody counts a CPU's memory")
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    model, wanted = MODELS["gpt"][0], int(FULL * whole)
    batch = step = MODELS["gpt"][1]
    more = True
    while step >= max(1, batch // 16):  # the largest microbatch whose plan is below that, nearly
        chain = pp.profile(f"zoo:{model}", microbatch=batch + step, gpu=entry_of(check)[0]).chain
        try:
            plan = pp.plan(chain, gpus=1, mem=f"{wanted}B", accumulate=1, **FLUSH)
        except PipeplanError:
            more = False
        else:
            batch += step
        step = batch if more else step // 2
    file = check.folder / "filled.json"
    plan.save(file)
    figures: Figures = {"samples": batch, "planned_bytes": max(x.peak_bytes for x in plan.stages), "whole_bytes": whole}
    words = ["run", file, "--model", model, "--steps", 3, "--lr", "0.01", "--device", "cuda", "--json"]
    for name, setting in (("usual", "expandable_segments:False"), ("expandable", "expandable_segments:True")):
        try:
            said = check.command("-m", "pipeplan", *words, environment={"PYTORCH_CUDA_ALLOC_CONF": setting})
            figures[name] = json.loads(said)["memory"][0]
        except RuntimeError as error:
            figures[name] = str(error)[-1000:]
    must(any(isinstance(figures[name], dict) for name in ("usual", "expandable")), f"neither fits: {figures}")
    row = next(figures[name] for name in ("usual", "expandable") if isinstance(figures[name], dict))
    share = figures["planned_bytes"] / whole
    return Outcome(
        f"a plan of {share:.0%} of the GPU ({batch} samples, {ACCUMULATE} microbatches) runs: "
        + ", ".join(f"{key.removesuffix('_bytes')} {row[key] / 1e9:.2f} GB" for key in row if key.endswith("_bytes")),
        figures,
    )


MEMORY = {
    "memory_truth": Part(memory_truth, "How do planned bytes compare with those that are taken?", 70),
    "memory_filled": Part(filled, "Does a plan that fills nearly all of a GPU fit?", 60),
}
